"""Out of memory: the budget is halved and the step replayed, or the run ends with settings to change, in order."""

from __future__ import annotations

import logging

import torch

from vembed.config.schema import TrainConfig
from vembed.distributed import collectives
from vembed.distributed.memory import memory_snapshot
from vembed.distributed.session import Session
from vembed.errors import RunError
from vembed.training.budget import SMALLEST_BUDGET, Budget

log = logging.getLogger("vembed")


class OutOfMemory(Exception):  # noqa: N818 - the name of the event
    """A rank ran out of device memory. Raised on all ranks at the same point, between two collectives."""


class MemoryGuard:
    """Detection of out-of-memory errors of any rank, at points that every rank reaches."""

    def __init__(self, config: TrainConfig, session: Session, *, active: bool | None = None) -> None:
        """`active`: by default on GPUs. Host memory does not fail with an exception."""
        self.config = config
        self.session = session
        self.active = session.device.type == "cuda" if active is None else active

    def agree(self, failed: bool, budget: Budget) -> None:
        """Raise OutOfMemory on every rank if it happened on any. Collective."""
        if not self.active:
            return
        if failed and self.session.strategy == "fsdp":
            # The other ranks are blocked in a layer's all-gather and cannot be notified. Ending this rank ends them.
            raise RunError(advice(self.config, self.session, budget))
        if self.session.strategy != "fsdp" and collectives.max_ints([int(failed)])[0]:
            raise OutOfMemory

    def smaller(self, budget: Budget) -> Budget:
        """Return the budget to replay the step with. Raise RunError if there is no smaller one."""
        if self.session.device.type == "cuda":
            torch.cuda.empty_cache()
        if budget.micro_batch_tokens <= SMALLEST_BUDGET:
            raise RunError(advice(self.config, self.session, budget))
        half = budget.halved()
        log.warning(
            "out of memory: the step is replayed with micro-batches of %s tokens instead of %s, graphs kept for up to "
            "%s; the result is the same, apart from fresh dropout draws",
            f"{half.micro_batch_tokens:,d}",
            f"{budget.micro_batch_tokens:,d}",
            f"{half.kept_graph_tokens:,d}",
        )
        return half


def advice(config: TrainConfig, session: Session, budget: Budget) -> str:
    """Return the current settings and what to change, the cheapest change first."""
    used = ", ".join(f"{key} {value}" for key, value in memory_snapshot(session.device).items())
    steps = []
    if budget.use_gradient_cache is False:
        steps.append("use_gradient_cache: true (it reduces memory, and the result is the same)")
    steps.append(f"micro_batch_tokens: {max(budget.micro_batch_tokens // 2, 1)} (now {budget.micro_batch_tokens:,d})")
    if not config.gradient_checkpointing:
        steps.append("gradient_checkpointing: true")
    if config.max_length is None or config.max_length > 128:
        steps.append(f"max_length: {(config.max_length or 512) // 2} (now {config.max_length or 'the model default'})")
    if not config.use_lora:
        steps.append("use_lora: true")
    if config.optim == "adamw" and not config.use_lora:
        steps.append("optim: adamw_8bit")
    if session.strategy != "fsdp" and session.world_size > 1:
        steps.append("use_fsdp: true (FULL_SHARD)")
    if session.strategy == "fsdp" and not config.fsdp_offload_params:
        steps.append("fsdp_offload_params: true")
    if not config.use_qlora:
        steps.append("use_qlora: true")
    listed = "; ".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))
    return (
        f"rank {session.rank} of {session.world_size} is out of device memory ({used}; batch_size {config.batch_size}, "
        f"strategy {session.strategy}). Change in this order: {listed}. A smaller batch_size is not needed: it changes "
        "the negatives, and memory is bounded by micro_batch_tokens"
    )
