"""Choice of the device and precision of a process, and GPU settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from vembed.errors import UserError
from vembed.parallel.environment import RankInfo


def choose_device(rank_info: RankInfo) -> torch.device:
    """Return the GPU of the local rank, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if rank_info.local_rank >= num_devices:
        raise UserError(
            f"LOCAL_RANK={rank_info.local_rank}, but this machine shows {num_devices} GPU(s): start at most "
            f"{num_devices} process(es) here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU."
        )
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    return device


def enable_expandable_segments() -> None:
    """Enable expandable segments of the CUDA allocator: micro-batches differ in shape and would fragment fixed ones.

    Settings of the user are kept.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    settings = "expandable_segments:True"
    # The allocator reads the variable at the first use of a GPU, and processes that this one starts inherit it.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # A notebook has used the GPU before.
        torch._C._accelerator_setAllocatorSettings(settings)


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
