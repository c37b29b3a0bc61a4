"""Placement: every decision of a run that needs its processes and devices, each made once, with its reason."""

import math
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from vembed.config.decisions import (
    DEFAULT,
    AskedPrecision,
    Decision,
    FsdpConfig,
    Precision,
    ResolvedRun,
    Strategy,
    default_recomputation,
)
from vembed.config.schema import ModelSection
from vembed.config.terms import source_batch_sizes
from vembed.errors import UserError
from vembed.models.families.description import describe
from vembed.parallel.devices import GIB, Gpu
from vembed.parallel.environment import RankInfo
from vembed.parallel.step_memory import MemoryEstimate, ModelSize, measure, tokens_of

PRECISION_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FITS_SHARE = 0.5
"""`strategy: auto` shards the model if weights, gradients and optimizer take more than this share of a process's memory.
The rest is for activations, gathered embeddings and the data."""
MIN_BF16_HIDDEN_DIM = 256
"""Hidden size from which `mixed_precision: auto` takes bfloat16 on CPUs that have instructions for it. Smaller models
spend most of their time outside of matrix products."""
NO_BF16_ON_CPU: Decision[Precision] = Decision(
    "no", "auto: the CPU computes in the dtype of the weights"
)
"""The precision of `auto` on a CPU without bfloat16, or where it is not faster."""
ADVICE_SHARE = 0.2
"""If weights, gradients and optimizer take less than this share of the memory, a run with `strategy: fsdp` gets the advice
to use ddp."""
SMALL_MICRO_BATCH_TOKENS = 4096
"""A micro-batch of so many tokens keeps a GPU busy."""
UNSHARDED_SHARE = 0.2
"""Unsharded gradients may take this share of a process's memory between the micro-batches of a step, and so may gathered
parameters."""
MIN_COMPILED_MINUTES = 5.0
"""`torch_compile: auto` compiles the layers of longer runs."""
OPERATIONS_PER_SECOND = 2e14
"""Floating-point operations per second of a current GPU in training, for the estimate of a run's length. On a slower GPU
the run takes longer, and compiling saves even more."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a model lies: on which processes and devices, whole or in shards, and in which precision it computes."""

    ranks: RankInfo
    device: torch.device
    memory: int
    """Bytes that a process has: of its GPU, or its part of the machine's memory; the least of all processes."""
    strategy: Decision[Strategy]
    fsdp: FsdpConfig | None
    """The settings of FSDP where the model is sharded, else None."""
    precision: Decision[Precision]
    """Precision of the arithmetic; `no` is that of the weights."""

    @property
    def num_machines(self) -> int:
        """Machines, each with equally many processes."""
        return self.ranks.world_size // self.ranks.local_world_size

    @property
    def is_hybrid(self) -> bool:
        """True if the model is sharded inside each machine and copied between machines."""
        if self.fsdp is None or self.fsdp.sharding_strategy != "HYBRID_SHARD":
            return False
        return self.num_machines > 1 and self.ranks.local_world_size > 1

    @property
    def unsharded_bytes_limit(self) -> float:
        """Bytes that unsharded gradients may take between the micro-batches of a step, and gathered parameters too."""
        return UNSHARDED_SHARE * self.memory

    def reduces_each_micro_batch(self, gradient_bytes: float) -> bool:
        """Return whether FSDP reduces gradients after every micro-batch, because unsharded ones would take too much."""
        return self.fsdp is not None and gradient_bytes > self.unsharded_bytes_limit

    def keeps_gathered(self, parameter_bytes: float) -> bool:
        """Return whether FSDP2 keeps parameters gathered between the micro-batches of a step: if they fit, and are not
        offloaded."""
        fsdp = self.fsdp
        can_keep = fsdp is not None and fsdp.version == 2 and not fsdp.offload
        return can_keep and parameter_bytes <= self.unsharded_bytes_limit


