"""The console of a run: five lines on the set-up, short lines for steps, the recent rate; verbose and quiet."""

from pathlib import Path

import pytest

from tests.cli.conftest import vembed
from tests.training.test_run import config_file

__all__ = ["vembed"]


@pytest.fixture
def train(vembed):
    """Runs `vembed train` with options and returns its output."""

    def run(*options):
        config = config_file(Path(), max_steps=2, val_data_path="train.jsonl")
        return vembed("train", str(config), *options).out

    return run


DETAILS = ("FSDP parameter summary:", "Rank 0, CPU: ")


def test_five_lines_then_steps_and_the_rest_in_the_log(train):
    lines = train().splitlines()
    names = [line.partition(":")[0] for line in lines]
    order = [names.index(name) for name in ("model", "data", "steps", "device", "log")]
    assert order == sorted(order)
    for kind in ("step ", "evaluation "):
        matching = [line for line in lines if line.startswith(kind)]
        assert len(matching) == 2
        assert all(len(line) <= 100 for line in matching)
    log = Path("run/training_log.txt").read_text()
    for detail in DETAILS:
        assert detail in log and detail not in "\n".join(lines)


def test_a_line_shows_the_rate_of_new_layers_too(train):
    options = ("learning_rate=1e-3", "lr_scheduler_type=constant", "warmup_steps=0")
    assert "lr 1.0e-03  grad" in train(*options, "output_dir=one")
    head = "head_learning_rate=0.02"
    assert "lr 1.0e-03 (head 2.0e-02)  grad" in train(*options, head)


def test_a_dry_run_counts_the_steps(train):
    options = ("max_steps=null", "batch_size=20", "gradient_accumulation_steps=2")
    known = train(*options, "epochs=3", "--dry-run")
    assert "batches: 4 per epoch of 20 examples; 16 of 96 fill no batch" in known
    assert "steps: 6 in all, 2 per epoch" in known
    unknown = train(*options, "model_name=org/nowhere", "--dry-run")
    assert "steps: known when the model is here (epochs: auto)" in unknown


def test_verbose_shows_all_and_quiet_only_warnings(train):
    output = train("output_dir=verbose", "--verbose")
    assert all(detail in output for detail in DETAILS)
    lines = train("output_dir=quiet", "--quiet").splitlines()
    assert lines and all(line.startswith("warning: ") for line in lines)
    assert "step 2/2" in Path("quiet/training_log.txt").read_text()


def test_decisions_that_the_data_and_the_machine_force_are_said(train):
    output = train("batch_size=1000", "mrl_dims=[16,8]", "use_fsdp=true")
    assert "of 96 examples (epochs: 2)" in output
    batch = "of 96 examples, since the data do not fill a global batch of 1,000"
    assert f"warning: batches: 1 per epoch {batch}\n" in output
    log = Path("run/training_log.txt").read_text()
    assert "global batch: 96 examples over 1 process (96 each); 2 steps" in log
    assert "1,000" not in log.replace(batch, "")
    assert "an MRL projection from 32 to max(mrl_dims)" in output
    assert "strategy single (FSDP needs at least two processes" in output
