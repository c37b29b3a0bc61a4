"""python -m benchmarks.gpu: speed, memory and correctness on one GPU, without network or weights.

The parts come in the order of their worth, and each row is printed and written when it has ended, so that a run that is
cut off loses the least. Without a GPU the same rows run with tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_correctness import run_correctness
from benchmarks.gpu_memory import run_memory
from benchmarks.gpu_record import Record, machine
from benchmarks.gpu_speed import run_speed
from vembed.parallel.devices import choose_device
from vembed.parallel.environment import RankInfo

PARTS: dict[str, Callable[[Record, Path], None]] = {
    "speed": run_speed,
    "memory": run_memory,
    "correctness": run_correctness,
}


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the chosen parts. Return 0 if no row failed, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__
    )
    parser.add_argument(
        "--part", choices=list(PARTS), help="only this part; default: all"
    )
    parser.add_argument("--row", default="", help="only rows with this in their name")
    parser.add_argument(
        "--small",
        action="store_true",
        help="tiny models, as where there is no GPU",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-benchmark.json"),
        help="file that is written row by row",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="rows that would begin later are skipped; default: no limit",
    )
    arguments = parser.parse_args(command_line)
    has_gpu = torch.cuda.is_available()
    is_small = arguments.small or not has_gpu
    if not has_gpu:
        print("no CUDA GPU: tiny models on the CPU", flush=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.getLogger("vembed").setLevel(logging.WARNING)
    # As a run does at its start: the allocator reads its settings once, and rows without a run come first.
    device = choose_device(RankInfo())
    record = Record(arguments.out, device, is_small, arguments.seconds, arguments.row)
    print(machine(device), flush=True)
    with tempfile.TemporaryDirectory(prefix="vembed-gpu-") as folder:
        for part in [arguments.part] if arguments.part else PARTS:
            room = Path(folder) / part
            room.mkdir()
            PARTS[part](record, room)
    counts = {
        name: sum(row["status"] == name for row in record.rows)
        for name in ("ok", "skipped", "failed")
    }
    print(
        f"{counts}, written to {record.path}"
        + (f"; failed: {', '.join(record.failed)}" if record.failed else "")
    )
    return 1 if record.failed else 0


if __name__ == "__main__":
    sys.exit(main())
