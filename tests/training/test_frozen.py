"""cache_frozen_features: what a frozen tower gives is computed once, kept, and changes no digit of the training."""

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import vembed
from tests.families.pictures import words_and_pictures
from tests.harness import STRATEGIES, result_of, run_cases, run_ranks
from tests.tiny import WORDS, shared, tiny_clip, tiny_siglip
from tests.training.test_run import final_weights, log_text, losses_and_norms, metrics
from tests.training.tiny_run import assert_same
from vembed.data import row_store
from vembed.errors import UserError
from vembed.models import embedding_model
from vembed.models.embedding_model import EmbeddingModel

NUM_ROWS = 16
FROZEN = {
    "freeze": ["vision"],
    "learning_rate": 1e-2,
    "use_gradient_cache": True,
    "logging_steps": 1,
    "report_to": [],
}


@pytest.fixture(autouse=True)
def cache(cache_home):
    """Where outputs of frozen towers are kept."""
    return cache_home / "vembed" / "features"


def options(folder, output, **more):
    """Two epochs of four steps over pictures of which none occurs twice; micro-batches of one row, because the last
    digits of a matrix product depend on the number of its rows."""
    data = folder / "train.jsonl"
    if not data.exists():
        words_and_pictures(folder, WORDS[:NUM_ROWS], 1, "train", seed=0)
    return {
        **FROZEN,
        "model_name": str(shared(tiny_clip, dropout=0.3)),
        "data_path": str(data),
        "output_dir": str(folder / output),
        "global_batch_size": 4,
        "epochs": 2,
        "micro_batch_tokens": 1,
        "cache_frozen_features": True,
        **more,
    }


def train(settings):
    """One run: its losses and gradient norms, and how many pictures passed the image tower in it."""
    passed = []
    image_states = embedding_model.image_states
    tower_output = EmbeddingModel.tower_output

    def counted_states(backbone, inputs):
        passed.append(len(inputs["image_grid_thw"]))
        return image_states(backbone, inputs)

    def counted_output(model, modality, inputs):
        if "pixel_values" in inputs:
            passed.append(len(inputs.get("image_grid_thw", inputs["pixel_values"])))
        return tower_output(model, modality, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_model, "image_states", counted_states)
        patch.setattr(EmbeddingModel, "tower_output", counted_output)
        vembed.train(settings)
    losses = losses_and_norms(settings["output_dir"])
    return {"losses": losses, "passed": sum(passed)}


def train_there(cache, settings):
    """On a rank, whose server took over the environment of the test that came first."""
    os.environ["XDG_CACHE_HOME"] = cache
    return train(settings)


NUM_EVALUATED = 5


def with_evaluations(folder, output, **more):
    """Evaluations before training, in it and after it; micro-batches of one row, as in training."""
    data = folder / "val.jsonl"
    if not data.exists():
        words_and_pictures(folder, WORDS[:NUM_EVALUATED], 1, "val", seed=1)
    val = {
        "val_data_path": str(data),
        "eval_steps": 4,
    }
    return options(folder, output, **val | more)


def test_later_epochs_evaluations_and_runs_pass_no_tower_and_nothing_else_changes(
    tmp_path,
):
    without = train(with_evaluations(tmp_path, "without", cache_frozen_features=False))
    first = train(with_evaluations(tmp_path, "first"))
    num_inputs = NUM_ROWS + NUM_EVALUATED
    num_read = NUM_ROWS + 2 * NUM_EVALUATED
    counts = f"frozen image tower: {num_inputs} outputs computed, {num_read} read from"
    assert counts in log_text(tmp_path / "first")
    second = train(with_evaluations(tmp_path, "second"))
    dummy = 1
    # Once per step, also under Gradient Cache.
    assert without["passed"] == 2 * NUM_ROWS + 3 * NUM_EVALUATED + dummy
    assert first["passed"] == num_inputs + dummy
    assert second["passed"] == dummy
    assert first["losses"] == second["losses"] == without["losses"]
    expected = final_weights(tmp_path / "without")
    scores = metrics(tmp_path / "without", "eval")
    assert len(scores) == 3 and scores[0] != scores[2]
    for output in ("first", "second"):
        assert_same(final_weights(tmp_path / output), expected)
        assert metrics(tmp_path / output, "eval") == scores


