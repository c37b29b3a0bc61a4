"""FSDP where Accelerate does not select it by itself: on gloo ranks without GPUs, and in one process that offloads."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def turn_on_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, device: torch.device) -> None:
    """Make an Accelerator that was made without FSDP take its FSDP paths from here on.

    `Accelerator(cpu=True, fsdp_plugin=...)` quietly becomes plain multi-CPU, because AcceleratorState looks for FSDP
    only beside several GPUs. The states are shared dictionaries, so what is set in them holds for the Accelerator too.
    On the CPU the device must have no index: FSDP1 takes cpu and cpu:0 for two devices.
    """
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
        state["device"] = device
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.distributed_type is DistributedType.FSDP
