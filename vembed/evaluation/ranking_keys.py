"""Ranking keys: a score and a document's number as one whole number, so that top-k has no ties."""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING = torch.iinfo(torch.int64).min
"""The key of a place without a document; it sorts last."""
_LOW_32 = 0xFFFFFFFF


def as_keys(scores: Tensor, documents: Tensor) -> Tensor:
    """Return one whole number per score and document that sorts by score, then by lower number, without ties."""
    bits = (scores.contiguous() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    # The bits of positive floats sort as integers. Those of negative floats sort in reverse; flipping all but the sign
    # bit corrects that. The order then fills the upper 32 bits, the reversed number the lower 32.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordered << 32) + (_LOW_32 - documents)


def documents_of(keys: Tensor) -> Tensor:
    """Return the documents of keys, -1 for NOTHING."""
    return torch.where(keys == NOTHING, -1, _LOW_32 - (keys & _LOW_32))


def scores_of(keys: Tensor) -> Tensor:
    """Return the scores of keys, -inf for NOTHING."""
    ordered = (keys >> 32).to(torch.int32)
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return torch.where(keys == NOTHING, -torch.inf, bits.view(torch.float32))
