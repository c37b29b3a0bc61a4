"""The one way from items to embeddings outside of a training step: for evaluation, use and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vembed.data import microbatches
from vembed.data.examples import Item, Kind
from vembed.data.features import Features, Featuriser
from vembed.data.feeding import Call, Feeder, Part, row_index
from vembed.distributed import collectives
from vembed.distributed.session import Session
from vembed.models.description import Lane

CHUNK = 16_384
"""Inputs per process that are featurised, planned and gathered together: bounds token ids and gathered rows."""
CPU_BUDGET = 4_096
CUDA_BUDGET = 32_768

Progress = Callable[[int, int], None]
"""Called with the number of items done and the number of all items, of all ranks together."""
Between = Callable[[], None]
"""Called after each micro-batch, by all ranks as often; what it raises ends the encoding."""


class KeptFeatures(Protocol):
    """Of lanes whose towers never change: what these gave before, which spares passing them again."""

    def see(
        self, features: Sequence[Features], budget: int, max_rows: int | None, between: Between | None
    ) -> Mapping[Lane, Tensor]:
        """Per lane what its tower gives for each of the inputs; collective."""
        ...

    def inputs(self, part: Part, tables: Mapping[Lane, Tensor]) -> tuple[Lane, dict[str, Tensor]]:
        """What the model takes in place of a part's inputs."""
        ...


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive distinct inputs, and which of them each rank encodes."""

    by_rank: list[list[int]]
    """Per rank: positions in the list of distinct inputs."""

    @property
    def size(self) -> int:
        return sum(map(len, self.by_rank))


def default_budget(device: torch.device | str) -> int:
    """Padded tokens that go through the model at once where nobody says: more bring no more speed."""
    return CPU_BUDGET if torch.device(device).type == "cpu" else CUDA_BUDGET


def encode_items(
    model: nn.Module,
    featuriser: Featuriser,
    items: Sequence[Item],
    kind: Kind,
    *,
    budget_tokens: int | None = None,
    max_rows: int | None = None,
    session: Session | None = None,
    normalize: bool = True,
    truncate_dim: int | None = None,
    progress: Progress | None = None,
    between: Between | None = None,
    kept: KeptFeatures | None = None,
) -> np.ndarray:
    """[n, d] float32 embeddings in the order of the items, on every rank.

    With a session of several ranks it is collective: all ranks give the same items, each encodes a share, and all run
    equally many micro-batches per lane (a rank with nothing left runs a dummy), as sharded models need. Equal items are
    encoded once. `truncate_dim` keeps the first coordinates; `normalize` comes after it. `kept` stands in for towers.
    """
    rank, world_size = (session.rank, session.world_size) if session else (0, 1)
    device = session.device if session else _device_of(model)
    distinct, where = _distinct(items)
    embeddings: np.ndarray | None = None
    feeder = Feeder(featuriser, device)
    reporter = _Reporter(progress, len(items), len(distinct), world_size)
    with _evaluating(model), ThreadPoolExecutor(1, thread_name_prefix="vembed-encode") as ahead:
        chunks = list(_chunks(distinct, world_size))

        def featurise(chunk: _Chunk) -> list[Features]:
            return featuriser.features([(distinct[index], kind) for index in chunk.by_rank[rank]])

        waiting = [ahead.submit(featurise, chunk) for chunk in chunks[:1]]
        for number, chunk in enumerate(chunks):
            features = waiting.pop().result()
            waiting = [ahead.submit(featurise, later) for later in chunks[number + 1 : number + 2]]
            budget = budget_tokens or default_budget(device)
            own = _encode_share(
                model,
                feeder,
                features,
                budget=budget,
                max_rows=max_rows,
                world_size=world_size,
                reporter=reporter,
                between=between,
                kept=kept,
            )
            if world_size > 1:
                own = collectives.all_gather_rows(own, [len(share) for share in chunk.by_rank])
            if embeddings is None:
                embeddings = np.empty((len(distinct), own.shape[1]), np.float32)
            embeddings[[index for share in chunk.by_rank for index in share]] = own.float().cpu().numpy()
    if embeddings is None:
        embeddings = np.empty((0, featuriser.description.embedding_dim), np.float32)
    if len(distinct) < len(items):
        embeddings = embeddings[where]
    return first_dims(embeddings, truncate_dim or embeddings.shape[1], normalize)


def first_dims(matrix_ND: np.ndarray, dim: int, normalize: bool) -> np.ndarray:
    """The first `dim` coordinates of each row, brought to length 1 where `normalize`; the matrix itself stays."""
    cut = matrix_ND[:, :dim]
    if not normalize:
        return np.ascontiguousarray(cut)
    unit: np.ndarray = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return unit


def plan_in_step(
    features: Sequence[Features],
    rows_of: Mapping[Lane, Sequence[int]],
    budget: int,
    max_rows: int | None,
    world_size: int,
) -> dict[Lane, list[list[int]]]:
    """Micro-batches of some inputs of each lane, as many on every rank; collective where there are several."""
    lengths = {lane: [features[row].length for row in rows] for lane, rows in rows_of.items()}
    plans = {lane: microbatches.plan(lengths[lane], budget, max_rows) for lane in rows_of}
    if world_size > 1:
        counts = collectives.max_ints([len(plan) for plan in plans.values()])
        for lane, count in zip(rows_of, counts, strict=True):
            if count > len(plans[lane]):
                plans[lane] = microbatches.plan(lengths[lane], budget, max_rows, at_least=count)
    return {lane: [[rows_of[lane][place] for place in places] for places in plan] for lane, plan in plans.items()}


def _encode_share(
    model: nn.Module,
    feeder: Feeder,
    features: Sequence[Features],
    *,
    budget: int,
    max_rows: int | None,
    world_size: int,
    reporter: _Reporter,
    between: Between | None,
    kept: KeptFeatures | None,
) -> Tensor:
    """[n, D] embeddings of this rank's inputs, in as many micro-batches per lane as every other rank runs."""
    tables = kept.see(features, budget, max_rows, between) if kept is not None else {}
    lanes = feeder.featuriser.description.lanes
    rows_of = {lane: [row for row, one in enumerate(features) if one.lane == lane] for lane in lanes}
    plans = plan_in_step(features, rows_of, budget, max_rows, world_size)
    calls: list[Call] = [[(lane, rows)] for lane, plan in plans.items() for rows in plan]
    fed = feeder.feed([[part for part in call if part[0] not in tables] for call in calls], features)
    result: Tensor | None = None
    for call, inputs in zip(calls, fed, strict=True):
        ((lane, rows),) = call
        given = inputs if kept is None or lane not in tables else [kept.inputs((lane, rows), tables)]
        (embeddings,) = model(given)
        if result is None:
            result = embeddings.new_empty(len(features), embeddings.shape[1])
        if rows:  # otherwise a dummy, which kept the ranks in step
            result[row_index(rows, embeddings.device)] = embeddings
            reporter.add(len(rows))
        if between is not None:
            between()
    assert result is not None, "a chunk holds at least one input, so every rank runs at least one micro-batch"
    return result


