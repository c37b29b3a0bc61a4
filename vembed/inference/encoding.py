"""Encoding of items outside a training step, shared by evaluation, inference and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vembed.data.batching.feeding import Feeder, MicroBatch, ModalitySlice, row_index
from vembed.data.batching.microbatches import LockstepSplit
from vembed.data.distinct import distinct
from vembed.data.examples import Item, Kind
from vembed.data.features import BaseFeaturiser, Features, Featuriser
from vembed.models.bf16 import holding_copies
from vembed.models.families.family import Modality
from vembed.parallel import collectives
from vembed.parallel.session import Session

CHUNK = 16_384
"""Inputs per process that are tokenized, batched and gathered together. Bounds token ids and gathered rows in
memory."""
CPU_BUDGET = 4_096
CUDA_BUDGET = 32_768

Progress = Callable[[int, int], None]
"""Called with the number of items done and the total, both summed over all ranks."""
Take = Callable[[np.ndarray, np.ndarray], None]
"""Called with the numbers of some inputs and their embeddings, [n, D] float32 as the model gives them."""
Between = Callable[[], None]
"""Called after each micro-batch, equally often on all ranks. An exception from it ends the encoding."""


class KeptFeatures(Protocol):
    """Cached features of modalities whose towers do not change."""

    def encode(
        self,
        features: Sequence[Features],
        budget: int,
        max_rows: int | None,
        between: Between | None,
    ) -> Mapping[Modality, Tensor]:
        """Return the tower features of the inputs, per modality. Collective."""
        ...

    def inputs(
        self, modality_slice: ModalitySlice, tables: Mapping[Modality, Tensor]
    ) -> tuple[Modality, dict[str, Tensor]]:
        """Return the model's input for one modality slice of a micro-batch."""
        ...


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive distinct inputs, split over the ranks."""

    numbers: np.ndarray
    """Positions in the list of distinct inputs."""
    by_rank: list[np.ndarray]
    """Positions in `numbers` of each rank's share."""


def default_budget(device: torch.device | str) -> int:
    """Return the default number of padded tokens per forward pass. More is not faster."""
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
    """Return [n, d] float32 embeddings in the order of the items, on every rank.

    With a session of several ranks it is collective: all ranks pass the same items, and each encodes a part. All ranks
    run equally many micro-batches per modality, as sharded models need (a rank without inputs runs a dummy). Equal
    items are encoded once. `truncate_dim` keeps the first coordinates; `normalize` is applied after it. `kept` provides
    cached tower features.
    """
    contents, where = distinct(
        items, key=lambda item: (item.key(), item.prompt, item.max_length)
    )
    matrices: list[np.ndarray] = []

    def take(numbers: np.ndarray, rows: np.ndarray) -> None:
        if not matrices:
            matrices.append(np.empty((len(contents), rows.shape[1]), np.float32))
        matrices[0][numbers] = rows

    encode_chunks(
        model,
        featuriser,
        contents,
        kind,
        take,
        num_items=len(items),
        budget_tokens=budget_tokens,
        max_rows=max_rows,
        session=session,
        progress=progress,
        between=between,
        kept=kept,
    )
    embeddings = (
        matrices.pop()
        if matrices
        else np.empty((0, featuriser.description.embedding_dim), np.float32)
    )
    if len(contents) < len(items):
        embeddings = embeddings[where]
    return first_dims(embeddings, truncate_dim or embeddings.shape[1], normalize)


