"""The verbs that load a model, with a tiny one: in this process, and on two processes that the command starts."""

from pathlib import Path

import pytest

from tests.cli.conftest import write_config
from tests.commands import command
from tests.training.test_run import metrics


@pytest.fixture
def run_config(vembed):
    """A config for four steps, with data and a model."""
    write_config(Path.cwd(), "global_batch_size: 8\nmax_steps: 4\n")
    return "cfg.yaml"


def test_the_written_config_repeats_the_run(vembed, run_config):
    vembed("train", run_config, "output_dir=one")
    assert len(metrics("one")) == 4
    vembed("train one/config.yaml output_dir=two")
    assert metrics("two") == metrics("one")


def test_a_mistake_in_the_data_on_two_processes_is_one_sentence(vembed, run_config):
    Path("train.jsonl").write_text('{"query": "a", "positive": "b"}\n{"query": ""}\n')
    done = command("train", run_config, "--nproc", "2", code=2)
    assert "error: " in done.stderr and "train.jsonl:2" in done.stderr
    assert "Traceback" not in done.stderr
