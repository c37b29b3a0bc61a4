"""Resuming: where a run goes on from, what may have changed meanwhile, and that no logged step is doubled."""

import logging
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.docs.resume_table import updated
from tests.training.test_checkpoint import FILE, found_in, resumed, saved, starting
from tests.training.test_integrity import damage, fake_checkpoint
from tests.training.tiny_run import config_for
from vembed.errors import UserError
from vembed.training.checkpoint import folders as integrity
from vembed.training.checkpoint.folders import (
    candidates,
    trim_metrics,
)
from vembed.training.trainer import LoopState


def test_resume_where_there_is_nothing(tmp_path):
    assert candidates(config_for(tmp_path / "new", resume="auto").run) == []
    with pytest.raises(UserError, match="holds no checkpoint; use resume: auto"):
        candidates(config_for(tmp_path / "new", resume=True).run)
    with pytest.raises(UserError, match="neither a checkpoint nor"):
        candidates(config_for(tmp_path, resume=str(tmp_path / "checkpoint-7")).run)


def test_a_folder_with_a_name_of_240_digits_is_no_checkpoint(tmp_path):
    strange = tmp_path / f"checkpoint-{'1' * 240}"
    strange.mkdir()
    for options in ({"resume": "auto"}, {"overwrite": True}):
        with resumed(tmp_path, **options) as run:
            assert run.state["step"] == 0
            run.train().save()
    assert found_in(tmp_path) == tmp_path / "checkpoint-1"
    assert strange.is_dir()


def test_another_runs_checkpoint_needs_a_folder_of_its_own(tmp_path):
    other = fake_checkpoint(tmp_path / "other", 5)
    renamed = other.rename(other.with_name("saved"))
    run = config_for(tmp_path / "new", resume=str(renamed)).run
    assert candidates(run) == [renamed]
    fake_checkpoint(tmp_path / "new", 1)
    with pytest.raises(UserError, match="is of another run"):
        candidates(run)


# ---- what may change -------------------------------------------------------------------------------------------


def test_a_changed_config_stops_the_run_unless_told_otherwise(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vembed")
    saved(tmp_path)
    identity = {"data": "xyz", "global_batch_size": 8}
    with (
        starting(tmp_path, resume=True, seed=7) as run,
        pytest.raises(UserError, match=r"seed 42 -> 7.*data abc -> xyz"),
    ):
        run.resume(identity)
    with resumed(
        tmp_path,
        resume="force",
        seed=7,
        epochs=9,
    ) as run:
        assert run.state["step"] == 1
    for change in ("seed 42 -> 7", "epochs auto -> 9.0"):
        assert change in caplog.text


@pytest.mark.parametrize(
    ("option", "value"), [("eval_metric", "mrr@10"), ("val_data_path", "other.jsonl")]
)
def test_scores_of_another_judge_are_forgotten(tmp_path, option, value):
    with resumed(tmp_path) as run:
        run.train()
        score = {"ndcg@10": 0.9}
        run.state |= {"best": 0.9, "best_step": 1, "best_scores": score}
        evaluated = {"before": score, "scores": score, "scored_step": 1}
        run.state |= evaluated
        run.state["hooks"] = {"guards": {}, "patience": {"best": 0.9}}
        state = dict(run.save().state)
    with resumed(tmp_path, resume=True) as run:
        assert run.state == state
    expected = asdict(LoopState(step=1, hooks={"guards": {}}))
    if option == "eval_metric":  # the same data: their scores are still those
        expected |= evaluated
    with resumed(tmp_path, resume=True, **{option: value}) as run:
        assert run.state == expected


# ---- damaged and abandoned checkpoints -------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_and_leaves_the_way_free(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vembed")
    saved(tmp_path, num_steps=3)
    damage(tmp_path / "checkpoint-3", FILE, "truncate", 0.9)
    (tmp_path / "checkpoint-4.partial").mkdir()
    with resumed(tmp_path, resume=True) as run:
        assert run.state["step"] == 2
        assert f"checkpoint-3: {FILE} has" in caplog.text
        assert "checkpoint-4.partial" in caplog.text
        run.train().save()
    names = {path.name for path in tmp_path.iterdir()}
    numbered = {f"checkpoint-{number}" for number in (1, 2, 3)}
    assert names == numbered | {"checkpoint-3.abandoned"}
    assert integrity.verify(tmp_path / "checkpoint-3") == []


def test_when_no_checkpoint_is_whole(tmp_path):
    saved(tmp_path)
    damage(tmp_path / "checkpoint-1", "state.json", "flip", 0.5)
    for resume in (True, str(tmp_path / "checkpoint-1")):
        with (
            starting(tmp_path, resume=resume) as run,
            pytest.raises(UserError, match=r"none of the 1 .*resume: auto"),
        ):
            run.resume()
    with resumed(tmp_path, resume="auto") as run:
        assert run.point is None
        run.train().save()
    assert integrity.verify(tmp_path / "checkpoint-1") == []


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------


def test_metrics_end_where_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    trim_metrics(tmp_path, 3)
    remaining = '{"step": 1, "loss": 2.0}\n{"step": 3}\n{"step": 3, "eval": {}}\n'
    broken = '[]\n{"loss": 1}\n{"step": "x"}\n\x00\n'
    later = '{"step": 4}\n{"step": 6, "lo'
    path.write_text(remaining + broken + later)
    for _ in range(2):
        trim_metrics(tmp_path, 3)
        assert path.read_text() == remaining
    assert list(tmp_path.iterdir()) == [path]


def test_the_page_says_of_every_option_whether_it_may_change():
    """`python -m tests.docs.resume_table` writes the table."""
    page = Path(__file__).parents[2] / "docs" / "resume.md"
    text = page.read_text(encoding="utf-8")
    assert text == updated(text)
