"""FSDP where Accelerate does not enable it: on CPU ranks with gloo, and in one process with offload."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def turn_on_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, device: torch.device) -> None:
    """Switch an existing Accelerator to its FSDP code paths.

    `Accelerator(cpu=True, fsdp_plugin=...)` silently becomes plain multi-CPU, because AcceleratorState enables FSDP
    only with several GPUs. The states are shared dictionaries, so a change also applies to existing Accelerators.
    On the CPU the device must have no index: FSDP1 treats cpu and cpu:0 as two devices.
    """
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
        state["device"] = device
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.distributed_type is DistributedType.FSDP
