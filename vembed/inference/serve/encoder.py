"""TextEncoder: what the server encodes with: an Embedder, or an export in its own runtime."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vembed.data.examples import Item, Kind
from vembed.errors import UserError
from vembed.export.exporting import KNOWN
from vembed.export.formats import ExportReader
from vembed.inference.embedder import Embedder
from vembed.models.families.weight_files import EXPORT_FILE

RUNTIMES = ("onnx", "openvino")
"""Formats of exports that have a runtime of their own."""


class TextEncoder(Protocol):
    """A model that the server asks. Threads may call it at the same time."""

    max_length: int
    """Tokens of the longest text; longer ones are cut."""

    def encode(self, texts: Sequence[str], kind: Kind | None) -> tuple[np.ndarray, int]:
        """Return [n, d] float32 embeddings and the number of tokens. `kind`: whose prompt is put before each text; None
        for none."""
        ...


class ModelEncoder:
    """A model in this process. One request is computed at a time, on all cores."""

    def __init__(
        self,
        model: str,
        *,
        device: str | None,
        truncate_dim: int | None,
        trust_remote_code: bool,
    ) -> None:
        self.embedder = Embedder(
            model,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )
        if "text" not in self.embedder.description.modalities:
            raise UserError(
                f"{model} embeds images only, and the server's protocols send texts"
            )
        self.max_length = self.embedder.description.max_length
        self.lock = threading.Lock()

    def encode(self, texts: Sequence[str], kind: Kind | None) -> tuple[np.ndarray, int]:
        """See TextEncoder."""
        prompt = "" if kind is None else None
        items = [Item(text=text, prompt=prompt) for text in texts]
        with self.lock:
            used = self.embedder.featuriser.features(
                [(item, kind or "document") for item in items]
            )
            vectors = self.embedder.encode(items, kind or "document")
        return vectors, sum(
            0 if one.token_ids is None else len(one.token_ids) for one in used
        )


class ExportEncoder:
    """An export for another runtime, in that runtime."""

    def __init__(self, folder: Path, form: str) -> None:
        found = next(kind for name, kind in KNOWN.items() if name == form)
        if (missing := found.missing()) is not None:
            raise UserError(f"{folder}: {missing}")
        self.reader: ExportReader = found.reader(folder)
        settings = json.loads(
            (folder / "sentence_bert_config.json").read_text(encoding="utf-8")
        )
        self.max_length = int(settings["max_seq_length"])
        self.lock = threading.Lock()

    def encode(self, texts: Sequence[str], kind: Kind | None) -> tuple[np.ndarray, int]:
        """See TextEncoder."""
        with self.lock:
            num_tokens = sum(len(self.reader.token_ids(text, kind)) for text in texts)
            return self.reader.encode(list(texts), kind), num_tokens


def open_encoder(
    model: str,
    *,
    device: str | None = None,
    truncate_dim: int | None = None,
    trust_remote_code: bool = False,
) -> TextEncoder:
    """Return the encoder of a model, a run, or a folder that `vembed export` wrote."""
    place = Path(model).expanduser()
    facts: dict[str, Any] = {}
    if (place / EXPORT_FILE).is_file():
        facts = json.loads((place / EXPORT_FILE).read_text(encoding="utf-8"))
    if facts.get("format") not in RUNTIMES:
        return ModelEncoder(
            model,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )
    if truncate_dim is not None or device not in (None, "cpu"):
        raise UserError(
            f"{model} is an export to {facts['format']}: it runs on the CPU at its own size"
        )
    return ExportEncoder(place, facts["format"])
