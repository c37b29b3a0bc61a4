"""Dropout and attention with dropout for training on CPUs: bulk random bits, and score matrices that fit the caches.

torch draws one random number per element, serially, which takes a third of a small encoder's step on a CPU, and its
attention with dropout writes every intermediate matrix to memory. Here one 64-bit number gives four 16-bit draws, and
attention processes the batch in pieces whose score matrices stay in the caches. The distribution is the same; the draws
differ from torch's and depend on torch's seed only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "vembed_cpu"
"""Name of `attention` in Transformers' registry."""
SCORES_AT_ONCE = 2**19
"""Elements of one piece's score matrices: 2 MB in float32."""
LEVELS = 2**16


def keep_mask(shape: torch.Size, p: float) -> tuple[Tensor, float]:
    """Return dropout's bool mask (true: keep) and the scale of kept elements. `p` is rounded to a multiple of 2^-16."""
    count = shape.numel()
    # Signed 16-bit draws are uniform on [-32768, 32767], so the threshold for "keep" is shifted by LEVELS / 2.
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return (bits[:count] < round((1.0 - p) * LEVELS) - LEVELS // 2).view(shape), scale_of(p)


def scale_of(p: float) -> float:
    """Return the factor for kept elements: 1 / (1 - p), with p rounded as in `keep_mask`."""
    return LEVELS / round((1.0 - p) * LEVELS)


class CpuDropout(nn.Dropout):
    """nn.Dropout with bulk draws on CPUs; unchanged on other devices."""

    def forward(self, values: Tensor) -> Tensor:
        """Apply dropout as nn.Dropout does, with other draws."""
        if not self.training or self.p in (0.0, 1.0) or values.device.type != "cpu":
            return super().forward(values)
        mask, scale = keep_mask(values.shape, self.p)
        dropped: Tensor = _Dropped.apply(values, mask, scale)  # type: ignore[no-untyped-call]
        return dropped


class _Dropped(torch.autograd.Function):
    """values * mask * scale in one fused pass, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        # The backward kernel computes exactly this product, so it serves as the forward too.
        dropped: Tensor = torch.ops.aten.native_dropout_backward(values, mask, scale)
        return dropped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(gradients[0].contiguous(), mask, ctx.scale), None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dropout(softmax(q k^T * scaling + mask)) v, and the probabilities and dropout mask for the backward pass.

    query, key, value: [n, heads, length, size]; probabilities and dropout mask: [n, heads, length, length].
    """
    scores = torch.matmul(query * scaling, key.transpose(2, 3))
    if mask is not None and mask.dtype == torch.bool:
        # The lowest finite value, not -inf: a row of padding that sees nothing must not become NaN.
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores += mask
    probabilities = torch.softmax(scores, dim=-1)
    kept, scale = keep_mask(probabilities.shape, p)
    dropped = torch.ops.aten.native_dropout_backward(probabilities, kept, scale)
    return torch.matmul(dropped, value), probabilities, kept


def attend_backward(
    inputs: Sequence[Tensor], draws: tuple[Tensor, Tensor], p: float, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `inputs`: query, key, value and the gradient of the output. `draws`: probabilities and dropout mask from `attend`.
    """
    query, key, value, gradient = inputs
    probabilities, kept = draws
    scale = scale_of(p)
    dropped = torch.ops.aten.native_dropout_backward(probabilities, kept, scale)
    grad_value = torch.matmul(dropped.transpose(2, 3), gradient)
    # Chain rule in reverse order: d(dropped probabilities), d(probabilities), d(scores), then query and key.
    through = torch.matmul(gradient, value.transpose(2, 3))
    through = torch.ops.aten.native_dropout_backward(through, kept, scale)
    scores = torch.ops.aten._softmax_backward_data(through, probabilities, -1, probabilities.dtype)
    grad_query = torch.matmul(scores, key).mul_(scaling)
    grad_key = torch.matmul(scores.transpose(2, 3), query).mul_(scaling)
    return grad_query, grad_key, grad_value


class Piece(Protocol):
    """Part of a batch whose score matrices are computed together."""

    @property
    def visible(self) -> Tensor | None:
        """Mask that broadcasts to the scores: bool (true: a query may attend to the key) or added; None: everywhere."""
        ...

    def take(self, values: Tensor) -> Tensor:
        """Return the piece of queries, keys or values as [n, heads, length, size]."""
        ...

    def put(self, result: Tensor, values: Tensor) -> None:
        """Write what `take` would return into the piece's place in `result`."""
        ...


def dropped_attention(
    query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], p: float, scaling: float
) -> Tensor:
    """Return dropout(softmax(q k^T * scaling + mask)) v, computed piece by piece."""
    attended: Tensor = _DroppedAttention.apply(query, key, value, pieces, p, scaling)  # type: ignore[no-untyped-call]
    return attended


class _DroppedAttention(torch.autograd.Function):
    """`attend`, piece by piece. Saves probabilities and dropout masks for the backward pass, so nothing is drawn or
    computed twice."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], p: float, scaling: float
    ) -> Tensor:
        output = value.new_empty(*query.shape[:-1], value.shape[-1])
        saved: list[Tensor] = []
        for piece in pieces:
            queries, keys, values = (piece.take(one) for one in (query, key, value))
            attended, *kept = attend(queries, keys, values, piece.visible, p, scaling)
            piece.put(output, attended)
            saved += kept
        ctx.save_for_backward(query, key, value, *saved)
        ctx.pieces, ctx.p, ctx.scaling = pieces, p, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        results = [torch.empty_like(one) for one in (query, key, value)]
        for number, piece in enumerate(ctx.pieces):
            inputs = [piece.take(one) for one in (query, key, value, gradients[0])]
            found = attend_backward(inputs, (saved[2 * number], saved[2 * number + 1]), ctx.p, ctx.scaling)
            for result, gradient in zip(results, found, strict=True):
                piece.put(result, gradient)
        return *results, None, None, None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a padded batch."""

    rows: slice
    visible: Tensor | None

    def take(self, values: Tensor) -> Tensor:
        return values[self.rows]

    def put(self, result: Tensor, values: Tensor) -> None:
        result[self.rows] = values


def _cut(query: Tensor, key: Tensor, mask: Tensor | None) -> list[_Rows]:
    """Return pieces of a padded batch whose scores [rows, heads, length, keys] have at most SCORES_AT_ONCE elements."""
    num_rows, heads, length, _ = query.shape
    step = max(1, SCORES_AT_ONCE // max(1, heads * length * key.shape[2]))
    rows = [slice(start, start + step) for start in range(0, num_rows, step)]
    return [_Rows(one, mask[one] if mask is not None and mask.shape[0] > 1 else mask) for one in rows]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for Transformers: sdpa, except with dropout on a CPU, where sdpa is slow."""
    causal = module.__dict__.get("is_causal", False) if is_causal is None else is_causal
    # sdpa also handles what `attend` does not: autocast, grouped queries, and causal attention without a mask.
    plain = (
        dropout in (0.0, 1.0)
        or query.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
        or key.shape[1] != query.shape[1]
        or (causal and attention_mask is None)
    )
    if plain:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
        return output, None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    dropped = dropped_attention(query, key, value, _cut(query, key, attention_mask), dropout, scaling)
    return dropped.transpose(1, 2).contiguous(), None


def use_cpu_kernels(backbone: nn.Module) -> int:
    """Replace every dropout of the model by CpuDropout and return their number. Attention is chosen at loading."""
    found = [module for module in backbone.modules() if type(module) is nn.Dropout and module.p > 0.0]
    for module in found:
        module.__class__ = CpuDropout
    return len(found)


def register() -> str:
    """Register `attention` with Transformers and return its name."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    return IMPLEMENTATION
