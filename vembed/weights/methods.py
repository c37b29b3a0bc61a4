"""Arithmetic of merging: how the values of one tensor in several models become one, in pieces and in float64."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vembed.weights.merge_rules import OF_DIFFERENCES, Method

PIECE = 2**20
"""Elements that are computed at once. `dare` draws by piece: another number would draw other elements."""
_BINS = 2**16
MIN_SINE = 1e-12
"""Below this sine of the angle between two tensors, slerp is a straight line."""


@dataclass(frozen=True)
class Recipe:
    """Method of a merge, with its options."""

    method: Method
    weights: tuple[float, ...]
    """One for each model."""
    density: float = 0.2
    """ties: share of each difference that is kept, the largest; dare: share that is kept, by chance."""
    scale: float = 1.0
    """task_arithmetic, ties, dare: factor of the merged difference."""
    interpolate: float = 1.0
    """1: the merged model; 0: the base."""
    of_differences: bool = False
    """slerp: of the differences from the base instead of the weights."""
    seed: int = 42
    """dare: what the draws depend on, besides the tensor's name and the model's place."""

    @property
    def needs_base(self) -> bool:
        """True if a base model takes part."""
        return (
            self.method in OF_DIFFERENCES
            or self.of_differences
            or self.interpolate != 1.0
        )


Read = Callable[[int, int], Tensor]
"""(start, stop) -> that range of a flattened tensor in float64, as a new tensor, which the caller may change."""


def merged_pieces(
    recipe: Recipe,
    name: str,
    size: int,
    models: Sequence[Read],
    base: Read | None,
) -> Iterator[Tensor]:
    """Yield the merged tensor's values in float64, piece by piece. `base`: needed where `recipe.needs_base`."""
    coefficients = list(recipe.weights)
    thresholds = [0.0] * len(models)
    if recipe.method == "mean":
        coefficients = [1 / len(models)] * len(models)
    elif recipe.method == "weighted":
        coefficients = [weight / sum(recipe.weights) for weight in recipe.weights]
    elif recipe.method == "slerp":
        coefficients = slerp_coefficients(
            _gram(recipe, size, models, base), recipe.weights
        )
    elif recipe.method == "ties":
        assert base is not None
        thresholds = []
        for read in models:
            thresholds.append(_threshold(read, base, size, recipe.density))
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        below = base(start, stop) if base is not None and recipe.needs_base else None
        if recipe.method in OF_DIFFERENCES or recipe.of_differences:
            assert below is not None
            if recipe.method == "ties":
                # It elects signs, so it needs the piece of all models at once.
                differences = [read(start, stop).sub_(below) for read in models]
                change = _ties(differences, recipe.weights, thresholds)
            else:
                # One after the other, so that only one model's values are in memory beside the sum.
                change = torch.zeros(stop - start, dtype=torch.float64)
                for number, read in enumerate(models):
                    difference = read(start, stop).sub_(below)
                    if recipe.method == "dare":
                        difference *= _drawn(recipe, name, number, start, stop - start)
                    change.add_(difference, alpha=coefficients[number])
            merged = below + recipe.scale * change
        else:
            merged = torch.zeros(stop - start, dtype=torch.float64)
            for read, factor in zip(models, coefficients, strict=True):
                merged.add_(read(start, stop), alpha=factor)
        if recipe.interpolate != 1.0:
            assert below is not None
            merged = below + recipe.interpolate * (merged - below)
        yield merged


def slerp_coefficients(gram: Tensor, weights: Sequence[float]) -> list[float]:
    """Return the coefficients of spherical interpolation, one model joined after the other.

    `gram` [n, n]: scalar products of the models' tensors. Two models of weights w: the point at w2 / (w1 + w2) of the
    arc from the first to the second.
    """
    coefficients = torch.zeros(len(weights), dtype=torch.float64)
    coefficients[0] = 1.0
    total = weights[0]
    for number in range(1, len(weights)):
        total += weights[number]
        # The first models may all have no weight: then the next one stands alone.
        second = weights[number] / total if total else 1.0
        first = 1 - second
        # Lengths of the tensor so far and of the next model's, and the angle between them.
        first_norm = math.sqrt(max(float(coefficients @ gram @ coefficients), 0.0))
        second_norm = math.sqrt(max(float(gram[number, number]), 0.0))
        if first_norm > 0 and second_norm > 0:
            product = float(coefficients @ gram[:, number])
            cosine = product / (first_norm * second_norm)
            angle = math.acos(min(max(cosine, -1.0), 1.0))
            if math.sin(angle) > MIN_SINE:
                first = math.sin(first * angle) / math.sin(angle)
                second = math.sin(second * angle) / math.sin(angle)
        coefficients *= first
        coefficients[number] = second
    return coefficients.tolist()


