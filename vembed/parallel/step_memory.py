"""Memory of a step: the estimate from the model's shapes, the measurement, the budget of a forward pass that follows from
either, and what happens when a device runs out.

`plan`, `doctor`, `strategy: auto` and the budget use the same estimate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor, nn

from vembed.config.decisions import FsdpConfig
from vembed.config.schema import BatchSection, TrainConfig
from vembed.data.batching.rank_batch import ModelInputs
from vembed.data.features import BaseFeaturiser, Features
from vembed.errors import RunError
from vembed.models.building import build_model
from vembed.models.families.backbones import layers_of, linear_names_inside_layers
from vembed.models.families.description import describe_trained
from vembed.parallel import collectives
from vembed.parallel.devices import GIB, is_shortage, memory_snapshot, seed_draws
from vembed.parallel.parameters import (
    discard_passes,
    num_parameters,
    set_fsdp_reduction,
)
from vembed.training.optimizer_kinds import OPTIMIZERS

if TYPE_CHECKING:
    from vembed.parallel.placement import Placement
    from vembed.parallel.session import Session

log = logging.getLogger("vembed")

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
CPU_MEMORY_SHARE = 0.25
"""Share of the free host memory that graphs may take, over all processes of the machine."""
CUDA_MEMORY_SHARE = 0.80
"""Share of the device memory that a step may reach."""
SMALLEST_BUDGET = 64
PROBE_TOKENS = 512
SHORT_TEXT_TOKENS = 128
"""Texts of so many tokens are not worth cutting."""


# ---- the estimate ------------------------------------------------------------


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model that a config trains, as one whole copy."""

    total: int
    """Parameters."""
    trained: int
    weight_bytes: float
    """Weights as they are held: float32 masters where trained, the file's dtype where frozen, or 4 bits."""
    gradient_bytes: float
    optimizer_bytes: float
    """The optimizer's state."""
    layer_parameters: int
    """Parameters of the largest layer."""
    num_layers: int
    hidden: int
    inner: int
    """Width of the feed-forward."""
    max_length: int

    @property
    def state_bytes(self) -> float:
        """What a process holds between steps that has a whole copy: weights, gradients and the optimizer's state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
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
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class Demand:
    """Bytes that one process needs in a step, estimated from the model's shapes or measured on the model."""

    fixed: float
    """Weights and their copies, whole gradients, optimizer state, gathered parameters, and the loss."""
    per_token: float
    """For each token whose graph is there."""


def measure(config: TrainConfig) -> ModelSize:
    """Measure the model of a config without its weights: its files' settings are read, and it is built empty."""
    description = describe_trained(
        config.model, config.matryoshka, config.objective, config.adapters
    )
    # 4-bit layers cannot be built empty: they are counted as what they replace, and their bytes below.
    adapters = config.adapters.model_copy(update={"quantize_weights": None})
    # Built once more for training, the model says then what there is.
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        model = build_model(
            description, config.model, adapters, objective=config.objective, meta=True
        )
    finally:
        log.setLevel(level)
    backbone = model.backbone
    packed = set()
    if config.adapters.use_qlora:
        for name in linear_names_inside_layers(backbone):
            packed |= {f"backbone.{name}.weight", f"backbone.{name}.base_layer.weight"}
    total = trained = 0
    weight_bytes = gradient_bytes = 0.0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        width = parameter.element_size()
        total += count
        if parameter.requires_grad:
            trained += count
            gradient_bytes += count * width
        weight_bytes += count * (FOUR_BIT_BYTES if name in packed else width)
    optimizer_bytes = float(trained * OPTIMIZERS[config.optimizer.optim].state_bytes)
    # The moments have the dtype of the weights.
    if config.model.torch_dtype == "pure_bfloat16":
        optimizer_bytes /= 2
    layers = layers_of(model)
    largest_layer = total if not layers else 0
    inner = 0
    for layer in layers:
        weights = list(layer.parameters())
        largest_layer = max(largest_layer, sum(weight.numel() for weight in weights))
        for weight in weights:
            if weight.ndim == 2:
                inner = max(inner, weight.shape[0])
    return ModelSize(
        total=total,
        trained=trained,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        layer_parameters=largest_layer,
        num_layers=len(layers),
        hidden=description.hidden_dim,
        inner=inner,
        max_length=description.max_length,
    )


