"""Losses that follow teachers, through the real step on several ranks: every gradient is that of the formula."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness import RankFailed, run_ranks
from tests.parity import test_parity
from tests.parity.engine import (
    BATCH_NUMBER,
    MRL,
    Case,
    assert_equal_gradients,
    build,
    examples,
    formula_gradients,
    plain_batch,
    step_on_rank,
    with_whole_loss,
)
from tests.teachers.test_cache import Data, stores, teachers_of
from tests.tiny import shared, tiny_bert, tiny_reranker
from vembed.data.examples import Item
from vembed.losses.batch import TeacherScores, TeacherVectors
from vembed.losses.table import LOSSES
from vembed.parallel.session import start_session
from vembed.teachers import item_key, pair_key

EVERY_NEGATIVE = {
    "bidirectional": True,
    "same_side_negatives": "both",
}
GUIDED = {
    "loss": "infonce",
    "guide": "teacher",
    "guide_margin": 0.02,
    "hardness_alpha": 3.0,
    "focal_gamma": 1.0,
    "mix_negatives": 2,
}
DISTILLED = [
    {
        "loss": "kl",
        "distill_candidates": "batch",
        "weight": 0.5,
        "teacher_temperature": 0.1,
    },
    {"loss": "kl", "teacher": "reranker", "weight": 0.3, "temperature": 0.2},
    {"loss": "margin_mse", "teacher": "reranker"},
    {"loss": "score_mse", "temperature": 0.2},
    {"loss": "embedding", "weight": 2.0},
    {"loss": "relational"},
    {"loss": "spread_out", "weight": 0.2},
    {"loss": "circle", "temperature": 0.2, "guide": "teacher", "weight": 0.5},
]
CASES = [
    Case("guide", {"losses": [GUIDED], **EVERY_NEGATIVE}, data="several"),
    Case(
        "guide-own-kept-graphs",
        {"losses": [GUIDED], "hard_negatives_scope": "own"},
        data="several",
        cache=False,
    ),
    Case(
        "hardness-of-own-negatives",
        {"losses": [{**GUIDED, "hardness_scope": "own"}], **EVERY_NEGATIVE},
        data="several",
    ),
    Case("everything", {"losses": [GUIDED, *DISTILLED]}, data="several"),
    Case(
        "everything-matryoshka",
        {"losses": [GUIDED, *DISTILLED], **MRL},
        data="several",
        micro="row",
    ),
    Case(
        "graded",
        {
            "losses": [
                {"loss": "ranknet"},
                {"loss": "listwise"},
                {"loss": "kl", "teacher": "scores"},
                {"loss": "angle"},
            ],
            "temperature": 0.2,
        },
        data="graded",
        cache=False,
    ),
    # The adapters are not left at zero: at the start model itself the anchor has no gradient.
    Case(
        "anchor",
        {
            "losses": [{"loss": "infonce"}, {"loss": "anchor", "weight": 0.7}],
            "use_lora": True,
            "lora_r": 2,
        },
        data="several",
    ),
]
BY_NAME = {case.name: case for case in CASES}
GROUPS = ("ddp-2", "fsdp2-3-uneven")
TEACHER_DIM = 24


def with_teachers(case):
    """The case with two teachers: one whose vectors depend on the role, one that scores pairs."""
    teacher = str(shared(tiny_bert, layers=1, hidden=TEACHER_DIM))
    reranker = str(shared(tiny_reranker))
    teachers = [
        {"model": teacher, "name": "teacher", "query_prompt": "find the "},
        {"model": reranker, "name": "reranker", "scale": 0.5},
    ]
    return replace(case, options={**case.options, "teachers": teachers})


def num_added(teachers):
    return sum(teacher.store.num_added for teacher in teachers.by_name.values())


def on_ranks(cases, strategy, more, cache):
    """Called on every rank. The first case asks its teachers during the step, the others before it."""
    results = []
    first, folder = cases[0]
    with start_session(first.config(folder, strategy=strategy, **more)) as session:
        for number, (case, folder) in enumerate(cases):
            config = case.config(folder, strategy=strategy, **more)
            teachers = teachers_of(config, session, cache)
            rows = examples(case)
            if number:
                teachers.prepare(Data(rows, f"data-{case.data}"))
            before = num_added(teachers)
            actual, _ = step_on_rank(case, config, session, teachers=teachers)
            results.append((actual, num_added(teachers) - before))
    return results


@cache
def group_of(group):
    """All cases of a group in one start of its ranks, and the cache that they have filled."""
    world_size, strategy, more = test_parity.GROUPS[group]
    folder = Path(tempfile.mkdtemp(prefix="teachers-", dir=shared(tiny_bert).parent))
    placed = [(with_teachers(case), case.folder()) for case in CASES]
    try:
        by_rank = run_ranks(on_ranks, world_size, placed, strategy, more, folder)
    except RankFailed as error:
        return error, folder
    actual = {}
    for number, case in enumerate(CASES):
        gradients = with_whole_loss([steps[number][0] for steps in by_rank])
        num_later = sum(steps[number][1] for steps in by_rank)
        actual[case.name] = gradients, num_later
    return actual, folder


def wanted(case, folder):
    """From the formula, with the answers that the cache holds."""
    config = with_teachers(case).config(case.folder())
    model, loss, featuriser = build(config, {"teacher": TEACHER_DIM})
    batch = answered(case, plain_batch(case, model, featuriser), folder)
    return formula_gradients(config, model, loss, batch)


def answered(case, batch, folder):
    """The batch with the teachers' answers, one vector for each occurrence."""
    by_width = stores(folder)

    def answers(keys, width):
        rows = by_width[width].find_rows(keys)
        return torch.from_numpy(np.stack([rows[place] for place in range(len(keys))]))

    vectors = []
    positive = []
    negative = []
    plain = []
    for example in examples(case):
        vectors.append(item_key(example.query, "query"))
        plain.append(item_key(example.query, None))
        for keys, documents in (
            (positive, example.positives),
            (negative, example.negatives),
        ):
            for document in documents:
                vectors.append(item_key(document, "document"))
                plain.append(item_key(document, None))
                keys.append(pair_key(example.query, document))
    teachers = {}
    if case.name == "anchor":  # the start model gives an input one vector in both roles
        teachers[str(case.folder())] = TeacherVectors(
            answers(plain, 32), batch.query, batch.positive, batch.negative
        )
    elif case.data != "graded":
        scores = answers([*positive, *negative], 1)[:, 0] * 0.5
        teachers = {
            "teacher": TeacherVectors(
                answers(vectors, TEACHER_DIM),
                batch.query,
                batch.positive,
                batch.negative,
            ),
            "reranker": TeacherScores(scores[: len(positive)], scores[len(positive) :]),
        }
    return replace(batch, teachers=teachers, batch_number=BATCH_NUMBER)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("group", GROUPS)
def test_gradient_is_that_of_the_formula(group, name):
    actual, folder = group_of(group)
    if isinstance(actual, RankFailed):
        raise actual
    ours, num_later = actual[name]
    assert_equal_gradients(ours, wanted(BY_NAME[name], folder))
    assert bool(num_later) is (name == CASES[0].name), (
        "answers that were not prepared are computed during the step"
    )


def test_the_same_text_has_a_key_for_each_role():
    item = Item("text")
    assert len({item_key(item, role) for role in (None, "query", "document")}) == 3
    assert pair_key(item, Item("other")) != pair_key(Item("other"), item)


@pytest.mark.parametrize("name", LOSSES)
def test_every_declared_loss_goes_through_the_real_step(name):
    """With Gradient Cache, ranks and shards: in a case of this file or of test_parity.py."""
    losses = {"none"}  # a model's own losses are in tests/training
    for case in (*CASES, *test_parity.CASES):
        terms = case.options.get("losses", [])
        losses.add(case.options.get("loss", "infonce"))
        losses.update(term["loss"] for term in terms)
    assert name in losses, f"loss: {name} is in no case of tests/parity"
