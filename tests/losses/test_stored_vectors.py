"""quantize_embeddings against its definition in float64: values, straight-through gradients, ranks, sizes."""

from dataclasses import replace

import pytest
import torch

from tests.losses.batches import (
    SIZES,
    assert_close,
    config_of,
    gradients,
    make_batch,
    rank_batches,
)
from vembed.losses.build import EDGE, build_loss

CASES = [
    {},
    {"mrl_dims": [4, 12], "learn_temperature": True},
    {"losses": [{"loss": "infonce"}, {"loss": "spread_out", "weight": 0.5}]},
    {"similarity": "dot"},
    {"loss": "cosent"},
]


def stored(vectors, form):
    """The definition: signs, or the middles of 256 levels of each coordinate."""
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    if form == "binary":
        return torch.where(unit > 0, 1.0, -1.0).double() / unit.shape[1] ** 0.5
    low = unit.min(0).values
    level = (unit.max(0).values - low) / 255
    number = ((unit - low) / level + EDGE).floor().clamp(0, 255)
    return low + (number + 0.5) * level


@pytest.mark.parametrize("form", ["int8", "binary"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_value_and_gradient(options, form):
    batch = make_batch(8, max_positives=2, num_contents=30)
    loss = build_loss(config_of(**options, quantize_embeddings=form), **SIZES).double()
    plain = build_loss(config_of(**options), **SIZES).double()
    for name, value in loss.named_parameters():
        plain.get_parameter(name.removeprefix("inner.")).data = value.data
    (actual,) = gradients(loss(batch), batch.embeddings)

    inputs = batch.embeddings.detach()
    lengths = inputs.norm(dim=1, keepdim=True)
    unit = inputs / lengths
    leaf = stored(inputs, form)
    if options.get("similarity") == "dot":
        leaf = leaf * lengths
    leaf = leaf.requires_grad_()
    of_stored = plain(replace(batch, embeddings=leaf))
    (through,) = gradients(of_stored, leaf)
    if options.get("similarity") != "dot":  # the derivative of the normalisation
        through = (through - unit * (unit * through).sum(1, keepdim=True)) / lengths
    as_is = plain(batch)
    (gradient,) = gradients(as_is, batch.embeddings)
    assert_close(loss(batch), 0.5 * (as_is + of_stored), 1e-12, "loss", 1.0)
    assert_close(actual, 0.5 * (gradient + through), 1e-11, "gradient", 1.0)


@pytest.mark.parametrize("form", ["int8", "binary"])
def test_shares_of_ranks_add_up(form):
    batch = make_batch(10, max_positives=2, num_contents=40)
    loss = build_loss(config_of(mrl_dims=[4, 12], quantize_embeddings=form)).double()
    whole = loss(batch)
    shares = [loss(part) for part in rank_batches(batch, [2, 3, 7])]
    assert_close(torch.stack(shares).sum(), whole, 1e-12, "loss", 1.0)
    (expected,) = gradients(whole, batch.embeddings)
    parts = [gradients(share, batch.embeddings)[0] for share in shares]
    assert_close(torch.stack(parts).sum(0), expected, 1e-11, "gradient", 1.0)
