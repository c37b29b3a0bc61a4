"""Memory of this process and of all: measuring, printing and giving back, on GPUs and on CPUs."""

from __future__ import annotations

import ctypes
import gc
import logging
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from vembed.distributed import collectives

GIB = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""

log = logging.getLogger("vembed")


def fsdp_empty_cache() -> None:
    """Give cached memory back on all ranks together and start measuring peaks anew; also without a process group."""
    collectives.barrier()  # nobody still waits for a tensor of this rank
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    reset_peak_memory()
    collectives.barrier()


def fsdp_print_memory_usage(prefix: str = "") -> list[str]:
    """Log one line of memory per rank and their sum, on rank 0 and in the order of ranks; collective.

    Where nobody has set up logging, the lines go to standard output. They are returned on every rank.
    """
    lead = f"{prefix}: " if prefix and not prefix.endswith((" ", ":")) else prefix
    lines = [lead + line for line in memory_lines()]
    if collectives.rank() == 0:
        if log.hasHandlers():
            for line in lines:
                log.info("%s", line)
        else:
            sys.stdout.write("\n".join(lines) + "\n")
    return lines


def memory_lines() -> list[str]:
    """The memory of each rank and of all together, on every rank; collective."""
    ranks = collectives.gather_objects_as_json(memory_snapshot(current_device()))
    total = {key: sum(memory[key] for memory in ranks) for key in ranks[0] if key.endswith("_gb")}
    lines = [f"Rank {rank}, {_place(memory)}: {_amounts(memory)}" for rank, memory in enumerate(ranks)]
    return [*lines, f"Total across {len(ranks)} processes: {_amounts(total)}"]


def memory_snapshot(device: torch.device) -> dict[str, Any]:
    """This process's memory in GiB: allocated, reserved and peak on a GPU, resident and peak on the CPU."""
    if device.type == "cuda":
        return {
            "device": str(device),
            "allocated_gb": round(torch.cuda.memory_allocated(device) / GIB, 4),
            "reserved_gb": round(torch.cuda.memory_reserved(device) / GIB, 4),
            "peak_gb": round(torch.cuda.max_memory_allocated(device) / GIB, 4),
        }
    resident = psutil.Process().memory_info().rss
    return {
        "device": "cpu",
        "rss_gb": round(resident / GIB, 4),
        "peak_gb": round(max(_peak_resident_bytes(), resident) / GIB, 4),
    }


def reset_peak_memory() -> None:
    """Measure peaks from here on; where the system cannot do that for resident memory, the old peak stays."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        try:
            switch.write_text("5")
        except OSError as error:
            log.debug("the peak of resident memory cannot be reset here: %s", error)


def current_device() -> torch.device:
    """The GPU that this process uses, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _place(memory: dict[str, Any]) -> str:
    name: str = memory["device"]
    return f"GPU {name.partition(':')[2] or 0}" if name.startswith("cuda") else "CPU"


def _amounts(memory: dict[str, Any]) -> str:
    names = {"allocated_gb": "Allocated", "reserved_gb": "Reserved", "rss_gb": "RSS", "peak_gb": "Peak"}
    return ", ".join(f"{name}: {memory[key]:.2f}GB" for key, name in names.items() if key in memory)


def keep_freed_memory() -> bool:
    """Let glibc keep what a step frees for the next step, where tensors live in host memory; True where that is so.

    By itself it gives large blocks back to the system at once, and each step of a training on a CPU pays for its
    pages anew: measured on two cores, a quarter of all page faults, and some percent of the time.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # The first is as large as glibc allows; setting either also ends its own guessing.
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
