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

from vembed.losses.batch import LossBatch, TeacherVectors
from vembed.losses.similarity import arithmetic_dtype

# Constants of SplitMix64, as signed integers.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


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
    has_two = size >= 2
    example = example[has_two].repeat_interleave(count)
    size = size[has_two].repeat_interleave(count)
    start = start[has_two].repeat_interleave(count)
    slot = torch.arange(count, device=size.device).repeat(int(has_two.sum()))
    uniform = []
    for draw in range(5):
        uniform.append(uniform_numbers(seed, batch.number, example, slot * 5 + draw))
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


def with_mixtures(
    batch: LossBatch, seed: int, count: int, *, cosine: bool
) -> LossBatch:
    """Return the batch with `count` mixed negatives of each example behind its own.

    `rank_negatives` stay those of the data.
    """
    drawn = draw_mixtures(batch, seed, count)
    left = batch.negative[drawn.left]
    right = batch.negative[drawn.right]
    embeddings = batch.embeddings.to(arithmetic_dtype(batch.embeddings))
    mixed = _mixed(embeddings[left], embeddings[right], drawn.share, unit=cosine)
    numbers = torch.arange(left.numel(), device=left.device)
    # A hard negative of the data is made of itself twice.
    twice = batch.negative[:, None].expand(-1, 2)
    teachers = dict(batch.teachers)
    for name, teacher in batch.teachers.items():
        if isinstance(teacher, TeacherVectors):
            # The teacher's vector of a mixture is the mixture of its vectors, of length 1.
            vectors = teacher.vectors
            teacher_left = vectors[teacher.negative[drawn.left]]
            teacher_right = vectors[teacher.negative[drawn.right]]
            mixtures = _mixed(teacher_left, teacher_right, drawn.share, unit=True)
            mixtures = F.normalize(mixtures, dim=1).to(vectors.dtype)
            teachers[name] = replace(
                teacher,
                vectors=torch.cat((vectors, mixtures)),
                negative=torch.cat((teacher.negative, len(vectors) + numbers)),
            )
    return replace(
        batch,
        embeddings=torch.cat((embeddings, mixed)),
        # Exclusion looks at both parts (`negative_parts`). This only gives each input
        # an id.
        content=torch.cat((batch.content, batch.content[left])),
        negative=torch.cat((batch.negative, len(embeddings) + numbers)),
        negative_example=torch.cat((batch.negative_example, drawn.example)),
        negative_parts=torch.cat((twice, torch.stack((left, right), dim=1))),
        teachers=teachers,
        host_indices=None,  # the mixtures are drawn on the device
    )


def _mixed(left: Tensor, right: Tensor, share: Tensor, *, unit: bool) -> Tensor:
    weight = share[:, None].to(arithmetic_dtype(left))
    left = left.to(weight.dtype)
    right = right.to(weight.dtype)
    if unit:
        left = F.normalize(left, dim=1)
        right = F.normalize(right, dim=1)
    return weight * left + (1 - weight) * right
