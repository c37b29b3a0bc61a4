"""OnnxFormat and OpenvinoFormat: the texts of a model as one graph, and its images as another, from inputs to embeddings."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor

from vembed.config.values import WeightPrecision
from vembed.data.batching.rank_batch import split_by_length
from vembed.data.examples import Item, Kind
from vembed.errors import UserError
from vembed.export.formats import ExportFormat, ExportJob, FolderTexts, write_texts
from vembed.files import write_json
from vembed.inference.embedder import Embedder, to_item
from vembed.models.embedding_model import Inputs, pool, run_texts, tower_module
from vembed.models.families.description import IMAGE_TOWER_FOLDER
from vembed.models.families.family import Modality
from vembed.models.families.model_files import read_object
from vembed.models.processors import save_processors

ONNX_FILE = "model.onnx"
IMAGE_FILE = "image_model.onnx"
OPENVINO_FILE = "openvino_model.xml"
PIXELS = "pixel_values"
OUTPUT = "sentence_embedding"
BATCH_TOKENS = 256
"""Padded tokens of a forward pass in onnxruntime. Its activations stay in the cache of a core: with 1,300 tokens each
text took nearly twice as long (6 layers of width 384)."""
OPENVINO_BATCH_ROWS = 16
MAX_FILE_BYTES = 1_800_000_000
"""Weights in one file. ONNX files end at 2 GiB; larger weights go into a file beside."""
TRACED_LENGTH = 8
TRACED_VOCAB_SIZE = 4
"""Token ids that any vocabulary has, for models whose config names no size: the graph does not depend on them."""
INT8_IMAGE_OPERATORS = ["MatMul", "Gemm"]
"""onnxruntime has no convolution of int8 weights, so that patch embeddings stay as they are."""


# ---- graphs --------------------------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Tower, pooling, projection, Dense modules, normalisation and truncation of one modality in one forward.

    It has no step that depends on values, which tracing would freeze.
    """

    modality: Modality

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.description = embedder.description
        self.model: Any = embedder.model
        self.backbone: Any = embedder.backbone
        traits = self.description.family_traits
        models: list[Any] = [self.backbone]
        if traits.is_composed:
            models = [
                tower_module(self.backbone, traits, name) for name in traits.towers
            ]
        # Eager attention is plain matrix products: every runtime has them, and int8 kernels replace them.
        for model in models:
            model.set_attn_implementation("eager")

    def finish(self, pooled: Tensor) -> Tensor:
        """Map pooled outputs [n, width] of a tower to [n, d] embeddings, as `Embedder.encode` returns them."""
        vectors: Tensor = self.model.project(self.modality, pooled).float()
        # First the length, then the cut: the values of Embedder and Sentence Transformers.
        if self.description.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        size = self.description.truncate_dim
        return vectors if size is None else vectors[:, :size]


class TextGraph(Graph):
    """Texts. The mask is always applied, and texts are padded."""

    modality: Modality = "text"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map [n, tokens] ids and mask to [n, d] embeddings."""
        traits = self.description.family_traits
        inputs = {"input_ids": input_ids}
        if traits.forward_kinds["text"] == "pooled_towers":
            # Texts of fixed length were trained without a mask.
            if not traits.has_fixed_length:
                inputs["attention_mask"] = attention_mask
            tower = tower_module(self.backbone, traits, "text")
            return self.finish(tower(**inputs).pooler_output)
        model = _text_model(self.backbone, traits)
        output = run_texts(self.description, model, inputs, attention_mask)
        hidden = output.last_hidden_state
        module = self.model.pooling
        pooled = pool(self.description.pooling, hidden, attention_mask, module=module)
        return self.finish(pooled)


class ImageGraph(Graph):
    """Images of one size."""

    modality: Modality = "image"

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map [n, channels, height, width] pixels, as the image processor gives them, to [n, d] embeddings."""
        inputs = {PIXELS: pixel_values}
        output = self.model.tower_output("image", inputs)
        return self.finish(output.pooled)


