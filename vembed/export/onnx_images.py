"""The image side of a model in ONNX: one graph from pixels to embeddings, and its comparison with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from vembed.data.images.files import load_image
from vembed.evaluation.dataset import EvalData, RetrievalData
from vembed.export.check import ImageCheck, distances, length_error
from vembed.export.formats import ExportJob
from vembed.export.graph import ImageGraph
from vembed.export.onnx_graphs import open_session, run_batches, save_graph, write_in
from vembed.inference.embedder import Embedder, to_item
from vembed.models.families.description import IMAGE_TOWER_FOLDER

IMAGE_FILE = "image_model.onnx"
PIXELS = "pixel_values"
NUM_IMAGES = 40
MATRIX_PRODUCTS = ("MatMul", "Gemm")
"""Operators in int8: onnxruntime has no convolution of int8 weights, so that patch embeddings stay as they are."""


def image_inputs(embedder: Embedder) -> Mapping[str, Tensor]:
    """Return what the model takes for two images."""
    items = [(to_item(one), "document") for one in made_images(2)]
    return embedder.featuriser.collate(embedder.featuriser.features(items))  # type: ignore[arg-type]


def write_images(job: ExportJob, folder: Path) -> None:
    """Write `image_model.onnx`. The image processor is in the folder, or with two models in the image tower's."""
    write_in(
        job.precision,
        partial(_trace, job.embedder),
        folder / IMAGE_FILE,
        MATRIX_PRODUCTS,
    )


def _trace(embedder: Embedder, target: Path) -> None:
    example = (image_inputs(embedder)[PIXELS].float(),)
    save_graph(
        ImageGraph(embedder),
        example,
        (PIXELS,),
        {PIXELS: {0: torch.export.Dim("batch")}},
        target,
    )


class OnnxImages:
    """The images of an ONNX export in onnxruntime, with the image processor of its folder."""

    def __init__(self, folder: Path) -> None:
        self.runtime = f"onnxruntime {version('onnxruntime')}"
        tower = folder / IMAGE_TOWER_FOLDER
        self.processor: Any = AutoImageProcessor.from_pretrained(
            tower if tower.is_dir() else folder
        )
        self.session: Any = open_session(folder / IMAGE_FILE)

    def encode(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return [n, d] embeddings of images in RGB."""
        given = [
            self.processor(images=[one], return_tensors="pt")[PIXELS].numpy()
            for one in images
        ]
        found = run_batches(
            self.session, [{PIXELS: pixels.astype(np.float32)} for pixels in given]
        )
        return np.concatenate(found).astype(np.float32)


def images_to_compare(data: EvalData | None) -> list[Image.Image]:
    """Return NUM_IMAGES images: the first half those of the evaluation data, the others made."""
    found: list[Image.Image] = []
    if data is not None:
        items = (
            (*data.documents, *data.queries)
            if isinstance(data, RetrievalData)
            else (*data.second, *data.first)
        )
        refs = dict.fromkeys(ref for item in items for ref in item.images)
        found = [load_image(ref) for ref in list(refs)[: NUM_IMAGES // 2]]
    return found + made_images(NUM_IMAGES - len(found))


def made_images(count: int) -> list[Image.Image]:
    """Return images of several shapes: gradients with noise; the same ones at every call."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        height, width = (int(one) for one in draw.integers(24, 160, size=2))
        ramp = (
            np.linspace(0, 200, height)[:, None, None]
            * np.linspace(0, 1, width)[None, :, None]
        )
        noise = draw.integers(0, 55, size=(height, width, 3))
        found.append(Image.fromarray((ramp * draw.random(3) + noise).astype(np.uint8)))
    return found


def compare_images(
    folder: Path, images: Sequence[Image.Image], model_ND: np.ndarray, tolerance: float
) -> ImageCheck:
    """Return the comparison of the exported image graph with the model's own vectors of the same images."""
    reader = OnnxImages(folder)
    vectors = reader.encode(images)
    return ImageCheck(
        reader.runtime,
        len(images),
        float(distances(model_ND, vectors).max()),
        length_error(model_ND, vectors),
        tolerance,
    )
