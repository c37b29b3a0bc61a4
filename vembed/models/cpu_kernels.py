"""Dropout and attention with dropout for training on CPUs: bulk random bits, and score matrices that fit the caches.

torch draws one random number per element, serially, which takes a third of a small encoder's step on a CPU, and its
attention with dropout writes every intermediate matrix to memory. Here one 64-bit number gives four 16-bit draws,
masks are applied to the bits of the numbers (`x & mask`, which vectorises in every dtype), and attention processes the
batch in pieces whose score matrices stay in the caches. The distribution is the same; the draws differ from torch's
and depend on torch's seed only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "vembed_cpu"
"""Name of `attention` in Transformers' registry."""
SCORE_BYTES = 2**21
"""Bytes of one piece's score matrices."""
DRAW_LEVELS = 2**16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the number of bytes of a number."""


def kept_ones(shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
    """Return dropout's draws for numbers of `dtype`: integers of their size, 1 with probability 1 - p, else 0.

    `p` is rounded to a multiple of 2^-16.
    """
    # As an array: no value is read from a device.
    seed = torch.empty(1, dtype=torch.int64).random_().numpy()
    count = shape.numel()
    numbers = np.random.SFC64(seed).random_raw((count + 3) // 4)
    draws = torch.from_numpy(numbers.view(np.int16))[:count]
    # Signed 16-bit draws are uniform on [-32768, 32767], so the threshold for "keep" is shifted by DRAW_LEVELS / 2.
    draws.lt_(round((1.0 - p) * DRAW_LEVELS) - DRAW_LEVELS // 2)
    return draws.to(BITS[dtype.itemsize]).view(shape)


def scale_of(p: float) -> float:
    """Return the factor for kept elements: 1 / (1 - p), with p rounded as in `kept_ones`."""
    return DRAW_LEVELS / round((1.0 - p) * DRAW_LEVELS)


def masked_(values: Tensor, mask: Tensor) -> Tensor:
    """Set `values` to 0 where `mask` is 0. Elsewhere all bits of the mask are set."""
    values.view(mask.dtype).bitwise_and_(mask)
    return values


class CpuDropout(nn.Dropout):
    """nn.Dropout with bulk draws on CPUs; unchanged on other devices."""

    def forward(self, values: Tensor) -> Tensor:
        """Apply dropout as nn.Dropout does, with other draws."""
        if not self.training or self.p in (0.0, 1.0) or values.device.type != "cpu":
            return super().forward(values)
        dropped: Tensor = _Dropped.apply(values, self.p)  # type: ignore[no-untyped-call]
        return dropped


class _Dropped(torch.autograd.Function):
    """values * mask * scale, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, p: float) -> Tensor:
        # The negative of 1 has all bits set.
        mask = kept_ones(values.shape, p, values.dtype).neg_()
        ctx.save_for_backward(mask)
        ctx.scale = scale_of(p)
        return masked_(values * ctx.scale, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return masked_(gradients[0] * ctx.scale, mask), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, heads: int, p: float
) -> tuple[Tensor, Tensor]:
    """Return dropout(softmax(q k^T + mask)) v, and the signed probabilities for the backward pass.

    query, key, value: [n * heads, length, size]; probabilities: [n * heads, length, length], negative where dropout
    keeps them (a probability has no sign of its own).
    """
    scores = torch.bmm(query, key.transpose(1, 2))  # [n * heads, length, length]
    if mask is not None:
        # A view, so that the mask [n or 1, 1, length, length] is applied to all heads of a text in place.
        by_head = scores.view(-1, heads, *scores.shape[1:])
        if mask.dtype == torch.bool:
            # The lowest finite value, not -inf: a row of padding that sees nothing must not become NaN.
            by_head.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        else:
            by_head += mask
    probabilities = torch.softmax(scores, dim=-1)
    kept = kept_ones(probabilities.shape, p, probabilities.dtype)
    integers = probabilities.view(kept.dtype)
    # The lowest integer is the sign bit, which no probability has: to add it sets it, in one pass.
    signed = torch.add(integers, kept, alpha=torch.iinfo(integers.dtype).min).view(
        probabilities.dtype
    )
    integers.mul_(kept)  # of the probabilities, in place
    # The factor for kept elements is applied to the small output instead of the probabilities.
    return torch.bmm(probabilities, value).mul_(scale_of(p)), signed


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    signed: Tensor,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from that of the output. `signed`: probabilities from `attend`."""
    gradient = gradient * scale_of(p)
    integers = signed.view(BITS[signed.dtype.itemsize])
    # An arithmetic shift fills a number with its sign: all bits where it is kept.
    kept = integers >> (8 * signed.dtype.itemsize - 1)
    probabilities = (integers & torch.iinfo(integers.dtype).max).view(signed.dtype)
    # Chain rule in reverse order: d(dropped probabilities), d(probabilities), d(scores), then query and key.
    through = masked_(torch.bmm(gradient, value.transpose(1, 2)), kept)
    scores = torch.ops.aten._softmax_backward_data(
        through, probabilities, -1, probabilities.dtype
    )
    grad_value = torch.bmm(masked_(probabilities, kept).transpose(1, 2), gradient)
    return torch.bmm(scores, key), torch.bmm(scores.transpose(1, 2), query), grad_value


class AttentionPiece(Protocol):
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Sequence[AttentionPiece],
    p: float,
    scaling: float,
) -> Tensor:
    """Return dropout(softmax(q k^T * scaling + mask)) v, computed piece by piece."""
    attended: Tensor = _DroppedAttention.apply(query, key, value, pieces, p, scaling)  # type: ignore[no-untyped-call]
    return attended


def in_autocast_dtype(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert queries, keys and values as autocast does where it is on. Rotary positions leave the first two wider."""
    if not torch.is_autocast_enabled("cpu"):
        return query, key, value
    dtype = torch.get_autocast_dtype("cpu")
    return query.to(dtype), key.to(dtype), value.to(dtype)


