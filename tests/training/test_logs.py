"""What a run says and where: a detailed file per process, and a tracker that hears of the run from process 0 alone."""

import os
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest

import vembed
from tests.harness import run_ranks
from tests.training.test_run import settings, settings_without_validation
from vembed.cli.main import run_process
from vembed.training.trackers import table


def train_in_detail(options):
    details = []

    def on_step(_):
        details.append(os.environ["TORCH_DISTRIBUTED_DEBUG"])

    vembed.train(options, on_step=on_step)
    return details


@pytest.mark.promise("A17", "B25", "C31")
def test_debug_writes_a_detailed_file_per_process(tmp_path):
    options = settings_without_validation(
        tmp_path,
        debug=True,
        log_file="training.log",
        max_steps=2,
        strategy="fsdp",
    )
    details = run_ranks(train_in_detail, 2, options)
    assert details == [["DETAIL"] * 2] * 2
    for rank in (0, 1):
        lines = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert " DEBUG unit: " in lines
        assert " INFO step 2/2 " in lines
    log = (tmp_path / "run" / "training.log").read_text()
    assert " DEBUG unit: " in log
    assert log.count(" INFO step 2/2 ") == 1, "of rank 0 alone"


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_loaded(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        table,
        "find_spec",
        lambda name: None if name in ("trackio", "mlflow") else find_spec(name),
    )
    words = [
        "model_name=org/nowhere",
        "data_path=nowhere.jsonl",
        f"output_dir={tmp_path / 'run'}",
        "report_to=[tensorboard, trackio, mlflow]",
    ]
    for flags in ([], ["--dry-run"]):
        assert run_process("train", [*flags, *words]) == 2
        assert "pip install 'vembed[trackio,mlflow]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def names_and_steps(log):
    """Each name that was logged, with its step."""
    logged = set()
    for call in log.call_args_list:
        logged.update((name, call.kwargs["step"]) for name in call.args[0])
    return logged


@pytest.mark.promise("C32")
def test_trackers_hear_of_settings_and_every_step_from_process_0(tmp_path, monkeypatch):
    """With objects in place of wandb and of MLflow, which are not installed."""
    wandb = MagicMock()
    mlflow = MagicMock()
    mlflow.utils.validation.MAX_PARAM_VAL_LENGTH = 6000
    mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 100
    mlflow.search_experiments.return_value = []
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tags = ["fsdp", "multi-node"]
    options = settings(
        tmp_path,
        max_steps=3,
        run_name="mine",
        report_to=["wandb", "mlflow"],
        wandb={"use_wandb": True, "project": "accfiy-fsdp", "tags": tags},
    )
    vembed.train(options)
    expected = {
        ("train/loss", 1),
        ("train/loss", 2),
        ("train/loss", 3),
        ("eval/ndcg_at_10", 3),
    }
    wandb.init.assert_called_once()
    started = wandb.init.call_args.kwargs
    assert started["project"] == "accfiy-fsdp"
    assert started["name"] == "mine"
    assert started["tags"] == tags
    assert started["config"]["max_steps"] == 3
    run = wandb.init.return_value
    assert expected <= names_and_steps(run.log)
    run.finish.assert_called_once()
    assert mlflow.create_experiment.call_args.kwargs["name"] == "accfiy-fsdp"
    assert mlflow.start_run.call_args.kwargs["run_name"] == "mine"
    logged = {}
    for call in mlflow.log_params.call_args_list:
        logged |= call.args[0]
    assert float(logged["learning_rate"]) == 2e-3
    names = names_and_steps(mlflow.log_metrics)
    assert expected <= names
    assert not any("@" in name for name, _ in names)
    mlflow.end_run.assert_called_once()
