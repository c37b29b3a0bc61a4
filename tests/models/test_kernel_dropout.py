"""Packed attention with dropout on GPUs without flash-attn: the arguments of torch's operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vembed.models import attention

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
        pieces = attention.cut(
            tuple(self.given["cum_seq_q"].tolist()),
            2**20,
            self.given["is_causal"],
            named["window_size_left"] + 1 if "window_size_left" in named else None,
        )
        output = attention.sdpa_by_piece(query, key, value, pieces, 0.0, named["scale"])
        return output, output, output, output, output


@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (False, 3), (True, 3)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_dropout_goes_to_the_operator(monkeypatch, causal, window, groups):
    operator = Operator()
    monkeypatch.setattr(attention, "_flash_forward", lambda: operator)
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    draw = torch.Generator().manual_seed(0)
    lengths = [5, 1, 7]
    query, key, value = (
        torch.randn(13, heads, 8, generator=draw)
        for heads in (4, 4 // groups, 4 // groups)
    )
    packed = attention.Packed(
        torch.tensor([0, 5, 6, 13], dtype=torch.int32), max(lengths)
    )
    found = attention.by_kernel(query, key, value, packed, DROPOUT, 0.5, causal, window)
    pieces = attention.cut((0, 5, 6, 13), 2**20, causal, window)
    torch.testing.assert_close(
        found, attention.sdpa_by_piece(query, key, value, pieces, 0.0, 0.5)
    )
    assert operator.given["dropout_p"] == DROPOUT
    assert operator.given["max_q"] == operator.given["max_k"] == 7
    assert operator.given["return_debug_mask"] is False


@pytest.mark.parametrize(("size", "said"), [(64, "None"), (12, "head size of 12")])
def test_sizes_of_heads_without_flash_attn(size, said, monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert said in str(attention.why_no_kernel(size, torch.device("cuda"), half=True))
