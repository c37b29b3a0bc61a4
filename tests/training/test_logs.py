"""What a run says and where: a detailed file per process, and a tracker that hears of the run from process 0 alone."""

import os
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest

import vembed
from tests.harness import run_ranks
from tests.training.test_run import settings
from vembed.cli.main import run_process
from vembed.config.loading import one_line_yaml
from vembed.errors import UserError
from vembed.training import trackers


def train(options):
    return int(vembed.train(options).steps)


def train_in_detail(options):
    details = []

    def on_step(_):
        details.append(os.environ["TORCH_DISTRIBUTED_DEBUG"])

    vembed.train(options, on_step=on_step)
    return details


@pytest.mark.promise("A17", "B25", "C31")
def test_debug_writes_a_detailed_file_per_process(tmp_path):
    options = settings(
        tmp_path,
        debug=True,
        log_file="training.log",
        max_steps=2,
        val_data_path=None,
        strategy="fsdp",
    )
    details = run_ranks(train_in_detail, 2, options, process_group=False)
    assert details == [["DETAIL"] * 2] * 2
    for rank in (0, 1):
        lines = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert " DEBUG unit: " in lines
        assert " INFO step 2/2 " in lines
    log_text = (tmp_path / "run" / "training.log").read_text()
    assert " DEBUG unit: " in log_text
    assert log_text.count(" INFO step 2/2 ") == 1, "of rank 0 alone"


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_loaded(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        trackers,
        "find_spec",
        lambda name: None if name in ("trackio", "mlflow") else find_spec(name),
    )
    options = {
        "model_name": "org/nowhere",
        "data_path": "nowhere.jsonl",
        "output_dir": str(tmp_path / "run"),
    }
    options["report_to"] = ["tensorboard", "trackio", "mlflow"]
    words = [f"{name}={one_line_yaml(options[name])}" for name in options]
    for flags in ([], ["--dry-run"]):
        assert run_process("train", [*flags, *words]) == 2
        assert "trackio and mlflow are not installed" in capsys.readouterr().err
    with pytest.raises(UserError, match="pip install trackio mlflow"):
        train(options)
    assert not (tmp_path / "run").exists()


@pytest.mark.promise("C32")
def test_wandb_hears_of_project_tags_and_every_step_from_process_0(
    tmp_path, monkeypatch
):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tags = ["fsdp", "multi-node"]
    block = {"use_wandb": True, "project": "accfiy-fsdp", "tags": tags}
    options = settings(tmp_path, max_steps=3, run_name="mine", report_to=["wandb"])
    assert train({**options, "wandb": block}) == 3
    wandb.init.assert_called_once()
    started = wandb.init.call_args.kwargs
    assert started["project"] == "accfiy-fsdp"
    assert started["name"] == "mine"
    assert started["tags"] == tags
    assert started["config"]["max_steps"] == 3
    run = wandb.init.return_value
    losses = []
    for call in run.log.call_args_list:
        if "train/loss" in call.args[0]:
            losses.append(call.kwargs["step"])
    assert losses == [1, 2, 3]
    assert any("eval/ndcg_at_10" in call.args[0] for call in run.log.call_args_list)
    run.finish.assert_called_once()


def test_mlflow_gets_settings_and_numbers(tmp_path, monkeypatch):
    """By Accelerate's tracker, with an object in place of MLflow, which is not installed."""
    mlflow = MagicMock()
    mlflow.utils.validation.MAX_PARAM_VAL_LENGTH = 6000
    mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 100
    mlflow.search_experiments.return_value = []
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    options = {"report_to": ["mlflow"], "wandb_project": "ours", "run_name": "first"}
    train(settings(tmp_path, max_steps=2, **options))
    assert mlflow.create_experiment.call_args.kwargs["name"] == "ours"
    assert mlflow.start_run.call_args.kwargs["run_name"] == "first"
    logged = {}
    for call in mlflow.log_params.call_args_list:
        logged |= call.args[0]
    assert float(logged["learning_rate"]) == 2e-3
    names = set()
    for call in mlflow.log_metrics.call_args_list:
        names |= {(name, call.kwargs["step"]) for name in call.args[0]}
    assert {("train/loss", 1), ("eval/ndcg_at_10", 2)} <= names
    assert not any("@" in name for name, _ in names)
    mlflow.end_run.assert_called_once()
