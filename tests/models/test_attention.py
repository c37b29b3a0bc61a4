"""Attention: dropout with bulk draws is torch's mathematics, padded and packed; which kernel is used, and with what."""

import inspect

import pytest
import torch
import torch.nn.attention.varlen  # before a test replaces an operator that it looks up
from torch import nn

from tests import tiny
from tests.models.families import built, config_for
from vembed.models import attention
from vembed.models.attention import CpuDropout, keep_draws
from vembed.models.families.backbones import read_config

CUDA = torch.device("cuda")
STEP = 2.0**-8
"""Largest relative rounding error of one number in bfloat16."""


def queries_keys_values(*shape):
    return [torch.randn(*shape).double().requires_grad_() for _ in "qkv"]


@pytest.mark.parametrize(
    ("p", "dtype"), [(0.1, torch.bfloat16), (0.5, torch.float32), (0.9, torch.float64)]
)
def test_share_of_kept_elements_and_expectation(p, dtype):
    torch.manual_seed(0)
    bits, scale = keep_draws(torch.Size([1001, 1003]), p, dtype)
    assert bits.dtype.itemsize == dtype.itemsize
    assert set(bits.unique().tolist()) == {1, 0}
    mask = bits.float()
    assert float(mask.mean()) == pytest.approx(1 - p, abs=2e-3)
    assert scale == pytest.approx(1 / (1 - p), rel=1e-4)
    for dim in (0, 1):
        # Neighbours come from the same 64-bit number: they must not know of each other.
        together = float((mask * mask.roll(1, dim)).mean())
        assert together == pytest.approx((1 - p) ** 2, abs=4e-3)


