"""Mixed negatives: further hard negatives of an example, each made of two of its own.

For an example with the hard negatives h_1 .. h_m, m >= 2, each of the `mix_negatives` further ones is

    h = lambda * u(h_j) + (1 - lambda) * u(h_k)        j != k, lambda from Beta(2, 2)

with u(x) = x / |x|, for the dot product u(x) = x. The draws are a function of the seed, the number of the batch and the
example's place in it, so that they are the same on any number of ranks and in a resumed run. With mask_duplicates a
mixture is left out where one of its parts is. The gradient passes through the mixture to both of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossBatch
from vembed.losses.exchange import RingParts
from vembed.losses.matryoshka import arithmetic_dtype
from vembed.losses.targets import TeacherVectors

_GOLDEN, _MIX_1, _MIX_2 = (
    -7046029254386353131,
    -4658895280553007687,
    -7723592293110705685,
)


@dataclass(frozen=True, slots=True)
class Mixtures:
    """The hard negatives of each mixture, and their weights."""

    left: Tensor
    """[X] number of the first hard negative."""
    right: Tensor
    """[X]"""
    share: Tensor
    """[X] float64, lambda."""
    example: Tensor
    """[X] number of the example."""


def draw_mixtures(batch: LossBatch, seed: int, count: int) -> Mixtures:
    """Draw `count` mixtures for each example that has two hard negatives or more."""
    example, size = torch.unique_consecutive(batch.negative_example, return_counts=True)
    # The hard negatives of an example are adjacent: `start` is the number of its first.
    start = size.cumsum(0) - size
    chosen = size >= 2
    example, size, start = (
        one[chosen].repeat_interleave(count) for one in (example, size, start)
    )
    slot = torch.arange(count, device=size.device).repeat(int(chosen.sum()))
    uniform = [
        uniform_numbers(seed, batch.number, example, slot * 5 + which)
        for which in range(5)
    ]
    left = torch.minimum((uniform[0] * size).long(), size - 1)
    right = torch.minimum((uniform[1] * (size - 1)).long(), size - 2)
    # k is drawn from m - 1 numbers and steps over j, so that j != k and every pair is equally likely.
    right = right + (right >= left)
    # The middle one of three uniform numbers has the distribution Beta(2, 2).
    share = torch.stack(uniform[2:]).sort(0).values[1]
    return Mixtures(start + left, start + right, share, example)


def uniform_numbers(seed: int, batch: int, example: Tensor, slot: Tensor) -> Tensor:
    """[X] float64 in [0, 1), a pure function of its arguments (SplitMix64)."""
    # One round per argument, so that neighbouring seeds, batches and slots have unrelated numbers.
    state = _scrambled(torch.full_like(example, (seed * 0x9E3779B9 + batch) % 2**62))
    state = _scrambled(state + example * _GOLDEN)
    state = _scrambled(state + slot * _GOLDEN)
    # The upper 53 bits are what a float64 can hold. int64 has no unsigned shift, so the sign's copies are masked.
    return ((state >> 11) & (2**53 - 1)).to(torch.float64) / 2.0**53


def _scrambled(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits without its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def with_mixtures(batch: LossBatch, config: TrainConfig) -> LossBatch:
    """Return the batch with the mixed negatives behind its own. `own_negatives` stay those of the data.

    In a ring each rank mixes for its own examples; the draws and the numbers are those of all.
    """
    drawn = draw_mixtures(batch, config.run.seed, config.objective.mix_negatives)
    left, right = batch.negative[drawn.left], batch.negative[drawn.right]
    here = (
        slice(0, left.numel())
        if batch.ring is None
        else _range_of(drawn, batch.own_hard_negatives())
    )
    embeddings = batch.embeddings.to(arithmetic_dtype(batch.embeddings))
    cosine = config.objective.similarity == "cosine"
    one, other = (embeddings[batch.places(numbers[here])] for numbers in (left, right))
    mixed = _mixed(one, other, drawn.share[here], unit=cosine)
    num = batch.embeddings.shape[0] if batch.ring is None else batch.ring.num_inputs
    return replace(
        batch,
        embeddings=torch.cat((embeddings, mixed)),
        # Exclusion looks at both parts (`negative_parts`); this only gives each input an id.
        content=torch.cat((batch.content, batch.content[left])),
        negative=torch.cat(
            (batch.negative, torch.arange(num, num + left.numel(), device=left.device))
        ),
        negative_example=torch.cat((batch.negative_example, drawn.example)),
        negative_parts=torch.cat(
            (batch.negative[:, None].expand(-1, 2), torch.stack((left, right), dim=1))
        ),
        teachers={
            name: _with_mixed_vectors(one, drawn, here)
            if isinstance(one, TeacherVectors)
            else one
            for name, one in batch.teachers.items()
        },
        ring=None
        if batch.ring is None
        else _with_numbers(batch, batch.ring, drawn, here),
    )


def _range_of(drawn: Mixtures, negatives: slice) -> slice:
    """Return the mixtures of a range of hard negatives. They are in the order of the negatives' examples."""
    first, last = (
        int((drawn.left < bound).sum()) for bound in (negatives.start, negatives.stop)
    )
    return slice(first, last)


def _with_numbers(
    batch: LossBatch, ring: RingParts, drawn: Mixtures, here: slice
) -> RingParts:
    """Count each rank's mixtures among its hard negatives."""
    num = batch.negative.numel()
    mixtures, start = [], 0
    for negatives in ring.negatives:
        some = _range_of(drawn, slice(start, start + negatives.numel()))
        mixtures.append(
            torch.arange(num + some.start, num + some.stop, device=negatives.device)
        )
        start += negatives.numel()
    return replace(
        ring,
        negatives=tuple(
            torch.cat(both) for both in zip(ring.negatives, mixtures, strict=True)
        ),
        # Mixture k has the number num_inputs + k, and the place (own embeddings) + k - (first own mixture).
        first_mixture=ring.num_inputs + here.start - batch.embeddings.shape[0],
    )


def _mixed(left: Tensor, right: Tensor, share: Tensor, *, unit: bool) -> Tensor:
    weight = share[:, None].to(arithmetic_dtype(left))
    left, right = left.to(weight.dtype), right.to(weight.dtype)
    if unit:
        left, right = F.normalize(left, dim=1), F.normalize(right, dim=1)
    return weight * left + (1 - weight) * right


def _with_mixed_vectors(
    teacher: TeacherVectors, drawn: Mixtures, here: slice
) -> TeacherVectors:
    """A teacher's vector of a mixture is the same mixture of its vectors, brought to length 1."""
    left, right = (
        teacher.vectors[teacher.places(teacher.negative[one[here]])]
        for one in (drawn.left, drawn.right)
    )
    vectors = F.normalize(_mixed(left, right, drawn.share[here], unit=True), dim=1).to(
        teacher.vectors.dtype
    )
    # The first of the mixtures here follows the last of the vectors; what lies before and after is of other ranks.
    first = teacher.first + teacher.vectors.shape[0] - here.start
    numbers = torch.arange(
        first, first + drawn.left.numel(), device=teacher.negative.device
    )
    return replace(
        teacher,
        vectors=torch.cat((teacher.vectors, vectors)),
        negative=torch.cat((teacher.negative, numbers)),
    )
