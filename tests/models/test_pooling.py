"""Pooling: the same as a plain loop over each text's own tokens, with the padding on either side."""

from __future__ import annotations

import pytest
import torch
from vembed.models.pooling import pool

LOOPS = {
    "cls": lambda tokens: tokens[0],
    "last": lambda tokens: tokens[-1],
    "mean": lambda tokens: sum(tokens) / len(tokens),
    "weighted_mean": lambda tokens: (
        sum((place + 1) * token for place, token in enumerate(tokens))
        / sum(range(1, len(tokens) + 1))
    ),
    "max": lambda tokens: torch.stack(list(tokens)).max(dim=0).values,
}
LENGTHS = [5, 1, 9, 3]


def _padded(side, dtype=torch.float64):
    texts = [
        torch.randn(
            length, 6, dtype=dtype, generator=torch.Generator().manual_seed(length)
        )
        for length in LENGTHS
    ]
    hidden = torch.full((len(texts), max(LENGTHS), 6), 1e3, dtype=dtype)
    mask = torch.zeros(len(texts), max(LENGTHS), dtype=torch.int64)
    for row, text in enumerate(texts):
        place = (
            slice(0, len(text))
            if side == "right"
            else slice(max(LENGTHS) - len(text), None)
        )
        hidden[row, place], mask[row, place] = text, 1
    return texts, hidden, mask


@pytest.mark.parametrize("pooling", LOOPS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_pooling_is_the_loop_over_real_tokens(pooling, side):
    texts, hidden, mask = _padded(side)
    expected = torch.stack([LOOPS[pooling](text) for text in texts])
    torch.testing.assert_close(
        pool(pooling, hidden, mask), expected, atol=1e-9, rtol=1e-9
    )


@pytest.mark.parametrize("pooling", LOOPS)
def test_no_mask_is_a_mask_of_ones(pooling):
    hidden = torch.randn(
        3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(
        pool(pooling, hidden, None),
        pool(pooling, hidden, torch.ones(3, 7, dtype=torch.int64)),
    )


@pytest.mark.parametrize("pooling", LOOPS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_gets_no_gradient(pooling, side):
    _, hidden, mask = _padded(side)
    hidden.requires_grad_(True)
    pool(pooling, hidden, mask).square().sum().backward()
    assert (hidden.grad[mask == 0] == 0).all() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("pooling", LOOPS)
def test_half_precision_is_pooled_in_float32(pooling):
    _, hidden, mask = _padded("right", torch.bfloat16)
    pooled = pool(pooling, hidden, mask)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, pool(pooling, hidden.float(), mask))
