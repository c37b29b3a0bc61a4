"""Hooks: additions to the loop by their interface alone. `ema` shows that state and tensors travel in checkpoints."""

import os

import pytest

from tests.harness import run_ranks
from tests.training.test_run import settings, settings_without_validation
from vembed.entrypoints.python_train import train
from vembed.training.hooks.base import Hook


class Notes(Hook):
    """All calls, and an end after a step."""

    def __init__(self, end_after=0):
        self.calls = []
        self.end_after = end_after

    def on_build(self, run):
        self.calls.append("build")

    def on_start(self, run):
        self.calls.append("start")

    def on_epoch(self, epoch):
        self.calls.append(f"epoch {epoch}")

    def before_step(self, step):
        self.calls.append(f"before {step}")

    def on_step(self, report):
        self.calls.append(f"step {report.step}")
        return "enough" if report.step == self.end_after else None

    def on_evaluation(self, evaluation):
        self.calls.append(f"evaluation {evaluation.step}")

    def on_finish(self, run):
        self.calls.append("finish")

    def close(self):
        self.calls.append("close")


def test_order_of_the_calls(tmp_path):
    notes = Notes()
    # 96 examples in batches of 40: two batches per epoch, three per step.
    options = settings(
        tmp_path,
        batch_size=40,
        gradient_accumulation_steps=3,
        max_steps=3,
        eval_steps=2,
    )
    train(options, hooks=[notes])
    assert ", ".join(notes.calls) == (
        "build, start, evaluation 0, epoch 0, before 1, step 1, epoch 1, before 2, step 2, evaluation 2, "
        "epoch 2, epoch 3, before 3, step 3, evaluation 3, finish, close"
    )


def test_the_step_at_which_a_hook_ends_the_run_can_be_the_best(tmp_path):
    best_steps = []

    class Enough(Hook):
        def on_evaluation(self, evaluation):
            return "enough" if evaluation.step == 3 else None

        def on_finish(self, run):
            best_steps.append(run.state.best_step)

    # Step 3 has no checkpoint, and its scores are the first after training has begun.
    train(settings(tmp_path, eval_steps=3, save_steps=4), hooks=[Enough()])
    assert best_steps == [3]


def test_hooks_are_closed_after_an_error(tmp_path):
    class Broken(Hook):
        def before_step(self, step):
            raise ValueError("broken")

    notes = Notes()
    with pytest.raises(ValueError, match="broken"):
        train(settings_without_validation(tmp_path), hooks=[notes, Broken()])
    assert notes.calls[-1] == "close" and "finish" not in notes.calls


def ended_by_rank_0(options):
    notes = Notes(end_after=2 if os.environ["RANK"] == "0" else 0)
    return train(options, hooks=[notes]).steps


def test_one_rank_ends_the_run_of_all(tmp_path):
    options = settings_without_validation(tmp_path, strategy="ddp")
    assert run_ranks(ended_by_rank_0, 2, options) == [2, 2]
