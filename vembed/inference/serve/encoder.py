"""TextEncoder: what the server encodes with: an Embedder, or an export in its own runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from vembed.data.examples import Item, Kind
from vembed.data.features import Features
from vembed.errors import UserError
from vembed.export.exporting import EXPORT_FORMATS
from vembed.export.onnx_format import GraphReader
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import encode_features
from vembed.models.families.model_files import EXPORT_FILE, read_object

SERVED_RUNTIMES = ("onnx", "openvino")
"""Formats of exports that the server runs in their own runtime."""


@dataclass(frozen=True, slots=True)
class ServedInput:
    """One input of a request: a text, or the token ids of one."""

    content: str | list[int]
    kind: Kind | None = None
    """Whose prompt is put before the text. None: no prompt."""


class TextEncoder(Protocol):
    """A model that the server asks, from one thread."""

    max_length: int
    """Tokens of the longest input. Longer texts are truncated."""
    vocab_size: int | None
    """Token ids are below this number. None: the model takes texts only."""

    def encode(self, inputs: Sequence[ServedInput]) -> tuple[np.ndarray, list[int]]:
        """Return [n, d] float32 embeddings and the number of tokens of each input."""
        ...


class ModelEncoder:
    """A model in this process."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        description = embedder.description
        if "text" not in description.modalities:
            raise UserError(
                f"{description.source} embeds images only, and the server's protocols send texts"
            )
        self.max_length = description.max_length
        self.fixed_length = (
            description.max_length if description.traits.has_fixed_length else None
        )
        self.prompts: dict[Kind | None, str] = {
            None: "",
            "query": description.query_prompt,
            "document": description.document_prompt,
        }
        # The ids of a conversation would have to bring its template along.
        self.vocab_size = (
            None if description.traits.reads_chats else embedder.featuriser.vocab_size
        )

    def encode(self, inputs: Sequence[ServedInput]) -> tuple[np.ndarray, list[int]]:
        """See TextEncoder."""
        featuriser = self.embedder.featuriser
        items: list[tuple[Item, Kind]] = []
        for served in inputs:
            if isinstance(served.content, str):
                item = Item(text=served.content, prompt=self.prompts[served.kind])
                items.append((item, "document"))
        tokenized = iter(featuriser.features(items))
        features = [
            next(tokenized)
            if isinstance(served.content, str)
            else self._features(served.content)
            for served in inputs
        ]
        embeddings = encode_features(
            self.embedder.model, featuriser, features, self.embedder.device
        )
        num_tokens = [
            0 if row.token_ids is None else len(row.token_ids) for row in features
        ]
        finished = self.embedder.finish(embeddings, self.embedder.truncate_dim, None)
        return finished, num_tokens

    def _features(self, token_ids: list[int]) -> Features:
        return Features(
            modality="text",
            length=self.fixed_length or len(token_ids),
            key=0,
            content=0,
            token_ids=np.array(token_ids, np.int32),
        )


class ExportEncoder:
    """An export to ONNX or OpenVINO, in that runtime."""

    def __init__(self, folder: Path, format_name: str) -> None:
        export_format = EXPORT_FORMATS[format_name]  # type: ignore[index]
        missing = export_format.missing()
        if missing is not None:
            raise UserError(f"{folder}: {missing}")
        self.reader = cast(GraphReader, export_format.reader(folder))
        self.max_length = self.reader.texts.max_length
        self.vocab_size: int | None = len(self.reader.texts.tokenizer)

    def encode(self, inputs: Sequence[ServedInput]) -> tuple[np.ndarray, list[int]]:
        """See TextEncoder."""
        rows = [
            self.reader.token_ids(served.content, served.kind)
            if isinstance(served.content, str)
            else served.content
            for served in inputs
        ]
        return self.reader.encode_ids(rows), [len(row) for row in rows]


def open_encoder(
    model: str,
    *,
    device: str | None = None,
    truncate_dim: int | None = None,
    trust_remote_code: bool = False,
) -> TextEncoder:
    """Return the encoder of a model, a run, or a folder that `vembed export` wrote."""
    folder = Path(model).expanduser()
    facts = read_object(folder / EXPORT_FILE) or {}
    format_name = str(facts.get("format"))
    if format_name not in SERVED_RUNTIMES:
        embedder = Embedder(
            model,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )
        return ModelEncoder(embedder)
    if truncate_dim is not None or device not in (None, "cpu"):
        raise UserError(
            f"{model} is an export to {format_name}: it runs on the CPU at its own size"
        )
    return ExportEncoder(folder, format_name)
