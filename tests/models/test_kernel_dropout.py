"""Packed attention with dropout on GPUs without flash-attn: the arguments of torch's operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig

from vembed.models import packing

DROPOUT = 0.25


class Operator:
    """A stand-in with the signature of aten::_flash_attention_forward: computes on the CPU, notes its arguments."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, *given: Any, **named: Any) -> tuple[Tensor, ...]:
        schema = torch.ops.aten._flash_attention_forward.default._schema
        arguments = schema.arguments
        positional = [one.name for one in arguments if not one.kwarg_only]
        assert len(given) <= len(positional) and set(named) <= {
            one.name for one in arguments if one.kwarg_only
        }
        self.given = dict(zip(positional, given, strict=False)) | named
        query, key, value = (self.given[name] for name in ("query", "key", "value"))
        assert query.shape == key.shape == value.shape, (
            "the operator is given equally many heads"
        )
        assert self.given["cum_seq_q"].dtype == torch.int32
        pieces = packing.cut(
            tuple(self.given["cum_seq_q"].tolist()),
            2**20,
            self.given["is_causal"],
            named["window_size_left"] + 1 if "window_size_left" in named else None,
        )
        output = packing._by_sdpa(query, key, value, pieces, 0.0, named["scale"])
        return output, output, output, output, output


@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (False, 3), (True, 3)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_dropout_goes_to_the_operator(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: int | None, groups: int
):
    operator = Operator()
    monkeypatch.setattr(packing, "_flash_forward", lambda: operator)
    monkeypatch.setattr(packing, "is_flash_attn_2_available", lambda: False)
    draw = torch.Generator().manual_seed(0)
    lengths = [5, 1, 7]
    query, key, value = (
        torch.randn(13, heads, 8, generator=draw)
        for heads in (4, 4 // groups, 4 // groups)
    )
    packed = packing.Packed(
        torch.tensor([0, 5, 6, 13], dtype=torch.int32), max(lengths)
    )
    found = packing._by_kernel(query, key, value, packed, DROPOUT, 0.5, causal, window)
    pieces = packing.cut((0, 5, 6, 13), 2**20, causal, window)
    torch.testing.assert_close(
        found, packing._by_sdpa(query, key, value, pieces, 0.0, 0.5)
    )
    assert operator.given["dropout_p"] == DROPOUT
    assert operator.given["max_q"] == operator.given["max_k"] == 7
    assert operator.given["return_debug_mask"] is False


def test_models_with_dropout_were_padded_without_flash_attn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    gpu = torch.device("cuda")
    assert (
        packing._why_no_kernel(BertConfig(attention_probs_dropout_prob=0.1), gpu)
        is None
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_heads_that_the_derivative_refuses_were_packed(
    monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    monkeypatch.setattr(packing, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    odd = BertConfig(
        hidden_size=36, num_attention_heads=3, attention_probs_dropout_prob=dropout
    )
    assert "head size of 12" in str(packing._why_no_kernel(odd, torch.device("cuda")))


def test_the_signature_of_the_kernel_was_read_in_every_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def varlen(
        query: Tensor, *given: Any, enable_gqa: bool = False, **named: Any
    ) -> Tensor:
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr(packing, "is_flash_attn_2_available", lambda: False)
    packing._varlen_groups.cache_clear()
    read: list[object] = []
    original = packing.inspect.signature
    monkeypatch.setattr(
        packing.inspect, "signature", lambda one: read.append(one) or original(one)
    )
    packed = packing.Packed(torch.tensor([0, 3], dtype=torch.int32), 3)
    query, key = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    for _ in range(5):
        packing._by_kernel(query, key, key, packed, 0.0, 1.0, False, None)
    packing._varlen_groups.cache_clear()
    assert len(read) == 1
