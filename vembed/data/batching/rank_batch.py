"""Rank batch: a rank's part of the global batch, its micro-batches, and their tensors on the device.

A rank batch has features of its distinct inputs, and their indices for each row, which is a (query, positive) pair.
Micro-batches divide the inputs by length, within a token budget. The feeder collates them in order, with images decoded
ahead on other cores.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vembed.data.examples import Example, Item, distinct
from vembed.data.features import BaseFeaturiser, Features
from vembed.models.attention import TOKEN_INDEX, real_tokens
from vembed.models.families.family import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """A rank's part of a global batch. Indices point into `features`, which holds each distinct input once."""

    modalities: tuple[Modality, ...]
    """Those of the model, in the order in which all ranks run them."""
    features: list[Features]
    content: np.ndarray
    """[n] hash of each input's content, without prompt and truncation. The loss finds duplicates by it."""
    num_vectors: list[int]
    """Number of vectors that the model gives for each input."""
    useful_tokens: int
    """Tokens and patches of the distinct inputs, without padding."""
    query: np.ndarray
    """[R] index of the query of each row; there is one row per (query, positive) pair."""
    positive: np.ndarray
    example: np.ndarray
    """[R] position of each row's example in the global batch."""
    negative: np.ndarray
    """[H] index of each occurrence of a hard negative."""
    negative_example: np.ndarray
    label_scores: np.ndarray | None
    """[R] score of each row, where the data have one for all of them."""
    negative_label_scores: np.ndarray
    """[H] score of each hard negative, NaN where it has none."""
    num_inputs: int
    """Number of inputs before the removal of duplicates."""
    where: list[str]
    """File and line of each example, for messages."""
    row_items: list[tuple[Item, Item]]
    """[R] the query and the positive of each row. Teachers are asked about them."""
    negative_items: list[tuple[Item, Item]]
    """[H] the query and the document of each hard negative."""
    source_index: int
    """Index of the source that the first example of the global batch comes from."""
    splits: dict[int, "LockstepSplit"] = field(default_factory=dict, repr=False)
    """Micro-batches of the features by their token budget, as far as they were asked for."""

    def split(self, budget: int) -> "LockstepSplit":
        """Return the micro-batches of the features. Cached: the thread that prepares the batch asks before the step."""
        if budget not in self.splits:
            lengths = [feature.length for feature in self.features]
            indices = indices_by_modality(self.features, self.modalities)
            self.splits[budget] = LockstepSplit(lengths, indices, budget)
        return self.splits[budget]


def make_rank_batch(
    examples: Sequence[Example],
    first: int,
    featuriser: BaseFeaturiser,
    source_index: int = 0,
    *,
    encodes_duplicates: bool = False,
) -> RankBatch:
    """Build a rank batch from a rank's examples. `first`: position of the first example in the global batch.

    `encodes_duplicates`: keep duplicates.
    """
    units: list[Any] = []
    row_items = []
    negative_items = []
    rows = []
    negatives = []
    scores: list[float] = []
    negative_scores: list[float] = []
    # Positions in the global batch, so that all ranks name an example alike.
    for example_position, example in enumerate(examples, start=first):
        query = len(units)
        units += featuriser.units(example)
        negative = len(units) - len(example.negatives)
        positive = negative - len(example.positives)
        for position in range(positive, negative):
            # There is no unit of the query beside its pairs: the row points to the pair twice.
            query_unit = position if featuriser.reads_pairs else query
            rows.append((query_unit, position, example_position))
        for position in range(negative, len(units)):
            negatives.append((position, example_position))
        row_items += [(example.query, document) for document in example.positives]
        negative_items += [(example.query, document) for document in example.negatives]
        scores += example.scores or ()
        known_scores = example.negative_scores or ()
        # Negatives that a run adds to those of the record have no score.
        num_added = len(example.negatives) - len(known_scores)
        negative_scores += [*known_scores, *[math.nan] * num_added]
    # By key, not by text: a text as query and as document differs if the model has prompts.
    features = featuriser.features(units)
    where_to = np.arange(len(units))
    if not encodes_duplicates:
        # Texts that differ in their content alone (in case, or behind max_length) stay apart: the loss masks by content, and
        # on other ranks they would be apart too.
        features, where_to = distinct(
            features, key=lambda feature: (feature.key, feature.content)
        )
    row_table = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
    negative_table = np.asarray(negatives, dtype=np.int64).reshape(-1, 2)
    return RankBatch(
        modalities=featuriser.modalities,
        features=features,
        content=np.array([feature.content for feature in features], np.int64),
        num_vectors=[feature.num_vectors for feature in features],
        useful_tokens=sum(feature.length for feature in features),
        query=where_to[row_table[:, 0]],
        positive=where_to[row_table[:, 1]],
        example=row_table[:, 2],
        negative=where_to[negative_table[:, 0]],
        negative_example=negative_table[:, 1],
        label_scores=np.array(scores) if len(scores) == len(rows) else None,
        negative_label_scores=np.array(negative_scores, dtype=np.float64),
        num_inputs=len(units),
        where=[example.where for example in examples],
        row_items=row_items,
        negative_items=negative_items,
        source_index=source_index,
    )