@dataclass(frozen=True, kw_only=True)
class Placement(Layout):
    """A resolved run on its processes and devices. The session, the step, `plan`, `doctor`, the advice on memory and
    the log read it."""

    run: ResolvedRun
    recomputation: Decision[bool]
    """True if activations are recomputed in the backward pass (gradient checkpointing)."""
    compilation: Decision[bool]
    """True if layers are compiled. `auto` on a GPU is decided by `for_work`, when the data are known."""
    num_examples: int
    """Examples of a global batch on one process, at most."""
    size: ModelSize | None = None
    """Sizes of the model, where a decision has asked for them."""
    notes: tuple[str, ...] = ()
    """Lines for the log: options without effect on these processes, and advice."""

    @property
    def decisions(self) -> dict[str, Decision[Any]]:
        """The decisions that the log, `plan`, `doctor` and run.json give, by name."""
        return {
            "strategy": self.strategy,
            "gradient checkpointing": self.recomputation,
            "mixed precision": self.precision,
            "compiled layers": self.compilation,
            "timeout in minutes": self.run.timeout_minutes,
        }

    @property
    def num_shards(self) -> int:
        """Processes that share one copy of the model."""
        if self.fsdp is None:
            return 1
        if self.is_hybrid:
            return self.ranks.local_world_size
        return self.ranks.world_size

    @property
    def offloads(self) -> bool:
        """True if weights, gradients and optimizer state rest in host memory, and not on a GPU."""
        return (
            self.fsdp is not None and self.fsdp.offload and self.device.type == "cuda"
        )

    @property
    def copies_weights(self) -> bool:
        """True if layers compute with bfloat16 copies of float32 weights (vembed.models.precision), unless FSDP converts the
        weights, the compiler the layers, or the weights have 4 bits."""
        can_copy = (
            self.precision.value == "bf16"
            and self.fsdp is None
            and not self.run.config.adapters.use_qlora
        )
        return can_copy and not self.compilation.value

    def for_work(self, operations: float) -> "Placement":
        """Return the placement with `torch_compile: auto` on a GPU decided for a run of so many floating-point operations.

        Compiling takes about a minute, which a short run would not win back.
        """
        config = self.run.config
        reason = None
        if config.adapters.use_qlora:
            reason = "layers of 4 bits are not compiled"
        elif config.model.model_class is not None or config.model.trust_remote_code:
            reason = "code of the model's own"
        elif self.fsdp is not None and self.fsdp.version == 1:
            reason = "FSDP1"
        minutes = operations / (OPERATIONS_PER_SECOND * self.ranks.world_size) / 60
        estimate = f"about {minutes:,.1f} minutes of arithmetic"
        compiles = reason is None and minutes >= MIN_COMPILED_MINUTES
        if compiles:
            reason = f"{estimate}; compiling takes about one"
        elif reason is None:
            reason = f"{estimate}, less than {MIN_COMPILED_MINUTES:g}"
        return replace(self, compilation=Decision(compiles, f"auto: {reason}"))


def place(
    run: ResolvedRun,
    ranks: RankInfo,
    device: torch.device,
    memory: int,
    gpu: Gpu | None = None,
    instructions: str | None = None,
) -> Placement:
    """Decide how a run is placed: strategy, precision, gradient checkpointing and compiled layers.

    Ranks with the same `memory` and `instructions` decide the same. `gpu`: facts of a GPU of another machine, for `plan`.
    `instructions`: bfloat16 instructions that the CPUs of all processes have.
    """
    strategy, size, advice = _choose_strategy(run, ranks, memory)
    fsdp = run.fsdp if strategy.value == "fsdp" else None
    config = run.config
    model = config.model
    auto_precision = NO_BF16_ON_CPU
    if device.type == "cpu":
        # No bfloat16 copies of weights under these (see `copies_weights`).
        is_compiled = model.torch_compile is True
        if fsdp is None and not is_compiled and not config.adapters.use_qlora:
            auto_precision = _auto_on_cpu(model, instructions)
    compiles = False
    origin = DEFAULT
    why_compiled = "auto: on CPUs only if asked for"
    if model.torch_compile != "auto":
        compiles = model.torch_compile
        why_compiled = "torch_compile"
        origin = run.origins.get("torch_compile", DEFAULT)
    elif device.type == "cuda":
        why_compiled = (
            f"auto: on in runs of more than about {MIN_COMPILED_MINUTES:g} minutes, once the data are "
            "read"
        )
    # The largest number of examples of a global batch on any process.
    batch = config.batch
    num_ranks = ranks.world_size
    run_size = batch.global_batch_size or batch.batch_size * num_ranks
    sizes = source_batch_sizes(config.data, batch, run_size)
    num_examples = math.ceil(max(*sizes, batch.global_batch_size or 0) / num_ranks)
    # Resumed on another number of processes, a run may divide its global batch unevenly. Otherwise
    # `examples_per_process` refuses a remainder.
    if not config.run.resume or batch.global_batch_size is None:
        num_examples = max(num_examples, batch.examples_per_process(num_ranks))
    recomputation = run.recomputation
    if recomputation.origin == DEFAULT and fsdp is not None:
        # `strategy: auto` may have chosen FSDP.
        recomputation = default_recomputation("fsdp")
    placement = Placement(
        run=run,
        ranks=ranks,
        device=device,
        memory=memory,
        strategy=strategy,
        fsdp=fsdp,
        precision=choose_precision(run.precision, device, gpu, auto_precision),
        recomputation=recomputation,
        compilation=Decision(compiles, why_compiled, origin),
        num_examples=num_examples,
        size=size,
        notes=(*_without_effect(run, ranks, strategy), *advice),
    )
    if recomputation.origin != DEFAULT or not recomputation.value:
        return placement
    # Last: the estimate of how many tokens fit needs all other decisions.
    return replace(placement, recomputation=_recomputation_by_memory(placement))


