"""Options that say which documents become hard negatives: of `vembed mine`, and of mining within training."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vembed.config.values import (
    FiniteFloat,
    Fraction,
    Frozen,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
)

LIMITS = frozenset({"relative_margin", "margin", "max_score", "threshold"})
"""Options that limit how high a negative may score."""


class ChoiceOptions(Frozen):
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