def with_in_batch_negatives(
    example: Example,
    others: Iterable[Example],
    count: int,
) -> Example:
    """Return the example with the first positives of the first `count` others as further negatives.

    Others with the same query are left out, and so are documents that the example has already.
    """
    query = example.query.key()
    known = {item.key() for item in example.items}
    documents: list[Item] = []
    for other in others:
        if len(documents) == count:
            break
        document = other.positives[0]
        if other.query.key() != query and document.key() not in known:
            known.add(document.key())
            documents.append(document)
    return replace(example, negatives=(*example.negatives, *documents))


Lengths = Sequence[int] | np.ndarray

PRICE_DIVISOR = 16
"""An additional micro-batch must save more than 1/16 of the budget in padding."""


def split_by_length(
    lengths: Lengths,
    budget: int,
    max_inputs: int | None = None,
    at_least: int = 0,
    places: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return micro-batches of indices, longest inputs first, of at most `budget` padded tokens and `max_inputs` inputs.
    `places`: only of these inputs.

    An input longer than the budget gets its own micro-batch. If there are fewer than `at_least` micro-batches, the
    largest are split; if there are fewer inputs than `at_least`, empty micro-batches are appended.
    """
    values = np.asarray(lengths, dtype=np.int64)
    indices = np.arange(len(values)) if places is None else np.array(places, np.int64)
    values = values[indices]
    order = np.argsort(-values, kind="stable")
    ends = _cut(values[order], budget, max_inputs)
    ordered = indices[order].tolist()
    parts = [ordered[start:end] for start, end in pairwise([0, *ends])]
    while len(parts) < at_least:
        several = [number for number, part in enumerate(parts) if len(part) > 1]
        if not several:
            break
        # The one of the most padded tokens is halved.
        sizes = [len(parts[number]) * lengths[parts[number][0]] for number in several]
        largest = several[int(np.argmax(sizes))]
        part = parts[largest]
        middle = len(part) // 2
        parts[largest : largest + 1] = [part[:middle], part[middle:]]
    # All ranks must run equally many forward passes: under FSDP each one is a collective.
    return parts + [[] for _ in range(at_least - len(parts))]


@dataclass
class LockstepSplit:
    """Slices of the inputs of each modality, of which every rank must run equally many.

    A forward pass of a sharded model is collective. So each rank splits its own inputs, the ranks exchange `counts`,
    and a rank below the maximum of a modality splits its slices further, or adds empty ones.
    """

    lengths: Sequence[int]
    """Of all inputs of the rank."""
    places_of: Mapping[Modality, Sequence[int]]
    """The inputs of each modality, as positions in `lengths`."""
    budget: int
    max_inputs: int | None = None

    def __post_init__(self) -> None:
        self.splits: dict[Modality, list[list[int]]] = {}
        self.padded_tokens = 0
        """Padded tokens of this rank before the ranks have agreed."""
        for modality, places in self.places_of.items():
            slices = split_by_length(
                self.lengths, self.budget, self.max_inputs, places=places
            )
            self.splits[modality] = slices
            self.padded_tokens += padded_tokens(self.lengths, slices)
        self.counts = list(map(len, self.splits.values()))
        """Number of this rank's slices of each modality, in the order of `places_of`."""

    def split_into(self, counts: Sequence[int]) -> dict[Modality, list[list[int]]]:
        """Return slices of positions in `lengths`, exactly `counts` of each modality: the maxima over the ranks.
        Modalities that no rank has inputs of are left out."""
        agreed = {}
        for (modality, slices), count in zip(self.splits.items(), counts, strict=True):
            if count > len(slices):
                # Split anew, and not padded with dummies: more, smaller slices cost this rank less padding.
                agreed[modality] = split_by_length(
                    self.lengths,
                    self.budget,
                    self.max_inputs,
                    count,
                    self.places_of[modality],
                )
            elif slices:
                agreed[modality] = slices
        return agreed


def padded_tokens(lengths: Lengths, micro_batches: Sequence[Sequence[int]]) -> int:
    """Return the tokens that the model computes: each micro-batch is padded to its longest input."""
    total = 0
    for indices in micro_batches:
        longest = max((int(lengths[index]) for index in indices), default=0)
        total += len(indices) * longest
    return total


def _cut(
    ordered: np.ndarray,
    budget: int,
    max_inputs: int | None,
) -> list[int]:
    """Return the end of each micro-batch, with the fewest padded tokens plus price of each micro-batch.

    Dynamic programming from the shortest input to the longest: `cheapest[i]` is the lowest cost of the inputs i, i + 1,
    ..., and `ends[i]` the end of the first micro-batch in that solution. A micro-batch that begins at i is padded to
    `widths[i]`, since the inputs are sorted in descending order.
    """
    num_inputs = len(ordered)
    if num_inputs == 0:
        return []
    limits = np.maximum(1, budget // np.maximum(1, ordered))
    left = num_inputs - np.arange(num_inputs)  # not beyond the last input
    limits = np.minimum(limits, left)
    limits = np.minimum(limits, max_inputs or num_inputs).tolist()
    widths = ordered.tolist()
    # The fixed cost of a micro-batch in tokens, for kernel launches and FSDP's all-gathers.
    price = min(budget, widths[0] * (max_inputs or budget)) // PRICE_DIVISOR
    counts = np.arange(1, num_inputs + 1)
    # The last one stays 0: no input is left.
    cheapest = np.zeros(num_inputs + 1, dtype=np.int64)
    ends = [0] * num_inputs
    for i in range(num_inputs - 1, -1, -1):
        # costs[n - 1]: n inputs in this micro-batch, and the cheapest solution for the inputs after them.
        limit = limits[i]
        after = cheapest[i + 1 : i + 1 + limit]
        costs = counts[:limit] * widths[i] + after
        # Searched from the end: of equal costs, the most inputs.
        count = limit - int(costs[::-1].argmin())
        cheapest[i] = costs[count - 1] + price
        ends[i] = i + count
    chosen_ends = [ends[0]]
    while chosen_ends[-1] < num_inputs:
        chosen_ends.append(ends[chosen_ends[-1]])
    return chosen_ends


ModalityIndices = tuple[Modality, list[int]]
"""A modality and the indices of its inputs in a micro-batch. Without indices, a dummy input runs."""
MicroBatch = list[ModalityIndices]
"""One forward pass of the model: the slice of each modality."""
ModelInputs = list[tuple[Modality, dict[str, Tensor]]]
"""Arguments of a forward pass: the tensors of each modality."""
CPU = torch.device("cpu")
HOST_INPUTS = frozenset({"spatial_shapes"})
"""Inputs whose numbers a model reads on the host, image by image: from a GPU each would have to be waited for."""
MICRO_BATCHES_AHEAD = 2
"""Micro-batches whose images are decoded ahead; limits the pixels in host memory."""


def indices_by_modality(
    features: Sequence[Features], modalities: Iterable[Modality]
) -> dict[Modality, list[int]]:
    """Return where the inputs of each of these modalities are."""
    indices: dict[Modality, list[int]] = {modality: [] for modality in modalities}
    for index, feature in enumerate(features):
        if feature.modality in indices:
            indices[feature.modality].append(index)
    return indices


@dataclass
class Feeder:
    """Converter from micro-batches of indices to the tensors of a forward pass."""

    featuriser: BaseFeaturiser
    device: torch.device
    packs_texts: bool = False
    """The model removes the padding of texts."""
    _pool: ThreadPoolExecutor | None = None
    """Threads that only wait for images and join them. The featuriser's decoders work elsewhere."""

    def feed(
        self, micro_batches: Sequence[MicroBatch], features: Sequence[Features]
    ) -> Iterator[ModelInputs]:
        """Yield the inputs of each micro-batch, in order."""
        with_images = []
        for micro_batch in micro_batches:
            for modality, indices in micro_batch:
                if modality != "text":
                    with_images += [features[index] for index in indices]
        if not with_images:
            # Nothing is to be decoded, so no thread is needed.
            for micro_batch in micro_batches:
                yield self._to_device(self._collate(micro_batch, features))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MICRO_BATCHES_AHEAD + 1, "vembed-collate")
        self.featuriser.decode_ahead(with_images)
        waiting: deque[Future[ModelInputs]] = deque()
        for micro_batch in micro_batches:
            waiting.append(self._pool.submit(self._collate, micro_batch, features))
            if len(waiting) > MICRO_BATCHES_AHEAD:
                yield self._to_device(waiting.popleft().result())
        while waiting:
            yield self._to_device(waiting.popleft().result())

    def padded_tokens(
        self, micro_batch: MicroBatch, features: Sequence[Features]
    ) -> int:
        """Return the tokens and patches of a micro-batch, including padding that the model computes."""
        total = 0
        for modality, indices in micro_batch:
            if modality == "text" and self.packs_texts:
                total += sum([features[index].length for index in indices])
            elif indices:
                # The longest input comes first.
                total += len(indices) * features[indices[0]].length
        return total

    def _collate(
        self, micro_batch: MicroBatch, features: Sequence[Features]
    ) -> ModelInputs:
        """Return the tensors of a micro-batch on the host. With images this runs in a thread beside the step."""
        inputs = []
        for modality, indices in micro_batch:
            chosen = [features[index] for index in indices]
            if not chosen:
                chosen = [self.featuriser.dummy(modality)]
            batch = self.featuriser.joined(chosen)
            if (
                self.device.type == "cuda"
                and modality == "text"
                and "attention_mask" in batch
            ):
                # On the GPU this would force a sync.
                batch[TOKEN_INDEX] = real_tokens(batch["attention_mask"])
            for name, tensor in batch.items():
                batch[name] = pinned(tensor, self.device)
            inputs.append((modality, batch))
        return inputs

    def _to_device(self, inputs: ModelInputs) -> ModelInputs:
        moved = []
        for modality, batch in inputs:
            tensors = {}
            for name, tensor in batch.items():
                device = CPU if name in HOST_INPUTS else self.device
                tensors[name] = tensor.to(device, non_blocking=True)
            # Pixels of 8 bits become numbers where the model computes.
            moved.append((modality, self.featuriser.finished(tensors)))
        return moved


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor in memory from which a copy to the device overlaps with computation: from pageable memory
    it would block the host."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, without a GPU synchronisation."""
    return pinned(tensor, device).to(device, non_blocking=True)


def index_tensor(rows: Sequence[int], device: torch.device) -> Tensor:
    """Return row numbers as an index tensor on the device."""
    return to_device(torch.tensor(rows, dtype=torch.int64), device)
