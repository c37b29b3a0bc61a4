"""Attention of texts of different lengths, computed plainly: what flash attention's kernels do on a GPU.

The kernels' conditions on dtype, strides and head size are checked here, so that a call which a GPU would refuse fails.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


@dataclass(frozen=True)
class Shape:
    """What a query sees: its own text, up to a distance to the left and to the right."""

    starts: Tensor
    """[n + 1] where each text starts, and the end of the last one."""
    scale: float
    left: int | None
    right: int | None

    def texts(self):
        """Yield the rows of each text that is not empty."""
        starts = self.starts.tolist()
        for start, end in pairwise(starts):
            if end > start:
                yield slice(start, end)

    def hidden(self, length):
        """Return [length, length] bool: the keys that a query does not see."""
        places = torch.arange(length)
        distance = places[None, :] - places[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left is not None and self.left >= 0:
            hidden |= distance < -self.left
        if self.right is not None and self.right >= 0:
            hidden |= distance > self.right
        return hidden

    def weights(self, query, key):
        """Return the attention weights [heads, length, length] of one text, in float32."""
        scores = query @ key.transpose(1, 2) * self.scale
        scores.masked_fill_(self.hidden(query.shape[1]), float("-inf"))
        return scores.softmax(dim=-1)


def checked_shape(query, key, value, starts, is_causal, scale, window):
    """Return the shape of a call, or raise as the kernels do. `window`: the distances to the left and to the right."""
    size = query.shape[-1]
    if query.dtype not in HALF:
        raise RuntimeError(
            f"flash attention takes float16 and bfloat16, not {query.dtype}"
        )
    if size % 8 or size > LARGEST_HEAD:
        raise RuntimeError(f"flash attention does not take heads of size {size}")
    if starts.dtype != torch.int32:
        raise RuntimeError(f"cumulative lengths must be int32, not {starts.dtype}")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise RuntimeError("flash attention needs a contiguous last dimension")
    left, right = window or (None, None)
    return Shape(
        starts, size**-0.5 if scale is None else scale, left, 0 if is_causal else right
    )


def by_head(tensor, rows, num_heads):
    """Return one text as float32 [num_heads, length, size], its heads repeated if it has fewer."""
    heads = tensor[rows].float().transpose(0, 1)
    return heads.repeat_interleave(num_heads // heads.shape[0], dim=0)


def forward(query, key, value, shape):
    """Return the attended values [tokens, heads, size]."""
    num_heads = query.shape[1]
    output = torch.zeros_like(query)
    for rows in shape.texts():
        q, k, v = (by_head(tensor, rows, num_heads) for tensor in (query, key, value))
        attended = shape.weights(q, k) @ v
        output[rows] = attended.transpose(0, 1).to(output.dtype)
    return output


def backward(gradient, query, key, value, shape):
    """Return the gradients of query, key and value."""
    num_heads = query.shape[1]
    gradients = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
    for rows in shape.texts():
        q, k, v, d_output = (
            by_head(tensor, rows, num_heads) for tensor in (query, key, value, gradient)
        )
        weights = shape.weights(q, k)
        d_weights = d_output @ v.transpose(1, 2)
        # Softmax: d_scores = weights * (d_weights - sum of weights * d_weights).
        mean = (weights * d_weights).sum(dim=-1, keepdim=True)
        d_scores = weights * (d_weights - mean) * shape.scale
        actual = (
            d_scores @ k,
            d_scores.transpose(1, 2) @ q,
            weights.transpose(1, 2) @ d_output,
        )
        for target, heads in zip(gradients, actual, strict=True):
            # Heads of keys and values that several heads of queries share get the sum.
            groups = heads.view(target.shape[1], -1, *heads.shape[1:]).sum(dim=1)
            target[rows] = groups.transpose(0, 1).to(target.dtype)
    return gradients[0], gradients[1], gradients[2]


# ---- the operators, with torch's own signatures ----------------------------------------------------------------


def varlen(
    query,
    key,
    value,
    starts,
    key_starts,
    longest,
    longest_key,
    is_causal=False,
    scale=None,
    window_size=None,
    enable_gqa=False,
    *unused,
    **options,
):
    """`torch_attn::_varlen_attn`."""
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError("fewer heads of keys than of queries need enable_gqa")
    shape = checked_shape(query, key, value, starts, is_causal, scale, window_size)
    log_sums = torch.zeros(query.shape[1], query.shape[0])
    state = torch.zeros(2, dtype=torch.uint64)
    return forward(query, key, value, shape), log_sums, state


def varlen_backward(
    gradient,
    query,
    key,
    value,
    output,
    log_sums,
    starts,
    key_starts,
    longest,
    longest_key,
    is_causal,
    state,
    scale=None,
    window_size=None,
    *unused,
    **options,
):
    """`torch_attn::_varlen_attn_backward`."""
    shape = checked_shape(query, key, value, starts, is_causal, scale, window_size)
    return backward(gradient, query, key, value, shape)


def flash(
    query,
    key,
    value,
    starts,
    key_starts,
    longest,
    longest_key,
    dropout,
    is_causal,
    *unused,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **options,
):
    """`aten::_flash_attention_forward`, without dropout."""
    window = (window_size_left, window_size_right)
    shape = checked_shape(query, key, value, starts, is_causal, scale, window)
    log_sums = torch.zeros(query.shape[1], query.shape[0])
    seed, offset = (torch.zeros(2, dtype=torch.uint64) for _ in range(2))
    debug = torch.zeros(0, dtype=query.dtype)
    return forward(query, key, value, shape), log_sums, seed, offset, debug


def flash_backward(
    gradient,
    query,
    key,
    value,
    output,
    log_sums,
    starts,
    key_starts,
    longest,
    longest_key,
    dropout,
    is_causal,
    *unused,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    """`aten::_flash_attention_backward`, without dropout."""
    window = (window_size_left, window_size_right)
    shape = checked_shape(query, key, value, starts, is_causal, scale, window)
    return backward(gradient, query, key, value, shape)


def product(left, right, out_dtype=None, **options):
    """`aten::mm`, with the dtype of the result that only CUDA takes."""
    if out_dtype is not None:
        left = left.to(out_dtype)
        right = right.to(out_dtype)
    return torch.mm(left, right, **options)


KERNELS = {
    "mm": product,
    "_varlen_attn": varlen,
    "_varlen_attn_backward": varlen_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
}
"""By the operator's name."""
