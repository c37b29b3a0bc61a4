"""One process of an evaluation, with the words of `vembed eval`: for torchrun, accelerate launch and `python -m`."""

import sys
from pathlib import Path


def main() -> None:
    """Evaluate with the words of the command line, and exit as `vembed eval` does."""
    from vembed.cli import run_process

    sys.exit(run_process("eval", sys.argv[1:]))


if __name__ == "__main__":
    if not __package__:
        # Started as a file: its folder is on the path, with modules named train and evaluate, and the checkout is not.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