def _text_model(backbone: Any, traits: Any) -> Any:
    """Return the model of Transformers that reads the texts."""
    return tower_module(backbone, traits, "text") if traits.is_composed else backbone


# ---- files ---------------------------------------------------------------------------------------------------------


def trace(
    graph: nn.Module,
    inputs: Inputs,
    shape: Mapping[int, Any],
    target: Path,
    output: str,
) -> None:
    """Save a module as a float32 graph. `shape`: the dimensions of every input that vary. `output`: name of its output."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside torch and onnxscript
        program: Any = torch.onnx.export(
            graph.eval(),
            tuple(inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=dict.fromkeys(inputs, shape),
            verbose=False,
        )
    size = sum(weight.nbytes for weight in graph.parameters())
    program.save(str(target), external_data=size > MAX_FILE_BYTES)


def convert(
    target: Path,
    precision: WeightPrecision,
    int8_operators: Sequence[str] | None,
) -> None:
    """Rewrite a float32 graph in int8 or float16. `int8_operators`: those whose weights int8 takes; None: all that
    onnxruntime's quantisation knows."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(target)
    for path in target.parent.glob(f"{target.name}*"):
        path.unlink()  # also model.onnx.data, which large models have
    # The shapes of inner values: of folded transposes they are those before folding, which the converters refuse. They
    # infer all shapes anew.
    del model.graph.value_info[:]
    is_large = model.ByteSize() > MAX_FILE_BYTES
    if precision == "int8":
        # Weights of matrix products. Activations are quantised as they are computed. Unsigned: products with signed weights
        # overflow their 16-bit sums on processors without VNNI.
        quantize_dynamic(
            model,
            target,
            weight_type=QuantType.QUInt8,
            per_channel=True,
            op_types_to_quantize=int8_operators,
            use_external_data_format=is_large,
        )
    else:
        # Inputs and the output keep their types.
        half = convert_float_to_float16(model, keep_io_types=True)
        onnx.save(half, target, save_as_external_data=is_large)


def write_graph(
    graph: nn.Module,
    inputs: Inputs,
    shape: Mapping[int, Any],
    target: Path,
    precision: WeightPrecision,
    *,
    output: str = OUTPUT,
    int8_operators: Sequence[str] | None = None,
) -> None:
    """Trace a module and save it in a precision."""
    # torch and onnxruntime name every operator library that is not installed, and hint at pre-processing, which changes
    # nothing here.
    logging.disable(logging.WARNING)
    try:
        trace(graph, inputs, shape, target, output)
        if precision != "float32":
            convert(target, precision, int8_operators)
    finally:
        logging.disable(logging.NOTSET)


class OnnxGraph:
    """A graph in onnxruntime on the CPU."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.runtime = f"onnxruntime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Waiting threads would take the cores from those of `run`.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session: Any = onnxruntime.InferenceSession(
            path,
            options,
            providers=["CPUExecutionProvider"],
            # Its kernel took 9 times as long as an addition and a LayerNormalization, which it replaces (1.31).
            disabled_optimizers=["SkipLayerNormFusion"],
        )
        self.shapes = {entry.name: entry.shape for entry in self._session.get_inputs()}
        """Shape of each input."""

    def run(
        self,
        lengths: Sequence[int],
        entries: Sequence[Any],
        collate: Callable[[list[Any]], Mapping[str, Any]],
    ) -> np.ndarray:
        """Return the float32 outputs of some entries in their order. `lengths`: in tokens. `collate`: gives the inputs of
        a batch of entries.

        Entries of similar length share a batch, because padding costs time. As many batches are computed at a time as
        there are threads: a single one shares its operators among them, which is slower where these are small.
        """
        batches = split_by_length(lengths, BATCH_TOKENS)
        inputs = []
        for numbers in batches:
            batch = collate([entries[number] for number in numbers])
            inputs.append({name: np.asarray(batch[name]) for name in self.shapes})
        num_threads = torch.get_num_threads()
        with ThreadPoolExecutor(num_threads, thread_name_prefix="vembed-onnx") as pool:
            results = pool.map(lambda batch: self._session.run(None, batch)[0], inputs)
            outputs = np.concatenate(list(results))
        rows = np.empty(outputs.shape, np.float32)
        rows[np.concatenate(batches)] = outputs
        return rows


# ---- texts ---------------------------------------------------------------------------------------------------------


class GraphReader(ABC):
    """The texts of an export to a graph, with the tokenizer and the prompts of its folder."""

    runtime: str

    def __init__(self, folder: Path) -> None:
        self.texts = FolderTexts(folder)

    @abstractmethod
    def encode_ids(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Return [n, d] float32 embeddings of token ids."""

    def encode(self, texts: list[str], kind: Kind) -> np.ndarray:
        """Return [n, d] float32 embeddings of texts."""
        return self.encode_ids(self.texts.token_ids(texts, kind))


