"""Out of memory: the budget is halved and the step replayed, or the run ends with settings to change, in order."""

from __future__ import annotations

import logging

import torch

from vembed.errors import RunError
from vembed.models.adapters import wants_adapters
from vembed.parallel import collectives
from vembed.parallel.estimate import GIB, measure
from vembed.parallel.memory import memory_snapshot
from vembed.parallel.session import Session
from vembed.training.budget import SMALLEST_BUDGET, Budget

log = logging.getLogger("vembed")


SHORT = 128
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
    config, size = placement.run.config, placement.size or measure(placement.run.config)
    now, limit = (
        placement.predict(size, tokens=budget.micro_batch_tokens),
        size.max_length,
    )
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
    if limit > SHORT:
        steps.append(f"max_length: {limit // 2} (now {limit})")
    if not wants_adapters(config.adapters):
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
    placement, steps = session.placement, []
    assert placement.fsdp is not None
    if placement.is_hybrid:
        saved = states * (1 - placement.num_shards / session.world_size)
        steps.append(
            f"fsdp_sharding_strategy: FULL_SHARD (over all machines: {_saves(saved)})"
        )
    if placement.fsdp.version == 2 and session.keeps_gathered:
        steps.append(
            "fsdp_reshard_after_forward: true (parameters are freed after each layer, and gathered again)"
        )
    if placement.fsdp.version == 1 and not placement.fsdp.reshard_after_forward:
        steps.append(
            "fsdp_sharding_strategy: FULL_SHARD (parameters are freed after each layer, and gathered again)"
        )
    return steps


def _saves(count: float) -> str:
    return f"about {count / GIB:.2f}GB less"
