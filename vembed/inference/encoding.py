"""Encoding of items outside a training step, shared by evaluation, inference and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vembed.data.batching.feeding import Feeder, MicroBatch, ModalitySlice, row_index
from vembed.data.batching.microbatches import LockstepSplit
from vembed.data.distinct import distinct
from vembed.data.examples import Item, Kind
from vembed.data.features import BaseFeaturiser, Features
from vembed.models.families.family import Modality
from vembed.models.precision import holding_copies
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


def default_budget(device: torch.device | str) -> int:
    """Return the default number of padded tokens per forward pass. More is not faster."""
    return CPU_BUDGET if torch.device(device).type == "cpu" else CUDA_BUDGET


def encode_items(
    model: nn.Module,
    featuriser: BaseFeaturiser[Any],
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
    featuriser: BaseFeaturiser[Any],
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
    total = num_items or len(contents)
    # Duplicates are encoded once but count as done together, and the other ranks are
    # assumed equally fast.
    factor = world_size * total / max(len(contents), 1)
    num_done = 0

    def after(num_rows: int) -> None:
        nonlocal num_done
        num_done += num_rows
        if progress is not None:
            progress(min(round(num_done * factor), total), total)
        if between is not None:
            between()

    def featurise(chunk: np.ndarray) -> list[Features]:
        numbers = chunk[rank::world_size].tolist()
        return featuriser.features([(contents[number], kind) for number in numbers])

    if lengths is None:
        texts = (len(content.text or "") for content in contents)
        lengths = np.fromiter(texts, np.int64, len(contents))
    # The longest come first, so that memory runs out at once or never. Exact token lengths
    # order the micro-batches within a chunk, whose inputs are dealt to the ranks in turn.
    order = np.argsort(-lengths, kind="stable")
    size = CHUNK * world_size
    chunks = [order[start : start + size] for start in range(0, len(order), size)]

    with (
        _evaluating(model),
        holding_copies(model),
        ThreadPoolExecutor(1, thread_name_prefix="vembed-encode") as ahead,
    ):
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
                after=after,
                between=between,
                kept=kept,
            )
            if world_size > 1:
                # The rows arrive in rank order, and go on in the order of the chunk.
                by_rank = [
                    np.arange(start, len(chunk), world_size)
                    for start in range(world_size)
                ]
                counts = [len(places) for places in by_rank]
                vectors = collectives.all_gather_rows(vectors, counts)
                places = torch.from_numpy(np.argsort(np.concatenate(by_rank)))
                vectors = vectors[places.to(vectors.device)]
            take(chunk, vectors.float().cpu().numpy())


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
            after=lambda _: None if between is None else between(),
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
    after: Callable[[int], None],
    between: Between | None,
    kept: KeptFeatures | None,
) -> Tensor:
    """Return [n, D] embeddings of this rank's inputs, in as many micro-batches per modality as every other rank.

    `after` is called after each micro-batch with the number of its inputs.
    """
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
        after(len(rows))
    assert result is not None, (
        "a chunk holds at least one input, so every rank runs at least one micro-batch"
    )
    return result


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
