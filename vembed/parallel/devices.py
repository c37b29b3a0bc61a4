"""Devices of a process: choice, precision and settings, and their memory in use. GPUs by name, for plans."""

import ctypes
import gc
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from vembed.errors import UserError
from vembed.parallel import collectives
from vembed.parallel.environment import RankInfo

log = logging.getLogger("vembed")

GIB = 2**30
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3)."""


def choose_device(rank_info: RankInfo) -> torch.device:
    """Return the GPU of the local rank, or the CPU if there is no GPU, and set its memory allocator for steps of
    different shapes. Settings of the user are kept."""
    if not torch.cuda.is_available():
        if platform.libc_ver()[0] == "glibc":
            # By default glibc returns large blocks to the system at once, and each step pays for page faults again:
            # measured on two cores, a quarter of all page faults, and a few percent of the time.
            libc = ctypes.CDLL(None)
            # 32 MiB is glibc's maximum. Setting either threshold also disables their dynamic adjustment.
            libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        return torch.device("cpu")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Micro-batches differ in shape, and would fragment segments of fixed size.
        settings = "expandable_segments:True"
        # The allocator reads the variable at the first use of a GPU, and processes that this one starts inherit it.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # A notebook has used the GPU before.
            torch._C._accelerator_setAllocatorSettings(settings)
    num_devices = torch.cuda.device_count()
    if rank_info.local_rank >= num_devices:
        raise UserError(
            f"LOCAL_RANK={rank_info.local_rank}, but this machine shows {num_devices} GPU(s): start at most "
            f"{num_devices} process(es) here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU."
        )
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    return device


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of this process's GPU.

    torch.manual_seed takes 1 to 3 ms: it notes a stack trace for each kind of device that the machine does not have.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def bf16_instructions() -> str | None:
    """Return the name of the CPU's instructions for matrix products in bfloat16; None: torch would emulate them."""
    # Below AVX-512 (also by ATEN_CPU_CAPABILITY) torch's own bfloat16 kernels are not worth it.
    if (
        "AVX512" not in torch.backends.cpu.get_cpu_capability()
        or not torch._C._has_mkldnn
    ):
        return None
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else None


@contextmanager
def matmul_precision(precision: Literal["highest", "high"]) -> Iterator[None]:
    """Set the precision of float32 matrix products on GPUs for a context: highest is float32, high is TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def quieten_bitsandbytes() -> None:
    """Silence bitsandbytes' import warning about a kernel on the Hub. Call this before bitsandbytes is imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


# ---- memory ------------------------------------------------------------------

AMOUNTS = {
    "allocated_gb": "Allocated",
    "reserved_gb": "Reserved",
    "rss_gb": "RSS",
    "peak_gb": "Peak",
}
"""Keys of a snapshot, and their names in the log."""

