"""Entry point of one process of an evaluation, with the arguments of `vembed eval`."""

import sys
from pathlib import Path


def main() -> None:
    """Evaluate with the arguments of the command line, and exit as `vembed eval` does."""
    from vembed.cli.main import run_process

    sys.exit(run_process("eval", sys.argv[1:]))


if __name__ == "__main__":
    if not __package__:
        # Run as a file: replace this folder on sys.path, whose modules train and evaluate would hide others, by the
        # checkout.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
