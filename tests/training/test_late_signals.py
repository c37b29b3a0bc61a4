"""Signals in an evaluation, and when training is over: nothing trained is lost, and the second one ends all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import vembed
from tests.harness import run_ranks
from tests.training.test_resume_run import logged
from tests.training.test_run import settings
from vembed.errors import Stopped
from vembed.training import final as finish
from vembed.training import interrupts as module
from vembed.training.interrupts import Interrupts

MANY = {"micro_batch_tokens": 32, "eval_steps": 3}
"""An evaluation of many micro-batches."""


def stop_in_evaluation(options, number):
    """Train; in that evaluation (from 1, without the one before the first step) the last rank gets SIGTERM."""
    agree_on_stop = Interrupts.agree_on_stop
    check = Interrupts.check
    calls = {"agree_on_stop": 0, "check": 0}
    is_last_rank = os.environ.get("RANK", "0") == str(
        int(os.environ.get("WORLD_SIZE", "1")) - 1
    )

    def counted(self, save_seconds=0.0):
        calls["agree_on_stop"] += 1
        return agree_on_stop(self, save_seconds)

    def signalled(self):
        calls["check"] += calls["agree_on_stop"] == 3 * number
        if calls["check"] == 3 and is_last_rank:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self._number:
                time.sleep(0.001)
        check(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interrupts, "agree_on_stop", counted)
        patch.setattr(Interrupts, "check", signalled)
        with pytest.raises(Stopped) as stopped:
            vembed.train(options)
    assert stopped.value.exit_code == 143
    assert 3 < calls["check"] <= 16, "the evaluation went on"
    return str(stopped.value)


@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_in_an_evaluation_saves_at_once_and_the_evaluation_is_made_up_for(
    number, tmp_path
):
    options = settings(tmp_path, **MANY)
    whole = vembed.train({**options, "output_dir": str(tmp_path / "whole")})
    options |= {"output_dir": str(tmp_path / "cut")}
    said = stop_in_evaluation(options, number)
    assert said.startswith(
        f"SIGTERM: stopped after step {3 * number}, saved in {tmp_path}/cut/checkpoint-{3 * number}"
    )
    assert not (tmp_path / "cut" / "final").exists()
    others = vembed.train({**options, "resume": True})
    messages = ("step", "epoch", "loss", "grad_norm", "eval")
    for mine, other in zip(
        logged(others.output_dir), logged(whole.output_dir), strict=True
    ):
        assert [mine.get(key) for key in messages] == [
            other.get(key) for key in messages
        ]
    first, two = (
        load_file(run.model_dir / "model.safetensors") for run in (whole, others)
    )
    assert all(torch.equal(first[name], two[name]) for name in first)
    assert others.metrics == whole.metrics
    messages = (tmp_path / "cut" / "training_log.txt").read_text()
    assert ("; steps done: 6 of 6" in messages) is (number == 2)


def test_a_signal_on_one_rank_ends_the_last_evaluation_on_all(tmp_path):
    options = settings(tmp_path, **MANY, strategy="ddp")
    said = run_ranks(stop_in_evaluation, 2, options, 2, process_group=False)
    assert [entry.partition(",")[0] for entry in said] == [
        "SIGTERM: stopped after step 6"
    ] * 2
    assert (tmp_path / "run" / "checkpoint-6").is_dir()


def signalled_while_final_is_written(options):
    module.REPEATED_SIGNAL_SECONDS = 0.1
    save_model = finish.save_model

    def slow(*arguments, **named):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return save_model(*arguments, **named)

    finish.save_model = slow
    return str(vembed.train(options).model_dir)


def test_a_signal_while_final_is_written_lets_it_be_written(tmp_path):
    (model_dir,) = run_ranks(
        signalled_while_final_is_written, 1, settings(tmp_path), process_group=False
    )
    assert (Path(model_dir) / "model.safetensors").exists()


def test_a_signal_to_one_rank_before_the_first_step_ends_all_at_once(tmp_path):
    options = settings(tmp_path, max_steps=1000)
    config = tmp_path / "cfg.yaml"
    config.write_text(json.dumps(options))
    command = [sys.executable, "-m", "vembed", "train", str(config), "--nproc", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        log = tmp_path / "run" / "training_log.txt"
        while not log.exists() or "run id:" not in log.read_text():
            assert launcher.poll() is None
            time.sleep(0.01)
        for rank in psutil.Process(launcher.pid).children():
            if rank.environ()["RANK"] == "1":
                rank.send_signal(signal.SIGTERM)
        began = time.monotonic()
        output = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 143, output
    assert time.monotonic() - began < 25, "the launcher waits 30 s for ranks that hang"
    assert "before the first step: nothing was trained" in output, output
    assert "Traceback" not in output
