"""`torch.cuda` of the imitation device: one GPU of the Hopper generation that never runs out of memory."""

import contextlib
from types import SimpleNamespace

import torch

from tests.imitation.device import (
    CUDA,
    FUSED_ON_GPUS,
    RECORDING,
    Functions,
    Operators,
)

NAME = "Imitation H100"
TOTAL_BYTES = 80 * 2**30
FREE_BYTES = 70 * 2**30
CAPABILITY = (9, 0)
CUDA_KERNELS = torch.library.Library("aten", "IMPL", "CUDA")
"""As long as it lives, torch finds kernels of CUDA for the operators that are registered here."""


class Event:
    """An event that has always happened. To wait for it is recorded all the same."""

    def __init__(self, *unused, **options): ...
    def record(self, *unused): ...
    def wait(self, *unused): ...

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0

    def synchronize(self):
        RECORDING.wait("event.synchronize")


class Stream:
    """The only stream."""

    device = CUDA

    def __init__(self, *unused, **options): ...
    def wait_stream(self, *unused): ...
    def wait_event(self, *unused): ...

    def record_event(self, *unused):
        return Event()

    def synchronize(self):
        RECORDING.wait("stream.synchronize")


def answer(value):
    """Return a function that returns `value`, whatever it is asked."""
    return lambda *_, **__: value


def synchronize(*_):
    """Wait for all work of the device."""
    RECORDING.wait("torch.cuda.synchronize")


def install():
    """Give this process the device, for as long as it lives. Import everything before."""
    properties = SimpleNamespace(
        name=NAME,
        total_memory=TOTAL_BYTES,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
    )
    values = {
        "_lazy_init": None,
        "current_device": 0,
        "device": contextlib.nullcontext(),
        "device_count": 1,
        "empty_cache": None,
        "get_device_capability": CAPABILITY,
        "get_device_name": NAME,
        "get_device_properties": properties,
        "ipc_collect": None,
        "is_available": True,
        "is_bf16_supported": True,
        "is_initialized": True,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (FREE_BYTES, TOTAL_BYTES),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "set_device": None,
        "stream": contextlib.nullcontext(),
    }
    functions = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "synchronize": synchronize,
    }
    replaced = {name: answer(value) for name, value in values.items()} | functions
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda._initialized = True
    torch.version.cuda = "13.0"
    # Weights that move to the device become tensors of another class: the parameter stays and swaps its contents.
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Backward passes in this thread: the modes below are those of a thread.
    torch.autograd.set_multithreading_enabled(False)
    for name in FUSED_ON_GPUS:
        # Never called: tensors of the device are dispatched before. Without it torch would take the operator apart.
        CUDA_KERNELS.impl(name, answer(None))
    Functions().__enter__()
    Operators().__enter__()
