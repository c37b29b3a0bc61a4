"""LossBatch: the embeddings of one global batch, with its rows, its teachers' answers and its listed pairs.

Listed pairs are a row's positive pair and the hard negatives of its example, in groups. Losses on them need no matrix:
their memory grows with the number of listed pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vembed.errors import UserError
from vembed.losses.declaration import LossDeclaration
from vembed.losses.similarity import Similarity, arithmetic_dtype, pair_scores

NO_KEY_ROW = -1
"""Fills the keys of rows up to a rectangle."""
INDEX_FIELDS = (
    "content",
    "query",
    "positive",
    "example",
    "negative",
    "negative_example",
)
"""Fields of a LossBatch that hold integers."""


def to_device_together(
    tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return host tensors on a device, by one copy for each dtype, which the host does not wait for."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    on_device = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        of_dtype = {
            name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype
        }
        # All tensors of a dtype in one flat buffer in pinned memory. On the device they are views of its pieces.
        flat = torch.cat([tensor.reshape(-1) for tensor in of_dtype.values()])
        if flat.numel() and flat.device != device:
            flat = flat.pin_memory()
        flat = flat.to(device, non_blocking=True)
        pieces = torch.split(flat, [tensor.numel() for tensor in of_dtype.values()])
        for (name, tensor), piece in zip(of_dtype.items(), pieces, strict=True):
            on_device[name] = piece.view(tensor.shape)
    return on_device


@dataclass(frozen=True)
class TeacherVectors:
    """A teacher's vectors of the inputs of one global batch. Their width is the teacher's.

    The teacher's score of a pair is the dot product of its vectors.
    """

    vectors: Tensor
    """[V, width] float32 or float64, of length 1. A vector of zeros stands for an input that the teacher does not know."""
    query: Tensor
    """[R] index of each row's query in `vectors`."""
    positive: Tensor
    """[R] index of each row's positive."""
    negative: Tensor
    """[H] index of each hard negative."""

    def occurrence_indices(self) -> Tensor:
        """Return [2 R + H] the index of each query, positive and hard negative in `vectors`."""
        return torch.cat((self.query, self.positive, self.negative))

    def scores_of(self, pairs: ListedPairs) -> Tensor:
        """Return [1, n + P] scores."""
        left, right = pairs.sides(self)
        dot_product = Similarity(cosine=False, dims=(self.vectors.shape[1],))
        return pair_scores(self.vectors, left, right, dot_product)


@dataclass(frozen=True)
class TeacherScores:
    """Scores of a reranker or of the data, for every positive pair and hard negative."""

    positive: Tensor
    """[R]"""
    negative: Tensor
    """[H] score with the query of the example that brought the negative."""

    def scores_of(self, pairs: ListedPairs) -> Tensor:
        """Return [1, n + P] scores."""
        positive = self.positive[pairs.rows]
        negative = self.negative[pairs.negatives]
        return torch.cat((positive, negative))[None]


TeacherAnswers = TeacherVectors | TeacherScores
"""Answers of one teacher for one batch."""


