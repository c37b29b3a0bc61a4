"""Exchange of embeddings between processes for the loss: which way a run takes, and what it needs."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from vembed.config.resolved import DEFAULT, Decision, ResolvedRun
from vembed.config.terms import needs_whole_batch, run_terms
from vembed.errors import UserError
from vembed.parallel import estimate
from vembed.parallel.environment import RankInfo
from vembed.parallel.estimate import GIB

Exchange = Literal["gather", "ring"]
EXCHANGES: tuple[Exchange, ...] = ("gather", "ring")

GATHERED_SHARE = 0.1
"""Embeddings of all processes, with their gradients, may take this share of a process's memory before `auto` takes the
ring."""
COPIES = 4
"""Numbers that a loss holds for each number of the embeddings that are its candidates: the embeddings, their unit
vectors, and the gradients of both."""
RING_ROWS = 6 * 8192
"""Rows of the buffers of a ring: two blocks of columns, and four of gradients."""
INTEGERS = 80
"""Bytes of the indices and contents of an input of the global batch, which every process holds."""
WIDEST = 8192
"""Numbers of an embedding at most, for a first look."""


def loss_bytes(inputs: int, world_size: int, dim: int, exchange: Exchange) -> float:
    """Estimate the bytes of a loss over `inputs` embeddings of `dim` numbers on each process."""
    integers = INTEGERS * inputs * world_size
    # A ring holds this rank's columns and its buffers, whose rows are not copied COPIES times.
    held = inputs + RING_ROWS / COPIES if exchange == "ring" else inputs * world_size
    return 4.0 * COPIES * held * dim + integers + estimate.WORKING_BYTES


def choose_exchange(
    run: ResolvedRun, ranks: RankInfo, memory: int, rows: int
) -> Decision[Exchange]:
    """Return the ring where it was asked for, or where the gathered embeddings of `rows` examples of each process would
    take too much memory."""
    config = run.config
    source = run.origins.get("loss_exchange", DEFAULT)
    if ranks.world_size == 1:
        return Decision("gather", "one process has all embeddings")
    if config.objective.loss_exchange != "auto":
        return Decision(
            config.objective.loss_exchange,
            f"loss_exchange: {config.objective.loss_exchange}",
            source,
        )
    every = f"{rows * ranks.world_size:,d} rows"
    # The model's files are read for its size only where some size could exceed the limit.
    dim = None
    need = 0.0
    limit = GATHERED_SHARE * memory
    inputs = rows * estimate.inputs_per_example(config.data.max_negatives)
    fits = loss_bytes(inputs, ranks.world_size, WIDEST, "gather") <= limit
    if not fits:
        with suppress(
            UserError
        ):  # raised again where the model is loaded; a session can do without one
            dim = estimate.hidden_size(config.model)
            need = loss_bytes(inputs, ranks.world_size, dim, "gather")
    cost = (
        ""
        if dim is None
        else f", {need / GIB:.2f}GB for {every} of {dim:,d} numbers, with their gradients"
    )
    terms = run_terms(config.objective, config.data, config.model.model_name)
    loss = needs_whole_batch(terms)
    if loss is not None:
        return Decision(
            "gather",
            f"auto: loss: {loss} needs the embeddings of the whole batch at once{cost}",
        )
    if config.objective.quantize_embeddings is not None:
        return Decision(
            "gather",
            f"auto: quantize_embeddings takes its levels from the whole batch{cost}",
        )
    if dim is None:
        known = (
            f"{every} of any size fit on every process"
            if fits
            else "the size of the embeddings is not known"
        )
        return Decision("gather", f"auto: {known}")
    said = (
        f"auto: the embeddings of {every} of {dim:,d} numbers, with their gradients, need {need / GIB:.2f}GB on every "
        "process"
    )
    if need > limit:
        return Decision(
            "ring",
            f"{said}, more than {GATHERED_SHARE:.0%} of its {memory / GIB:.1f}GB",
        )
    return Decision(
        "gather", f"{said}, at most {GATHERED_SHARE:.0%} of its {memory / GIB:.1f}GB"
    )
