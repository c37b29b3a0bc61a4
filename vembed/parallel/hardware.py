"""GPUs by name: memory and peak arithmetic of the vendors' data sheets, for plans on hardware that is not at hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from vembed.errors import UserError
from vembed.names import nearest
from vembed.parallel.devices import GIB

VISIBLE_SHARE = 0.97
"""Share of a GPU's nominal memory that a process sees: the driver and error correction keep the rest."""
FULL_NAME = re.compile(r"(?:(\d{1,4})\s*[x*]\s*)?(\S.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
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

    def tflops(self, *, in_half: bool) -> float | None:
        """Return the peak for a precision of the arithmetic."""
        return self.half_tflops if in_half else self.single_tflops


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


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs of each machine that a plan is made for."""

    gpu: Gpu
    count: int | None
    """None: as many as the config or the command asks for, else one."""


def read_hardware(gpu: str | None, memory: str | None) -> Hardware | None:
    """Return the hardware of `--gpu 2xA100-80GB` and `--memory 80`; None if neither is given."""
    if gpu is None:
        return None if memory is None else Hardware(_of_memory(memory), None)
    match = FULL_NAME.fullmatch(gpu.strip())
    if match is None or match[1] == "0":
        raise UserError(f"--gpu {gpu!r}: give a number and a name, as 2xA100-80GB")
    device = _named(match[2])
    if memory is not None:
        device = replace(device, gigabytes=_of_memory(memory).gigabytes)
    return Hardware(device, int(match[1] or 1))


def _of_memory(text: str) -> Gpu:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", text.strip(), re.IGNORECASE)
    if match is None or not 0 < float(match[1]) <= 100_000:
        raise UserError(f"--memory {text!r}: give the memory of one GPU in GB, as 80")
    return Gpu(f"a GPU of {float(match[1]):g} GB", float(match[1]), None, None)


def _named(name: str) -> Gpu:
    plain_name = _plain(name)
    # By full name, or without the memory: A100 is then two, and the memory is asked for.
    same = []
    for gpu in GPUS:
        without_memory = gpu.name.rpartition("-")[0]
        if plain_name in (_plain(gpu.name), _plain(without_memory)):
            same.append(gpu)
    if len(same) == 1:
        return same[0]
    if same:
        raise UserError(
            f"--gpu {name}: give its memory too: {' or '.join(gpu.name for gpu in same)}"
        )
    near = nearest(name, [gpu.name for gpu in GPUS])
    hint = f", did you mean {near}?" if near else ""
    known = ", ".join(gpu.name for gpu in GPUS)
    raise UserError(
        f"--gpu {name} is not in the table{hint} (it has {known}); or give --memory GB"
    )


def _plain(name: str) -> str:
    """Return a name without its maker, spaces, marks and units: NVIDIA A100 80GB -> a10080."""
    text = re.sub(
        r"nvidia|geforce|tesla|quadro|rtx|sxm\d?|(?<=\d)gi?b?\b", "", name.lower()
    )
    return re.sub(r"[^a-z0-9]", "", text)