class MemoryEstimate:
    """The memory of one process in a step of a placed run."""

    def __init__(self, placement: Placement, size: ModelSize | None = None) -> None:
        """`size`: of the model, if it is known. Without it the placement's, which is measured only on demand."""
        self.placement = placement
        self.size = size or placement.size or measure(placement.run.config)
        config = placement.run.config
        # A query, a positive, and the hard negatives as far as the config gives a number.
        num_negatives = config.data.max_negatives or 0
        num_inputs = 2 + num_negatives + config.data.in_batch_negatives
        self.output_size = self.size.hidden
        """Numbers that the model gives for an input."""
        if config.model.task == "rerank":
            num_inputs -= 1  # a pair for each document
            self.output_size = 1
        self.inputs = placement.num_examples * num_inputs
        """Inputs of a process's batch at most: texts, images or pairs."""

    def loss_bytes(self, dim: int) -> float:
        """Return the bytes of the loss: the embeddings of `dim` numbers of all ranks' inputs, their gradients, and small
        buffers."""
        gathered = self.placement.ranks.world_size * self.inputs
        return (4.0 * LOSS_COPIES * dim + LOSS_INDEX_BYTES) * gathered + WORKING_BYTES

    def demand(self, recomputes: bool | None = None) -> Demand:
        """Estimate the demand from the model's shapes. `recomputes`: instead of what the run would do."""
        if recomputes is None:
            recomputes = self.placement.recomputation.value
        size = self.size
        width = 2 if self.placement.precision.value != "no" else 4
        per_token = width * (KEPT_PER_HIDDEN * size.hidden + 3.0 * size.inner)
        if recomputes:  # one layer at a time, and the inputs of all
            per_token += width * float(size.hidden * size.num_layers)
        else:
            per_token *= size.num_layers
        return Demand(self._without_graphs().total, per_token)

    def in_step(
        self,
        *,
        tokens: int | None = None,
        recomputes: bool | None = None,
        uses_cache: bool | None = None,
    ) -> Memory:
        """Estimate the memory in a step. `tokens` of a micro-batch, `recomputes`, `uses_cache`: instead of what the run
        would do."""
        demand = self.demand(recomputes)
        longest = self.size.max_length
        whole_batch = self.inputs * longest
        micro_batch, fitting = tokens_of(self.placement, demand, longest)
        if tokens is not None:
            micro_batch = tokens
            fitting = 0  # the least that a step needs
        graph_limit = 0 if uses_cache else self._kept(whole_batch, micro_batch, fitting)
        graph_tokens = min(max(micro_batch, graph_limit), whole_batch)
        activations = graph_tokens * demand.per_token
        return replace(self._without_graphs(), activations=activations)

    def repeated_share(self, batch_tokens: float) -> float:
        """Return the share of a process's batch that passes the model twice."""
        longest = self.size.max_length
        tokens, fitting = tokens_of(self.placement, self.demand(), longest)
        return max(1 - self._kept(batch_tokens, tokens, fitting) / batch_tokens, 0.0)

    def _kept(
        self,
        batch_tokens: float,
        micro_batch: int,
        fitting: int,
    ) -> float:
        """Return the tokens of a batch whose graphs are kept, of which `fitting` fit: of all micro-batches or of some."""
        asked = self.placement.run.config.batch.use_gradient_cache
        if asked is False or (asked == "auto" and batch_tokens <= fitting):
            return batch_tokens
        if asked == "auto" and not _is_fsdp1(self.placement.fsdp):
            return fitting // micro_batch * micro_batch
        return 0

    def _without_graphs(self) -> Memory:
        placement = self.placement
        size = self.size
        share = 0.0 if placement.offloads else 1.0 / placement.num_shards
        width = 2 if placement.precision.value != "no" else 4
        gradient_share = share
        gathered = 0.0
        if placement.fsdp is not None:
            if not placement.reduces_each_micro_batch(size.gradient_bytes):
                gradient_share = 1.0
            gathered = float(size.total * width)
            if not placement.keeps_gathered(gathered):
                # One unit computes while FSDP gathers the next.
                gathered = float(2 * size.layer_parameters * width)
        copies = 0.0
        if placement.copies_weights:
            # bfloat16 copies of the float32 weights inside the layers: of all, or of adapters alone.
            copied = size.trained
            if size.weight_bytes > 3.0 * size.total:
                copied = min(size.layer_parameters * size.num_layers, size.total)
            copies = 2.0 * copied
        return Memory(
            weights=size.weight_bytes * share,
            gradients=size.gradient_bytes * gradient_share,
            optimizer=size.optimizer_bytes * share,
            gathered=gathered,
            copies=copies,
            activations=0.0,
            loss=self.loss_bytes(self.output_size),
        )


