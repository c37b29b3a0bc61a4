"""Embedder: a saved model for inference in Python. Texts, images or both in, one array out."""

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import nn

from vembed.config.decisions import Decision, Precision
from vembed.config.values import EmbeddingPrecision, ModelDtype
from vembed.data.examples import (
    LONE_SURROGATE,
    ImageRef,
    Item,
    Kind,
    has_lone_surrogate,
)
from vembed.data.features import Featuriser
from vembed.errors import UserError, did_you_mean
from vembed.inference.encoding import encode_items, first_dims, quantized, unit_rows
from vembed.models.building import load_embedder
from vembed.models.embedding_model import LayerPooler
from vembed.models.precision import bf16_weights_of
from vembed.parallel.devices import bf16_instructions
from vembed.parallel.placement import precision_of_use
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

log = logging.getLogger(__name__)

Input = str | Path | Image.Image | Mapping[str, Any] | Item
"""A text, an image or its Path, {"text": ..., "image": path, image or a list of them}, or an Item."""
OneOrSeveral = Input | Sequence[Input]
"""One input or several."""

# Others (CMYK, YCbCr, F) cannot be written as PNG.
PNG_MODES = frozenset({"1", "L", "P", "RGB"})


class Embedder:
    """A model ready to encode: a model folder (vembed's or any of Sentence Transformers) or a Hub name.

    model = vembed.Embedder("run/final")
    vectors = model.encode(["how to sort a list"], kind="query")
    """

    def __init__(
        self,
        path_or_name: str | Path,
        *,
        device: str | torch.device | None = None,
        torch_dtype: ModelDtype = "auto",
        mixed_precision: Literal["auto", "no", "bf16"] = "auto",
        truncate_dim: int | None = None,
        trust_remote_code: bool = False,
        session: Session | None = None,
    ) -> None:
        """`device`: by default the GPU if there is one. `torch_dtype: auto` is the dtype of the file.
        `mixed_precision: auto` computes in that dtype too, but with `torch_dtype: auto` in bfloat16 on CPUs that have
        instructions for it where that is faster; `bf16`: on any CPU. `truncate_dim`
        keeps the first coordinates of every embedding. `session`: of processes that use this Embedder together; all of
        them make each call, with the same inputs, share the work and get the same result. Where its strategy is fsdp,
        each holds a shard of the model."""
        require_choice("mixed_precision", mixed_precision, ("auto", "no", "bf16"))
        require_choice("torch_dtype", torch_dtype, get_args(ModelDtype))
        self.device = (
            session.device if session is not None else inference_device(device)
        )
        model = load_embedder(
            path_or_name,
            device=self.device if session is None else session.model_device,
            computes_on=self.device,
            meta=session is not None and session.builds_empty,
            torch_dtype=torch_dtype,
            trust_remote_code=trust_remote_code,
        )
        asked = mixed_precision if torch_dtype == "auto" else "no"
        # bf16 on a GPU is as auto, which there is the dtype of the weights.
        self.precision: Decision[Precision]
        if asked == "no" or (asked == "bf16" and self.device.type == "cpu"):
            self.precision = Decision(asked, f"mixed_precision: {asked}")
        else:
            self.precision = precision_of_use(
                str(path_or_name),
                self.device,
                bf16_instructions() if session is None else session.instructions,
                trust_remote_code=trust_remote_code,
            )
        is_sharded = session is not None and session.fsdp is not None
        if self.precision.value == "bf16":
            model.compute_in_bf16()
            copies = bf16_weights_of(model)
            copies.may_keep = not is_sharded
            # The weights do not change any more, so bfloat16 copies are made once and not in each forward pass.
            copies.num_holders += 1
        log.info("%s: mixed precision: %s", path_or_name, self.precision)
        self.description = model.description
        self.backbone = model.backbone
        self.head = model.head
        self.pooling = model.pooling
        self.session = session
        self.model: nn.Module = model
        """Maps inputs to embeddings; with shards, what the session made of it."""
        if session is not None and is_sharded:
            self.model = session.prepare(model, model.description.layer_classes).eval()
        if self._checked(truncate_dim):
            self.description = replace(self.description, truncate_dim=truncate_dim)
        self.featuriser = Featuriser(self.description)

    @property
    def arithmetic(self) -> str:
        """Dtype in which the layers compute, for messages."""
        if self.precision.value == "bf16":
            return "bfloat16"
        dtype = next(self.backbone.parameters()).dtype
        return str(dtype).removeprefix("torch.")

    def encode(
        self,
        inputs: OneOrSeveral,
        kind: Kind = "document",
        *,
        prompt: str | None = None,
        batch_size: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        normalize_embeddings: bool | None = None,
        precision: EmbeddingPrecision = "float32",
        ranges: np.ndarray | None = None,
        convert_to_tensor: bool = False,
        show_progress: bool = False,
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Return [n, d] float32 embeddings in the order of the inputs, or [d] for a single input.

        Args:
            inputs: texts, PIL images, or dicts with `text`, `image` or both.
            kind: query or document, which chooses the prompt.
            prompt: another prompt.
            batch_size: maximum number of inputs per forward pass.
            truncate_dim: keep the first coordinates.
            normalize: true normalises each vector after truncation, false returns the model's output. By default the
                values equal those of Sentence Transformers: normalised if the model says so, then cut.
            precision: float32, int8, uint8, binary or ubinary.
            ranges: [2, d] lowest and highest value of each coordinate for int8 and uint8. Default: those of the inputs.
            convert_to_tensor: return a torch tensor on the model's device.
            normalize_embeddings: as in Sentence Transformers. False leaves the default.
            show_progress_bar: as in Sentence Transformers.
        """
        if kind not in ("query", "document"):
            raise UserError(f"kind is {kind!r}; give query or document")
        items, is_single = _items(inputs)
        if prompt is not None:
            items = [replace(item, prompt=prompt) for item in items]
        with ProgressReport(
            "encoding", active=show_progress or show_progress_bar
        ) as progress:
            full = encode_items(
                self.model,
                self.featuriser,
                items,
                kind,
                max_inputs=batch_size,
                session=self.session,
                progress=progress,
            )
        # False asks for no normalisation besides the model's own, which Sentence Transformers keeps too.
        unit = True if normalize_embeddings else normalize
        finished = self.finish(full, unit, self._checked(truncate_dim))
        vectors = quantized(finished, precision, ranges)
        result: Any = vectors[0] if is_single else vectors
        if convert_to_tensor:
            result = torch.from_numpy(result).to(self.device)
        return result  # type: ignore[no-any-return]

    def encode_query(self, inputs: OneOrSeveral, **options: Any) -> np.ndarray:
        """Return the embeddings of queries: `encode` with kind="query"."""
        return self.encode(inputs, "query", **options)

    def encode_document(self, inputs: OneOrSeveral, **options: Any) -> np.ndarray:
        """Return the embeddings of documents: `encode` with kind="document"."""
        return self.encode(inputs, "document", **options)

    def score(
        self, pairs: Iterable[tuple[Input, Input]], *, batch_size: int | None = None
    ) -> np.ndarray:
        """Return [n] float32 similarities of given (query, document) pairs, in their order, as the model was trained:
        cosine or dot product. Equal inputs are encoded once."""
        normalize = self.description.compares_unit_vectors
        pairs = list(pairs)
        queries = [query for query, _ in pairs]
        documents = [document for _, document in pairs]
        options: dict[str, Any] = {"batch_size": batch_size, "normalize": normalize}
        first = self.encode(queries, "query", **options)
        second = self.encode(documents, "document", **options)
        similarities: np.ndarray = np.einsum("nd,nd->n", first, second)
        return similarities

    def hidden_states(
        self,
        inputs: OneOrSeveral,
        layers: Literal["all"] | Sequence[int] = "all",
        kind: Kind = "document",
        *,
        pooling: str | None = None,
        batch_size: int | None = None,
        budget_tokens: int | None = None,
    ) -> np.ndarray:
        """Return [n, layers, width] float32 outputs of the layers of the text tower, pooled to one vector per text.

        Layer 0 is the input of the first transformer layer, layer k the output of the k-th one before any last norm, and -1
        the last layer. `pooling` is the model's own by default.
        """
        states = LayerPooler(
            self.model, self.backbone, self.description, layers, pooling
        )
        items, _ = _items(inputs)
        if any(item.images for item in items):
            raise UserError("hidden states are of texts; an input has an image")
        flat = encode_items(
            states,
            self.featuriser,
            items,
            kind,
            budget_tokens=budget_tokens,
            max_inputs=batch_size,
            session=self.session,
        )
        return flat.reshape(len(items), len(states.layers), states.width)

    def finish(
        self,
        full_ND: np.ndarray,
        normalize: bool | None,
        truncate_dim: int | None = None,
    ) -> np.ndarray:
        """Truncate and normalise the model's output vectors. `truncate_dim`: another one than this Embedder's."""
        if normalize is None:
            # Sentence Transformers normalises in a module of the model and truncates after it, without another
            # normalisation.
            full_ND = first_dims(full_ND, None, self.description.normalize)
        size = truncate_dim or self.description.truncate_dim
        return first_dims(full_ND, size, bool(normalize))

    def similarity(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return [n, m] similarities of embeddings [n, d] and [m, d] (or of single ones) by the model's measure:
        cosine or dot product."""
        first = np.atleast_2d(np.asarray(a, np.float32))
        second = np.atleast_2d(np.asarray(b, np.float32))
        if self.description.similarity == "cosine":
            first = unit_rows(first)
            second = unit_rows(second)
        return first @ second.T

    def _checked(self, truncate_dim: int | None) -> int | None:
        width = self.description.embedding_dim
        if truncate_dim is not None and not 1 <= truncate_dim <= width:
            raise UserError(
                f"truncate_dim is {truncate_dim}, and this model's embeddings have 1 to {width} dimensions"
            )
        return truncate_dim


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise UserError if the value of an argument is none of the choices."""
    if value not in choices:
        raise UserError(
            f"{name} is {value!r}, and not one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
        )


def inference_device(asked: str | torch.device | None) -> torch.device:
    """Return the device: the one asked for, by default the GPU if there is one."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise UserError(
            f"device is {asked!r}; give cpu, cuda, or cuda:1 for the second GPU"
        ) from error
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise UserError(
            f"device is {str(asked)!r}, and this machine shows {num_gpus} GPU(s); give cpu, or leave it out"
        )
    return device


