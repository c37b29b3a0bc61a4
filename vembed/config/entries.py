"""Entries of options that hold several values: sampling, guards, teachers, losses, data sources, mined negatives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, create_model, model_validator

from vembed.config.values import (
    FiniteFloat,
    Form,
    Fraction,
    Immutable,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
)
from vembed.losses.table import LOSSES, loss_options, with_constraints

# The numbers of the pattern are 0, 1, .5, 0.5 and 1.0; what it lets through above 1 is refused by value.
_SAMPLING = re.compile(
    r"(proportional|round_robin|weights)|temperature\(\s*(0|1|0?\.\d+|[01]\.\d*)\s*\)"
)
SAMPLING_FORMS = (
    "proportional, temperature(alpha) with alpha from 0 to 1, round_robin or weights"
)


def checked_sampling(text: str) -> str:
    """Return a value of `sampling` as it is. Raise ValueError if it has another form."""
    parse_sampling(text)
    return text


@dataclass(frozen=True, slots=True)
class Sampling:
    """A value of `sampling`."""

    kind: str = "proportional"
    """proportional, temperature, round_robin or weights."""
    alpha: float = 1.0
    """Power of a source's size."""

    def num_drawn(
        self, sizes: Sequence[int], weights: Sequence[float], batch_sizes: Sequence[int]
    ) -> list[int]:
        """Return how many examples of each source an epoch draws: about as many in all as with `proportional`."""
        wanted = [size * weight for size, weight in zip(sizes, weights, strict=True)]
        if self.kind == "round_robin":
            num_batches = max(1, round(sum(wanted) / sum(batch_sizes)))
            return [num_batches * size for size in batch_sizes]
        if self.alpha != 1.0:
            shares = [
                weight * size**self.alpha
                for size, weight in zip(sizes, weights, strict=True)
            ]
            factor = sum(wanted) / sum(shares)
            wanted = [share * factor for share in shares]
        return [max(1, round(count)) for count in wanted]


PROPORTIONAL = Sampling()


def parse_sampling(text: str) -> Sampling:
    """Return the sampling that a value of the option stands for."""
    match = _SAMPLING.fullmatch(text)
    alpha = 1.0 if match is None or match[2] is None else float(match[2])
    if match is None or alpha > 1.0:
        raise ValueError(f"must be {SAMPLING_FORMS}")
    kind = match[1] or "temperature"
    # size ** 0: the weights alone.
    return Sampling(kind, 0.0 if kind == "weights" else alpha)


SamplingName = Annotated[str, AfterValidator(checked_sampling), Form(SAMPLING_FORMS)]
RELEVANCE = (
    "Given a search query, retrieve the passages that answer it or are relevant to it"
)
"""Definition of relevance for models that are asked whether a document is relevant."""
if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


class Guard(Immutable):
    """One entry of `guards`."""

    path: str
    """Evaluation data, as `val_data_path` takes them."""
    name: str | None = None
    """Name in the log and the report. Default: that of the file."""
    max_drop: NonNegativeFloat = 0.02
    """The most that its main score (ndcg@10, or spearman for scored pairs) may fall below that before training."""

    @property
    def label(self) -> str:
        """Name of the guard in this run."""
        return self.name or PurePath(self.path).stem


class Teacher(Immutable):
    """One entry of `teachers`."""

    model: str
    """An embedding model or a reranker: a Hub name or a local folder."""
    name: str | None = None
    """Name that `teacher` and `guide` refer to. Default: `model`."""
    kind: Literal["auto", "embedder", "reranker", "yes_no"] = "auto"
    """embedder: gives vectors. reranker: a sequence classifier that scores (query, document) pairs. yes_no: a decoder
    whose next token answers whether they belong together (Qwen3-Reranker). `auto`: from the architectures that the
    model's config names; a decoder without files of Sentence Transformers is yes_no where no loss needs vectors."""
    query_prompt: str | None = None
    """Text put before every query. Default: the model's own."""
    document_prompt: str | None = None
    """Text put before every document. Default: the model's own."""
    max_length: PositiveInt | None = None
    """Longest text in tokens. Default: the model's own limit, at most 512."""
    scale: PositiveFloat = 1.0
    """Factor of a reranker's scores: its logits are no cosines, and losses compare them with similarities. The score of
    yes_no is the logit of yes less that of no."""
    instruction: str = RELEVANCE
    """Definition of relevance, for yes_no."""
    sharded: Literal["auto"] | bool = "auto"
    """Each of several processes holds a shard of the teacher. `auto`: where the model is sharded, or a copy of the
    teacher takes more than four fifths of a process's memory."""

    @property
    def label(self) -> str:
        """Name of the teacher in this run."""
        return self.name or self.model


class _LossTerm(Immutable):
    """One entry of `losses`: a loss, its weight, and options of the same names for this term alone."""

    loss: LossName
    """Its loss."""
    weight: PositiveFloat = 1.0
    """Factor of the term in the sum."""


def _with_loss_options() -> Any:
    """Return the model of an entry of `losses`: every option of every loss, or None."""
    fields: dict[str, Any] = {}
    for name, field in loss_options().items():
        fields[name] = (with_constraints(field) | None, None)
    return create_model("LossTerm", __base__=_LossTerm, **fields)


if TYPE_CHECKING:
    LossTerm = _LossTerm
