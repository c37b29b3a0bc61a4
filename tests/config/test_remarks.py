"""What has no effect is said, what cannot be is refused before training, and advice knows what is on already."""

import pytest
import torch

import vembed
from tests import tiny
from tests.config.effects import build, given, resolve
from tests.training.test_run import log_text
from vembed.errors import UserError
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import place

CPU = torch.device("cpu")


def test_a_metric_that_is_none_is_found_before_training(tmp_path):
    options = {
        "val_data_path": "val.jsonl",
        "eval_before": False,
        "output_dir": str(tmp_path / "run"),
        "eval_metric": "ndgc@10",
    }
    with pytest.raises(UserError, match=r"eval_metric: ndgc@10 .*'ndcg@10'"):
        vembed.train(given(options))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_batch_that_cannot_be_divided_is_refused_by_python_too():
    run = resolve({"global_batch_size": 10, "batch_size": None})
    with pytest.raises(UserError, match=r"global_batch_size: 10 .* 3 processes"):
        place(run, RankInfo(0, 3, 0, 3), CPU, 2**30)


def test_processes_that_nobody_started_are_said(tmp_path):
    options = {"devices": 4, "num_nodes": 2, "max_steps": 1}
    result = vembed.train(given({**options, "output_dir": str(tmp_path)}))
    log = log_text(result.output_dir)
    for option in ("num_processes: 4", "num_machines: 2"):
        assert f"{option} (the config) has no effect: this run has 1" in log


def test_options_that_this_kind_of_model_or_optimizer_does_not_have_are_said():
    options = {"data_path": "images.jsonl", "min_pixels": 9}
    lines = build({"model_name": tiny.tiny_clip, **options}).lines
    assert "min_pixels: 9 has no effect on a model of the family clip" in lines
    notes = resolve({"optim": "sgd", "adam_epsilon": 0.5}).notes
    assert "adam_epsilon: 0.5 has no effect with optim: sgd" in notes
    teachers = {
        "teachers": ["me/teacher", "me/other"],
        "losses": [{"loss": "kl", "teacher": "me/teacher"}],
    }
    (note,) = [note for note in resolve(teachers).notes if "teachers" in note]
    assert "teachers: me/other has no effect" in note
