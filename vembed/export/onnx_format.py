"""OnnxFormat: the whole text side of a model as one ONNX graph with the output `sentence_embedding`."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vembed.data.examples import Kind
from vembed.export.folder_texts import FolderTexts, write_texts
from vembed.export.formats import ExportJob, WeightPrecision
from vembed.export.graph import INPUTS, OUTPUT, TextGraph, example_inputs
from vembed.inference.embedder import Embedder
from vembed.models.processors import save_processors

ONNX_FILE = "model.onnx"
LARGEST_FILE = 1_800_000_000
"""Bytes of weights in one file. ONNX files end at 2 GiB; larger weights go into a file beside."""
BATCH = 16


class OnnxFormat:
    """ONNX by torch's exporter; int8 and float16 by onnxruntime's converters."""

    precisions: tuple[WeightPrecision, ...] = ("float32", "float16", "int8")

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        names = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
        return f"{', '.join(names)} not installed: `pip install 'vembed[export]'`" if names else None

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        description = embedder.description
        if "text" not in description.modalities:
            return "the ONNX graph takes texts, and this model embeds images only"
        if description.traits.reads_chats:
            return "the ONNX graph takes text models and the text tower of CLIP-like ones, not vision-language models"
        if description.traits.has_fixed_length:
            return "the ONNX graph pads texts to the longest of a batch, and this model needs texts of fixed length"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write `model.onnx`, the tokenizer, the prompts and the model's config."""
        description = job.embedder.description
        save_processors(description, folder)
        write_texts(
            folder,
            description.query_prompt,
            description.document_prompt,
            description.max_length,
            description.similarity,
        )
        job.embedder.backbone.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        target = folder / ONNX_FILE
        if job.precision == "float32":
            _trace(job.embedder, target)
            return
        whole = folder / "whole.onnx"
        _trace(job.embedder, whole)
        (_to_int8 if job.precision == "int8" else _to_float16)(whole, target)
        for path in folder.glob("whole.onnx*"):
            path.unlink()

    def reader(self, folder: Path) -> OnnxReader:
        """Return the export in onnxruntime."""
        return OnnxReader(folder)


class OnnxReader:
    """An ONNX export in onnxruntime, with the tokenizer and the prompts of its folder."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        self.runtime = f"onnxruntime {version('onnxruntime')}"
        self.texts = FolderTexts(folder)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session: Any = onnxruntime.InferenceSession(
            folder / ONNX_FILE, options, providers=["CPUExecutionProvider"]
        )
        self.names = [one.name for one in self.session.get_inputs()]

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return the token ids of a text with its prompt."""
        return self.texts.token_ids(text, kind)

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:
        """Return [n, d] embeddings. Texts of similar length share a batch, because padding costs time."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: list[Any] = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            given = self.texts.padded([texts[row] for row in rows], kind)
            (vectors,) = self.session.run([OUTPUT], {name: given[name] for name in self.names})
            for row, vector in zip(rows, vectors, strict=True):
                found[row] = vector
        return np.stack(found).astype(np.float32)


def _trace(embedder: Embedder, target: Path) -> None:
    graph = TextGraph(embedder).eval()
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    shape = {0: batch, 1: tokens}
    exporter = logging.getLogger("torch.onnx")
    before = exporter.level
    exporter.setLevel(logging.ERROR)  # it names every operator library that is not installed
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecations inside torch and onnxscript
            program: Any = torch.onnx.export(
                graph,
                example_inputs(int(embedder.backbone.config.get_text_config().vocab_size)),  # type: ignore[union-attr,operator]
                dynamo=True,
                input_names=list(INPUTS),
                output_names=[OUTPUT],
                dynamic_shapes=dict.fromkeys(INPUTS, shape),
                verbose=False,
            )
            size = sum(one.nbytes for one in graph.parameters())
            program.save(str(target), external_data=size > LARGEST_FILE)
    finally:
        exporter.setLevel(before)


def _to_int8(whole: Path, target: Path) -> None:
    """Quantise the weights of matrix products to int8; activations are quantised as they are computed."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = _without_shapes(whole)
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)  # a hint about pre-processing, which changes nothing here
    try:
        quantize_dynamic(
            model,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            use_external_data_format=model.ByteSize() > LARGEST_FILE,
        )
    finally:
        root.setLevel(before)


def _to_float16(whole: Path, target: Path) -> None:
    """Store and compute in float16; inputs and the output keep their types."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model: Any = convert_float_to_float16(_without_shapes(whole), keep_io_types=True)
    onnx.save(model, target, save_as_external_data=model.ByteSize() > LARGEST_FILE)


def _without_shapes(path: Path) -> Any:
    """Return a graph without the shapes of its inner values: of folded transposes they are those before folding, which
    the converters refuse. They infer all shapes anew."""
    import onnx

    model: Any = onnx.load(path)
    del model.graph.value_info[:]
    return model
