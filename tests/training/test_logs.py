"""What a run says and where: a detailed file per process, and a tracker that hears of the run from process 0 alone."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

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


@pytest.mark.promise("A17", "B25", "C31")
def test_debug_writes_a_detailed_file_per_process(tmp_path):
    options = settings(
        tmp_path,
        debug=True,
        log_file="training.log",
        max_steps=2,
        val_data_path=None,
        strategy="ddp",
    )
    assert run_ranks(train, 2, options, process_group=False) == [2, 2]
    for rank in (0, 1):
        lines = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert f" DEBUG rank {rank}: " in lines
        assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in lines
        assert " INFO step 2/2 " in lines
    log_text = (tmp_path / "run" / "training.log").read_text()
    assert " DEBUG rank 0: " in log_text
    assert " DEBUG rank 1: " not in log_text


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
    started = []
    logged = []
    run = SimpleNamespace(
        log=lambda values, step, **_: logged.append((step, values)),
        finish=lambda: logged.append((-1, {})),
    )

    def init(**options):
        started.append(options)
        return run

    wandb = ModuleType("wandb")
    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    said = {
        "wandb": {
            "use_wandb": True,
            "project": "accfiy-fsdp",
            "tags": ["fsdp", "multi-node"],
        }
    }
    options = {
        **settings(tmp_path, max_steps=3, run_name="mine"),
        "report_to": ["wandb"],
        **said,
    }
    assert train(options) == 3
    (only,) = started
    assert (only["project"], only["name"], only["tags"]) == (
        "accfiy-fsdp",
        "mine",
        ["fsdp", "multi-node"],
    )
    assert only["config"]["max_steps"] == 3
    assert [step for step, values in logged if "train/loss" in values] == [1, 2, 3]
    assert any("eval/ndcg_at_10" in values for _, values in logged)
    assert logged[-1] == (-1, {})


def test_mlflow_gets_settings_and_numbers(tmp_path, monkeypatch):
    """By Accelerate's tracker, with a module in place of MLflow."""
    messages = {"params": {}, "steps": {}}
    mlflow = ModuleType("mlflow")
    mlflow.utils = SimpleNamespace(
        validation=SimpleNamespace(
            MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100
        )
    )
    mlflow.search_experiments = lambda filter_string: []
    mlflow.create_experiment = lambda name, **_: messages.setdefault("experiment", name)
    mlflow.start_run = lambda run_name, **_: messages.setdefault("run", run_name)
    mlflow.log_params = messages["params"].update
    mlflow.log_metrics = lambda values, step: (
        messages["steps"].setdefault(step, {}).update(values)
    )
    mlflow.end_run = lambda: messages.setdefault("ended", True)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    train(
        settings(
            tmp_path,
            max_steps=2,
            report_to=["mlflow"],
            wandb_project="ours",
            run_name="first",
        )
    )
    assert (messages["experiment"], messages["run"], messages["ended"]) == (
        "ours",
        "first",
        True,
    )
    assert float(messages["params"]["learning_rate"]) == 2e-3
    assert (
        "train/loss" in messages["steps"][1]
        and "eval/ndcg_at_10" in messages["steps"][2]
    )
    assert all(
        "@" not in name for values in messages["steps"].values() for name in values
    )
