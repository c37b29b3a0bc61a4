"""Pooling of token vectors to one vector per text, equal to Sentence Transformers' Pooling module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vembed.models.families.table import Pooling


def pool(pooling: Pooling, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Map [n, tokens, dim] to [n, dim], in at least float32.

    `mask` [n, tokens] is 1 on real tokens, with the padding on either side; None: no padding.
    """
    if hidden.dtype in (torch.bfloat16, torch.float16):
        hidden = hidden.float()
    with torch.autocast(hidden.device.type, enabled=False):
        return _POOLINGS[pooling](hidden, mask)


def _cls(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return hidden[:, 0]
    # argmax returns the first maximum, that is the first real token.
    return _take(hidden, mask.int().argmax(dim=1))


def _last(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return hidden[:, -1]
    # The first real token of the flipped mask is the last one.
    return _take(hidden, mask.shape[1] - 1 - mask.int().flip(1).argmax(dim=1))


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return hidden.mean(dim=1)
    return _weighted(hidden, mask.to(hidden.dtype))


def _weighted(hidden: Tensor, weight: Tensor) -> Tensor:
    # Not a matrix product: on GPUs that is computed in TF32, forward and backward, with the mantissa of float16.
    return (hidden * weight.unsqueeze(-1)).sum(dim=1) / weight.sum(dim=1, keepdim=True)


def _weighted_mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean with weight k for the k-th real token."""
    if mask is None:
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    return _weighted(hidden, (mask.cumsum(dim=1) * mask).to(hidden.dtype))


def _max(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        hidden = hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf"))
    return hidden.amax(dim=1)


def _take(hidden: Tensor, position: Tensor) -> Tensor:
    return hidden.gather(
        1, position[:, None, None].expand(-1, 1, hidden.shape[-1])
    ).squeeze(1)


_POOLINGS: dict[Pooling, Callable[[Tensor, Tensor | None], Tensor]] = {
    "cls": _cls,
    "last": _last,
    "mean": _mean,
    "weighted_mean": _weighted_mean,
    "max": _max,
}