class _DroppedAttention(torch.autograd.Function):
    """`attend`, piece by piece. Saves signed probabilities for the backward pass, so nothing is drawn or computed
    twice."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Sequence[AttentionPiece],
        p: float,
        scaling: float,
    ) -> Tensor:
        output = value.new_empty(*query.shape[:-1], value.shape[-1])
        saved: list[Tensor] = []
        for piece in pieces:
            taken = [piece.take(tensor) for tensor in (query, key, value)]
            num_texts, heads, length, _ = taken[0].shape
            # Saved as the backward pass needs them: copied once, and scaled.
            queries, keys, values = (
                tensor.flatten(0, 1).contiguous() for tensor in taken
            )
            queries = queries * scaling
            attended, signed = attend(queries, keys, values, piece.visible, heads, p)
            piece.put(output, attended.view(num_texts, heads, length, -1))
            saved += queries, keys, values, signed
        ctx.save_for_backward(*saved)
        ctx.pieces = pieces
        ctx.p = p
        ctx.scaling = scaling
        ctx.shapes = query.shape, key.shape, value.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        # One buffer for each of query, key and value. The pieces cover all their tokens, so nothing stays unset.
        results = [gradients[0].new_empty(shape) for shape in ctx.shapes]
        for number, piece in enumerate(ctx.pieces):
            queries, keys, values, signed = saved[4 * number : 4 * number + 4]
            gradient = piece.take(gradients[0])  # [texts, heads, length, size]
            num_texts, heads = gradient.shape[:2]
            grads = attend_backward(
                queries,
                keys,
                values,
                gradient.flatten(0, 1).contiguous(),
                signed,
                ctx.p,
            )
            # The first is the gradient of the scaled queries.
            grads[0].mul_(ctx.scaling)
            for result, grad in zip(results, grads, strict=True):
                piece.put(result, grad.view(num_texts, heads, *grad.shape[1:]))
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
    # sdpa also handles what `attend` does not: grouped queries, and causal attention without a mask.
    plain = (
        dropout in (0.0, 1.0)
        or query.device.type != "cpu"
        or key.shape[1] != query.shape[1]
        or (causal and attention_mask is None)
    )
    if plain:
        output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **others,
        )
        return output, None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = in_autocast_dtype(query, key, value)
    # Pieces of the batch whose scores [rows, heads, length, keys] have at most SCORE_BYTES: at least one row.
    num_rows, num_heads, length, _ = query.shape
    row_bytes = num_heads * length * key.shape[2] * query.dtype.itemsize
    step = max(1, SCORE_BYTES // max(1, row_bytes))
    mask = attention_mask
    pieces = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        visible = mask
        if mask is not None and len(mask) > 1:
            visible = mask[rows]
        pieces.append(_Rows(rows, visible))
    dropped = dropped_attention(query, key, value, pieces, dropout, scaling)
    return dropped.transpose(1, 2).contiguous(), None


def register(name: str, function: Callable[..., tuple[Tensor, None]]) -> str:
    """Register an attention function with Transformers, with the masks of sdpa, and return its name."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


# ---- gradients of token embeddings ---------------------------------------------------


MIN_TABLE_ROWS = 8192
"""Smaller tables are about as large as the rows of a micro-batch."""


def use_row_gradients(backbone: nn.Module) -> int:
    """Let large trained nn.Embedding modules give gradients by rows, and return their number. `.grad` stays dense.

    For models that are not sharded, on CPUs.
    """
    tables = [
        module
        for module in backbone.modules()
        # Exactly this class: a subclass may compute something else.
        if type(module) is nn.Embedding
        and module.weight.requires_grad
        and module.num_embeddings >= MIN_TABLE_ROWS
        and not module.scale_grad_by_freq
    ]
    for module in tables:
        module.sparse = True
        module.weight.register_post_accumulate_grad_hook(_make_dense)  # type: ignore[no-untyped-call]
    return len(tables)


def _make_dense(weight: torch.Tensor) -> None:
    """Convert the first gradient of a step. torch adds later ones to it in place, row by row."""
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
