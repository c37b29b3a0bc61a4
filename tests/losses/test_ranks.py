"""Each rank computes its own rows' share; the shares add up to the loss and gradient of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.losses.batches import (
    assert_close,
    check,
    config_of,
    gradients,
    make_batch,
    term_sizes,
)
from vembed.losses.batch import LossBatch
from vembed.losses.build import build_loss

CASES = [
    {},
    {
        "bidirectional": True,
        "same_side_negatives": "both",
    },
    {
        "mrl_dims": [4, 12],
        "false_negative_margin": 0.1,
        "learn_temperature": True,
    },
    {"hard_negatives_scope": "own", "same_side_negatives": "documents"},
    {"bidirectional": True},
    {"losses": [{"loss": "infonce", "hardness_alpha": 5.0, "hardness_scope": "own"}]},
    {"loss": "sigmoid", "mrl_dims": [4, 12]},
    {"loss": "cosent", "learn_temperature": True},
    {"loss": "angle", "learn_temperature": True},
    {"loss": "cosine"},
    {"loss": "triplet", "mrl_dims": [4, 12]},
]


def rank_batches(batch: LossBatch, cuts: list[int]) -> list[LossBatch]:
    """The batch as ranks see it that hold the examples between the cuts."""
    examples = batch.example.unique().tolist()
    parts = []
    for first, last in zip([0, *cuts], [*cuts, len(examples)], strict=True):
        mine = torch.tensor(examples[first:last], dtype=torch.int64)
        rows, negatives = (
            torch.isin(x, mine).nonzero().flatten()
            for x in (batch.example, batch.negative_example)
        )
        row_start, negative_start = (
            (int(rows[0]) if len(rows) else 0),
            (int(negatives[0]) if len(negatives) else 0),
        )
        parts.append(
            replace(
                batch,
                rank_rows=slice(row_start, row_start + len(rows)),
                rank_negatives=slice(negative_start, negative_start + len(negatives)),
            )
        )
    return parts


@pytest.mark.parametrize("cuts", [[], [5], [1, 9], [0, 4, 4], [2, 3, 10]], ids=str)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_shares_add_up(options: dict[str, object], cuts: list[int]) -> None:
    batch = make_batch(10, max_positives=2, num_contents=40)
    config = config_of(**options)
    loss = build_loss(config).double()
    inputs = [batch.embeddings, *loss.parameters()]
    terms = term_sizes(batch, config, loss)
    names = ["embeddings", *(name for name, _ in loss.named_parameters())]
    whole = loss(batch)
    wanted = gradients(whole, *inputs)
    found = [loss(part) for part in rank_batches(batch, cuts)]
    assert_close(torch.stack(found).sum(), whole, 1e-12, "loss", terms["loss"])
    by_rank = zip(
        *(gradients(rank_batch, *inputs) for rank_batch in found), strict=True
    )
    for name, parts, want in zip(names, by_rank, wanted, strict=True):
        assert_close(
            torch.stack(parts).sum(0), want, 1e-12, f"gradient of {name}", terms[name]
        )


def test_a_row_split_from_its_example_is_no_different() -> None:
    batch = make_batch(6, max_positives=3)
    config = config_of(hard_negatives_scope="own", bidirectional=True)
    for start in range(batch.num_rows):
        check(replace(batch, rank_rows=slice(start, start + 1)), config)
