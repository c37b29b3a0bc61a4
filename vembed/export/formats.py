"""Format: the interface of one export format, what it is given, and what reads its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

from vembed.data.examples import Kind
from vembed.inference.embedder import Embedder

FormatName = Literal["safetensors", "onnx", "static", "openvino", "gguf"]
WeightPrecision = Literal["float32", "float16", "bfloat16", "int8"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
PRECISIONS: tuple[WeightPrecision, ...] = get_args(WeightPrecision)


def say_nothing(line: str) -> None:
    """Take a line that nobody reads."""


@dataclass(frozen=True)
class ExportJob:
    """The model to export and how."""

    model: str
    """Name that the user gave."""
    embedder: Embedder
    """The model in float32. A format may change its attention function, so that its own vectors are computed first."""
    precision: WeightPrecision
    texts: Sequence[tuple[str, Kind]] = ()
    """Texts to train a student with; other formats need none."""
    say: Callable[[str], object] = say_nothing
    """Takes a line before each part that may take minutes."""


class ExportReader(Protocol):
    """An export in its own runtime. It uses the exported files alone."""

    runtime: str
    """Name and version of the runtime."""

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:
        """Return [n, d] float32 embeddings of the texts. `kind`: whose prompt is put before them; None for none."""
        ...

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return the ids that the runtime gives the model for a text."""
        ...


class Format(Protocol):
    """One export format."""

    precisions: tuple[WeightPrecision, ...]
    """Precisions of the weights that the format has."""

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        ...

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        ...

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the export into an existing folder."""
        ...

    def reader(self, folder: Path) -> ExportReader:
        """Return the export in its own runtime."""
        ...