def encode_chunks(
    model: nn.Module,
    featuriser: Featuriser,
    contents: Sequence[Item],
    kind: Kind,
    take: Take,
    *,
    lengths: np.ndarray | None = None,
    num_items: int | None = None,
    budget_tokens: int | None = None,
    max_rows: int | None = None,
    session: Session | None = None,
    progress: Progress | None = None,
    between: Between | None = None,
    kept: KeptFeatures | None = None,
) -> None:
    """Encode distinct inputs as `encode_items` does, and give the embeddings of each chunk to `take`, on every rank.

    At most CHUNK inputs per rank, twice, are in memory. The inputs come sorted by length, in the same order on any
    number of ranks. `lengths`: of their texts in characters, if they are known. `num_items`: what progress counts to.
    """
    rank, world_size = (session.rank, session.world_size) if session else (0, 1)
    device = session.device if session else _device_of(model)
    budget = budget_tokens or default_budget(device)
    feeder = Feeder(featuriser, device)
    reporter = _Reporter(
        progress, num_items or len(contents), len(contents), world_size
    )

    def featurise(chunk: _Chunk) -> list[Features]:
        numbers = chunk.numbers[chunk.by_rank[rank]].tolist()
        return featuriser.features([(contents[number], kind) for number in numbers])

    with (
        _evaluating(model),
        holding_copies(model),
        ThreadPoolExecutor(1, thread_name_prefix="vembed-encode") as ahead,
    ):
        chunks = _chunks(contents, lengths, world_size)
        # Tokenize the next chunk in a thread while this one is encoded.
        waiting = [ahead.submit(featurise, chunk) for chunk in chunks[:1]]
        for number, chunk in enumerate(chunks):
            features = waiting.pop().result()
            # Submitted before this chunk is encoded, popped in the next round.
            waiting = [
                ahead.submit(featurise, later)
                for later in chunks[number + 1 : number + 2]
            ]
            vectors = _encode_rank_batch(
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
                # The rows arrive in rank order, and go on in the order of the chunk.
                gathered = collectives.all_gather_rows(
                    vectors, [len(share) for share in chunk.by_rank]
                )
                vectors = gathered[
                    torch.from_numpy(np.argsort(np.concatenate(chunk.by_rank))).to(
                        gathered.device
                    )
                ]
            take(chunk.numbers, vectors.float().cpu().numpy())


def encode_features(
    model: nn.Module,
    featuriser: BaseFeaturiser[Any],
    features: Sequence[Features],
    device: torch.device,
    *,
    world_size: int = 1,
    between: Between | None = None,
    kept: KeptFeatures | None = None,
) -> np.ndarray:
    """Return [n, d] float32 embeddings of this rank's tokenized inputs, as the model gives them.

    With `world_size` > 1 it is collective: each rank passes inputs of its own, at least one rank has some, and all run
    equally many micro-batches.
    """
    with _evaluating(model), holding_copies(model):
        embeddings = _encode_rank_batch(
            model,
            Feeder(featuriser, device),
            features,
            budget=default_budget(device),
            max_rows=None,
            world_size=world_size,
            reporter=_Reporter(None, len(features), len(features), 1),
            between=between,
            kept=kept,
        )
    result: np.ndarray = embeddings.float().cpu().numpy()
    return result


def first_dims(matrix_ND: np.ndarray, dim: int, normalize: bool) -> np.ndarray:
    """Return the first `dim` coordinates of each row, normalised if `normalize`. The matrix itself is not changed."""
    cut = matrix_ND[:, :dim]
    if not normalize:
        return np.ascontiguousarray(cut)
    unit: np.ndarray = cut / np.maximum(
        np.linalg.norm(cut, axis=1, keepdims=True), 1e-12
    )
    return unit


def split_in_step(
    features: Sequence[Features],
    rows_of: Mapping[Modality, Sequence[int]],
    budget: int,
    max_rows: int | None,
    world_size: int,
) -> dict[Modality, list[list[int]]]:
    """Return micro-batches of some inputs of each modality, equally many on every rank. Collective with several
    ranks."""
    split = LockstepSplit(
        [feature.length for feature in features], rows_of, budget, max_rows
    )
    return split.agreed(
        collectives.max_ints(split.counts) if world_size > 1 else split.counts
    )


def _encode_rank_batch(
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
    """Return [n, D] embeddings of this rank's inputs, in as many micro-batches per modality as every other rank."""
    tables = (
        kept.encode(features, budget, max_rows, between) if kept is not None else {}
    )
    modalities = feeder.featuriser.modalities
    rows_of = {
        modality: [
            row for row, feature in enumerate(features) if feature.modality == modality
        ]
        for modality in modalities
    }
    splits = split_in_step(features, rows_of, budget, max_rows, world_size)
    micro_batches: list[MicroBatch] = [
        [(modality, rows)] for modality, split in splits.items() for rows in split
    ]
    # Modalities with kept features need no pixels or token ids: their micro-batches are empty here.
    fed = feeder.feed(
        [
            [
                modality_slice
                for modality_slice in micro_batch
                if modality_slice[0] not in tables
            ]
            for micro_batch in micro_batches
        ],
        features,
    )
    result: Tensor | None = None
    for micro_batch, inputs in zip(micro_batches, fed, strict=True):
        ((modality, rows),) = micro_batch
        inputs_of_batch = (
            inputs
            if kept is None or modality not in tables
            else [kept.inputs((modality, rows), tables)]
        )
        (embeddings,) = model(inputs_of_batch)
        if result is None:
            result = embeddings.new_empty(len(features), embeddings.shape[1])
        if rows:  # otherwise a dummy: it was run only for its collectives
            result[row_index(rows, embeddings.device)] = embeddings
            reporter.add(len(rows))
        if between is not None:
            between()
    assert result is not None, (
        "a chunk holds at least one input, so every rank runs at least one micro-batch"
    )
    return result


def _chunks(
    contents: Sequence[Item], lengths: np.ndarray | None, world_size: int
) -> list[_Chunk]:
    """Return chunks of inputs of similar length, dealt to the ranks in turn. The longest come first, so that memory
    runs out at once or never. Text length in characters is the sort key; exact token lengths order the micro-batches
    within a chunk."""
    if lengths is None:
        lengths = np.fromiter(
            (len(content.text or "") for content in contents), np.int64, len(contents)
        )
    order = np.argsort(-lengths, kind="stable")
    parts = [
        order[start : start + CHUNK * world_size]
        for start in range(0, len(order), CHUNK * world_size)
    ]
    return [
        _Chunk(
            part, [np.arange(rank, len(part), world_size) for rank in range(world_size)]
        )
        for part in parts
    ]


class _Reporter:
    """Scales this rank's finished micro-batches to progress over all items of all ranks."""

    def __init__(
        self,
        progress: Progress | None,
        num_items: int,
        num_distinct: int,
        world_size: int,
    ) -> None:
        self.progress = progress
        self.num_items = num_items
        # Duplicates are encoded once but count as done together, and the other ranks are assumed equally fast.
        self.factor = world_size * num_items / max(num_distinct, 1)
        self.done = 0

    def add(self, num_rows: int) -> None:
        self.done += num_rows
        if self.progress is not None:
            self.progress(
                min(round(self.done * self.factor), self.num_items), self.num_items
            )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and autograd, then restore each module's own mode (a frozen one may have been in eval mode)."""
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