class OnnxReader(GraphReader):
    """The texts of an ONNX export in onnxruntime."""

    def __init__(self, folder: Path) -> None:
        if not (folder / ONNX_FILE).is_file():
            raise UserError(
                f"{folder} has no {ONNX_FILE}: this model embeds images only"
            )
        super().__init__(folder)
        self.graph = OnnxGraph(folder / ONNX_FILE)
        self.runtime = self.graph.runtime
        length = self.graph.shapes["input_ids"][1]
        self.fixed_length = length if isinstance(length, int) else None
        """Tokens of every text, for a model with texts of fixed length."""

    def encode_ids(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Return [n, d] embeddings."""
        lengths = [self.fixed_length or len(row) for row in rows]
        collate = partial(self.texts.padded, length=self.fixed_length)
        return self.graph.run(lengths, rows, collate)


class OnnxFormat(ExportFormat):
    """ONNX by torch's exporter; int8 and float16 by onnxruntime's converters."""

    precisions = ("float32", "float16", "int8")
    packages = ("onnx", "onnxscript", "onnxruntime")
    install = "`pip install 'vembed[export]'`"
    reader = OnnxReader

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        description = embedder.description
        if description.family_traits.is_vision_language:
            return "the ONNX graphs take texts and images apart, and a vision-language model reads them together"
        if "image" in description.modalities and list(image_inputs(embedder)) != [
            PIXELS
        ]:
            return "the ONNX graph takes images of one size, and this model takes them in any shape"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write a graph for each modality, the tokenizer, the prompts, the image processor and the model's config."""
        description = job.embedder.description
        save_processors(description, folder)
        if "text" in description.modalities:
            write_text_graph(job.embedder, job.precision, folder)
        if "image" in description.modalities:
            pixels = image_inputs(job.embedder)[PIXELS].float()
            write_graph(
                ImageGraph(job.embedder),
                {PIXELS: pixels},
                {0: torch.export.Dim("batch")},
                folder / IMAGE_FILE,
                job.precision,
                int8_operators=INT8_IMAGE_OPERATORS,
            )


def write_text_graph(
    embedder: Embedder,
    precision: WeightPrecision,
    folder: Path,
) -> None:
    """Write `model.onnx`, the prompts and the config of the text model."""
    description = embedder.description
    write_texts(
        folder,
        description.query_prompt,
        description.document_prompt,
        description.max_length,
        description.similarity,
    )
    model = _text_model(embedder.backbone, description.family_traits)
    model.config.save_pretrained(folder)
    config = read_object(folder / "config.json")
    # It names Python code that a graph does without, and that is not in this folder.
    if config.pop("auto_map", None):
        write_json(folder / "config.json", config)
    # Dimensions that may vary; texts of fixed length have one only.
    shape = {0: torch.export.Dim("batch")}
    length = description.max_length
    if not description.family_traits.has_fixed_length:
        shape[1] = torch.export.Dim("tokens")
        length = TRACED_LENGTH
    # A class of the user's own has a config without vocab_size.
    text_config = model.config.get_text_config().to_dict()
    vocab_size = int(text_config.get("vocab_size", TRACED_VOCAB_SIZE))
    # Sizes of 1 would be taken for constants.
    ids = torch.arange(2 * length).remainder(max(vocab_size, 1)).view(2, length)
    write_graph(
        TextGraph(embedder),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        shape,
        folder / ONNX_FILE,
        precision,
    )


class OpenvinoReader(GraphReader):
    """An export in OpenVINO on a CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        openvino = import_module("openvino")
        self.runtime = f"openvino {openvino.get_version()}"
        # On CPUs with bfloat16 instructions it would otherwise compute in bfloat16.
        options = {"INFERENCE_PRECISION_HINT": "f32"}
        path = str(folder / OPENVINO_FILE)
        self.model: Any = openvino.Core().compile_model(path, "CPU", options)
        self.names = [graph_input.get_any_name() for graph_input in self.model.inputs]

    def encode_ids(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Return [n, d] embeddings."""
        embeddings = []
        for start in range(0, len(rows), OPENVINO_BATCH_ROWS):
            padded = self.texts.padded(rows[start : start + OPENVINO_BATCH_ROWS])
            inputs = {name: padded[name] for name in self.names}
            embeddings.append(np.array(self.model(inputs)[OUTPUT], np.float32))
        return np.concatenate(embeddings)


class OpenvinoFormat(ExportFormat):
    """OpenVINO, converted from the float32 graph of ONNX."""

    precisions = ("float32", "float16")
    packages = ("openvino", *OnnxFormat.packages)
    install = "`pip install openvino 'vembed[export]'`"
    reader = OpenvinoReader

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        if "text" not in embedder.description.modalities:
            return "the OpenVINO graph takes texts, and this model embeds images only; export it as onnx"
        if embedder.description.family_traits.has_fixed_length:
            return "the OpenVINO graph pads texts to the longest of a batch, and this model needs texts of fixed length"
        return OnnxFormat().refusal(embedder)

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the model, the tokenizer and the prompts."""
        save_processors(job.embedder.description, folder)
        write_text_graph(job.embedder, "float32", folder)
        openvino = import_module("openvino")
        model = openvino.convert_model(str(folder / ONNX_FILE))
        # Named, because save_model's own default stores float16.
        is_float16 = job.precision == "float16"
        target = str(folder / OPENVINO_FILE)
        openvino.save_model(model, target, compress_to_fp16=is_float16)
        for path in folder.glob(ONNX_FILE + "*"):
            path.unlink()


# ---- images --------------------------------------------------------------------------------------------------------


def image_inputs(embedder: Embedder) -> Inputs:
    """Return what the model takes for two images."""
    items: list[tuple[Item, Kind]] = [
        (to_item(image), "document") for image in made_images(2)
    ]
    return embedder.featuriser.collate(embedder.featuriser.features(items))


def made_images(count: int) -> list[Image.Image]:
    """Return images of several shapes, with blurred fields of random colours; the same ones at every call."""
    draw = np.random.default_rng(0)
    images = []
    for _ in range(count):
        height, width = draw.integers(24, 160, size=2).tolist()
        colours = draw.integers(0, 256, size=(4, 4, 3), dtype=np.uint8)
        images.append(Image.fromarray(colours).resize((width, height)))
    return images


class OnnxImages:
    """The images of an ONNX export in onnxruntime, with the image processor of its folder."""

    def __init__(self, folder: Path) -> None:
        tower = folder / IMAGE_TOWER_FOLDER
        source = tower if tower.is_dir() else folder
        self.processor: Any = AutoImageProcessor.from_pretrained(source)
        self.graph = OnnxGraph(folder / IMAGE_FILE)
        self.runtime = self.graph.runtime

    def encode(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return [n, d] embeddings of images in RGB."""

        def collate(batch: list[Any]) -> Mapping[str, Any]:
            pixels = self.processor(images=batch, return_tensors="pt")[PIXELS]
            return {PIXELS: pixels.float()}

        # One at a time.
        return self.graph.run([BATCH_TOKENS] * len(images), images, collate)
