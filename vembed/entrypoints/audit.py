"""Entry point of one process of an audit, with the arguments of `vembed audit`."""

import sys
from pathlib import Path


def main() -> None:
    """Audit with the arguments of the command line, and exit as `vembed audit` does."""
    from vembed.cli.main import run_process

    sys.exit(run_process("audit", sys.argv[1:]))


if __name__ == "__main__":
    if not __package__:
        # Started as a file: its folder is on the path, and the checkout is not.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