def _recomputation_by_memory(placement: Placement) -> Decision[bool]:
    """Return the decision to recompute activations, or that not to where memory is enough without."""
    size = placement.size
    recomputed = placement.recomputation
    # On CPUs the size of micro-batches does not depend on memory.
    if size is None or placement.device.type != "cuda":
        return recomputed
    estimate = MemoryEstimate(placement)
    demand = estimate.demand(recomputes=False)
    # Tokens whose graphs fit without recomputation, and then all tokens of a batch.
    _, fitting = tokens_of(placement, demand, 0)
    if estimate.inputs * size.max_length <= fitting:
        return Decision(False, "default: the graphs of a batch fit without it")
    if placement.run.config.batch.use_gradient_cache is False:
        return recomputed
    # With Gradient Cache only one micro-batch has a graph, and recomputation would add a third forward pass. A micro-batch
    # takes half of the tokens that fit, as in `tokens_of`.
    if fitting < 2 * max(SMALL_MICRO_BATCH_TOKENS, size.max_length):
        few = f"without it only {fitting:,d} tokens fit at once"
        return replace(recomputed, reason=f"{recomputed.reason}; {few}")
    fits = f"micro-batches of {fitting // 2:,d} tokens fit without it"
    return Decision(
        False, f"default: {fits}, and Gradient Cache bounds the graphs of a batch"
    )


