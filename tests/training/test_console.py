"""The console of a run: five lines on the set-up, short step lines, the recent rate; verbose and quiet."""

from pathlib import Path

import pytest

from tests.cli.conftest import vembed
from tests.data.files import write_jsonl
from tests.tiny import shared, texts, tiny_bert
from vembed.training.hooks.metrics import log_line

__all__ = ["vembed"]


@pytest.fixture
def cfg(vembed):
    words = texts(32)
    rows = [
        {"query": words[2 * row], "positive": f"{words[2 * row + 1]} {row}"}
        for row in range(16)
    ]
    write_jsonl(Path("train.jsonl"), rows)
    Path("cfg.yaml").write_text(
        f"model_name: {shared(tiny_bert)}\ndata_path: train.jsonl\nval_data_path: train.jsonl\nbatch_size: 8\n"
        "max_steps: 2\nlogging_steps: 1\nreport_to: none\n"
    )
    return "cfg.yaml"


def test_five_lines_then_steps_and_the_rest_in_the_log(vembed, cfg):
    done = vembed("train", cfg, "output_dir=normal")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    setup = [
        line.partition(":")[0]
        for line in lines
        if line.partition(":")[0] in ("model", "data", "steps", "device")
    ]
    assert setup[:4] == ["model", "data", "steps", "device"]
    assert "log: normal/training_log.txt" in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 2 and all(len(line) <= 100 for line in steps)
    evaluations = [line for line in lines if line.startswith("evaluation ")]
    assert len(evaluations) == 2 and all(
        len(line) <= 100 and "; took " in line for line in evaluations
    )
    assert any(
        line.startswith("warning: 16 of the 16 queries of the validation data")
        for line in lines
    )
    assert "FSDP" not in done.out and "Rank 0" not in done.out
    log = Path("normal/training_log.txt").read_text()
    assert all(
        " MAP@10 " in line for line in log.splitlines() if "INFO evaluation " in line
    ), "all scores"
    assert (
        "FSDP parameter summary:" in log
        and "Rank 0, CPU: " in log
        and "device: cpu, processes: 1, " in log
    )


def test_fsdp_that_one_process_cannot_do_is_said(vembed, cfg):
    out = vembed(
        "train", cfg, "output_dir=asked", "use_fsdp=true", "val_data_path=null"
    ).out
    assert "strategy single (FSDP needs at least two processes" in out


def test_a_batch_above_the_data_and_a_projection_are_said(vembed, cfg):
    done = vembed(
        "train",
        cfg,
        "output_dir=cut",
        "batch_size=1000",
        "mrl_dims=[16,8]",
        "query_prompt=q: ",
    )
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    steps = [line for line in lines if line.startswith("steps: ")]
    model = [line for line in lines if line.startswith("model: ")]
    assert "of 16 examples (epochs: 2)" in steps[0]
    projection = "an MRL projection from 32 to max(mrl_dims)"
    assert f"16 dimensions ({projection}" in model[0]
    start = f"the start model with the query_prompt of the config, and {projection}"
    assert start in Path("cut/report.md").read_text()


def test_verbose_shows_all_and_quiet_only_warnings(vembed, cfg):
    out = vembed("train", cfg, "output_dir=verbose", "--verbose").out
    assert "FSDP parameter summary:" in out and "Rank 0, CPU: " in out
    out = vembed("train", cfg, "output_dir=quiet", "--quiet").out
    assert out and all(line.startswith("warning: ") for line in out.splitlines()), out
    assert "step 2/2" in Path("quiet/training_log.txt").read_text()


def test_step_lines_fit():
    values = {
        "step": 123_456,
        "epoch": 12.34,
        "loss": 12.3456,
        "learning_rate": 1.25e-5,
        "grad_norm": 1234.5678,
        "samples_per_second": 12_345.6,
    }
    assert len(log_line(values, 1_234_567, 400_000)) <= 100
