"""OpenvinoFormat: the ONNX graph as a model of OpenVINO."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vembed.export.folder_texts import FolderTexts
from vembed.export.formats import ExportJob, ExportReader, WeightPrecision
from vembed.export.graph import OUTPUT
from vembed.export.onnx_format import (
    ONNX_FILE,
    GraphReader,
    OnnxFormat,
    write_text_graph,
)
from vembed.inference.embedder import Embedder
from vembed.models.processors import save_processors

OPENVINO_FILE = "openvino_model.xml"
BATCH_ROWS = 16


class OpenvinoFormat:
    """OpenVINO, converted from the float32 graph of ONNX."""

    precisions: tuple[WeightPrecision, ...] = ("float32", "float16")

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        if find_spec("openvino") is None:
            return "openvino is not installed: `pip install openvino 'vembed[export]'`"
        return OnnxFormat().missing()

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        if "text" not in embedder.description.modalities:
            return "the OpenVINO graph takes texts, and this model embeds images only; export it as onnx"
        if embedder.description.traits.has_fixed_length:
            return "the OpenVINO graph pads texts to the longest of a batch, and this model needs texts of fixed length"
        return OnnxFormat().refusal(embedder)

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the model, the tokenizer and the prompts."""
        save_processors(job.embedder.description, folder)
        write_text_graph(ExportJob(job.model, job.embedder, "float32"), folder)
        openvino: Any = import_module("openvino")
        model = openvino.convert_model(str(folder / ONNX_FILE))
        # In words: save_model's own default stores float16.
        openvino.save_model(
            model,
            str(folder / OPENVINO_FILE),
            compress_to_fp16=job.precision == "float16",
        )
        for path in folder.glob(ONNX_FILE + "*"):
            path.unlink()

    def reader(self, folder: Path) -> ExportReader:
        """Return the export in OpenVINO."""
        return OpenvinoReader(folder)


class OpenvinoReader(GraphReader):
    """An export in OpenVINO on a CPU."""

    def __init__(self, folder: Path) -> None:
        openvino: Any = import_module("openvino")
        self.runtime = f"openvino {openvino.get_version()}"
        self.texts = FolderTexts(folder)
        # On CPUs with bfloat16 instructions it would otherwise compute in bfloat16.
        options = {"INFERENCE_PRECISION_HINT": "f32"}
        self.model: Any = openvino.Core().compile_model(
            str(folder / OPENVINO_FILE), "CPU", options
        )
        self.names = [one.get_any_name() for one in self.model.inputs]

    def encode_ids(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Return [n, d] embeddings."""
        embeddings = []
        for start in range(0, len(rows), BATCH_ROWS):
            padded = self.texts.padded(rows[start : start + BATCH_ROWS])
            inputs = {name: padded[name] for name in self.names}
            embeddings.append(np.array(self.model(inputs)[OUTPUT], np.float32))
        return np.concatenate(embeddings)
