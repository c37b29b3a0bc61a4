"""Mixed negatives: further hard negatives of an example, each made of two of its own.

For an example with the hard negatives h_1 .. h_m, m >= 2, each of the `mix_negatives` further ones is

    h = lambda * u(h_j) + (1 - lambda) * u(h_k)        j != k, lambda from Beta(2, 2)

with u(x) = x / |x|, for the dot product u(x) = x. The draws are a function of the seed, the number of the batch and the
example's place in it, so that they are the same on any number of ranks and in a resumed run. A
mixture is left out where one of its parts is. The gradient passes through the mixture to both of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vembed.losses.batch import LossBatch, TeacherVectors, copied_together
from vembed.losses.similarity import arithmetic_dtype


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
    # On the host, where the numbers are the same on every device.
    negative_example = batch.on_host().negative_example.cpu()
    example, size = torch.unique_consecutive(negative_example, return_counts=True)
    # The hard negatives of an example are adjacent: `start` is the place of its first.
    start = size.cumsum(0) - size
    has_two = size >= 2
    example = example[has_two]
    size = size[has_two, None]
    start = start[has_two, None]
    # A table for the whole batch, with a row for each place of an example in it.
    num_examples = int(example.max()) + 1 if example.numel() else 0
    draw = torch.Generator().manual_seed((seed * 0x9E3779B9 + batch.number) % 2**63)
    table = torch.rand(num_examples, count, 5, generator=draw, dtype=torch.float64)
    uniform = table[example]  # [examples, count, 5]
    left = torch.minimum((uniform[:, :, 0] * size).long(), size - 1)
    right = torch.minimum((uniform[:, :, 1] * (size - 1)).long(), size - 2)
    # k is drawn from m - 1 numbers and steps over j, so that j != k and every pair is equally likely.
    right = right + (right >= left)
    # The middle one of three uniform numbers has the distribution Beta(2, 2).
    share = uniform[:, :, 2:].sort(2).values[:, :, 1]
    mixtures = {
        "left": (start + left).flatten(),
        "right": (start + right).flatten(),
        "share": share.flatten(),
        "example": example.repeat_interleave(count),
    }
    return Mixtures(**copied_together(mixtures, batch.negative.device))


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
        host_indices=None,  # they lack the mixtures
    )


def _mixed(left: Tensor, right: Tensor, share: Tensor, *, unit: bool) -> Tensor:
    weight = share[:, None].to(arithmetic_dtype(left))
    left = left.to(weight.dtype)
    right = right.to(weight.dtype)
    if unit:
        left = F.normalize(left, dim=1)
        right = F.normalize(right, dim=1)
    return weight * left + (1 - weight) * right