@dataclass(frozen=True)
class LossBatch:
    """One global batch as input of a loss: U inputs, R rows, H hard negatives.

    A row is a (query, positive) pair. All tensors are on one device. Every rank holds
    the same values. Only `rank_rows` and `rank_negatives` differ. A text that occurs in
    several roles or rows is one input of a rank, with several indices. An index is that of an input: its vector in
    `embeddings`, or its vectors from `starts` on.
    """

    embeddings: Tensor
    """[T, D] float32 or float64, not normalised. A leaf that requires grad in training. T is U for dense vectors."""
    content: Tensor
    """[U] int64 content id. Equal ids mean equal content. One text may have two embeddings, from two ranks."""
    query: Tensor
    """[R] index of each row's query."""
    positive: Tensor
    """[R] index of each row's positive."""
    example: Tensor
    """[R] position in the global batch of the example that each row comes from. An example with several positives has
    several rows, which are adjacent."""
    negative: Tensor
    """[H] index of each hard negative occurrence. May be empty."""
    negative_example: Tensor
    """[H] position of the example that each hard negative comes from."""
    rank_rows: slice
    """Rows whose loss terms this rank computes. Both slices have plain bounds."""
    rank_negatives: slice
    """Hard negatives of this rank's examples."""
    label_scores: Tensor | None = None
    """[R] label score of each row's pair. None if the data have no scores."""
    negative_label_scores: Tensor | None = None
    """[H] label score of each hard negative, NaN where it has none. None if the data have no scores."""
    negative_parts: Tensor | None = None
    """[H, 2] indices of what each hard negative is made of, where some are mixtures. Twice its own otherwise."""
    teachers: Mapping[str, TeacherAnswers] = field(default_factory=dict)
    """Answers of each teacher for this batch, by the teacher's name."""
    source_index: int = 0
    """Index of the batch's source. That of the first example, where sources are mixed."""
    batch_number: int = 0
    """Number of the batch in the run: random draws of a loss depend on it and on nothing else."""
    embeddings_are_scores: bool = False
    """True for rerankers: `embeddings` is [U, 1], the score of a pair. Query and positive of a row both point to the score
    of their pair, and a hard negative to that with the query of its example."""
    starts: Tensor | None = None
    """[U + 1] where the vectors of each input begin in `embeddings`, and T. None where each has one."""
    host_indices: Mapping[str, Tensor] | None = None
    """The integer fields on the host, by name, where the batch is on a GPU: to read them there would wait for it."""

    def on_host(self) -> LossBatch:
        """Return the batch with its integers on the host, where they are known."""
        if self.host_indices is None or self.query.device.type == "cpu":
            return self
        return replace(self, **self.host_indices, host_indices=None)  # type: ignore[arg-type]

    @property
    def num_rows(self) -> int:
        """Number of rows R of the global batch."""
        return int(self.query.numel())

    def occurrence_indices(self) -> Tensor:
        """Return [2 R + H] the index of each query, positive and hard negative in `embeddings`."""
        return torch.cat((self.query, self.positive, self.negative))

    def rank_occurrences(self) -> Tensor:
        """Return which of the occurrences are of this rank's rows and hard negatives."""
        num_rows = self.num_rows
        num_negatives = self.negative.numel()
        places = torch.arange(2 * num_rows + num_negatives, device=self.query.device)
        queries = places[self.rank_rows]
        negatives = places[2 * num_rows :][self.rank_negatives]
        return torch.cat((queries, queries + num_rows, negatives))

    def like_scores(self, values: Tensor) -> Tensor:
        """Return values on the device and in the dtype of the scores."""
        dtype = arithmetic_dtype(self.embeddings)
        return values.to(self.embeddings.device, dtype)

    # ---- Contents, and the pairs that examples list ------------------------------------

    def content_keys(self, content: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys by the content [U] of each embedding: [R, S] of each row's query and its example's positives, and
        [H, 1 or 2] of what each hard negative is made of. Unused slots of rows are -1."""
        positive = content[self.positive]
        _, example, size = torch.unique_consecutive(
            self.example, return_inverse=True, return_counts=True
        )
        # `example` [R]: index of each row's example. `size` [examples]: its number of positives. Scatter the positives
        # into [examples, width]. The slot of a positive is its row minus the first row of its example.
        first = size.cumsum(0) - size
        row = torch.arange(len(example), device=example.device)
        slot = row - first[example]
        width = int(size.max()) if len(size) else 0
        positives = positive.new_full((len(size), width), NO_KEY_ROW)
        positives[example, slot] = positive
        query = content[self.query]
        row_positives = positives[example]
        row_keys = torch.cat((query[:, None], row_positives), dim=1)
        parts = self.negative_parts
        if parts is None:
            parts = self.negative[:, None]
        return row_keys, content[parts]

    def countable_negatives(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return rows [P] and hard negatives [P]: each row with each hard negative of its example.

        Rows count from the start of `rows`, ascending. Pairs are dropped whose negative has the content of the row's
        query or of one of its example's positives.
        """
        row, negative = join_equal(self.example[rows], self.negative_example)
        if not row.numel():
            return row, negative
        row_keys, negative_keys = self.content_keys(compact_keys(self.content))
        row_keys = row_keys[rows][row]  # [P, S]
        negative_keys = negative_keys[negative]
        # [P, S, 1 or 2]: every key of the row against every key of the negative.
        differs_by_key = row_keys[:, :, None] != negative_keys[:, None]
        differs = differs_by_key.flatten(1).all(1)
        return row[differs], negative[differs]

    def listed_by_row(self) -> ListedPairs:
        """Return a group for each row of this rank. Pair i of the n positive pairs is in group i."""
        first = self.rank_rows.start
        stop = self.rank_rows.stop
        # All ranks' pairs, since losses divide by their number.
        row, negative = self.on_host().countable_negatives(slice(None))
        is_of_rank = (row >= first) & (row < stop)
        rows = torch.arange(first, stop, device=row.device)
        negative_rows = row[is_of_rank]
        tensors = {
            "rows": rows,
            "negative_rows": negative_rows,
            "negatives": negative[is_of_rank],
            "groups": torch.cat((rows, negative_rows)) - first,
        }
        return ListedPairs(
            **to_device_together(tensors, self.query.device),
            num_groups=len(rows),
            num_negative_pairs=len(row),
        )

    def listed_by_example(self, *, of_rank: bool = True) -> ListedPairs:
        """Return a group for each example of the global batch.

        `of_rank`: only the pairs of examples whose first row this rank has. A list belongs to one rank, also where its
        rows lie on two: otherwise it would count twice. Groups keep their indices.
        """
        host = self.on_host()
        examples, example = torch.unique(host.example, return_inverse=True)
        rows = torch.arange(host.num_rows, device=example.device)
        first_row = rows.new_full((len(examples),), host.num_rows)
        first_row = first_row.scatter_reduce(0, example, rows, "amin")
        negative_rows, negatives = host.countable_negatives(slice(None))
        # Every row of an example has all of its negatives: take those of the first.
        is_first = first_row[example[negative_rows]] == negative_rows
        negative_rows = negative_rows[is_first]
        negatives = negatives[is_first]
        num_negative_pairs = len(negative_rows)
        if of_rank:
            rank_rows = self.rank_rows
            is_of_rank = (first_row >= rank_rows.start) & (first_row < rank_rows.stop)
            is_of_rank = is_of_rank[example]
            rows = rows[is_of_rank]
            is_of_rank = is_of_rank[negative_rows]
            negatives = negatives[is_of_rank]
            negative_rows = negative_rows[is_of_rank]
        pair_rows = torch.cat((rows, negative_rows))
        tensors = {
            "rows": rows,
            "negative_rows": negative_rows,
            "negatives": negatives,
            "groups": example[pair_rows],
        }
        return ListedPairs(
            **to_device_together(tensors, self.query.device),
            num_groups=len(examples),
            num_negative_pairs=num_negative_pairs,
        )

    # ---- Scores of the data and of teachers --------------------------------------------

    def required_label_scores(self, loss: str) -> Tensor:
        """Return the label scores. Raise UserError if the data have none."""
        if self.label_scores is None:
            raise UserError(
                f"loss: {loss} needs a score for every pair, and the training data have none; "
                "add them (sentence1, sentence2, score) or use loss: infonce."
            )
        return self.label_scores

    def teacher_vectors(self, name: str | None) -> TeacherVectors:
        """Return the vectors of a teacher, for what needs more than scores of listed pairs."""
        answers = self.teachers[str(name)]
        assert isinstance(answers, TeacherVectors), "`Teachers` refuses another model"
        return answers


class LossModule(nn.Module):
    """Base class of the modules that compute a loss of embeddings.

    `forward` returns the share of one rank. The shares of all ranks add up to the loss L
    of the global batch, and so do their gradients. A caller whose gradients are averaged
    over ranks must therefore multiply by the world size.
    """

    declared: LossDeclaration | None = None
    """Declaration of the loss that this module itself computes. None for a module that combines others."""
    term_shares: Mapping[str, Tensor] = MappingProxyType({})
    """This rank's share of each term of the newest batch, without its weight. Empty for losses of one term."""

    def forward(self, batch: LossBatch) -> Tensor:
        """Return this rank's share of L, a scalar."""
        raise NotImplementedError

    def project_parameters(self) -> None:
        """Clamp all learned parameters to their ranges. Called after every optimizer step."""
        for module in self.modules():
            if isinstance(module, LossModule) and module.declared is not None:
                module.declared.clamp(dict(module.named_parameters()))

    def logit_scale_and_bias(self) -> tuple[float, float] | None:
        """Return the learned scale and bias of the logits, or None. They are saved with CLIP and SigLIP models.

        With several losses: those of the first one that learns a scale.
        """
        for module in self.modules():
            if isinstance(module, LossModule) and module.declared is not None:
                parameters = dict(module.named_parameters())
                learned = module.declared.logit_scale_and_bias(parameters)
                if learned is not None:
                    return learned
        return None


@dataclass(frozen=True)
class ListedPairs:
    """n positive pairs of rows, then P pairs of a row's query and a hard negative."""

    rows: Tensor
    """[n] row of each positive pair."""
    negative_rows: Tensor
    """[P] row whose query meets the hard negative."""
    negatives: Tensor
    """[P] index of the hard negative among those of the batch."""
    groups: Tensor
    """[n + P] group of each pair, counted from 0."""
    num_groups: int
    num_negative_pairs: int
    """Pairs with a hard negative on all ranks."""

    def sides(self, source: LossBatch | TeacherVectors) -> tuple[Tensor, Tensor]:
        """Return [n + P] the index of each pair's query, and of its document, in the vectors of a batch or a teacher."""
        query_rows = torch.cat((self.rows, self.negative_rows))
        positives = source.positive[self.rows]
        negatives = source.negative[self.negatives]
        return source.query[query_rows], torch.cat((positives, negatives))

    def select(self, is_selected: Tensor) -> ListedPairs:
        """Return the pairs for which a bool tensor [n + P] is true. Groups keep their indices."""
        num_rows = len(self.rows)
        is_positive = is_selected[:num_rows]
        is_negative = is_selected[num_rows:]
        return replace(
            self,
            rows=self.rows[is_positive],
            negative_rows=self.negative_rows[is_negative],
            negatives=self.negatives[is_negative],
            groups=self.groups[is_selected],
        )

    def margins(self, scores: Tensor) -> Tensor:
        """Return [K, P] how far each hard negative of `listed_by_row` is below the positive of its row."""
        num_rows = len(self.rows)
        positives = scores[:, self.groups[num_rows:]]
        return positives - scores[:, num_rows:]

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return [K, n + P] the log softmax of logits [K, n + P] within each group."""
        shape = len(logits), self.num_groups
        groups = self.groups.expand(len(logits), -1)
        # Relative to the largest logit of the group, so that no exp overflows. It cancels, so it needs no gradient.
        largest = logits.new_full(shape, -torch.inf).scatter_reduce(
            1, groups, logits.detach(), "amax"
        )
        differences = logits - largest.gather(1, groups)
        zeros = logits.new_zeros(shape)
        sums = zeros.scatter_add(1, groups, differences.exp())
        return differences - sums.gather(1, groups).log()

    def ordered(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return two pairs [M], [M] of one group, of which the first has the higher target, for targets [n + P].

        A target that is not a number is below all others.
        """
        left, right = join_equal(self.groups, self.groups)
        targets = targets.nan_to_num(nan=-torch.inf)
        is_higher = targets[left] > targets[right]
        return left[is_higher], right[is_higher]


def compact_keys(values: Tensor) -> Tensor:
    """Return int32 keys that are equal where the int64 values are: the place of each value among the sorted distinct ones.

    They take half the memory.
    """
    inverse: Tensor = torch.unique(values, return_inverse=True)[1]
    return inverse.int()


def join_equal(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return i [P] and j [P] of all pairs with left[i] == right[j], ascending by i (a sort-merge join)."""
    # For each value of `left`: where its equal values begin in the sorted `right`, and how many there are.
    ordered, order = torch.sort(right, stable=True)
    first = torch.searchsorted(ordered, left)
    count = torch.searchsorted(ordered, left, right=True) - first
    i = torch.repeat_interleave(count)
    # Equal values of `right` are adjacent after sorting: match m of left[i] is at first[i] + m.
    before = (count.cumsum(0) - count)[i]
    match = torch.arange(len(i), device=left.device) - before
    return i, order[first[i] + match]


# ---- Mixed negatives ---------------------------------------------------------------


@dataclass(frozen=True)
class Mixtures:
    """The hard negatives of each mixture, and their weights."""

    left: Tensor
    """[X] index of the first hard negative."""
    right: Tensor
    """[X]"""
    share: Tensor
    """[X] float64, lambda."""
    example: Tensor
    """[X] position of the example in the global batch."""


def draw_mixtures(
    batch: LossBatch,
    seed: int,
    count: int,
) -> Mixtures:
    """Draw `count` mixtures for each example that has two hard negatives or more."""
    # On the host, where the numbers are the same on every device.
    negative_example = batch.on_host().negative_example.cpu()
    example, size = torch.unique_consecutive(negative_example, return_counts=True)
    # The hard negatives of an example are adjacent: `start` is the place of its first.
    start = size.cumsum(0) - size
    has_two = size >= 2
    example = example[has_two]
    size = size[has_two, None]
    start = start[has_two, None]
    # A table for the whole batch, with a row for each position of an example in it.
    num_examples = int(example.max()) + 1 if len(example) else 0
    batch_seed = (seed * 0x9E3779B9 + batch.batch_number) % 2**63
    draw = torch.Generator().manual_seed(batch_seed)
    shape = (num_examples, count, 5)
    table = torch.rand(shape, generator=draw, dtype=torch.float64)
    # [examples, count] each.
    first, second, *three = table[example].unbind(2)
    # j of m numbers, and k of m - 1. The minimum: a product may be rounded up to m.
    last = size - 1
    left = torch.minimum((first * size).long(), last)
    right = torch.minimum((second * last).long(), last - 1)
    # k is drawn from m - 1 numbers and steps over j, so that j != k and every pair is equally likely.
    right = right + (right >= left)
    # The middle one of three uniform numbers has the distribution Beta(2, 2).
    share = torch.stack(three).sort(0).values[1]
    mixtures = {
        "left": (start + left).flatten(),
        "right": (start + right).flatten(),
        "share": share.flatten(),
        "example": example.repeat_interleave(count),
    }
    return Mixtures(**to_device_together(mixtures, batch.negative.device))


def with_mixtures(
    batch: LossBatch,
    seed: int,
    count: int,
    *,
    cosine: bool,
) -> LossBatch:
    """Return the batch with `count` mixed negatives of each example behind its own.

    For an example with the hard negatives h_1 .. h_m, m >= 2, each of the `mix_negatives` further ones is

        h = lambda * u(h_j) + (1 - lambda) * u(h_k)        j != k, lambda from Beta(2, 2)

    with u(x) = x / |x|, for the dot product u(x) = x. The draws are a function of the seed, the index of the batch and the
    example's position in it, so that they are the same on any number of ranks and in a resumed run. A
    mixture is excluded where one of its parts is. The gradient passes through the mixture to both of its parts.

    `rank_negatives` stay those of the data.
    """
    drawn = draw_mixtures(batch, seed, count)
    left = batch.negative[drawn.left]
    right = batch.negative[drawn.right]
    embeddings = batch.embeddings.to(arithmetic_dtype(batch.embeddings))
    share = drawn.share
    mixed = _mixed(embeddings[left], embeddings[right], share, unit=cosine)
    places = torch.arange(len(left), device=left.device)
    # A hard negative of the data is made of itself twice.
    twice = batch.negative[:, None].expand(-1, 2)
    teachers = dict(batch.teachers)
    for name, teacher in batch.teachers.items():
        if isinstance(teacher, TeacherVectors):
            # The teacher's vector of a mixture is the mixture of its vectors, of length 1.
            vectors = teacher.vectors
            teacher_left = vectors[teacher.negative[drawn.left]]
            teacher_right = vectors[teacher.negative[drawn.right]]
            mixtures = _mixed(teacher_left, teacher_right, share, unit=True)
            mixtures = F.normalize(mixtures, dim=1).to(vectors.dtype)
            teachers[name] = replace(
                teacher,
                vectors=torch.cat((vectors, mixtures)),
                negative=torch.cat((teacher.negative, len(vectors) + places)),
            )
    parts_of_mixtures = torch.stack((left, right), dim=1)
    # Exclusion looks at both parts (`negative_parts`). This only gives each input an id.
    content = batch.content[left]
    index = len(embeddings) + places
    return replace(
        batch,
        embeddings=torch.cat((embeddings, mixed)),
        content=torch.cat((batch.content, content)),
        negative=torch.cat((batch.negative, index)),
        negative_example=torch.cat((batch.negative_example, drawn.example)),
        negative_parts=torch.cat((twice, parts_of_mixtures)),
        teachers=teachers,
        host_indices=None,  # they lack the mixtures
    )


def _mixed(
    left: Tensor,
    right: Tensor,
    share: Tensor,
    *,
    unit: bool,
) -> Tensor:
    weight = share[:, None].to(left.dtype)
    if unit:
        left = F.normalize(left, dim=1)
        right = F.normalize(right, dim=1)
    return weight * left + (1 - weight) * right
