"""Hooks: additions to the loop by their interface alone; their state and tensors travel in checkpoints."""

import os
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.harness import result_of, run_cases, run_ranks
from tests.training.test_run import metrics, settings
from vembed.training.hooks.base import Hook, Hooks
from vembed.training.run import train


class Average(Hook):
    """A moving average of the weights, as a user would write it."""

    name = "average"

    def on_build(self, run):
        self.live = [
            one for one in run.components.model.parameters() if one.requires_grad
        ]
        self.averaged = [one.detach().clone() for one in self.live]
        self.num_steps = 0
        self.started_at = -1
        self.swaps = 0

    def on_start(self, run):
        self.started_at = run.state.step

    @torch.no_grad()
    def on_step(self, report):
        self.num_steps += 1
        for mean, live in zip(self.averaged, self.live, strict=True):
            mean.lerp_(live.detach(), 0.5)

    def metrics(self, report):
        return {"averaged_steps": self.num_steps}

    @contextmanager
    def evaluation_weights(self):
        self.swaps += 1
        kept = [one.detach().clone() for one in self.live]
        with torch.no_grad():
            for live, mean in zip(self.live, self.averaged, strict=True):
                live.copy_(mean)
        yield
        with torch.no_grad():
            for live, own in zip(self.live, kept, strict=True):
                live.copy_(own)

    def state(self):
        return {"num_steps": self.num_steps}

    def load_state(self, state):
        self.num_steps = state["num_steps"]

    def tensors(self):
        return {str(number): mean for number, mean in enumerate(self.averaged)}


class Notes(Hook):
    """All calls, and an end after a step or an evaluation."""

    def __init__(self, *, end_after=0, end_at_evaluation=-1):
        self.calls = []
        self.end_after = end_after
        self.end_at_evaluation = end_at_evaluation

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
        return "too low" if evaluation.step == self.end_at_evaluation else None

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
        "epoch 3, before 3, step 3, evaluation 3, finish, close"
    )


@pytest.mark.parametrize("how", [{"end_after": 2}, {"end_at_evaluation": 2}])
def test_a_hook_ends_the_run_well(how, tmp_path):
    result = train(settings(tmp_path, eval_steps=2), hooks=[Notes(**how)])
    assert result.steps == 2 and len(metrics(result.output_dir)) == 2
    assert (result.model_dir / "model.safetensors").is_file() and (
        result.output_dir / "report.html"
    ).is_file()
    said = (result.output_dir / "training_log.txt").read_text()
    assert "Notes ends the run: enough" in said or "Notes ends the run: too low" in said


def test_hooks_are_closed_after_an_error(tmp_path):
    class Broken(Hook):
        def before_step(self, step):
            raise ValueError("broken")

    notes = Notes()
    with pytest.raises(ValueError, match="broken"):
        train(settings(tmp_path, val_data_path=None), hooks=[notes, Broken()])
    assert notes.calls[-1] == "close" and "finish" not in notes.calls


def test_two_hooks_of_one_name_are_a_mistake():
    with pytest.raises(AssertionError, match="same name"):
        Hooks([Average(), Average()])


def averaged_run(options, end_after):
    """Called on every rank: this rank's shards of the averages, the steps they count, where it began. Only rank 0 asks
    for the end."""
    average = Average()
    train(
        options,
        hooks=[average, Notes(end_after=end_after if os.environ["RANK"] == "0" else 0)],
    )
    shards = [
        mean.to_local() if isinstance(mean, DTensor) else mean
        for mean in average.averaged
    ]
    return [shard.clone() for shard in shards], average.num_steps, average.started_at


def test_state_and_tensors_of_hooks_are_resumed_under_fsdp(tmp_path):
    (tmp_path / "whole").mkdir()
    common = {
        "strategy": "fsdp",
        "batch_size": 8,
        "eval_steps": 2,
        "save_steps": 2,
        "eval_before": False,
    }
    whole = settings(tmp_path / "whole", **common)
    parts = settings(tmp_path, **common)
    found = run_cases(
        averaged_run, 2, {"whole": (whole, 0), "first": (parts, 4)}, process_group=False
    )
    expected, first = result_of(found, "whole"), result_of(found, "first")
    second = run_ranks(
        averaged_run, 2, {**parts, "resume": True}, 0, process_group=False
    )
    for rank in range(2):
        assert (
            first[rank][1:] == (4, 0)
            and second[rank][1:] == (6, 4)
            and expected[rank][1:] == (6, 0)
        )
        for mean, wanted in zip(second[rank][0], expected[rank][0], strict=True):
            assert torch.equal(mean, wanted)
    assert metrics(parts["output_dir"]) == metrics(whole["output_dir"])
    assert metrics(parts["output_dir"], "averaged_steps") == [1, 2, 3, 4, 5, 6]
    # final/ and the scores are of the averages, the checkpoints of the trained weights.
    assert metrics(parts["output_dir"], "eval") == metrics(whole["output_dir"], "eval")
