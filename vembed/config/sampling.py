"""Sampling: how often the sources of the training data are drawn, as the option `sampling` says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["proportional", "temperature", "round_robin", "weights"]
# The numbers of the pattern are 0, 1, .5, 0.5 and 1.0; what it lets through above 1 is refused by value.
FORM = re.compile(
    r"(proportional|round_robin|weights)|temperature\(\s*(0|1|0?\.\d+|[01]\.\d*)\s*\)"
)
ACCEPTED = (
    "proportional, temperature(alpha) with alpha from 0 to 1, round_robin or weights"
)


def checked_sampling(text: str) -> str:
    """Return a value of `sampling` as it is. Raise ValueError if it has another form."""
    parse_sampling(text)
    return text


@dataclass(frozen=True, slots=True)
class Sampling:
    """A value of `sampling`."""

    kind: Kind = "proportional"
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
    match = FORM.fullmatch(text)
    alpha = 1.0 if match is None or match[2] is None else float(match[2])
    if match is None or alpha > 1.0:
        raise ValueError(f"must be {ACCEPTED}")
    match match[1]:
        case "round_robin":
            return Sampling("round_robin")
        case "weights":
            # size ** 0: the weights alone.
            return Sampling("weights", 0.0)
        case "proportional":
            return PROPORTIONAL
        case _:
            return Sampling("temperature", alpha)