else:
    LossTerm = _with_loss_options()


class DataSource(Immutable):
    """One entry of `data_path` when it is a list."""

    path: str
    """A file (JSONL, CSV, TSV, Parquet), a folder saved by `datasets`, or a Hub dataset name."""
    weight: PositiveFloat = 1.0
    """Number of times that each example is drawn per epoch, on average. 1: once; 0.5: half of them. With `sampling:
    weights`, the source's share of the draws."""
    name: str | None = None
    """Name in logs. Default: the path."""
    column_mapping: dict[str, str] | None = None
    """Like the option of the same name, for this source only."""
    query_prompt: str | None = None
    """Text put before the queries of this source, in place of the run's."""
    document_prompt: str | None = None
    """Text put before the documents of this source, in place of the run's."""
    max_length: PositiveInt | None = None
    """Maximum length of this source's texts in tokens, where it is below the run's."""
    losses: list[LossTerm] | None = None
    """The losses of this source, instead of those of the run; needs `homogeneous_batches`. A task of its own."""
    temperature: PositiveFloat | None = None
    """Like the option of the same name, for this source only; needs `homogeneous_batches`."""
    batch_size: PositiveInt | None = None
    """Examples per process in a batch of this source; needs `homogeneous_batches`."""
    global_batch_size: PositiveInt | None = None
    """The same over all processes, where the run has a `global_batch_size`."""
    val_data_path: str | None = None
    """Validation data of this source's task, as those of the run: scored with each evaluation."""
    max_negatives: NonNegativeInt | None = None
    """Like the option of the same name, for this source only."""


LIMITS = frozenset({"relative_margin", "margin", "max_score", "threshold"})
"""Options that limit how high a negative may score."""


class ChoiceOptions(Immutable):
    """Options that choose negatives among the candidates, and their number."""

    num_negatives: PositiveInt = 5
    """Negatives that each row gets, where there are so many."""
    top_k: PositiveInt = 100
    """Candidates per query: the best ones after known positives are left out."""
    skip_first: NonNegativeInt = 0
    """Leave out so many of the best candidates."""
    relative_margin: Fraction | None = 0.05
    """Keep a candidate d only if s(q, d) <= s(q, p) - relative_margin * |s(q, p)|, p being the query's known positive
    with the lowest score. `null` turns it off."""
    margin: FiniteFloat | None = None
    """Keep a candidate d only if s(q, d) <= s(q, p) - margin."""
    max_score: FiniteFloat | None = None
    """Keep only candidates with at most this score."""
    min_score: FiniteFloat | None = None
    """Keep only candidates with at least this score."""
    threshold: Literal["auto"] | None = None
    """`auto`: hide a part of the known positives, see at which threshold too many of them would become negatives, and
    use that threshold instead of `relative_margin`. The log says the threshold and the estimated rate."""
    max_false_negative_rate: Annotated[float, Field(gt=0.0, lt=1.0), Number] = 0.05
    """With `threshold: auto`: the estimated share of negatives that are in truth relevant stays at or below this."""
    prefer_claimed: Literal["auto"] | bool = "auto"
    """Take first those candidates that another query claims: with its known positive it is nearer to them than this
    query with its own, so few of them are relevant here. `auto`: where `relative_margin`, `margin`, `max_score` and
    `threshold` are left out; claimed candidates may then score up to 5 % above the positive, and the default margin
    holds for the others."""
    near_duplicate: Fraction | None = 0.9
    """Leave out candidates of whose word n-grams at least this share is in a known positive, or the other way round.
    `null`: only equal texts, apart from case, punctuation and spaces."""
    sampling: Literal["top", "random", "softmax"] = "top"
    """Choice among those that are left: the best, any, or any with probability softmax(score / temperature)."""
    sampling_temperature: PositiveFloat = 0.05
    """Temperature of `sampling: softmax`."""
    per_query_budget: PositiveInt | None = None
    """Different negatives for all rows of one query together; the rows take turns. Default: `num_negatives`, so that
    all rows of a query get the same."""

    @model_validator(mode="after")
    def _is_enough(self) -> Self:
        if self.skip_first + self.num_negatives > self.top_k:
            raise ValueError(
                f"top_k: {self.top_k} must be at least skip_first + num_negatives: "
                f"{self.skip_first} + {self.num_negatives}"
            )
        if (
            self.per_query_budget is not None
            and self.per_query_budget < self.num_negatives
        ):
            raise ValueError(
                f"per_query_budget: {self.per_query_budget} must be at least num_negatives: {self.num_negatives}"
            )
        return self

    @property
    def takes_claimed(self) -> bool:
        """True if claimed candidates come first."""
        return (
            not (LIMITS & self.model_fields_set)
            if self.prefer_claimed == "auto"
            else self.prefer_claimed
        )

    @property
    def budget(self) -> int:
        """Negatives that are chosen per query."""
        return self.per_query_budget or self.num_negatives


class EpochMining(ChoiceOptions):
    """The option `mine`: negatives that the run's own model mines between epochs."""

    every_epochs: PositiveInt = 1
    """Epochs from one mining to the next."""
    at_start: bool = True
    """Mine before the first epoch too. false: the first epoch has only the negatives of the data."""
    corpus_path: str | list[str] | None = None
    """Documents to search: a file with one document per record, a BEIR-style folder, or a list of these. Default: the
    documents of the training data."""
