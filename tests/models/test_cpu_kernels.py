"""Dropout and attention with bulk draws are the same mathematics as torch's, apart from which numbers are drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vembed.models import attention as module
from vembed.models.attention import CpuDropout, attention, kept_ones, scale_of


@pytest.mark.parametrize(
    ("p", "dtype"), [(0.1, torch.bfloat16), (0.5, torch.float32), (0.9, torch.float64)]
)
def test_share_of_kept_elements_and_expectation(p, dtype):
    torch.manual_seed(0)
    bits = kept_ones(torch.Size([1001, 1003]), p, dtype)
    assert bits.dtype.itemsize == dtype.itemsize
    assert set(bits.unique().tolist()) == {1, 0}
    mask = bits != 0
    assert float(mask.float().mean()) == pytest.approx(1 - p, abs=2e-3)
    assert scale_of(p) == pytest.approx(1 / (1 - p), rel=1e-4)
    for dim in (0, 1):
        # Neighbours come from the same 64-bit number: they must not know of each other.
        shifted = mask.float().roll(1, dim)
        together = float((mask.float() * shifted).mean())
        assert together == pytest.approx((1 - p) ** 2, abs=4e-3)


def test_dropout_is_seeded_and_only_in_training():
    layer, values = (
        CpuDropout(0.3),
        torch.randn(17, 5, dtype=torch.float64, requires_grad=True),
    )
    torch.manual_seed(1)
    first = layer(values)
    torch.manual_seed(1)
    assert torch.equal(first, layer(values))
    assert not torch.equal(first, layer(values))
    kept = first != 0
    torch.testing.assert_close(first[kept], values[kept] / 0.7, rtol=1e-4, atol=0)
    (gradient,) = torch.autograd.grad(first.sum(), values)
    torch.testing.assert_close(gradient, kept.double() / 0.7, rtol=1e-4, atol=0)
    assert layer.eval()(values) is values


@pytest.mark.parametrize("pieces", [1, 3, 8])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "float", "shared"])
def test_attention_is_that_of_the_formula(pieces, mask_kind, monkeypatch):
    rows, heads, length, size = 8, 3, 7, 5
    monkeypatch.setattr(
        module, "SCORE_BYTES", 8 * heads * length * length * (rows // pieces)
    )
    torch.manual_seed(2)
    query, key, value = (
        torch.randn(rows, heads, length, size, dtype=torch.float64, requires_grad=True)
        for _ in "qkv"
    )
    mask: torch.Tensor | None = None
    if mask_kind != "none":
        keep = torch.rand(1 if mask_kind == "shared" else rows, 1, length, length) > 0.3
        keep[..., 0] = True
        mask = (
            keep
            if mask_kind != "float"
            else torch.zeros(keep.shape).double().masked_fill(~keep, -1e30)
        )
    torch.manual_seed(3)
    output, _ = attention(nn.Module(), query, key, value, mask, dropout=0.2)
    weights = torch.randn_like(output)
    ours = torch.autograd.grad((output * weights).sum(), (query, key, value))

    torch.manual_seed(3)
    scores = query @ key.transpose(2, 3) * size**-0.5
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf)
            if mask.dtype == torch.bool
            else scores + mask
        )
    step = max(1, module.SCORE_BYTES // (8 * heads * length * length))
    kept = [kept_ones(part.shape, 0.2, part.dtype) != 0 for part in scores.split(step)]
    dropped = scores.softmax(-1) * torch.cat(kept) * scale_of(0.2)
    plain = (dropped @ value).transpose(1, 2)
    wanted = torch.autograd.grad((plain * weights).sum(), (query, key, value))
    torch.testing.assert_close(output, plain, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_without_dropout_it_is_sdpa():
    query, key, value = (torch.randn(2, 3, 4, 8) for _ in "qkv")
    module = nn.Module()
    output, _ = attention(module, query, key, value, None, dropout=0.0, is_causal=False)
    wanted = nn.functional.scaled_dot_product_attention(query, key, value).transpose(
        1, 2
    )
    torch.testing.assert_close(output, wanted)