def test_dropout_is_seeded_and_only_in_training():
    layer = CpuDropout(0.3)
    values = torch.randn(17, 5, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    first = layer(values)
    torch.manual_seed(1)
    assert torch.equal(first, layer(values))
    assert not torch.equal(first, layer(values))
    remaining = first != 0
    torch.testing.assert_close(
        first[remaining], values[remaining] / 0.7, rtol=1e-4, atol=0
    )
    (gradient,) = torch.autograd.grad(first.sum(), values)
    torch.testing.assert_close(gradient, remaining.double() / 0.7, rtol=1e-4, atol=0)
    assert layer.eval()(values) is values


def formula(query, key, value, visible, factors):
    """Attention of [..., tokens, size], whose probabilities are multiplied by these factors."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) * factors) @ value


@pytest.mark.parametrize("num_pieces", [1, 4, 8])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "float", "shared"])
@pytest.mark.parametrize("kind", ["float64", "bfloat16", "autocast"])
def test_padded_attention_with_dropout_is_that_of_the_formula(
    num_pieces, mask_kind, kind, monkeypatch
):
    rows = 8
    heads = 3
    length = 7
    size = 5
    p = 0.2
    item_bytes = 8 if kind == "float64" else 2
    at_once = rows // num_pieces
    monkeypatch.setattr(
        attention, "SCORE_BYTES", item_bytes * heads * length**2 * at_once
    )
    torch.manual_seed(2)
    dtype = torch.float64 if kind == "float64" else torch.bfloat16
    inputs = [torch.randn(rows, heads, length, size, dtype=dtype) for _ in range(3)]
    exact = [tensor.clone().double() for tensor in inputs]
    for tensor in (*inputs, *exact):
        tensor.requires_grad_()
    values = list(inputs)
    if kind == "autocast":  # queries and keys with rotary positions arrive in float32
        values[:2] = [tensor.float() for tensor in inputs[:2]]
    mask = None
    added = None
    if mask_kind != "none":
        mask = torch.rand(1 if mask_kind == "shared" else rows, 1, length, length) > 0.3
        mask[..., 0] = True
        added = mask
    if mask_kind == "float":
        added = torch.zeros(mask.shape, dtype=inputs[0].dtype)
        added.masked_fill_(~mask, -1e30)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        output, _ = attention.attention(nn.Module(), *values, added, dropout=p)
    assert output.dtype == inputs[0].dtype
    weights = torch.randn_like(output)
    output.backward(weights)

    torch.manual_seed(3)
    factors = []
    for _ in range(num_pieces):
        shape = torch.Size([at_once * heads, length, length])
        draws, scale = keep_draws(shape, p, output.dtype)
        is_kept = (draws != 0).view(at_once, heads, length, length)
        factors.append(is_kept.double() * scale)
    visible = torch.tensor(True) if mask is None else mask
    expected = formula(*exact, visible, torch.cat(factors)).transpose(1, 2)
    expected.backward(weights.double())
    # In bfloat16 a score is rounded, and its error is a relative one of the probability.
    bound = 1e-12 if kind == "float64" else 4 * STEP
    compared = [(output.detach(), expected.detach())]
    for rounded, true in zip(inputs, exact, strict=True):
        compared.append((rounded.grad, true.grad))
    for ours, theirs in compared:
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scores_at_once", [1, 150, 10_000])
def test_packed_attention_is_that_of_the_formula(
    causal, window, scores_at_once, monkeypatch
):
    lengths = [7, 7, 4, 6, 1, 3]
    heads = 2
    size = 5
    p = 0.3
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    torch.manual_seed(1)
    inputs = queries_keys_values(sum(lengths), heads, size)
    pieces = attention.cut(tuple(starts), scores_at_once, causal, window)
    assert len(pieces) == {1: len(lengths), 10_000: 1}.get(scores_at_once, len(pieces))
    draws = []

    def drawn(shape, p, dtype):
        ones = (torch.rand(shape) > p).to(attention.BITS[dtype.itemsize])
        draws.append(ones.view(-1, heads, *shape[1:]) != 0)
        return ones, 1 / (1 - p)

    monkeypatch.setattr(attention, "keep_draws", drawn)
    dropped = attention._DroppedAttention.apply(*inputs, pieces, p, size**-0.5)
    plain = attention.sdpa_by_piece(*inputs, pieces, 0.0, size**-0.5)
    weights = torch.randn_like(dropped)

    for p_used, output in ((p, dropped), (0.0, plain)):
        expected = []
        text = 0
        for piece, draw in zip(pieces, draws, strict=True):
            for row in range(piece.num_texts):
                tokens = slice(starts[text], starts[text + 1])
                heads_first = [tensor[tokens].transpose(0, 1) for tensor in inputs]
                length = lengths[text]
                ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
                visible = ahead <= (0 if causal else length)
                if window is not None:
                    visible &= ahead.abs() < window
                factors = 1.0
                if p_used:
                    factors = draw[row, :, :length, :length].double() / (1 - p)
                vectors = formula(*heads_first, visible, factors)
                expected.append(vectors.transpose(0, 1))
                text += 1
        reference = torch.cat(expected)
        torch.testing.assert_close(output, reference, rtol=1e-12, atol=1e-12)
        ours = torch.autograd.grad((output * weights).sum(), inputs)
        theirs = torch.autograd.grad((reference * weights).sum(), inputs)
        for mine, true in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-12)


# ---- kernels of GPUs, stood in for on the CPU --------------------------------------------


SCALE = 0.5
PACKED = attention.Packed(torch.tensor([0, 5, 6, 13], dtype=torch.int32), 7)


def by_pieces(query, key, value, causal, window):
    pieces = attention.cut(tuple(PACKED.starts.tolist()), 2**20, causal, window)
    return attention.sdpa_by_piece(query, key, value, pieces, 0.0, SCALE)


def varlen(
    query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False
):
    """As torch.nn.attention.varlen documents it."""
    assert cu_q is cu_k is PACKED.starts
    assert max_q == max_k == PACKED.longest
    assert scale == SCALE
    assert enable_gqa or query.shape == key.shape
    left, right = window_size
    window = None if left < 0 else left + 1
    return by_pieces(query, key, value, right == 0, window)


def older_varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    cuts = (cu_q, cu_k, max_q, max_k)
    return varlen(query, key, value, *cuts, scale=scale, window_size=window_size)


def operator(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale,
    window_size_left=-1,
    window_size_right=-1,
):
    """aten::_flash_attention_forward, without its dropout."""
    assert dropout_p == 0.25
    assert return_debug_mask is False
    sides = (window_size_left, 0 if is_causal else window_size_right)
    cuts = (cum_seq_q, cum_seq_k, max_q, max_k)
    output = older_varlen(query, key, value, *cuts, scale=scale, window_size=sides)
    return (output,)


def test_the_operators_arguments_are_torchs():
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    asked = list(inspect.signature(operator).parameters)
    assert asked == names[: len(asked)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [varlen, older_varlen, operator])
def test_kernels_are_asked_for_the_same(kernel, groups, causal, window, monkeypatch):
    dropout = 0.0
    if kernel is operator:
        dropout = 0.25
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    else:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    torch.manual_seed(0)
    row = [torch.randn(13, heads, 8) for heads in (4, 4 // groups, 4 // groups)]
    output = attention.by_kernel(*row, PACKED, dropout, SCALE, causal, window)
    torch.testing.assert_close(output, by_pieces(*row, causal, window))


# ---- which kernel --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "capability", "half", "kernel"),
    [
        (True, (9, 0), True, "flash_attention_2"),
        (False, (9, 0), True, "sdpa"),
        (True, (7, 5), True, "sdpa"),
        (True, (9, 0), False, "sdpa"),
    ],
)
def test_auto_takes_flash_attention_where_it_can(
    installed, capability, half, kernel, monkeypatch
):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    backbone = type(built(tiny.tiny_bert).backbone)
    chosen, _ = attention.attention_kernel("auto", backbone, CUDA, half=half)
    assert chosen == kernel


@pytest.mark.parametrize(
    ("make", "options", "capability", "half", "head_size", "named"),
    [
        (tiny.tiny_bert, {}, None, False, 16, None),
        (tiny.tiny_bert, {"padding_free": False}, None, False, 16, "padding_free"),
        (
            tiny.tiny_bert,
            {"attn_implementation": "eager"},
            *(None, False, 16, "attn_implementation"),
        ),
        (tiny.tiny_modernbert, {}, None, False, 16, "modernbert"),
        (tiny.tiny_bert, {}, (9, 0), True, 64, None),
        (tiny.tiny_bert, {}, (7, 5), True, 64, "older"),
        (tiny.tiny_bert, {}, (9, 0), False, 64, "float32"),
        (tiny.tiny_bert, {}, (9, 0), True, 12, "head size of 12"),
        (tiny.tiny_bert, {}, (9, 0), True, 512, "head size of 512"),
    ],
)
def test_when_texts_are_padded(
    make, options, capability, half, head_size, named, monkeypatch
):
    """On a CPU, or on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    model = read_config(tiny.shared(make), trust_remote_code=False)
    model.head_dim = head_size
    config = config_for(make, **options)
    device = torch.device("cpu" if capability is None else "cuda")
    reason = attention.why_padded(config.model, model, device, half=half)
    assert reason is None if named is None else named in reason
