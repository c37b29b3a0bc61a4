"""Entry point of one process of a judging, with the arguments of `vembed judge`."""

import sys
from pathlib import Path


def main() -> None:
    """Judge with the arguments of the command line, and exit as `vembed judge` does."""
    from vembed.cli.main import run_process

    sys.exit(run_process("judge", sys.argv[1:]))


if __name__ == "__main__":
    if not __package__:
        # Started as a file: its folder is on the path, and the checkout is not.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
