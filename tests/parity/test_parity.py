"""After backward every parameter's gradient is that of the formula on the whole global batch, in float64, to 1e-9."""

from functools import cache

import pytest

from tests.harness import RankFailed, run_ranks
from tests.parity.engine import (
    LORA,
    MRL,
    Case,
    assert_equal_gradients,
    reference,
    steps_on_ranks,
    with_whole_loss,
)

CASES = [
    Case("plain", data="pairs", micro="whole", cache=False),
    Case("plain-cached-rows", data="pairs", micro="row"),
    Case("hard-negatives"),
    Case("own-negatives", {"hard_negatives_scope": "own"}, micro="whole"),
    Case(
        "document-document",
        {"same_side_negatives": "documents"},
        data="several",
        micro="row",
        cache=False,
    ),
    Case(
        "everything",
        {
            "bidirectional": True,
            "same_side_negatives": "both",
            "false_negative_margin": 0.05,
            "learn_temperature": True,
            **MRL,
        },
        data="several",
    ),
    Case("dot-product", {"similarity": "dot", "temperature": 1.0}),
    Case("matryoshka-projection", {"mrl_dims": [16, 8]}, micro="row"),
    Case("cosent", {"loss": "cosent", **MRL}, data="scored", micro="row"),
    Case("cosine", {"loss": "cosine"}, data="scored", cache=False),
    Case("triplet", {"loss": "triplet"}),
    Case("sigmoid", {"loss": "sigmoid"}),
    Case("checkpointing", {"gradient_checkpointing": True}),
    Case(
        "checkpointing-kept-graphs",
        {"gradient_checkpointing": True, **MRL},
        micro="whole",
        cache=False,
    ),
    Case("lora", LORA),
    Case(
        "lora-checkpointing-rows", {**LORA, "gradient_checkpointing": True}, micro="row"
    ),
    Case("dropout", dropout=0.1),
    Case("dropout-checkpointing", {"gradient_checkpointing": True}, dropout=0.1),
    Case("dropout-lora", {**LORA, "lora_dropout": 0.1}, dropout=0.1),
    Case("frozen-layers", {"freeze": ["embeddings", "first_n_layers=1"]}),
]
RERANK = {"task": "rerank", "temperature": 1.0}
for listwise in ("bce", "ranknet", "lambda", "margin_mse", "mse", "kl", "listwise"):
    options = {**RERANK, "loss": listwise, "teacher": "scores"}
    CASES.append(Case(f"rerank-{listwise}", options, data="graded"))
CASES += [
    Case("rerank-infonce", {**RERANK, "loss": "infonce"}),
    Case("rerank-kept-graphs", {**RERANK, "loss": "infonce"}, cache=False),
    Case("rerank-labels", {**RERANK, "loss": "bce"}, data="several", micro="row"),
    Case("rerank-dropout", {**RERANK, "loss": "infonce"}, dropout=0.1),
    Case("rerank-lora", {**RERANK, **LORA, "loss": "bce"}),
]
BY_NAME = {case.name: case for case in CASES}
GROUPS = {
    "one": (1, "single", {}),
    "ddp-2": (2, "ddp", {}),
    "ddp-3-uneven": (3, "ddp", {}),
    "fsdp2-3-uneven": (3, "fsdp", {}),
    "fsdp1-2": (2, "fsdp", {"fsdp_version": 1}),
}
SOME = (
    "hard-negatives",
    "everything",
    "checkpointing",
    "lora",
    "dropout",
    "cosent",
    "frozen-layers",
    "rerank-lambda",
    "rerank-infonce",
    "rerank-dropout",
)
"""What runs on every strategy; on two processes everything does."""
TABLE = [
    (group, case.name)
    for group in GROUPS
    for case in CASES
    if group == "ddp-2" or case.name in SOME
]


@cache
def found(group):
    """All cases of a group, in one start of its ranks."""
    world_size, strategy, more = GROUPS[group]
    cases = [BY_NAME[name] for of, name in TABLE if of == group]
    # The folders are made here: training a tokenizer is not the same in every process.
    placed = [(case, case.folder()) for case in cases]
    try:
        by_rank = run_ranks(steps_on_ranks, world_size, placed, strategy, more)
    except RankFailed as error:
        return {case.name: error for case in cases}  # started once, also where it fails
    by_name = {}
    for number, case in enumerate(cases):
        by_name[case.name] = with_whole_loss([steps[number][0] for steps in by_rank])
    return by_name


@cache
def wanted(name, world_size):
    return reference(BY_NAME[name], world_size)


@pytest.mark.parametrize(
    ("group", "name"), TABLE, ids=[f"{group}-{name}" for group, name in TABLE]
)
@pytest.mark.promise("C12", "D27", "D32")
def test_gradient_is_that_of_the_formula(group, name):
    world_size = GROUPS[group][0]
    ours = found(group)[name]
    if isinstance(ours, RankFailed):
        raise ours
    case = BY_NAME[name]
    # Without dropout the reference is the same for any number of ranks.
    draws_depend_on_ranks = case.dropout or case.options.get("lora_dropout")
    plain = wanted(name, world_size if draws_depend_on_ranks else 1)
    assert_equal_gradients(ours, plain)
