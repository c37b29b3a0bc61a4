"""Entry point of one process of `vembed mine`, for accelerate launch, torchrun and `python -m`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:
        # Started as a file: its folder is on the path, whose modules would hide others, and the checkout is not.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    from vembed.cli.main import run_process

    sys.exit(run_process("mine", sys.argv[1:]))
