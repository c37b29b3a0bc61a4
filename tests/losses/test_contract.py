"""What every declared loss must keep: its formula, with every option, size, rank and temperature.

The cases follow from the declarations. A new loss is tested here as soon as it is in `table.py`.
"""

import pydoc
from dataclasses import replace
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import torch

import vembed.losses
from tests.data.files import pair, refused_rows
from tests.losses import reference
from tests.losses.batches import (
    SIZES,
    check,
    config_of,
    gradients,
    make_batch,
    rank_batches,
    tiled,
)
from tests.parts import unlisted_classes
from vembed.config.loading import load_config
from vembed.config.schema import TrainConfig
from vembed.config.terms import loss_terms, source_terms
from vembed.losses.build import build_loss
from vembed.losses.declaration import LossDeclaration
from vembed.losses.table import LOSSES, check_losses

MRL = {"mrl_dims": [8, 4, 12], "mrl_weights": [0.5, 2.0, 1.0]}
TEACHERS = {"teacher": ["vectors", "reranker", "scores"], "vectors": ["vectors"]}


EACH = [name for name, loss in LOSSES.items() if loss.negatives == "each"]
SOME = [name for name, loss in LOSSES.items() if loss.negatives == "some"]
SCORED = [name for name, loss in LOSSES.items() if loss.records == "scores"]


def other_values(annotation, default):
    """Values of an option besides its default."""
    if get_origin(annotation) is Annotated:
        return other_values(get_args(annotation)[0], default)
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if value != default]
    if get_origin(annotation) in (Union, UnionType) or default is None:
        members = [
            member for member in get_args(annotation) if member is not type(None)
        ]
        return other_values(members[0], 0.0) if members else []
    if annotation is bool:
        return [not default]
    if annotation is int:
        return [default + 2]
    # No usual default of another loss, which one that ignores the option might have.
    return [default + 0.17] if annotation is float else []


def cases_of(loss):
    """Options that select a loss: its defaults, each option changed alone, and each kind of teacher."""
    base = {"loss": loss.name}
    if loss.follows in TEACHERS:
        base["teacher"] = "vectors"
    cases = [base]
    for teacher in TEACHERS.get(loss.follows, [])[1:]:
        cases.append({**base, "teacher": teacher})
    if loss.follows == "scores_or_teacher":
        cases.append({**base, "teacher": "vectors"})
    for name, field in loss.model_fields.items():
        if name == "guide":
            cases.append({**base, "guide": "vectors"})
        elif name.startswith("guide_"):
            for value in other_values(field.annotation, field.default):
                margin = {"guide": "vectors", "guide_margin": 0.1}
                cases.append({**base, **margin, name: value})
        elif name != "teacher":
            for value in other_values(field.annotation, field.default):
                cases.append({**base, name: value})
    return cases


BOTH_SIDES = {"bidirectional": True, "same_side_negatives": "both"}
LEARN = {"learn_temperature": True}
GUIDE = {"guide": "vectors", "guide_margin": 0.1}
MARGIN = {"false_negative_margin": 0.3}
OWN = {"hard_negatives_scope": "own"}
ALL_OF_INFONCE = {
    "loss": "infonce",
    "guide": "vectors",
    "hardness_alpha": 2.0,
    "focal_gamma": 2.0,
    "mix_negatives": 2,
    **BOTH_SIDES,
    **LEARN,
}
KL_BATCH = {"loss": "kl", "teacher": "vectors", "distill_candidates": "batch"}
TERMS = [
    {**ALL_OF_INFONCE, **MARGIN},
    {**KL_BATCH, "teacher_temperature": 0.2, "weight": 0.7},
    {"loss": "margin_mse", "teacher": "reranker", "weight": 1.3},
    {"loss": "ranknet", "temperature": 0.3},
    {"loss": "relational", "teacher": "vectors"},
    {"loss": "spread_out", "weight": 0.5},
    {"loss": "embedding", "teacher": "vectors"},
]
COMBINED = [
    # EmbeddingGemma's: in-batch positives, and each query's own hard negatives weighted by exp(5 s).
    {"loss": "infonce", "hardness_alpha": 5.0, "hardness_scope": "own", **OWN},
    {**ALL_OF_INFONCE, **MARGIN},
    {**ALL_OF_INFONCE, **MARGIN, "hardness_scope": "own"},
    {**ALL_OF_INFONCE, **OWN},
    {"loss": "circle", "margin": 0.4, **GUIDE, **MARGIN, **OWN, **BOTH_SIDES},
    {"loss": "sigmoid", "guide": "vectors", "guide_margin": -0.1},
    {"loss": "sigmoid", **BOTH_SIDES, **LEARN},
    {"loss": "cosent", **LEARN},
    {"loss": "kl", "teacher": "scores", **LEARN},
    {"loss": "bce", "teacher": "reranker"},
    {**KL_BATCH, **OWN, **LEARN},
    {"losses": TERMS},
]
"""Options that go together."""

