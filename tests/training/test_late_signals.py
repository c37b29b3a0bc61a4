"""Signals in an evaluation, and when training is over: nothing trained is lost, and the second one ends all."""

import os
import signal
import time

import psutil
import pytest

import vembed
from tests.commands import start
from tests.harness import run_ranks
from tests.training.test_resume_run import is_last_rank, send_sigterm
from tests.training.test_run import (
    config_file,
    final_weights,
    log_text,
    metric_lines,
    settings,
)
from tests.training.tiny_run import assert_same
from vembed.errors import Stopped
from vembed.training import final as finish
from vembed.training import interrupts as module
from vembed.training.interrupts import Interrupts

MANY = {"micro_batch_tokens": 32, "eval_steps": 3}
"""An evaluation of many micro-batches."""


def stop_in_evaluation(options, number):
    """Train; in that evaluation (from 1, without the one before the first step) the last rank gets SIGTERM."""
    agree_to_stop = Interrupts.agree_to_stop
    check = Interrupts.check
    calls = {"agree_to_stop": 0, "check": 0}

    def counted(self, save_seconds=0.0):
        calls["agree_to_stop"] += 1
        return agree_to_stop(self, save_seconds)

    def signalled(self):
        calls["check"] += calls["agree_to_stop"] == 3 * number
        if calls["check"] == 3 and is_last_rank():
            send_sigterm(self)
        check(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interrupts, "agree_to_stop", counted)
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
    cut = tmp_path / "cut"
    options |= {"output_dir": str(cut), "resume": "auto"}
    said = stop_in_evaluation(options, number)
    assert said.endswith("run it again to go on")
    assert f"stopped after step {3 * number}, saved in {cut}/checkpoint-" in said
    assert not (cut / "final").exists()
    resumed = vembed.train({**options, "resume": True})
    assert repeated(cut) == repeated(whole.output_dir)
    assert_same(final_weights(cut), final_weights(whole.output_dir))
    assert resumed.metrics == whole.metrics
    assert ("; steps done: 6 of 6" in log_text(cut)) is (number == 2)


def repeated(output):
    """What every repetition logs alike: all but the times."""
    keys = ("step", "epoch", "loss", "grad_norm", "eval")
    return [[line.get(key) for key in keys] for line in metric_lines(output)]


def test_a_signal_on_one_rank_ends_the_last_evaluation_on_all(tmp_path):
    options = settings(tmp_path, **MANY, strategy="ddp")
    for said in run_ranks(stop_in_evaluation, 2, options, 2):
        assert "SIGTERM: stopped after step 6" in said
    assert (tmp_path / "run" / "checkpoint-6").is_dir()


def signalled_while_final_is_written(options):
    module.REPEATED_SIGNAL_SECONDS = 0.1
    save_model = finish.save_model

    def slow(*arguments, **named):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return save_model(*arguments, **named)

    finish.save_model = slow
    vembed.train(options)


def test_a_signal_while_final_is_written_lets_it_be_written(tmp_path):
    run_ranks(signalled_while_final_is_written, 1, settings(tmp_path))
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_a_signal_to_one_rank_before_the_first_step_ends_all_at_once(tmp_path):
    config = config_file(tmp_path, max_steps=1000)
    out = tmp_path / "out"
    words = ("train", str(config), "--nproc", "2")
    launcher = start(*words, stdout=out, stderr=out)
    log = tmp_path / "run" / "training_log.txt"
    while not log.exists() or "run id:" not in log.read_text():
        assert launcher.poll() is None
        time.sleep(0.01)
    _, second_rank = psutil.Process(launcher.pid).children()
    second_rank.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code = launcher.wait(120)
    output = out.read_text()
    assert code == 143, output
    assert time.monotonic() - began < 25, "the launcher waits 30 s for ranks that hang"
    assert "before the first step: nothing was trained" in output, output
    assert "Traceback" not in output
