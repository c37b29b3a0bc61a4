"""Guides, hardness, mixtures and the losses that follow a teacher, each and in pairs, against the plain formulas."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.losses.batches import SIZES, check, config_of, make_batch
from tests.losses.test_ranks import rank_batches as rank_views
from vembed.errors import UserError
from vembed.losses.build import TermLoss, build_loss
from vembed.losses.mixing import draw_mixtures
from vembed.losses.tiles import Tiling

MRL = {"mrl_dims": [8, 3, 12], "mrl_weights": [0.5, 2.0, 1.0]}
ALL_TERMS = {
    "bidirectional": True,
    "same_side_negatives": "both",
}
TERMS: dict[str, dict[str, Any]] = {
    # Single options are those of test_contract.py; these go together.
    "guide-own": {"loss": "infonce", "guide": "vectors", "hard_negatives_scope": "own"},
    "hardness-learned": {
        "loss": "infonce",
        "hardness_alpha": 4.0,
        "learn_temperature": True,
    },
    "focal-half": {"loss": "infonce", "focal_gamma": 0.5, "temperature": 0.5},
    "mixtures-own": {
        "loss": "infonce",
        "mix_negatives": 2,
        "hard_negatives_scope": "own",
    },
    "all-of-infonce": {
        "loss": "infonce",
        "guide": "vectors",
        "hardness_alpha": 2.0,
        "focal_gamma": 2.0,
        "mix_negatives": 2,
        "false_negative_margin": 0.3,
        **ALL_TERMS,
    },
    "all-of-infonce-own": {
        "loss": "infonce",
        "guide": "vectors",
        "hardness_alpha": 2.0,
        "focal_gamma": 2.0,
        "mix_negatives": 2,
        "hard_negatives_scope": "own",
        **ALL_TERMS,
    },
    "circle-guided": {
        "loss": "circle",
        "guide": "vectors",
        "guide_margin": 0.1,
        "margin": 0.4,
        "temperature": 0.2,
        "hard_negatives_scope": "own",
        "false_negative_margin": 0.3,
        **ALL_TERMS,
    },
    "guided-sigmoid": {"loss": "sigmoid", "guide": "vectors", "guide_margin": -0.1},
    "kl": {"loss": "kl", "teacher": "vectors", "teacher_temperature": 0.3},
    "kl-scores": {"loss": "kl", "teacher": "scores", "learn_temperature": True},
    "kl-batch": {
        "loss": "kl",
        "teacher": "vectors",
        "distill_candidates": "batch",
        "teacher_temperature": 0.2,
    },
    "kl-batch-own": {
        "loss": "kl",
        "teacher": "vectors",
        "distill_candidates": "batch",
        "hard_negatives_scope": "own",
        "learn_temperature": True,
    },
    "margin-mse": {"loss": "margin_mse", "teacher": "reranker"},
    "ranknet": {"loss": "ranknet", "temperature": 0.3},
    "relational": {"loss": "relational", "teacher": "vectors"},
    "spread-out": {"loss": "spread_out"},
    "embedding": {"loss": "embedding", "teacher": "vectors"},
    "anchor": {"loss": "anchor"},
}
PAIRS = list(
    itertools.combinations(
        [
            "all-of-infonce",
            "kl-batch",
            "kl",
            "margin-mse",
            "ranknet",
            "relational",
            "spread-out",
            "embedding",
        ],
        2,
    )
)


class LiveMemory(TorchDispatchMode):
    """Bytes of all tensors that operations have returned and that are still alive: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._known:
            self._known.add(address)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("mrl", [{}, MRL], ids=["whole", "mrl"])
def test_each_loss_equals_its_formula(name: str, mrl: dict[str, Any]) -> None:
    for max_positives, num_contents, seed in ((1, None, 0), (3, None, 1), (3, 9, 2)):
        batch = make_batch(
            7,
            max_positives=max_positives,
            max_negatives=4,
            num_contents=num_contents,
            seed=seed,
        )
        check(batch, config_of(**TERMS[name], **mrl))