CASES = [*COMBINED]
for loss_class in LOSSES.values():
    CASES += cases_of(loss_class)


@pytest.mark.parametrize("name", LOSSES)
def test_it_has_a_reference(name):
    assert callable(reference.reference_of(name))


@pytest.mark.promise("D24")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_its_formula(case):
    """Alone, and at Matryoshka sizes with dot products and duplicates of every kind. Shares of ranks have cosines at
    Matryoshka sizes."""
    batch = make_batch(7, max_positives=2, max_negatives=4, num_contents=40)
    check(batch, config_of(**case))
    crowded = make_batch(6, max_positives=3, max_negatives=3, num_contents=9, seed=2)
    check(
        crowded, config_of(**{"temperature": 1.0, **case, "similarity": "dot"}, **MRL)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shares_of_ranks_add_up(case):
    """Those of no example, of one, and of several."""
    batch = make_batch(7, max_positives=2, max_negatives=3, num_contents=60, seed=3)
    config = config_of(**case, **MRL)
    parts = rank_batches(batch, [0, 1, 4, 4])
    for part in parts:
        check(part, config)
    loss = build_loss(config, **SIZES).double()
    whole = float(loss(batch).detach())
    total = sum(float(loss(part).detach()) for part in parts)
    assert total == pytest.approx(whole, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_tiles_change_nothing(name):
    batch = make_batch(9, max_positives=2, max_negatives=3, num_contents=60)
    for case in cases_of(LOSSES[name])[:2]:
        config = config_of(**case, **MRL)
        loss = build_loss(config, **SIZES)
        with tiled(5, 7):
            check(batch, config, loss)


@pytest.mark.parametrize("name", LOSSES)
def test_one_loss_is_a_list_of_one(name):
    """Also for CLIP, whose files name a temperature."""
    batch = make_batch(7, max_positives=2, max_negatives=3)
    case = cases_of(LOSSES[name])[0]
    for start_scale in (None, 100.0):
        alone = build_loss(config_of(**case), start_scale=start_scale, **SIZES)
        listed = build_loss(config_of(losses=[case]), start_scale=start_scale, **SIZES)
        value = alone.double()(batch)
        of_listed = listed.double()(batch)
        assert torch.equal(value, of_listed)
        (first,) = gradients(value, batch.embeddings)
        (second,) = gradients(of_listed, batch.embeddings)
        assert torch.equal(first, second)


def without_negatives(batch):
    none = batch.negative[:0]
    teachers = {}
    for name, answers in batch.teachers.items():
        teachers[name] = replace(answers, negative=none)  # type: ignore[type-var]
    return replace(
        batch,
        negative=none,
        negative_example=none,
        negative_label_scores=batch.negative_label_scores[:0],
        teachers=teachers,
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "none"])
def test_it_declares_the_negatives_without_which_it_is_zero(name):
    batch = without_negatives(make_batch(7, max_positives=2))
    for case in cases_of(LOSSES[name]):
        config = config_of(**case)
        ((term,), *_) = source_terms(config.objective, config.data, "none")
        value = float(build_loss(config, **SIZES).double()(batch).detach())
        declared = term.loss.needed_negatives()
        is_needed = declared in ("some", "each")
        assert (value == 0.0) is is_needed, (
            f"{case} is {value} without negatives, and declares `negatives = {declared!r}`"
        )


@pytest.mark.parametrize("name", ["bce", "lambda", "ranknet", "listwise"])
def test_negatives_may_lack_a_score(name):
    batch = make_batch(7, max_positives=2, max_negatives=4)
    batch.negative_label_scores[::2] = torch.nan
    check(batch, config_of(loss=name))


@pytest.mark.parametrize("name", SCORED)
def test_equal_scores_have_a_finite_gradient(name):
    """As in a batch of one grade: there is no order to learn, but nothing may divide by their spread."""
    batch = make_batch(5, max_positives=1)
    batch = replace(batch, label_scores=torch.full_like(batch.label_scores, 0.5))
    loss = build_loss(config_of(loss=name), **SIZES).double()
    value = loss(batch)
    gradient, *_ = gradients(value, batch.embeddings)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


def temperatures(**options):
    """(temperature, its source) of every loss, of a model that was trained with one."""
    config = TrainConfig(model_name="m", **{"data_path": "d", **options})
    source = config.data.sources()[0]
    terms = loss_terms(config.objective, "m", source, model_temperature=0.01)
    return {
        term.loss.name: (term.temperature, term.temperature_source) for term in terms
    }


def test_temperatures_are_resolved_by_term_and_by_source():
    losses = [{"loss": name} for name in LOSSES]
    actual = temperatures(losses=losses)
    assert actual["cosent"] == (0.1, "default of loss: cosent")
    assert actual["infonce"] == (0.01, "with which this model was trained")
    assert actual["circle"] == (0.05, "default")
    assert actual["triplet"][0] is None
    actual = temperatures(losses=losses, temperature=0.3)
    assert {value for value in actual.values() if value[0]} == {(0.3, "given")}
    source = {"path": "d", "losses": [{"loss": "cosent"}]}
    assert temperatures(data_path=[source])["cosent"][0] == 0.1
    source["temperature"] = 0.2
    actual = temperatures(data_path=[source])
    assert actual["cosent"] == (0.2, "given")


def test_every_loss_is_in_the_table():
    missing = []
    for name in unlisted_classes(vembed.losses, LossDeclaration, LOSSES.values()):
        loss = pydoc.locate(name)
        if hasattr(loss, "name"):
            missing.append(name)
    assert not missing, f"list these in vembed/losses/table.py: {missing}"


class OtherTriplet(LOSSES["triplet"]):
    """With another default for a shared option."""

    name = "other_triplet"
    summary = "the same as triplet, by another margin"
    margin: float | None = 0.3
    """loss: other_triplet: the margin."""


def test_an_option_that_losses_share_has_one_default():
    with pytest.raises(TypeError, match=r"OtherTriplet .*`margin: "):
        check_losses((LOSSES["triplet"], OtherTriplet))


@pytest.mark.parametrize("name", [*EACH, *SOME])
def test_data_without_the_negatives_that_it_needs_are_refused(name, tmp_path):
    teacher = {"teacher": "t"} if name in SOME else {}
    assert f"loss: {name}" in refused_rows(tmp_path, [pair()], loss=name, **teacher)


def test_options_of_losses_are_options_of_the_config():
    losses = [{"loss": "triplet", "margin": 0.3}, {"loss": "circle"}]
    values = {"model_name": "m", "data_path": "d", "losses": losses}
    config = load_config({**values, "circle_margin": 0.4})
    terms = source_terms(config.objective, config.data, "m")[0]
    assert [dict(term.loss)["margin"] for term in terms] == [0.3, 0.4]