def _distinct(items: Sequence[Item]) -> tuple[list[Item], np.ndarray]:
    """Each content once, and for every item the place of its content."""
    place: dict[int, int] = {}
    distinct: list[Item] = []
    where = np.empty(len(items), np.int64)
    for position, item in enumerate(items):
        key = item.key()
        if key not in place:
            place[key] = len(distinct)
            distinct.append(item)
        where[position] = place[key]
    return distinct, where


def _chunks(distinct: Sequence[Item], world_size: int) -> Iterator[_Chunk]:
    """Chunks of similar length, dealt out to the ranks one by one; longest first, so that memory runs out at once or
    never. Characters stand for tokens here: the exact lengths order the micro-batches within a chunk."""
    order = sorted(range(len(distinct)), key=lambda index: -len(distinct[index].text or ""))
    for start in range(0, len(order), CHUNK * world_size):
        chunk = order[start : start + CHUNK * world_size]
        yield _Chunk([chunk[rank::world_size] for rank in range(world_size)])


class _Reporter:
    """Turns the micro-batches of this rank into progress over all items, for all ranks."""

    def __init__(self, progress: Progress | None, num_items: int, num_distinct: int, world_size: int) -> None:
        self.progress = progress
        self.num_items = num_items
        self.factor = world_size * num_items / max(num_distinct, 1)
        self.done = 0

    def add(self, num_rows: int) -> None:
        self.done += num_rows
        if self.progress is not None:
            self.progress(min(round(self.done * self.factor), self.num_items), self.num_items)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without graphs; afterwards every module is as it was (a frozen one may have been in eval)."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in before:
            module.training = was_training


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