def tokens_of(
    placement: Placement,
    demand: Demand,
    longest: int,
    memory: float | None = None,
) -> tuple[int, int]:
    """Return the padded tokens of a micro-batch and those whose graphs are kept at once, as the config gives them or as
    they fit. The budget asks with what it has measured, `plan` with what it estimates.

    `longest`: tokens of the longest input. `memory`: bytes that the process has, if not the device's.
    """
    options = placement.run.config.batch
    memory = placement.memory if memory is None else memory
    on_gpu = placement.device.type == "cuda"
    # Host memory is shared with everything else on the machine: graphs get a share of it beside the fixed part.
    free = CPU_MEMORY_SHARE * memory
    if on_gpu:
        free = max(CUDA_MEMORY_SHARE * memory - demand.fixed, 0.0)
    kept_tokens = int(free / max(demand.per_token, 1.0))
    # Half of what is free: more would not be faster, and what a step needs varies with its texts.
    micro_batch = max(kept_tokens // 2, longest)
    if options.micro_batch_tokens != "auto":
        micro_batch = options.micro_batch_tokens
    elif not on_gpu:
        micro_batch = CPU_MICRO_BATCH_TOKENS
    return micro_batch, kept_tokens


def _is_fsdp1(fsdp: FsdpConfig | None) -> bool:
    return fsdp is not None and fsdp.version == 1


# ---- the budget --------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Limits of one forward pass, and of the graphs kept until their backward pass."""

    micro_batch_tokens: int
    kept_graph_tokens: int
    use_gradient_cache: bool | None
    """Switch: use Gradient Cache for all micro-batches or for none. None: decided per batch by `kept_graph_tokens`."""

    def num_kept_graphs(
        self,
        padded_tokens: int,
        longest: int,
        num_forwards: int,
        session: Session,
    ) -> int:
        """Return how many of `num_forwards` micro-batches keep their graphs. The backward pass replays the others.

        `padded_tokens` of the batch and tokens of its `longest` input are maxima over the ranks, so that the result is
        the same on every rank.
        """
        if _is_fsdp1(session.fsdp) and num_forwards > 1:
            return 0  # FSDP1 frees a unit's parameters after the first of several pending backward passes
        if self.use_gradient_cache is not None:
            return 0 if self.use_gradient_cache else num_forwards
        if padded_tokens <= self.kept_graph_tokens:
            return num_forwards
        # A bound that holds on every rank: only a single input may be larger than a micro-batch. The last forward pass
        # has micro-batches of all modalities, and is kept only if everything is.
        largest = max(self.micro_batch_tokens, longest)
        return min(self.kept_graph_tokens // largest, num_forwards - 1)


def find_budget(
    options: BatchSection,
    model: nn.Module,
    featuriser: BaseFeaturiser,
    session: Session,
    sample: Sequence[Features],
) -> Budget:
    """Return the budget of the config, or what the device holds. Collective; the same on every rank.

    Call it before the optimizer has state.

    Nothing is tried out: memory that runs out on one rank would leave the others waiting for it.
    """
    cache = None if options.use_gradient_cache == "auto" else options.use_gradient_cache
    if cache is False and _is_fsdp1(session.fsdp):
        log.warning(
            "use_gradient_cache: false holds only for steps of one micro-batch under fsdp_version: 1, which frees a "
            "unit's parameters after the first of several backward passes: larger steps use Gradient Cache (the same "
            "gradient for one more forward pass). fsdp_version: 2 keeps the graphs of all micro-batches"
        )
    tokens = options.micro_batch_tokens
    on_gpu = session.device.type == "cuda"
    is_measured = cache is None or (tokens == "auto" and on_gpu)
    if not is_measured:
        limit = CPU_MICRO_BATCH_TOKENS if tokens == "auto" else tokens
        return Budget(limit, limit, cache)
    placement = session.placement
    # Batch norms count the inputs of the probes too.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    if on_gpu:
        demand = measure_demand(model, featuriser, session, sample)
        # What the first step adds to what is measured: the optimizer's state, and the loss.
        to_come = MemoryEstimate(placement).loss_bytes(
            featuriser.description.embedding_dim
        )
        if not placement.offloads:
            trained = num_parameters(model, trainable_only=True) / placement.num_shards
            to_come += (
                trained * OPTIMIZERS[placement.run.config.optimizer.optim].state_bytes
            )
        demand = replace(demand, fixed=demand.fixed + to_come)
        free, _ = torch.cuda.mem_get_info(session.device)
        memory = free + torch.cuda.memory_reserved(session.device)
    else:
        # Nothing fixed: what is free now is asked for, with the weights in place.
        demand = Demand(0.0, bytes_per_token(model, featuriser, session, sample))
        memory = psutil.virtual_memory().available // session.local_world_size
    for buffer, before in buffers:
        buffer.copy_(before)
    longest = max((feature.length for feature in sample), default=1)
    limits = tokens_of(placement, demand, longest, memory)
    # The minimum over the ranks: all must agree whether a batch has a second phase.
    lowest = collectives.max_ints([-limit for limit in limits])
    micro_batch = -lowest[0]
    kept_tokens = -lowest[1]
    log.info(
        f"micro-batches: up to {micro_batch:,d} padded tokens; graphs: kept for up to {kept_tokens:,d} padded tokens "
        f"per rank, Gradient Cache replays the rest of larger batches (measured: {demand.fixed / GIB:.2f}GB and "
        f"{demand.per_token:,.0f} bytes per token, of {memory / GIB:.2f}GB)"
    )
    return Budget(micro_batch, kept_tokens, cache)


# ---- measurement -------------------------------------------------------------


def measure_demand(
    model: nn.Module,
    featuriser: BaseFeaturiser,
    session: Session,
    sample: Sequence[Features],
) -> Demand:
    """Measure the peak of a step's forward and backward passes on the device. Collective."""

    def peak(inputs: ModelInputs) -> int:
        # The second pass has the gradients in place, as all steps but the first.
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(session.device)
            seed_draws(0, session.device)
            with torch.enable_grad():
                output = model(inputs)[0]
            if output.requires_grad:
                output.sum().backward()
            del output
        return torch.cuda.max_memory_allocated(session.device)

    # Whole gradients between micro-batches, as in a step. FSDP1 would keep them where `discard_passes` cannot see them.
    reduces_each = session.reduces_each_micro_batch or _is_fsdp1(session.fsdp)
    set_fsdp_reduction(model, reduces_each)
    session.keep_gathered(model, on=True)
    try:
        demand = _demand_of(featuriser, session, sample, peak)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        # The other ranks may wait inside a layer: ending this one ends them.
        raise RunError(
            f"rank {session.rank} has no memory for {2 * PROBE_TOKENS} tokens; `vembed plan` says why"
        ) from error
    # Gradients of these passes must not reach the first step.
    discard_passes(model)
    session.keep_gathered(model, on=False)
    torch.cuda.empty_cache()
    return demand


def bytes_per_token(
    model: nn.Module,
    featuriser: BaseFeaturiser,
    session: Session,
    sample: Sequence[Features],
) -> int:
    """Return the graph bytes per token of the longest inputs, measured on small forward passes. Collective."""
    saved = {}
    nothing = torch.empty(0)

    def pack(tensor: Tensor) -> Tensor:
        """Hold the storage, so that no other tensor gets its address. The graph holds nothing: an output that the hook
        gave it would hold its own graph, and neither would ever be freed."""
        source = tensor if tensor._base is None else tensor._base
        # Parameters live without the graph. FSDP gathers them in storages of their own.
        if not isinstance(source, nn.Parameter):
            # Keyed by storage, so that views of one tensor are counted once.
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return nothing

    def graph_bytes(inputs: ModelInputs) -> int:
        seed_draws(0, session.device)
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            outputs = model(inputs)
        storages = [tensor.untyped_storage() for tensor in saved.values()]
        num_bytes = sum(storage.nbytes() for storage in storages)
        del outputs
        if session.fsdp is not None:
            discard_passes(model)  # a checkpoint is restored into shards
        saved.clear()
        return num_bytes

    demand = _demand_of(featuriser, session, sample, graph_bytes)
    (per_token,) = collectives.max_ints([int(demand.per_token)])
    return max(per_token, 1)


def _demand_of(
    featuriser: BaseFeaturiser,
    session: Session,
    sample: Sequence[Features],
    num_bytes: Callable[[ModelInputs], int],
) -> Demand:
    """Return the line through the bytes of two micro-batches of each modality's longest input.

    The second has twice the rows of the first. From one size alone, what does not grow with the tokens (autocast's
    copies of the weights, gathered parameters) would count as activations.
    """
    fixed = 0.0
    per_token = 1.0
    for modality in featuriser.description.modalities:
        longest = max(
            (feature for feature in sample if feature.modality == modality),
            key=lambda feature: feature.length,
            default=featuriser.dummy(modality),
        )
        num_rows = max(PROBE_TOKENS // longest.length, 1)
        sizes = []
        for count in (num_rows, 2 * num_rows):
            batch = featuriser.collate([longest] * count)
            tensors = {}
            for name, part in batch.items():
                tensors[name] = part.to(session.device)
            sizes.append(num_bytes([(modality, tensors)]))
        tokens = num_rows * longest.length
        slope = max(sizes[1] - sizes[0], 0) / tokens
        fixed = max(fixed, sizes[0] - slope * tokens)
        per_token = max(per_token, slope)
    return Demand(fixed, per_token)


# ---- out of memory -----------------------------------------------------------


class OutOfMemory(Exception):  # noqa: N818 - the name of the event
    """A rank ran out of device memory. Raised on all ranks at the same point, between two collectives."""


def halved(session: Session, budget: Budget) -> Budget:
    """Return half the budget, to repeat the step with. Raise RunError if there is no smaller one."""
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    tokens = budget.micro_batch_tokens
    if tokens <= SMALLEST_BUDGET:
        raise RunError(advice(session, budget))
    half = replace(
        budget,
        micro_batch_tokens=tokens // 2,
        kept_graph_tokens=budget.kept_graph_tokens // 2,
    )
    log.warning(
        f"out of memory: the step is replayed with micro-batches of {half.micro_batch_tokens:,d} tokens instead of "
        f"{tokens:,d}, graphs kept for up to {half.kept_graph_tokens:,d}; the result is the same, apart from fresh "
        "dropout draws"
    )
    return half


def smaller_states(placement: Placement) -> list[str]:
    """Return options that make weights, gradients and optimizer state smaller, the cheapest first."""
    config = placement.run.config
    fsdp = placement.fsdp
    steps = []
    if not config.adapters.use_lora:
        steps.append("use_lora: true")
        # FSDP1 leaves flat pieces of parameters, which 8-bit optimizers do not take.
        if config.optimizer.optim == "adamw" and not _is_fsdp1(fsdp):
            steps.append("optim: adamw_8bit")
    if fsdp is None:
        steps.append("use_fsdp: true on several processes")
    elif placement.is_hybrid or not fsdp.reshard_after_forward:
        steps.append("fsdp_sharding_strategy: FULL_SHARD")
    if fsdp is None or not fsdp.offload:
        steps.append("fsdp_offload_params: true (with FSDP)")
    if not config.adapters.use_qlora:
        steps.append("use_qlora: true")
    return steps


def advice(
    session: Session,
    budget: Budget,
    *,
    in_loss: bool = False,
) -> str:
    """Return the estimated memory by use, and what to change, the cheapest change first.

    `in_loss`: memory ran out beside the embeddings of the global batch, and not in the model.
    """
    placement = session.placement
    estimate = MemoryEstimate(placement)
    tokens = budget.micro_batch_tokens
    num_ranks = session.world_size
    max_length = estimate.size.max_length
    cache = "use_gradient_cache: true (the result is the same)"
    steps = []
    if in_loss:
        place = "out of device memory in the loss"
        if not budget.use_gradient_cache:
            steps.append(cache)
        half = max(placement.num_examples // 2, 1)
        steps.append(f"batch_size: {half} on each process (half the negatives)")
    else:
        place = "out of device memory"
        if budget.use_gradient_cache is False:
            steps.append(cache)
        steps.append(f"micro_batch_tokens: {max(tokens // 2, 1)} (now {tokens:,d})")
        if not placement.recomputation.value:
            steps.append("gradient_checkpointing: true")
        if max_length > SHORT_TEXT_TOKENS:
            steps.append(f"max_length: {max_length // 2} (now {max_length})")
    steps += smaller_states(placement)
    numbered = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    snapshot = memory_snapshot(session.device)
    used = ", ".join(f"{key} {value}" for key, value in snapshot.items())
    memory = asdict(estimate.in_step(tokens=tokens)).items()
    parts = ", ".join(f"{use} {num_bytes / GIB:.2f}GB" for use, num_bytes in memory)
    return (
        f"rank {session.rank} of {num_ranks} is {place} ({used}; {placement.num_examples:,d} rows per process, strategy "
        f"{session.strategy}). Estimated of {placement.memory / GIB:.2f}GB: {parts}. Change in this order: "
        f"{'; '.join(numbered)}. The loss takes the whole batch at once, and the model micro_batch_tokens at a time"
    )