SHORTAGES = ("_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Parts of the messages of errors that are a shortage of memory and not torch.OutOfMemoryError: libraries such as
cuBLAS and cuDNN, and the driver, allocate beside torch's allocator."""


def is_shortage(error: RuntimeError) -> bool:
    """Return whether an error says that device memory has run out."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        phrase in str(error) for phrase in SHORTAGES
    )


def fsdp_empty_cache() -> None:
    """Release cached memory and reset peak counters on all ranks. Collective; works without a process group."""
    collectives.barrier()  # no rank still waits for a tensor of this rank
    # First: tensors in reference cycles are freed only by the collector.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif platform.libc_ver()[0] == "glibc":
        # What glibc keeps for the next step (see `choose_device`).
        ctypes.CDLL(None).malloc_trim(0)
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        # Linux: 5 resets VmHWM, the peak of resident memory. Not all containers may.
        with suppress(OSError):
            switch.write_text("5")
    collectives.barrier()


def fsdp_print_memory_usage(prefix: str = "") -> list[str]:
    """Log the memory of each rank and the sum, on rank 0. Collective. Return the lines on every rank.

    Without logging handlers the lines go to standard output.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    by_rank = collectives.gather_objects(memory_snapshot(device))
    total = {}
    for key in AMOUNTS:
        if key in by_rank[0]:
            total[key] = sum(memory[key] for memory in by_rank)
    if prefix and not prefix.endswith((" ", ":")):
        prefix += ": "
    lines = []
    for rank, memory in enumerate([*by_rank, total]):
        owner = f"Total across {rank} processes"
        if rank < len(by_rank):
            kind, _, number = memory["device"].partition(":")
            name = f"GPU {number or 0}" if kind == "cuda" else "CPU"
            owner = f"Rank {rank}, {name}"
        amounts = [f"{AMOUNTS[key]}: {memory[key]:.2f}GB" for key in total]
        lines.append(f"{prefix}{owner}: {', '.join(amounts)}")
    if collectives.rank() == 0:
        if log.hasHandlers():
            for line in lines:
                log.info(line)
        else:
            sys.stdout.write("\n".join(lines) + "\n")
    return lines


def memory_snapshot(device: torch.device) -> dict[str, Any]:
    """Return this process's memory in GiB: allocated, reserved and peak on a GPU, resident and peak on the CPU."""
    if device.type == "cuda":
        return {
            "device": str(device),
            "allocated_gb": round(torch.cuda.memory_allocated(device) / GIB, 4),
            "reserved_gb": round(torch.cuda.memory_reserved(device) / GIB, 4),
            "peak_gb": round(torch.cuda.max_memory_allocated(device) / GIB, 4),
        }
    resident = psutil.Process().memory_info().rss
    peak = resident
    # Linux has a peak that can be reset.
    status = Path("/proc/self/status")
    if status.exists():
        match = re.search(r"VmHWM:\s+(\d+)", status.read_text())
        if match is not None:
            peak = max(peak, int(match[1]) * 1024)
    return {
        "device": "cpu",
        "rss_gb": round(resident / GIB, 4),
        "peak_gb": round(peak / GIB, 4),
    }


# ---- GPUs by name: memory and peak arithmetic of the vendors' data sheets --------

VISIBLE_SHARE = 0.97
"""Share of a GPU's nominal memory that a process sees: the driver and error correction keep the rest."""
FULL_NAME = re.compile(r"(?:(\d{1,4})\s*[x*]\s*)?(\S.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """One model of GPU."""

    name: str
    gigabytes: float
    half_tflops: float | None
    """Peak of dense bfloat16 (float16 where there is no bfloat16) products with sums in float32; None: not known."""
    single_tflops: float | None
    """Peak of float32 products outside tensor cores."""
    has_bf16: bool = True

    @property
    def memory(self) -> int:
        """Return the bytes that a process can use."""
        return int(self.gigabytes * VISIBLE_SHARE * GIB)


GPUS = (
    Gpu("T4-16GB", 16, 65, 8.1, has_bf16=False),
    Gpu("V100-16GB", 16, 125, 15.7, has_bf16=False),
    Gpu("V100-32GB", 32, 125, 15.7, has_bf16=False),
    Gpu("A10-24GB", 24, 125, 31.2),
    Gpu("A10G-24GB", 24, 70, 31.5),
    Gpu("A30-24GB", 24, 165, 10.3),
    Gpu("A40-48GB", 48, 150, 37.4),
    Gpu("A6000-48GB", 48, 155, 38.7),
    Gpu("A100-40GB", 40, 312, 19.5),
    Gpu("A100-80GB", 80, 312, 19.5),
    Gpu("L4-24GB", 24, 121, 30.3),
    Gpu("L40-48GB", 48, 181, 90.5),
    Gpu("L40S-48GB", 48, 362, 91.6),
    Gpu("RTX3090-24GB", 24, 71, 35.6),
    Gpu("RTX4090-24GB", 24, 165, 82.6),
    Gpu("RTX5090-32GB", 32, 209, 104.8),
    Gpu("H100-PCIE-80GB", 80, 756, 51),
    Gpu("H100-80GB", 80, 989, 67),
    Gpu("H100-NVL-94GB", 94, 835, 60),
    Gpu("H200-141GB", 141, 989, 67),
    Gpu("B200-180GB", 180, 2250, 75),
)


def read_hardware(gpu: str | None, memory: str | None) -> tuple[Gpu | None, int | None]:
    """Return the GPU of `--gpu 2xA100-80GB` and `--memory 80`, and how many of them each machine has. None: not given."""
    if gpu is None:
        device = None if memory is None else _of_memory(memory)
        return device, None
    match = FULL_NAME.fullmatch(gpu.strip())
    if match is None or match[1] == "0":
        raise UserError(f"--gpu {gpu!r}: give a number and a name, as 2xA100-80GB")
    device = _named(match[2])
    if memory is not None:
        device = replace(device, gigabytes=_of_memory(memory).gigabytes)
    return device, int(match[1] or 1)


def _of_memory(text: str) -> Gpu:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", text.strip(), re.IGNORECASE)
    if match is None or not 0 < float(match[1]) <= 100_000:
        raise UserError(f"--memory {text!r}: give the memory of one GPU in GB, as 80")
    return Gpu(f"a GPU of {float(match[1]):g} GB", float(match[1]), None, None)


def _named(name: str) -> Gpu:
    matching = []
    for gpu in GPUS:
        full_name = gpu.name.lower()
        # Without the memory A100 is two.
        if name.lower() in (full_name, full_name.rpartition("-")[0]):
            matching.append(gpu)
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(gpu.name for gpu in matching or GPUS)
    raise UserError(f"--gpu {name}: give one of {names}; or give --memory GB")