def _items(inputs: Any) -> tuple[list[Item], bool]:
    """Return the items of one input or several, and whether it is one. Raise UserError with the number of a bad one."""
    is_single = isinstance(inputs, str | Path | Image.Image | Mapping | Item)
    several = [inputs] if is_single else list(inputs)
    items = []
    for number, input_ in enumerate(several):
        try:
            items.append(to_item(input_))
        except UserError as error:
            where = f"inputs[{number}]: " if len(several) > 1 else ""
            raise UserError(f"{where}{error}") from error
    return items, is_single


def to_item(input_: Input) -> Item:
    """Convert an input to an Item."""
    if isinstance(input_, Item):
        return input_
    if isinstance(input_, str):
        input_ = {"text": input_}
    elif isinstance(input_, Image.Image | Path):
        input_ = {"image": input_}
    if not isinstance(input_, Mapping):
        raise UserError(
            f"an input is of type {type(input_).__name__}; vembed encodes texts, images and {{text, image}} records"
        )
    if not input_ or set(input_) - {"text", "image", "images"}:
        raise UserError(
            f"an input has the keys {', '.join(map(repr, input_))}; vembed knows text, image and images"
        )
    images: list[Any] = []
    for key in ("image", "images"):
        value = input_.get(key)
        if value is not None:
            images += value if isinstance(value, list | tuple) else [value]
    text = input_.get("text")
    if text is None and not images:
        raise UserError(f"an input has neither text nor image: {dict(input_)!r}")
    if text is not None:
        if not isinstance(text, str):
            raise UserError(
                f"the text of an input is of type {type(text).__name__}: {text!r}"
            )
        if has_lone_surrogate(text):
            raise UserError(f"an input {LONE_SURROGATE}")
    return Item(text=text, images=tuple(map(_image_ref, images)))


def _image_ref(image: Any) -> ImageRef:
    if isinstance(image, str | Path):
        return ImageRef(path=str(image))
    if isinstance(image, bytes):
        return ImageRef(data=image)
    if isinstance(image, Image.Image):
        if image.has_transparency_data:
            # As processors of Transformers do. (Sentence Transformers drops the transparency of files before that.)
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        # PNG, because it loses nothing: items are told apart by their bytes. Level 1: it stays in memory only.
        encoded = io.BytesIO()
        (image if image.mode in PNG_MODES else image.convert("RGB")).save(
            encoded, "PNG", compress_level=1
        )
        return ImageRef(data=encoded.getvalue())
    raise UserError(
        f"an image is of type {type(image).__name__}; give a path, the bytes of an image file or a PIL image"
    )
