"""OnnxFormat: the text side of a model as one ONNX graph, and its image side as another, from inputs to embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vembed.data.examples import Kind
from vembed.errors import UserError
from vembed.export.folder_texts import FolderTexts, write_texts
from vembed.export.formats import ExportJob, WeightPrecision
from vembed.export.graph import INPUTS, TextGraph, example_inputs
from vembed.export.onnx_graphs import open_session, run_batches, save_graph, write_in
from vembed.export.onnx_images import image_inputs, write_images
from vembed.inference.embedder import Embedder
from vembed.models.families.weight_files import read_object
from vembed.models.processors import save_processors
from vembed.models.towers import tower_module
from vembed.saving.layout import write_json

ONNX_FILE = "model.onnx"
BATCH_TOKENS = 256
"""Padded tokens of a forward pass. Its activations stay in the cache of a core: with 1,300 tokens each text took nearly
twice as long (6 layers of width 384)."""


FEW_TOKENS = 4
"""Token ids that any vocabulary has: what is traced does not depend on them."""


class OnnxFormat:
    """ONNX by torch's exporter; int8 and float16 by onnxruntime's converters."""

    precisions: tuple[WeightPrecision, ...] = ("float32", "float16", "int8")

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        names = [
            name
            for name in ("onnx", "onnxscript", "onnxruntime")
            if find_spec(name) is None
        ]
        return (
            f"{', '.join(names)} not installed: `pip install 'vembed[export]'`"
            if names
            else None
        )

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        description = embedder.description
        if description.traits.reads_chats:
            return "the ONNX graphs take texts and images apart, and a vision-language model reads them together"
        if "image" in description.modalities and list(image_inputs(embedder)) != [
            "pixel_values"
        ]:
            return "the ONNX graph takes images of one size, and this model takes them in any shape"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write a graph for each modality, the tokenizer, the prompts, the image processor and the model's config."""
        modalities = job.embedder.description.modalities
        save_processors(job.embedder.description, folder)
        if "text" in modalities:
            write_text_graph(job, folder)
        if "image" in modalities:
            write_images(job, folder)

    def reader(self, folder: Path) -> OnnxReader:
        """Return the texts of the export in onnxruntime."""
        return OnnxReader(folder)


def write_text_graph(job: ExportJob, folder: Path) -> None:
    """Write `model.onnx`, the prompts and the config of the text model."""
    description = job.embedder.description
    write_texts(
        folder,
        description.query_prompt,
        description.document_prompt,
        description.max_length,
        description.similarity,
    )
    _text_model(job.embedder).config.save_pretrained(folder)
    config = read_object(folder / "config.json") or {}
    if config.pop(
        "auto_map", None
    ):  # names Python code that a graph does without, and that is not in this folder
        write_json(folder / "config.json", config)
    write_in(job.precision, partial(_trace, job.embedder), folder / ONNX_FILE)


class GraphReader(ABC):
    """The texts of an export to a graph, with the tokenizer and the prompts of its folder."""

    runtime: str
    texts: FolderTexts

    @abstractmethod
    def encode_ids(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Return [n, d] float32 embeddings of token ids."""

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:
        """Return [n, d] float32 embeddings of texts."""
        return self.encode_ids(self.texts.all_token_ids(texts, kind))

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return the token ids of a text with its prompt."""
        return self.texts.token_ids(text, kind)


class OnnxReader(GraphReader):
    """The texts of an ONNX export in onnxruntime."""

    def __init__(self, folder: Path) -> None:
        if not (folder / ONNX_FILE).is_file():
            raise UserError(
                f"{folder} has no {ONNX_FILE}: this model embeds images only"
            )
        self.runtime = f"onnxruntime {version('onnxruntime')}"
        self.texts = FolderTexts(folder)
        self.session: Any = open_session(folder / ONNX_FILE)
        self.names = [one.name for one in self.session.get_inputs()]
        length = self.session.get_inputs()[0].shape[1]
        self.fixed_length = length if isinstance(length, int) else None
        """Tokens of every text, for a model with texts of fixed length."""

    def encode_ids(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Return [n, d] embeddings. Texts of similar length share a batch, because padding costs time."""
        batches = _batches([self.fixed_length or len(row) for row in rows])
        inputs = []
        for numbers in batches:
            batch = [rows[number] for number in numbers]
            padded = self.texts.padded(batch, self.fixed_length)
            inputs.append({name: padded[name] for name in self.names})
        outputs = np.concatenate(run_batches(self.session, inputs))
        embeddings = np.empty(outputs.shape, np.float32)
        embeddings[np.concatenate(batches)] = outputs
        return embeddings


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of each batch, the longest texts first: BATCH_TOKENS padded tokens, or a single longer text."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= BATCH_TOKENS:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _trace(embedder: Embedder, target: Path) -> None:
    description = embedder.description
    length = description.max_length if description.traits.has_fixed_length else None
    # Dimensions that may vary; texts of fixed length have one only.
    shape = {0: torch.export.Dim("batch")} | (
        {} if length else {1: torch.export.Dim("tokens")}
    )
    # A class of the user's own has a config without it.
    vocab_size = (
        _text_model(embedder)
        .config.get_text_config()
        .to_dict()
        .get("vocab_size", FEW_TOKENS)
    )
    example = example_inputs(int(vocab_size), length)
    save_graph(
        TextGraph(embedder), example, INPUTS, dict.fromkeys(INPUTS, shape), target
    )


def _text_model(embedder: Embedder) -> Any:
    """Return the model of Transformers that reads the texts."""
    family = embedder.description.traits
    return (
        tower_module(embedder.backbone, family, "text")
        if family.has_two_models
        else embedder.backbone
    )
