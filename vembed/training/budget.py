"""Memory of a step: token budgets from a measurement, and what happens when the device runs out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn

from vembed.config.schema import BatchSection
from vembed.data.features import Features, Featuriser
from vembed.errors import RunError
from vembed.models.families.family import Modality
from vembed.parallel import collectives
from vembed.parallel.devices import seed_draws
from vembed.parallel.estimate import (
    CPU_MICRO_BATCH_TOKENS,
    GIB,
    Demand,
    measure,
)
from vembed.parallel.memory import is_shortage, memory_snapshot
from vembed.parallel.parameters import (
    discard_passes,
    forget_forward,
    num_parameters,
    set_gradient_sync,
    set_keep_gathered,
)
from vembed.parallel.session import Session
from vembed.training.optimizers.table import OPTIMIZERS

log = logging.getLogger("vembed")

SMALLEST_BUDGET = 64
PROBE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one forward pass, and of the graphs kept until their backward pass."""

    micro_batch_tokens: int
    max_rows: int | None
    kept_graph_tokens: int
    use_gradient_cache: bool | None
    """Switch: use Gradient Cache. None: decided per batch by `kept_graph_tokens`."""

    def keeps_graphs(
        self, padded_tokens: int, num_forwards: int, session: Session
    ) -> bool:
        """Return whether phase 1 keeps its graphs, so that no phase 2 is needed. The same on every rank."""
        if session.fsdp is not None and session.fsdp.version == 1 and num_forwards > 1:
            return False  # FSDP1 frees a unit's parameters after the first of several pending backward passes
        if self.use_gradient_cache is not None:
            return not self.use_gradient_cache
        return padded_tokens <= self.kept_graph_tokens

    def halved(self) -> Budget:
        """Return half this budget, for use after the device ran out of memory."""
        return replace(
            self,
            micro_batch_tokens=max(self.micro_batch_tokens // 2, 1),
            max_rows=None if self.max_rows is None else max(self.max_rows // 2, 1),
            kept_graph_tokens=self.kept_graph_tokens // 2,
        )


class PeakMeter:
    """Peak of a GPU's allocated memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """Begin a measurement."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Return the highest number of bytes allocated since `reset`."""
        return int(torch.cuda.max_memory_allocated(self.device))


def find_budget(
    options: BatchSection,
    model: nn.Module,
    featuriser: Featuriser,
    session: Session,
    sample: Sequence[Features],
    optimizer: torch.optim.Optimizer | None = None,
) -> Budget:
    """Return the budget of the config, or what the device holds. Collective; the same on every rank.

    Nothing is tried out: memory that runs out on one rank would leave the others waiting for it.
    """
    cache = None if options.use_gradient_cache == "auto" else options.use_gradient_cache
    rows = options.gradient_cache_chunk_size
    if cache is False and session.fsdp is not None and session.fsdp.version == 1:
        log.warning(
            "use_gradient_cache: false holds only for steps of one micro-batch under fsdp_version: 1, which frees a "
            "unit's parameters after the first of several backward passes: larger steps use Gradient Cache (the same "
            "gradient for one more forward pass). fsdp_version: 2 keeps the graphs of all micro-batches"
        )
    tokens = options.micro_batch_tokens
    on_gpu = session.device.type == "cuda"
    if not (cache is None or (tokens == "auto" and on_gpu)):
        micro_batch = (
            2**40 if rows else CPU_MICRO_BATCH_TOKENS if tokens == "auto" else tokens
        )
        return Budget(micro_batch, rows, micro_batch, cache)
    if on_gpu:
        demand = measure_demand(
            model, featuriser, session, sample, PeakMeter(session.device)
        )
        demand = replace(
            demand,
            fixed=demand.fixed + _bytes_to_come(model, featuriser, session, optimizer),
        )
        free, _ = torch.cuda.mem_get_info(session.device)
        memory = free + torch.cuda.memory_reserved(session.device)
    else:
        # Nothing fixed: what is free now is asked for below, with the weights in place.
        demand = Demand(0.0, bytes_per_token(model, featuriser, session, sample))
        memory = psutil.virtual_memory().available // session.local_world_size
    longest = max((feature.length for feature in sample), default=1)
    # The minimum over the ranks: all must agree whether a batch has a second phase.
    limits = session.placement.tokens(demand, longest, memory)
    micro_batch, kept_tokens = (
        -largest for largest in collectives.max_ints([-limit for limit in limits])
    )
    log.info(
        "micro-batches: up to %s padded tokens; graphs: kept for batches of up to %s padded tokens per rank, larger "
        "ones use Gradient Cache (measured: %.2fGB and %s bytes per token, of %.2fGB)",
        f"{micro_batch:,d}",
        f"{kept_tokens:,d}",
        demand.fixed / GIB,
        f"{demand.per_token:,.0f}",
        memory / GIB,
    )
    return Budget(2**40 if rows else micro_batch, rows, kept_tokens, cache)


def measure_demand(
    model: nn.Module,
    featuriser: Featuriser,
    session: Session,
    sample: Sequence[Features],
    meter: PeakMeter,
) -> Demand:
    """Measure the memory of a step's forward and backward passes. Collective.

    The peak of two sizes, with gradients in place, gives a fixed part and a slope. From one size alone, what does not
    grow with the tokens (autocast's copies of the weights, gathered parameters) would count as activations.
    """
    fixed = per_token = 0.0
    failed = False
    # Whole gradients between micro-batches, as in a step. FSDP1 would keep them where `discard_passes` cannot see them.
    is_fsdp1 = session.fsdp is not None and session.fsdp.version == 1
    set_gradient_sync(model, session.reduces_each_micro_batch or is_fsdp1)
    if session.keeps_gathered:
        set_keep_gathered(model, True)
    try:
        for modality in featuriser.description.modalities:
            points: list[tuple[int, int]] = []
            for inputs, tokens in _two_sizes(featuriser, modality, sample):
                meter.reset()
                _pass(model, modality, inputs, session)
                if not points:  # once more, with the gradients in place
                    meter.reset()
                    _pass(model, modality, inputs, session)
                points.append((tokens, meter.peak()))
            (small, low), (large, high) = points
            slope = max(high - low, 0) / (large - small)
            fixed = max(fixed, low - slope * small)
            per_token = max(per_token, slope)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        failed = True
    # Gradients of these passes must not reach the first step.
    discard_passes(model)
    if session.fsdp is not None and session.keeps_gathered:
        set_keep_gathered(model, False, session.fsdp.reshard_after_forward)
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
        if (
            failed and session.strategy == "fsdp"
        ):  # the other ranks wait inside a layer: ending this one ends them
            raise RunError(
                f"rank {session.rank} has no memory for {2 * PROBE_TOKENS} tokens; `vembed plan` says why"
            )
    if collectives.max_ints([int(failed)])[0]:
        size = session.placement.size or measure(session.placement.run.config)
        demand = session.placement.demand(size)
        log.warning(
            "out of memory while memory was measured: the budget follows the estimate of `vembed plan`"
        )
        return demand
    return Demand(fixed, max(per_token, 1.0))


def _pass(
    model: nn.Module, modality: Modality, inputs: dict[str, Tensor], session: Session
) -> None:
    """Run one micro-batch forward and backward. In a function of its own, so that nothing outlives a failure."""
    seed_draws(0, session.device)
    with torch.enable_grad():
        outputs = model([(modality, _move(inputs, session.device))])
    if outputs[0].requires_grad:
        outputs[0].sum().backward()


def _bytes_to_come(
    model: nn.Module,
    featuriser: Featuriser,
    session: Session,
    optimizer: torch.optim.Optimizer | None,
) -> float:
    """Return the bytes that the first step adds to what is measured: the optimizer's state, and the loss."""
    trained = num_parameters(model, trainable_only=True) / session.placement.num_shards
    has_state = optimizer is not None and bool(optimizer.state)
    state = (
        0.0
        if has_state or session.placement.offloads
        else trained * OPTIMIZERS[session.config.optimizer.optim].state_bytes
    )
    return state + session.placement.loss_bytes(featuriser.description.embedding_dim)


def bytes_per_token(
    model: nn.Module,
    featuriser: Featuriser,
    session: Session,
    sample: Sequence[Features],
) -> int:
    """Return the graph bytes per token of the longest inputs, measured on a small forward pass. Collective."""
    saved: dict[int, Tensor] = {}

    nothing = torch.empty(0)

    def pack(tensor: Tensor) -> Tensor:
        """Hold the storage, so that no other tensor gets its address. The graph holds nothing: an output that the hook
        gave it would hold its own graph, and neither would ever be freed."""
        source = tensor if tensor._base is None else tensor._base
        if not isinstance(
            source, nn.Parameter
        ):  # parameters live without the graph; FSDP gathers them in storages of their own
            # Keyed by storage, so that views of one tensor are counted once.
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return nothing

    most = 0
    for modality in featuriser.description.modalities:
        points = []
        for inputs, tokens in _two_sizes(featuriser, modality, sample):
            seed_draws(0, session.device)
            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            ):
                outputs = model([(modality, _move(inputs, session.device))])
            points.append(
                (
                    tokens,
                    sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
                )
            )
            del outputs
            forget_forward(model)
            saved.clear()
        (small, low), (large, high) = points
        # The slope: autocast's copies of weights are saved too, and do not grow with the tokens.
        most = max(most, (high - low) // (large - small))
    return max(collectives.max_ints([most])[0], 1)


def _two_sizes(
    featuriser: Featuriser, modality: Modality, sample: Sequence[Features]
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yield two micro-batches of a modality's longest input, and their sizes in tokens: the second has twice the rows
    of the first, however long the input is."""
    longest = max(
        (feature for feature in sample if feature.modality == modality),
        key=lambda feature: feature.length,
        default=featuriser.dummy(modality),
    )
    first = max(PROBE_TOKENS // longest.length, 1)
    for rows in (first, 2 * first):
        yield featuriser.collate([longest] * rows), rows * longest.length


def _move(inputs: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


SHORT_TEXT_TOKENS = 128
"""Texts of so many tokens are not worth cutting."""


class OutOfMemory(Exception):  # noqa: N818 - the name of the event
    """A rank ran out of device memory. Raised on all ranks at the same point, between two collectives."""


class MemoryGuard:
    """Detection of out-of-memory errors of any rank, at points that every rank reaches."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # Host memory does not fail with an exception: the kernel ends the process.
        self.active = session.device.type == "cuda"

    def agree(self, failed: bool, budget: Budget) -> None:
        """Raise OutOfMemory on every rank if it happened on any. Collective."""
        if not self.active:
            return
        if failed and self.session.strategy == "fsdp":
            # The other ranks are blocked in a layer's all-gather and cannot be notified. Ending this rank ends them.
            raise RunError(advice(self.session, budget))
        # With whole copies no rank is inside a collective here, so that all can agree.
        if self.session.strategy != "fsdp" and collectives.max_ints([int(failed)])[0]:
            raise OutOfMemory

    def smaller(self, budget: Budget) -> Budget:
        """Return the budget to replay the step with. Raise RunError if there is no smaller one."""
        if self.session.device.type == "cuda":
            torch.cuda.empty_cache()
        # With chunks of rows the tokens have no limit: one row is the least.
        if budget.micro_batch_tokens <= SMALLEST_BUDGET or budget.max_rows == 1:
            raise RunError(advice(self.session, budget))
        half = budget.halved()
        if budget.max_rows is not None and half.max_rows is not None:
            sizes = f"{half.max_rows:,d} rows instead of {budget.max_rows:,d}"
        else:
            sizes = f"{half.micro_batch_tokens:,d} tokens instead of {budget.micro_batch_tokens:,d}"
        log.warning(
            "out of memory: the step is replayed with micro-batches of %s, graphs kept for up to %s; the result is the "
            "same, apart from fresh dropout draws",
            sizes,
            f"{half.kept_graph_tokens:,d}",
        )
        return half


def advice(session: Session, budget: Budget) -> str:
    """Return the current settings and what to change, the cheapest change first, each with what it saves."""
    placement = session.placement
    config = placement.run.config
    size = placement.size or measure(placement.run.config)
    now = placement.predict(size, tokens=budget.micro_batch_tokens)
    limit = size.max_length
    steps = []
    if budget.use_gradient_cache is False:
        steps.append(
            "use_gradient_cache: true (it reduces memory, and the result is the same)"
        )
    if (
        budget.max_rows is not None
    ):  # micro-batches are cut by rows, and the tokens have no limit
        steps.append(
            f"gradient_cache_chunk_size: {max(budget.max_rows // 2, 1)} (now {budget.max_rows:,d})"
        )
    else:
        half = max(budget.micro_batch_tokens // 2, 1)
        steps.append(f"micro_batch_tokens: {half} (now {budget.micro_batch_tokens:,d})")
    if not placement.recomputation.value:
        saved = (
            now.activations
            - placement.predict(
                size, tokens=budget.micro_batch_tokens, recomputes=True
            ).activations
        )
        steps.append(f"gradient_checkpointing: true ({_saves(saved)})")
    if limit > SHORT_TEXT_TOKENS:
        steps.append(f"max_length: {limit // 2} (now {limit})")
    if not config.adapters.use_lora:
        steps.append(f"use_lora: true ({_saves(now.gradients + now.optimizer)})")
        # FSDP1 leaves flat pieces of parameters, which 8-bit optimizers do not take.
        if config.optimizer.optim == "adamw" and not (
            placement.fsdp is not None and placement.fsdp.version == 1
        ):
            steps.append(f"optim: adamw_8bit ({_saves(0.75 * now.optimizer)})")
    if placement.fsdp is None and session.world_size > 1:
        steps.append(
            f"use_fsdp: true (FULL_SHARD: {_saves(now.states * (1 - 1 / session.world_size))})"
        )
    if placement.fsdp is not None:
        steps += _more_sharding(session, now.states)
    if placement.fsdp is not None and not placement.fsdp.offload:
        steps.append(
            f"fsdp_offload_params: true ({_saves(now.weights + now.optimizer)})"
        )
    if not config.adapters.use_qlora:
        steps.append("use_qlora: true")
    bound = (
        "gradient_cache_chunk_size"
        if budget.max_rows is not None
        else "micro_batch_tokens"
    )
    listed = "; ".join(
        f"{number}. {step}" for number, step in enumerate(steps, start=1)
    )
    used = ", ".join(
        f"{key} {value}" for key, value in memory_snapshot(session.device).items()
    )
    return (
        f"rank {session.rank} of {session.world_size} is out of device memory ({used}; {placement.rows:,d} rows per "
        f"process, strategy {session.strategy}, an estimated {now.total / GIB:.2f}GB of "
        f"{placement.memory / GIB:.2f}GB). Change in this order: {listed}. A smaller batch_size is not needed: it "
        f"changes the negatives, and memory is bounded by {bound}"
    )


def _more_sharding(session: Session, states: float) -> list[str]:
    """Return what would shard more than the run does: between machines too, and after each forward pass."""
    placement = session.placement
    steps = []
    assert placement.fsdp is not None
    if placement.is_hybrid:
        saved = states * (1 - placement.num_shards / session.world_size)
        steps.append(
            f"fsdp_sharding_strategy: FULL_SHARD (over all machines: {_saves(saved)})"
        )
    if not placement.fsdp.reshard_after_forward:
        steps.append(
            "fsdp_sharding_strategy: FULL_SHARD (parameters are freed after each layer, and gathered again)"
        )
    return steps


def _saves(count: float) -> str:
    return f"about {count / GIB:.2f}GB less"
