"""Guides, hardness, mixtures and the losses that follow a teacher, each and together, against the plain formulas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.losses.batches import check, config_of, make_batch
from tests.tiny import shared, tiny_reranker
from vembed.errors import UserError
from vembed.losses.batch import draw_mixtures
from vembed.teachers import Teachers

MRL = {"mrl_dims": [8, 3, 12], "mrl_weights": [0.5, 2.0, 1.0]}
ALL_TERMS = {"bidirectional": True, "same_side_negatives": "both"}
ALL_OF_INFONCE = {
    "loss": "infonce",
    "guide": "vectors",
    "hardness_alpha": 2.0,
    "focal_gamma": 2.0,
    "mix_negatives": 2,
    **ALL_TERMS,
}
KL_BATCH = {"loss": "kl", "teacher": "vectors", "distill_candidates": "batch"}
OWN = {"hard_negatives_scope": "own"}
# Single options are those of test_contract.py; these go together.
TERMS = {
    # EmbeddingGemma's: in-batch positives, and each query's own hard negatives weighted by exp(5 s).
    "hardness-of-gemma": {
        "loss": "infonce",
        "hardness_alpha": 5.0,
        "hardness_scope": "own",
        **OWN,
    },
    "all-of-infonce": {**ALL_OF_INFONCE, "false_negative_margin": 0.3},
    "all-of-infonce-hardness-own": {
        **ALL_OF_INFONCE,
        "hardness_scope": "own",
        "false_negative_margin": 0.3,
    },
    "all-of-infonce-own": {**ALL_OF_INFONCE, **OWN},
    "circle-guided": {
        "loss": "circle",
        "guide": "vectors",
        "guide_margin": 0.1,
        "margin": 0.4,
        "temperature": 0.2,
        "false_negative_margin": 0.3,
        **OWN,
        **ALL_TERMS,
    },
    "guided-sigmoid": {"loss": "sigmoid", "guide": "vectors", "guide_margin": -0.1},
    "kl-scores": {"loss": "kl", "teacher": "scores", "learn_temperature": True},
    "kl-batch-own": {**KL_BATCH, **OWN, "learn_temperature": True},
}
TOGETHER = [
    {**ALL_OF_INFONCE, "false_negative_margin": 0.3},
    {**KL_BATCH, "teacher_temperature": 0.2},
    {"loss": "margin_mse", "teacher": "reranker"},
    {"loss": "ranknet", "temperature": 0.3},
    {"loss": "relational", "teacher": "vectors"},
    {"loss": "spread_out"},
    {"loss": "embedding", "teacher": "vectors"},
]


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("mrl", [{}, MRL], ids=["whole", "mrl"])
def test_each_loss_equals_its_formula(name, mrl):
    for max_positives, num_contents, seed in ((1, None, 0), (3, None, 1), (3, 9, 2)):
        batch = make_batch(
            7,
            max_positives=max_positives,
            max_negatives=4,
            num_contents=num_contents,
            seed=seed,
        )
        check(batch, config_of(**TERMS[name], **mrl))


@pytest.mark.parametrize("mrl", [{}, MRL], ids=["whole", "mrl"])
def test_losses_together_equal_the_sum(mrl):
    losses = []
    for number, term in enumerate(TOGETHER):
        losses.append({**term, "weight": 0.7 + 0.2 * number})
    batch = make_batch(6, max_positives=2, max_negatives=3, num_contents=60)
    check(batch, config_of(losses=losses, **mrl))


def test_mixtures_are_a_function_of_seed_batch_and_example():
    batch = make_batch(40, max_negatives=5, num_contents=None)
    drawn = draw_mixtures(batch, 42, 50)
    assert torch.equal(drawn.share, draw_mixtures(batch, 42, 50).share)
    assert not torch.equal(drawn.share, draw_mixtures(batch, 43, 50).share)
    assert (drawn.left != drawn.right).all()
    for parts in (drawn.left, drawn.right):
        assert torch.equal(batch.negative_example[parts], drawn.example)
    # Beta(2, 2): mean 1/2, variance 1/20.
    assert float(drawn.share.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(drawn.share.var()) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize(
    "options",
    [
        {"guide": "reranker"},
        {"loss": "kl", "teacher": "reranker", "distill_candidates": "batch"},
    ],
    ids=["guide", "kl"],
)
def test_scores_of_pairs_are_no_vectors(options):
    teacher = {"name": "reranker", "model": str(shared(tiny_reranker))}
    config = config_of(teachers=[teacher], **options)
    session = SimpleNamespace(mixed_precision="no")
    with pytest.raises(UserError, match="teacher reranker is a reranker"):
        Teachers(config.objective, config.data, config.model, session)