def test_a_frozen_tower_without_projection_and_kept_graphs(tmp_path):
    more = {"model_name": str(shared(tiny_siglip)), "use_gradient_cache": False}
    more["loss"] = "sigmoid"
    without = train(options(tmp_path, "without", cache_frozen_features=False, **more))
    assert train(options(tmp_path, "with", **more))["losses"] == without["losses"]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """A run on one process, and runs on two ranks: after it, and with an empty cache."""
    folder = tmp_path_factory.mktemp("ranks")
    more = {"model_name": str(shared(tiny_clip)), "mixed_precision": "no"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        first = train(options(folder, "one", **more))
    cases = {}
    shutil.copytree(folder / "cache", folder / "fsdp2-full")
    for name in ("ddp-empty", "fsdp1-empty", "fsdp2-full"):
        strategy = STRATEGIES[name.partition("-")[0]]
        run = options(folder, f"{name}-run", **more | strategy)
        cases[name] = (str(folder / name), run)
    return first, run_cases(train_there, 2, cases)


@pytest.mark.parametrize(
    ("name", "num_passed"),
    [("ddp-empty", NUM_ROWS), ("fsdp1-empty", NUM_ROWS), ("fsdp2-full", 0)],
)
def test_two_ranks_use_what_the_other_has_computed(on_two_ranks, name, num_passed):
    first, actual = on_two_ranks
    ranks = result_of(actual, name)
    num_dummies = 2
    assert sum(rank["passed"] for rank in ranks) == num_passed + num_dummies
    np.testing.assert_allclose(ranks[0]["losses"], first["losses"], rtol=1e-4)


def test_ranks_that_find_unequally_much_stay_in_step_in_an_evaluation(tmp_path, cache):
    more = {
        "model_name": str(shared(tiny_clip)),
        "mixed_precision": "no",
        "eval_steps": None,
    }
    train(with_evaluations(tmp_path, "one", **more, max_steps=1))  # all validation data
    picture = tmp_path / "images" / f"val-{WORDS[0]}-0.png"
    os.utime(picture, ns=(1, 1))  # one that only one rank lacks
    run = with_evaluations(tmp_path, "two", **more, strategy="fsdp")
    two = run_ranks(train_there, 2, str(cache.parent.parent), run)
    train(with_evaluations(tmp_path, "whole", **more, cache_frozen_features=False))
    expected = metrics(tmp_path / "whole", "eval")
    first_of_each = 2
    to_stay_in_step = 1
    num_expected = 1 + (NUM_ROWS - 4) + first_of_each + to_stay_in_step
    assert sum(rank["passed"] for rank in two) == num_expected
    scores = metrics(tmp_path / "two", "eval")
    for score, other in zip(scores, expected, strict=True):
        assert score == pytest.approx(other)


def test_other_weights_other_pictures_and_other_settings_have_features_of_their_own(
    tmp_path, cache
):
    train(options(tmp_path, "first"))
    others = {
        "dropout": {"model_name": str(shared(tiny_clip))},
        "half": {"torch_dtype": "bfloat16"},
        "int8": {"quantize_weights": "int8"},
    }
    for number, (name, changes) in enumerate(others.items(), start=2):
        other = train(options(tmp_path, name, **changes))
        assert other["passed"] == NUM_ROWS + 1 and len(list(cache.iterdir())) == number
    picture = min((tmp_path / "images").iterdir())
    os.utime(picture, ns=(1, 1))
    assert train(options(tmp_path, "changed"))["passed"] == 1 + 1


# ---- broken files ----------------------------------------------------------------------------------------------------


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path):
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    keys = [number.to_bytes(16, "little") for number in range(6)]
    place = (tmp_path, "tower", "cache_frozen_features", ".features")
    store = row_store.RowStore(*place)
    store.add_rows(keys[:3], rows[:3])
    store.add_rows(keys[3:], rows[3:])
    store.close()
    (path,) = (tmp_path / "tower").iterdir()

    def check(content):
        path.write_bytes(content)
        try:
            stored = row_store.RowStore(*place).find_rows(keys)
        except UserError as error:
            assert f"is damaged: delete {path.parent}" in str(error)
        else:
            assert len(stored) < 6
            for number, row in stored.items():
                assert np.array_equal(row, rows[number])

    whole = path.read_bytes()
    for position, value in enumerate(whole):
        flipped = bytearray(whole)
        flipped[position] = value ^ 0xFF
        check(bytes(flipped))
        check(whole[:position])


def test_a_full_disk_costs_time_and_not_the_run(tmp_path, monkeypatch):
    without = train(options(tmp_path, "without", cache_frozen_features=False))
    add_rows = row_store.RowStore.add_rows
    calls = itertools.count(1)

    def full(store, keys, rows):
        if next(calls) == 4:
            store._own.close()
            store._own = Path("/dev/full").open("wb")  # noqa: SIM115 - the store closes it
        return add_rows(store, keys, rows)

    monkeypatch.setattr(row_store.RowStore, "add_rows", full)
    assert train(options(tmp_path, "run"))["losses"] == without["losses"]
    said = log_text(tmp_path / "run")
    assert said.count("cannot be written (No space left on device)") == 1
    assert "set XDG_CACHE_HOME" in said


# ---- what cannot be --------------------------------------------------------------------------------------------------


def test_without_a_frozen_tower_it_is_refused_before_a_model_is_read(tmp_path):
    with pytest.raises(UserError, match=r"cache_frozen.*freeze: \[vision\]"):
        vembed.train(options(tmp_path, "run", model_name="nowhere", freeze=[]))


def test_parts_of_towers_are_not_enough(tmp_path):
    with pytest.raises(UserError, match=r"\(clip\) has none in this run: freeze one"):
        vembed.train(options(tmp_path, "run", freeze=["first_n_layers=1"]))
