"""Gradients of token embeddings that are added row by row are those of torch."""

import pytest
import torch
from torch import nn

from vembed.models import precision
from vembed.models.precision import use_row_gradients


def gradient(table, micro_batches, *, tied):
    """Return the gradient after several micro-batches, where the table may also be the matrix of a product."""
    for number, ids in enumerate(micro_batches):
        values = table(ids)
        loss = (values * (number + 1 + values.cos())).sum()
        if tied:
            loss = loss + (values @ table.weight.T).sin().sum()
        loss.backward()
        assert table.weight.grad is not None
        assert table.weight.grad.layout == torch.strided
    assert table.weight.grad is not None
    return table.weight.grad


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
def test_gradients_match_a_float64_reference(padding, tied, monkeypatch):
    monkeypatch.setattr(precision, "MIN_TABLE_ROWS", 40)
    torch.manual_seed(0)
    table = nn.Embedding(40, 6, padding_idx=padding)
    exact = nn.Embedding(40, 6, padding_idx=padding).double()
    exact.load_state_dict(table.state_dict())
    use_row_gradients(nn.Sequential(table))
    assert table.sparse
    # Tokens repeat within a micro-batch and between them, and some rows get nothing.
    micro_batches = [torch.randint(0, 20, (3, 17)) for _ in range(3)]
    actual, expected = (
        gradient(entry, micro_batches, tied=tied) for entry in (table, exact)
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().sum() > 0
    if padding is not None and not tied:
        assert not actual[padding].any()


def test_small_and_frozen_tables_stay_as_they_are():
    large, small, frozen = (
        nn.Embedding(rows, 2) for rows in (precision.MIN_TABLE_ROWS, 512, 30_000)
    )
    frozen.requires_grad_(False)
    use_row_gradients(nn.Sequential(large, small, frozen))
    assert [large.sparse, small.sparse, frozen.sparse] == [True, False, False]
