"""Entry point of one process of a training run, with the arguments of `vembed train`."""

import sys
from pathlib import Path


def main() -> None:
    """Train with the arguments of the command line, and exit as `vembed train` does."""
    from vembed.cli.main import run_process

    sys.exit(run_process("train", sys.argv[1:]))


if __name__ == "__main__":
    if not __package__:
        # Run as a file: replace this folder on sys.path, whose modules train and evaluate would hide others, by the
        # checkout.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