def _gram(
    recipe: Recipe,
    size: int,
    models: Sequence[Read],
    base: Read | None,
) -> Tensor:
    products = torch.zeros(len(models), len(models), dtype=torch.float64)
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        values = [read(start, stop) for read in models]
        if recipe.of_differences:
            assert base is not None
            below = base(start, stop)
            values = [value.sub_(below) for value in values]
        stacked = torch.stack(values)
        products += stacked @ stacked.T
    return products


def _threshold(
    read: Read,
    base: Read,
    size: int,
    density: float,
) -> float:
    """Return the magnitude of a difference, rounded to float32, that the share `density` of the elements reach, without sorting them.

    The bits of non-negative float32 numbers are ordered as the numbers are: the first pass counts by the upper 16 bits,
    the second by the lower 16 bits of those elements whose upper bits are the threshold's.
    """
    wanted = max(round(density * size), 1)
    upper = 0
    for level in range(2):
        counts = torch.zeros(_BINS, dtype=torch.int64)
        for start in range(0, size, PIECE):
            stop = min(start + PIECE, size)
            difference = read(start, stop).sub_(base(start, stop))
            bits = difference.abs_().float().view(torch.int32)
            keys = bits >> 16
            if level == 1:
                keys = (bits & (_BINS - 1))[keys == upper]
            counts += torch.bincount(keys, minlength=_BINS)
        # at_least[b]: elements in bin b or above. It falls with b, so the bins that reach `wanted` are the first ones,
        # and the last of them holds the threshold.
        at_least = counts.flip(0).cumsum(0).flip(0)
        last_bin = int((at_least >= wanted).sum()) - 1
        if level == 0:
            upper = last_bin
            # Elements in higher bins are above the threshold for certain; the second pass looks for the rest within
            # this bin.
            if upper + 1 < _BINS:
                wanted -= int(at_least[upper + 1])
    bits_of_threshold = torch.tensor([(upper << 16) + last_bin], dtype=torch.int32)
    return float(bits_of_threshold.view(torch.float32))


def _ties(
    differences: list[Tensor],
    weights: Sequence[float],
    thresholds: Sequence[float],
) -> Tensor:
    """Trim each difference to its largest elements, elect a sign for each element, average those that have it."""
    total = torch.zeros_like(differences[0])
    for number, difference in enumerate(differences):
        difference.mul_(difference.abs().float() >= thresholds[number])
        total.add_(difference, alpha=weights[number])
    # A sign is elected by the sum of weighted differences, as TIES does it, not by the number of models.
    sign = total.sign()
    kept = torch.zeros_like(total)
    weight_kept = torch.zeros_like(total)
    for difference, weight in zip(differences, weights, strict=True):
        agrees = (difference.sign() == sign) & (difference != 0)
        kept.add_(difference * agrees, alpha=weight)
        weight_kept.add_(agrees, alpha=weight)
    return torch.where(weight_kept != 0, kept / weight_kept, 0.0)


def _drawn(
    recipe: Recipe,
    name: str,
    model: int,
    start: int,
    count: int,
) -> Tensor:
    """Return 1 / density where an element is kept and 0 elsewhere, the same for every order of tensors and files."""
    text = f"{recipe.seed}/{name}/{model}/{start}".encode()
    # 7 bytes: manual_seed takes any number below 2**63.
    number = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
    draw = torch.Generator().manual_seed(number)
    kept = torch.rand(count, generator=draw) < recipe.density
    return kept.double() / recipe.density
