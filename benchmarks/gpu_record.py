"""Record of a benchmark on one GPU: rows that print as they end, one JSON file, a time limit, and the trainings."""

from __future__ import annotations

import gc
import json
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

import vembed
from benchmarks.cases import SEED
from vembed.models import precision

Values = dict[str, Any]
PACKAGES = (
    "vembed",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "flash-attn",
    "sentence-transformers",
)


class NotMeasuredError(Exception):
    """A row that cannot be measured here, with the reason."""


@dataclass
class Record:
    """Rows measured so far, in a file that is written after each."""

    path: Path
    device: torch.device
    is_small: bool
    seconds: float
    """Time limit of the whole benchmark."""
    only: str = ""
    """Part of the names of the rows that are measured."""
    rows: list[Values] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)

    def row(
        self,
        part: str,
        name: str,
        measure: Callable[[], Values],
        *,
        limit: float = 60.0,
    ) -> Values:
        """Measure one row in at most `limit` seconds, print it and write the file. A failure is written, not raised."""
        if self.only not in name:
            return {}
        began = time.monotonic()
        # A CPU has other work, and is slow at what is compiled for GPUs.
        limit = min(6 * limit if self.is_small else limit, self.left())
        try:
            if limit < 5.0:
                raise NotMeasuredError(f"only {max(limit, 0.0):.0f} s were left")
            with _alarm(limit):
                values = {"status": "ok", **measure()}
        except NotMeasuredError as reason:
            values = {"status": "skipped", "reason": str(reason)}
        except Exception as error:
            # Whatever fails in one row, the others are still measured; `main` ends with exit code 1.
            values = {
                "status": "failed",
                "reason": f"{type(error).__name__}: {error}"[:1000],
            }
        values = {
            "part": part,
            "name": name,
            **values,
            "row_seconds": round(time.monotonic() - began, 2),
        }
        self.rows.append(values)
        cells = ", ".join(
            f"{key}={_short(value)}"
            for key, value in values.items()
            if key not in ("part", "name")
        )
        print(f"{part}: {name}: {cells}", flush=True)
        self.write()
        self.free()
        return values

    def write(self) -> None:
        """Write all rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(
            json.dumps({"machine": machine(self.device), "rows": self.rows}, indent=1)
            + "\n"
        )

    def free(self) -> None:
        """Return cached memory, so that a row begins as the first did."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def failed(self) -> list[str]:
        """Names of the rows that failed."""
        return [row["name"] for row in self.rows if row["status"] == "failed"]


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def quick_compiler(record: Record) -> Iterator[None]:
    """Compile small models without inductor, whose C++ takes minutes on a CPU; the graphs are the same."""
    backend = "aot_eager" if record.is_small else "inductor"
    with patch.object(
        precision, "compile_layers", partial(precision.compile_layers, backend=backend)
    ):
        yield


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine(device: torch.device) -> Values:
    """Return the device and the versions of what runs on it."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    values: Values = {
        "device": "CPU",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values |= {
            "device": properties.name,
            "memory_gb": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return values | {"versions": versions}


@dataclass
class Trained:
    """A training that has ended."""

    losses: list[float]
    seconds: list[float]
    """Of each step."""
    samples_per_second: list[float]
    peak_bytes: int
    """Highest allocated memory; 0 without a GPU."""
    folder: Path

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the trained model, or of its adapter, on the CPU."""
        tensors: dict[str, Tensor] = {}
        for path in sorted((self.folder / "final").glob("*.safetensors")):
            tensors |= load_file(path)
        return tensors


def train(
    record: Record, model: Path, data: Path, folder: Path, **options: Any
) -> Trained:
    """Train with the same options in every row, except for those given."""
    settings: Values = {
        "model_name": str(model),
        "data_path": str(data),
        "output_dir": str(folder),
        "temperature": 0.05,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "weight_decay": 0.0,
        "seed": SEED,
        "logging_steps": 1,
        "report_to": [],
        **options,
    }
    if record.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result = vembed.train(settings)
    peak = torch.cuda.max_memory_allocated() if record.device.type == "cuda" else 0
    lines = [
        json.loads(line)
        for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "loss" in line]
    return Trained(
        losses=[line["loss"] for line in steps],
        seconds=[line["step_seconds"] for line in steps],
        samples_per_second=[line["samples_per_second"] for line in steps],
        peak_bytes=peak,
        folder=result.output_dir,
    )


def relative(
    trained: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]
) -> float:
    """Return the relative difference of two updates from the same start. With SGD it is that of the gradients."""
    square = whole = 0.0
    for name, value in trained.items():
        base = (
            start[name].double()
            if name in start
            else torch.zeros_like(value, dtype=torch.float64)
        )
        first = value.double() - base
        second = other[name].double() - base
        square += float((first - second).square().sum())
        whole += float(second.square().sum())
    if whole == 0.0:
        raise ValueError("the weights have not changed: nothing was trained")
    return (square / whole) ** 0.5


def require(condition: bool, message: str) -> None:
    """Fail the row with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)
