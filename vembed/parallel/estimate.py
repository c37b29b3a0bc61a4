"""The memory that a process needs for a model, its optimizer and a micro-batch: one estimate for everybody who asks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from vembed.config.schema import ModelSection, OptimizerSection, TrainConfig
from vembed.models.embedding_model import build_model
from vembed.models.families.backbones import layers_of, linear_names_inside_layers
from vembed.models.families.decisions import describe
from vembed.training.optimizers.table import OPTIMIZERS

GIB = 2**30
FOUR_BIT_BYTES = 0.55
"""Bytes per weight in 4 bits, scales included."""
KEPT_PER_HIDDEN = 16
"""Numbers that a transformer layer keeps for the backward pass, per token and hidden unit, besides the feed-forward."""
WORKING_BYTES = 64 * 2**20
"""Tiles of the loss and other small buffers."""
LOSS_COPIES = 4
"""Numbers that a loss holds for each number of the gathered embeddings: the embeddings, their unit vectors, and the
gradients of both."""
LOSS_INDEX_BYTES = 80
"""Bytes of the indices and contents of each input of the global batch."""
CPU_MICRO_BATCH_TOKENS = 4096
"""On CPUs larger micro-batches are not faster, and their activations fall out of the caches."""
SMALL_MICRO_BATCH_TOKENS = 4096
"""A micro-batch of so many tokens keeps a GPU busy."""
CPU_MEMORY_SHARE = 0.25
"""Share of the free host memory that graphs may take, over all processes of the machine."""
CUDA_MEMORY_SHARE = 0.80
"""Share of the device memory that a step may reach."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of the model that a config trains, as one whole copy."""

    total: int
    """Parameters."""
    trained: int
    weight_bytes: float
    """Weights as they are held: float32 masters where trained, the file's dtype where frozen, or 4 bits."""
    gradient_bytes: float
    layer_parameters: int
    """Parameters of the largest layer."""
    num_layers: int
    hidden: int
    inner: int
    """Width of the feed-forward."""
    max_length: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one process needs, by use."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Parameters of other shards that are here for the moment."""
    copies: float
    """bfloat16 copies of float32 weights."""
    activations: float
    loss: float
    """Embeddings of the global batch, and the loss."""

    @property
    def states(self) -> float:
        """Bytes held between steps: weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.gathered + self.copies + self.activations + self.loss


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that one process needs in a step, estimated from the model's shapes or measured on the model."""

    fixed: float
    """Weights and their copies, whole gradients, optimizer state, gathered parameters, and the loss."""
    per_token: float
    """For each token whose graph is there."""


def measure(config: TrainConfig) -> ModelSize:
    """Measure the model of a config without its weights: its files' settings are read, and it is built empty."""
    with _quiet():
        description = describe(
            config.model, config.matryoshka, use_qlora=config.adapters.use_qlora
        )
        # 4-bit layers cannot be built empty: they are counted as what they replace, and their bytes below.
        adapters = config.adapters.model_copy(update={"quantize_weights": None})
        model = build_model(
            description, config.model, adapters, objective=config.objective, meta=True
        )
    backbone = model.backbone
    packed = (
        {f"backbone.{name}.weight" for name in linear_names_inside_layers(backbone)}
        if config.adapters.use_qlora
        else set()
    )
    packed |= {name.replace(".weight", ".base_layer.weight") for name in packed}
    total = trained = 0
    weight_bytes = gradient_bytes = 0.0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        total += count
        if parameter.requires_grad:
            trained += count
            gradient_bytes += count * parameter.element_size()
        weight_bytes += count * (
            FOUR_BIT_BYTES if name in packed else parameter.element_size()
        )
    layers = layers_of(model)
    return ModelSize(
        total=total,
        trained=trained,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        layer_parameters=max((_count(layer) for layer in layers), default=total),
        num_layers=len(layers),
        hidden=description.hidden_dim,
        inner=max(
            (
                weight.shape[0]
                for layer in layers
                for weight in layer.parameters()
                if weight.ndim == 2
            ),
            default=0,
        ),
        max_length=description.max_length,
    )


def hidden_size(options: ModelSection) -> int:
    """Return the hidden size of a model, of its widest tower where it has two, from its files' settings."""
    with _quiet():
        description = describe(options)
    return max(
        description.hidden_dim,
        description.text_hidden_dim or 0,
        description.image_hidden_dim or 0,
    )


def file_bytes(options: ModelSection) -> int:
    """Return the bytes of a model's files of weights."""
    with _quiet():
        folder = Path(describe(options).source)
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def bytes_per_token(size: ModelSize, *, compute_bytes: int, recomputes: bool) -> float:
    """Estimate what one token leaves in the graph for the backward pass."""
    per_layer = compute_bytes * (KEPT_PER_HIDDEN * size.hidden + 3.0 * size.inner)
    if not recomputes:
        return per_layer * size.num_layers
    return per_layer + compute_bytes * float(
        size.hidden * size.num_layers
    )  # one layer at a time, and its inputs


def tokens_that_fit(limit: float, demand: Demand, longest: int) -> tuple[int, int]:
    """Return the padded tokens of a micro-batch and those whose graphs may be kept at once, within `limit` bytes.

    A micro-batch takes half of what is free: more would not be faster, and what a step needs varies with its texts.
    """
    free = max(limit - demand.fixed, 0.0) / max(demand.per_token, 1.0)
    return max(int(free / 2), longest), int(free)


def optimizer_bytes(
    optimizer: OptimizerSection, model: ModelSection, size: ModelSize
) -> float:
    """Return the bytes of the optimizer's state for the whole model."""
    float32_bytes = size.trained * OPTIMIZERS[optimizer.optim].state_bytes
    # The moments have the dtype of the weights.
    if model.torch_dtype == "pure_bfloat16":
        return float32_bytes / 2
    return float32_bytes


def copied_bytes(size: ModelSize) -> float:
    """Return the bytes of bfloat16 copies of the weights inside the layers, as `vembed.models.bf16` makes them of those
    that are float32: of all, or of adapters alone."""
    is_wide = size.weight_bytes > 3.0 * size.total
    return 2.0 * (
        min(size.layer_parameters * size.num_layers, size.total)
        if is_wide
        else size.trained
    )


def loss_bytes(inputs: int, world_size: int, dim: int) -> float:
    """Estimate the bytes of the loss of each process, over `inputs` embeddings of `dim` numbers of every process."""
    gathered = inputs * world_size
    return (4.0 * LOSS_COPIES * dim + LOSS_INDEX_BYTES) * gathered + WORKING_BYTES


def inputs_per_example(max_negatives: int | None) -> int:
    """Return the inputs of an example: query, positive, and the hard negatives as far as the config gives a number."""
    return 2 + (max_negatives or 0)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop log lines of the with-block: the model is built once more for training, and says then what there is."""
    log = logging.getLogger("vembed")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