def memory_of_a_process(ranks: RankInfo, device: torch.device) -> int:
    """Return the bytes of a process's GPU, or its part of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total // ranks.local_world_size


def choose_precision(
    asked: Decision[AskedPrecision],
    device: torch.device,
    gpu: Gpu | None = None,
    on_cpu: Decision[Precision] = NO_BF16_ON_CPU,
) -> Decision[Precision]:
    """Return the precision of the arithmetic: the one that was asked for, for `auto` by the device.

    `on_cpu`: what `auto` is on a CPU.
    """
    has_bf16 = True
    name = "the CPU"
    if gpu is not None:
        has_bf16 = gpu.has_bf16
        name = gpu.name
    elif device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(device)
    # A precision that was asked for is refused if the device lacks it. Only `auto` chooses another one.
    if asked.value == "fp16" and device.type == "cpu":
        raise UserError(
            f"mixed_precision: fp16 ({asked.origin}) needs a GPU, and this process computes on the CPU: use bf16 or no."
        )
    if asked.value == "bf16" and not has_bf16:
        raise UserError(
            f"mixed_precision: bf16 ({asked.origin}), but {name} has no bfloat16: use fp16 or no."
        )
    if asked.value != "auto":
        return Decision(asked.value, asked.reason, asked.origin)
    if device.type == "cpu":
        return on_cpu
    if has_bf16:
        return Decision("bf16", f"auto: {name} computes in bfloat16")
    return Decision("no", f"auto: {name} has no bfloat16")


def precision_of_use(
    model: str,
    device: torch.device,
    instructions: str | None,
    *,
    trust_remote_code: bool = False,
) -> Decision[Precision]:
    """Return the precision of inference with a finished model: that of its weights, or bfloat16 on CPUs where it is
    faster."""
    if device.type != "cpu":
        return Decision("no", f"auto: {device} computes in the dtype of the weights")
    options = ModelSection(model_name=model, trust_remote_code=trust_remote_code)
    return _auto_on_cpu(options, instructions)


def _auto_on_cpu(
    options: ModelSection, instructions: str | None
) -> Decision[Precision]:
    """Return what `auto` is on CPUs with these bfloat16 instructions: bf16 where it is faster, otherwise no."""
    if instructions is None:
        return NO_BF16_ON_CPU
    try:
        model = describe(options)
    except UserError:
        # Raised again where the model is loaded. A session may also have no model.
        return NO_BF16_ON_CPU
    # The widest tower decides.
    towers = (model.text_hidden_dim or 0, model.image_hidden_dim or 0)
    hidden = max(model.hidden_dim, *towers)
    if hidden < MIN_BF16_HIDDEN_DIM:
        reason = f"auto: float32, since bfloat16 does not pay for a hidden size of {hidden:,d}, below {MIN_BF16_HIDDEN_DIM}"
        return Decision("no", reason)
    reason = f"auto: the CPU has {instructions}, and the hidden size of {hidden:,d} is at least {MIN_BF16_HIDDEN_DIM}"
    return Decision("bf16", reason)


def _choose_strategy(
    run: ResolvedRun,
    ranks: RankInfo,
    memory: int,
) -> tuple[Decision[Strategy], ModelSize | None, list[str]]:
    """Return the strategy, the model's sizes where they were asked for, and advice."""
    asked = run.strategy
    if ranks.world_size == 1:
        if asked.value == "fsdp":
            reason = "FSDP needs at least two processes; training unsharded"
            return Decision("single", reason, asked.origin), None, []
        return Decision("single", "one process"), None, []
    if asked.value == "single":
        raise UserError(
            f"strategy: single, but {ranks.world_size} processes were started: start one, or use strategy: ddp."
        )
    if asked.value == "ddp":
        return Decision("ddp", asked.reason, asked.origin), None, []
    # Only here, because it takes time: the model is built without weights to count its parameters.
    size = measure(run.config)
    share = size.state_bytes / memory
    need = (
        f"{size.total:,d} parameters need {size.state_bytes / GIB:.2f}GB for weights, gradients and optimizer, {share:.0%} of "
        f"the {memory / GIB:.1f}GB of a process"
    )
    if asked.value == "fsdp":
        advice = []
        if share < ADVICE_SHARE:
            advice.append(
                f"FSDP is not needed here: {need}; strategy: ddp would be faster"
            )
        return Decision("fsdp", asked.reason, asked.origin), size, advice
    if share > FITS_SHARE:
        return Decision("fsdp", f"auto: {need}, more than {FITS_SHARE:.0%}"), size, []
    return Decision("ddp", f"auto: {need}, so each process can hold a copy"), size, []


def _without_effect(
    run: ResolvedRun,
    ranks: RankInfo,
    strategy: Decision[Strategy],
) -> list[str]:
    """Return a note for each option that has no effect on these processes."""
    notes = []
    if strategy.value != "fsdp" and run.fsdp is not None:
        for option in run.fsdp_given:
            notes.append(f"{option} has no effect: the strategy is {strategy.value}")
    running = f"{ranks.local_world_size} process(es) on this machine"
    if run.processes.value not in ("auto", ranks.local_world_size):
        asked = f"num_processes: {run.processes.value} ({run.processes.origin})"
        notes.append(
            f"{asked} has no effect: this run has {running}; `vembed train` starts as many as it says"
        )
    num_machines = ranks.world_size // ranks.local_world_size
    if run.machines.origin != "default" and run.machines.value != num_machines:
        asked = f"num_machines: {run.machines.value} ({run.machines.origin})"
        notes.append(f"{asked} has no effect: this run has {num_machines} machine(s)")
    return notes
