"""Encoding of items outside a training step, shared by evaluation, inference and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vembed.config.values import EmbeddingPrecision
from vembed.data.batching.rank_batch import (
    Feeder,
    LockstepSplit,
    index_tensor,
    indices_by_modality,
)
from vembed.data.examples import Item, Kind, distinct
from vembed.data.features import BaseFeaturiser, Features
from vembed.errors import UserError
from vembed.models.families.family import Modality
from vembed.models.precision import bf16_weights_of
from vembed.parallel import collectives
from vembed.parallel.session import Session

if TYPE_CHECKING:
    from vembed.training.frozen import InputBuilder

INPUTS_PER_CHUNK = 16_384
"""Inputs per process that are tokenized, batched and gathered together. Bounds token ids and gathered rows in
memory."""
CPU_BUDGET = 4_096
CUDA_BUDGET = 32_768
"""Padded tokens of a forward pass by default. More is not faster."""

Progress = Callable[[int, int], None]
"""Called with the number of distinct inputs done and the total, both summed over all ranks."""
Take = Callable[[np.ndarray, np.ndarray], None]
"""Called with the numbers of some inputs and their embeddings, [n, D] float32 as the model gives them."""
InterruptCheck = Callable[[], None]
"""Called after each micro-batch, equally often on all ranks. An exception from it ends the encoding."""


def encode_items(
    model: nn.Module,
    featuriser: BaseFeaturiser,
    items: Sequence[Item],
    kind: Kind,
    **options: Any,
) -> np.ndarray:
    """Return [n, D] float32 embeddings as the model gives them, in the order of the items, on every rank. Equal items are
    encoded once. `options`: those of `encode_chunks`."""
    contents, content_of = distinct(
        items, key=lambda item: (item.key(), item.prompt, item.max_length)
    )
    embeddings = np.empty((0, featuriser.description.embedding_dim), np.float32)

    def take(numbers: np.ndarray, rows: np.ndarray) -> None:
        nonlocal embeddings
        if not len(embeddings):
            embeddings = np.empty((len(contents), rows.shape[1]), np.float32)
        embeddings[numbers] = rows

    encode_chunks(model, featuriser, contents, kind, take, **options)
    return embeddings[content_of] if len(contents) < len(items) else embeddings


def encode_chunks(
    model: nn.Module,
    featuriser: BaseFeaturiser,
    contents: Sequence[Item],
    kind: Kind,
    take: Take,
    *,
    lengths: np.ndarray | None = None,
    budget_tokens: int | None = None,
    max_inputs: int | None = None,
    session: Session | None = None,
    progress: Progress | None = None,
    check_interrupt: InterruptCheck | None = None,
    input_builder: InputBuilder | None = None,
) -> None:
    """Encode distinct inputs, and give the embeddings of each chunk to `take`, on every rank.

    With a session of several ranks it is collective: all ranks pass the same inputs, and each encodes a part. All ranks
    run equally many micro-batches per modality, as sharded models need (a rank without inputs runs a dummy). At most
    INPUTS_PER_CHUNK inputs per rank, twice, are in memory. The inputs come sorted by length, in the same order on any
    number of ranks. `lengths`: of their texts in characters, if they are known. `input_builder`: reads
    the outputs of frozen towers from its stores, so that these towers need not run.
    """
    rank = session.rank if session else 0
    world_size = session.world_size if session else 1
    device = session.device if session else next(model.parameters()).device
    num_done = 0

    def after(num_rows: int) -> None:
        nonlocal num_done
        # All ranks are assumed to be equally fast.
        num_done += num_rows * world_size
        if progress is not None:
            progress(min(num_done, len(contents)), len(contents))

    def featurise(chunk: np.ndarray) -> list[Features]:
        # The chunk is dealt to the ranks in turn.
        numbers = chunk[rank::world_size].tolist()
        return featuriser.features([(contents[number], kind) for number in numbers])

    if lengths is None:
        texts = (len(content.text or "") for content in contents)
        lengths = np.fromiter(texts, np.int64, len(contents))
    # The longest come first, so that memory runs out at once or never. Exact token lengths
    # order the micro-batches within a chunk, whose inputs are dealt to the ranks in turn.
    order = np.argsort(-lengths, kind="stable")
    size = INPUTS_PER_CHUNK * world_size
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    feeder = Feeder(featuriser, device)
    with (
        _evaluating(model),
        bf16_weights_of(model).held(),
        ThreadPoolExecutor(1, thread_name_prefix="vembed-encode") as ahead,
    ):
        # The next chunk is tokenized in a thread while this one is encoded.
        waiting = ahead.submit(featurise, chunks[0]) if chunks else None
        for number, chunk in enumerate(chunks):
            assert waiting is not None
            features = waiting.result()
            if number + 1 < len(chunks):
                waiting = ahead.submit(featurise, chunks[number + 1])
            embeddings = _encode_rank(
                model,
                feeder,
                features,
                budget_tokens=budget_tokens,
                max_inputs=max_inputs,
                world_size=world_size,
                check_interrupt=check_interrupt,
                input_builder=input_builder,
                after=after,
            )
            if world_size > 1:
                embeddings = collectives.all_gather_dealt(embeddings, len(chunk))
            take(chunk, embeddings.float().cpu().numpy())


def encode_features(
    model: nn.Module,
    featuriser: BaseFeaturiser,
    features: Sequence[Features],
    device: torch.device,
    *,
    world_size: int = 1,
    check_interrupt: InterruptCheck | None = None,
    input_builder: InputBuilder | None = None,
) -> np.ndarray:
    """Return [n, d] float32 embeddings of this rank's tokenized inputs, as the model gives them.

    With `world_size` > 1 it is collective: each rank passes inputs of its own, at least one rank has some, and all run
    equally many micro-batches.
    """
    with _evaluating(model), bf16_weights_of(model).held():
        embeddings = _encode_rank(
            model,
            Feeder(featuriser, device),
            features,
            world_size=world_size,
            check_interrupt=check_interrupt,
            input_builder=input_builder,
        )
    return embeddings.float().cpu().numpy()


def from_all_ranks(
    rows: np.ndarray,
    num_rows: int,
    session: Session | None,
) -> np.ndarray:
    """Return the rows of all ranks, to which they were dealt in turn, in their order."""
    if session is None or session.world_size == 1:
        return rows
    local = torch.from_numpy(np.ascontiguousarray(rows)).to(session.device)
    return collectives.all_gather_dealt(local, num_rows).cpu().numpy()


def check_finite(values_ND: np.ndarray, what: str) -> None:
    """Raise UserError where a model gives values that are not finite."""
    broken = int((~np.isfinite(values_ND).all(axis=1)).sum())
    if broken:
        raise UserError(
            f"non-finite {what} for {broken:,d} of {len(values_ND):,d} inputs: the model's weights are broken, or overflow "
            "in their dtype (try torch_dtype: float32)"
        )


def first_dims(
    matrix_ND: np.ndarray,
    dim: int | None,
    normalize: bool,
) -> np.ndarray:
    """Return the first `dim` coordinates of each row, normalised if `normalize`. None: all coordinates. The matrix itself
    is not changed."""
    cut = matrix_ND[:, :dim]
    return unit_rows(cut) if normalize else np.ascontiguousarray(cut)


def unit_rows(matrix_ND: np.ndarray) -> np.ndarray:
    """Return each row at length 1. A row of zeros stays zero."""
    norms = np.linalg.norm(matrix_ND, axis=1, keepdims=True)
    unit: np.ndarray = matrix_ND / np.maximum(norms, 1e-12)
    return unit


def split_in_step(
    features: Sequence[Features],
    indices_of: Mapping[Modality, Sequence[int]],
    budget: int,
    max_inputs: int | None,
    world_size: int,
) -> dict[Modality, list[list[int]]]:
    """Return micro-batches of some inputs of each modality, equally many on every rank. Collective with several
    ranks."""
    lengths = [feature.length for feature in features]
    split = LockstepSplit(lengths, indices_of, budget, max_inputs)
    counts = split.counts
    if world_size > 1:
        counts = collectives.max_ints(counts)
    return split.split_into(counts)


def _encode_rank(
    model: nn.Module,
    feeder: Feeder,
    features: Sequence[Features],
    *,
    world_size: int,
    check_interrupt: InterruptCheck | None,
    input_builder: InputBuilder | None,
    budget_tokens: int | None = None,
    max_inputs: int | None = None,
    after: Callable[[int], object] | None = None,
) -> Tensor:
    """Return [n, D] embeddings of this rank's inputs, in as many micro-batches per modality as every other rank runs.
    `after` is called after each with the number of its inputs."""
    on_cpu = feeder.device.type == "cpu"
    budget = budget_tokens or (CPU_BUDGET if on_cpu else CUDA_BUDGET)
    tables = {}
    if input_builder is not None:
        tables = input_builder.encode(features, budget, max_inputs, check_interrupt)
    indices_of = indices_by_modality(features, feeder.featuriser.modalities)
    splits = split_in_step(features, indices_of, budget, max_inputs, world_size)
    # One forward pass for each slice. Frozen modalities need no pixels or token ids: their rows come from the tables.
    slices = []
    micro_batches = []
    for modality, batches in splits.items():
        for indices in batches:
            slices.append((modality, indices))
            micro_batches.append([] if modality in tables else [(modality, indices)])
    fed = feeder.feed(micro_batches, features)
    result: Tensor | None = None
    for (modality, indices), inputs in zip(slices, fed, strict=True):
        if input_builder is not None and modality in tables:
            inputs = [input_builder.inputs((modality, indices), tables)]  # noqa: PLW2901
        (embeddings,) = model(inputs)
        if result is None:
            result = embeddings.new_empty(len(features), embeddings.shape[1])
        if indices:  # otherwise a dummy: it was run only for its collectives
            result[index_tensor(indices, embeddings.device)] = embeddings
        if after is not None:
            after(len(indices))
        if check_interrupt is not None:
            check_interrupt()
    assert result is not None, "at least one input of one rank, so one micro-batch"
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


# ---- embeddings in fewer bits, with the formulas of Sentence Transformers ------------------------------------------


def ranges_of(vectors_ND: np.ndarray) -> np.ndarray:
    """Return [2, d] float32, the lowest and highest value of each coordinate."""
    low = vectors_ND.min(axis=0)
    high = vectors_ND.max(axis=0)
    return np.stack([low, high]).astype(np.float32)


def read_ranges(path: str, dim: int) -> np.ndarray:
    """Read ranges from a .npy file. Raise UserError unless they are those of `dim` coordinates."""
    try:
        ranges = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"ranges: {path} cannot be read as a .npy file: {error}"
        ) from error
    return checked_ranges(ranges, dim, path)


def checked_ranges(
    ranges_2D: np.ndarray,
    dim: int,
    name: str = "ranges",
) -> np.ndarray:
    """Return ranges as [2, dim] float32. Raise UserError for other shapes and for values that are no ranges."""
    ranges = np.asarray(ranges_2D)
    if ranges.shape != (2, dim) or not np.issubdtype(ranges.dtype, np.floating):
        raise UserError(
            f"{name} has the shape {list(ranges.shape)}, and [2, {dim}] is needed: the lowest and the highest value of "
            "each coordinate, as `vembed encode --precision int8` writes them beside the vectors"
        )
    return ranges.astype(np.float32)


def quantized(
    vectors_ND: np.ndarray,
    precision: EmbeddingPrecision,
    ranges_2D: np.ndarray | None = None,
) -> np.ndarray:
    """Return the vectors in a precision. int8 and uint8 take the range of each coordinate from `ranges_2D`, and values
    beyond it are cut off; without, from these vectors. binary and ubinary keep one bit per coordinate, eight in a
    byte."""
    if precision not in get_args(EmbeddingPrecision):
        raise UserError(
            f"precision is {precision!r}; give one of {', '.join(get_args(EmbeddingPrecision))}"
        )
    if precision == "float32":
        return vectors_ND
    if precision in ("binary", "ubinary"):
        levels = np.packbits(vectors_ND > 0, axis=1)
    else:
        if ranges_2D is None and len(vectors_ND) < 2:
            raise UserError(
                f"precision is {precision!r} for {len(vectors_ND)} vector(s): the range of each coordinate comes from "
                "the vectors that are encoded together; give at least two, better a thousand"
            )
        if ranges_2D is None:
            ranges_2D = ranges_of(vectors_ND)
        low, high = checked_ranges(ranges_2D, vectors_ND.shape[1])
        # The level of each coordinate in its range. A constant coordinate becomes 0 instead of 0 / 0; astype cuts off as
        # Sentence Transformers does.
        steps = np.where(high > low, (high - low) / 255, 1)
        levels = np.clip((vectors_ND - low) / steps, 0, 255).astype(np.uint8)
    if precision in ("ubinary", "uint8"):
        return levels
    # Signed bytes are shifted by 128, as in Sentence Transformers; by way of int16, since uint8 has no negative
    # numbers.
    return (levels.astype(np.int16) - 128).astype(np.int8)
