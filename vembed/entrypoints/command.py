"""Entry point of one process of `vembed mine`, `judge`, `audit`, `generate` or `eval`, for accelerate launch, torchrun and
`python -m`. The first argument names the command."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:
        # Started as a file: its folder is on the path, whose modules would hide others, and the checkout is not.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    from vembed.cli.main import run_process

    sys.exit(run_process(sys.argv[1], sys.argv[2:]))