@pytest.mark.parametrize("name", TERMS)
def test_with_dot_products(name: str) -> None:
    options: dict[str, Any] = {
        "temperature": 1.0,
        **TERMS[name],
        "similarity": "dot",
        "mrl_dims": [5, 12],
    }
    options["temperature"] = 1.0
    check(
        make_batch(6, max_positives=2, max_negatives=3, num_contents=20),
        config_of(**options),
    )


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_each_pair_of_losses_equals_the_sum(one: str, other: str) -> None:
    losses = [{**TERMS[one], "weight": 0.7}, {**TERMS[other], "weight": 1.3}]
    batch = make_batch(6, max_positives=2, max_negatives=3, num_contents=60)
    check(batch, config_of(losses=losses, **MRL))
    check(batch, config_of(losses=losses))


@pytest.mark.parametrize("cuts", [[3], [1, 6]], ids=["two-ranks", "three-ranks"])
@pytest.mark.parametrize("name", TERMS)
def test_each_share_is_that_of_the_formula_and_they_add_up(
    name: str, cuts: list[int]
) -> None:
    batch = make_batch(7, max_positives=2, max_negatives=3, num_contents=60, seed=3)
    config = config_of(**TERMS[name], **MRL)
    parts = rank_views(batch, cuts)
    for part in parts:
        check(part, config)
    loss = build_loss(config, **SIZES).double()
    assert float(sum(loss(part).detach() for part in parts)) == pytest.approx(
        float(loss(batch).detach()), rel=1e-12
    )


def test_mixtures_are_a_function_of_seed_batch_and_example() -> None:
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


def test_scores_of_pairs_are_no_vectors() -> None:
    batch = make_batch(4)
    for options in (
        {"guide": "reranker"},
        {"loss": "relational", "teacher": "reranker"},
        {"loss": "kl", "teacher": "reranker", "distill_candidates": "batch"},
    ):
        with pytest.raises(
            UserError, match="needs the teacher's vectors, and reranker gives scores"
        ):
            build_loss(config_of(**options))(batch)
    with pytest.raises(UserError, match="teacher nobody says nothing about this batch"):
        build_loss(config_of(loss="kl", teacher="nobody"))(batch)


def test_autocast_changes_nothing() -> None:
    batch = make_batch(6, max_negatives=3, dtype=torch.float32)
    apart = ("kl-scores", "guided-sigmoid", "anchor-weight")
    losses = [dict(one) for name, one in TERMS.items() if name not in apart]
    loss = build_loss(config_of(losses=losses, **MRL), **SIZES)
    value = loss(batch)
    (plain,) = torch.autograd.grad(value, batch.embeddings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = loss(batch)
        (gradient,) = torch.autograd.grad(again, batch.embeddings)
    assert torch.equal(value, again) and torch.equal(plain, gradient)


def test_several_losses_hold_one_gradient() -> None:
    """The peak of a guided InfoNCE with kl over the batch and spread_out is below twice that of InfoNCE alone."""
    peaks = []
    options = {"mrl_dims": [16, 32, 48, 64]}
    guided = [
        {"loss": "infonce", "guide": "vectors"},
        TERMS["kl-batch"],
        {"loss": "spread_out"},
    ]
    for losses in ([{"loss": "infonce"}], guided):
        batch = make_batch(1500, dim=64, max_negatives=0, dtype=torch.float32)
        loss = build_loss(config_of(losses=losses, **options))
        for term in loss.modules():
            if isinstance(term, TermLoss):
                term.tiling = Tiling(64, 512)
        with LiveMemory() as memory:
            loss(batch).backward()
        peaks.append(memory.peak)
    assert 10**6 < peaks[0] < peaks[1] < 2 * peaks[0], peaks
