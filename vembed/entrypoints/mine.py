"""One process of a mining run, with the words of `vembed mine`: for torchrun, accelerate launch and `python -m`."""

import sys
from pathlib import Path


def main() -> None:
    """Mine with the words of the command line, and exit as `vembed mine` does."""
    from vembed.cli.main import run_process

    sys.exit(run_process("mine", sys.argv[1:]))


if __name__ == "__main__":
    if not __package__:
        # Started as a file: its folder is on the path, with modules named train and evaluate, and the checkout is not.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
