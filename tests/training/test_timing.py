"""profile_steps: a trace of the chosen steps that a run has, whatever it ends or begins with."""

import json
from types import SimpleNamespace

import pytest

from vembed.training.hooks.base import StepReport
from vembed.training.hooks.metrics import Profile


def profiling(folder, chosen):
    """The profile of a run of five steps, begun."""
    run = SimpleNamespace(
        output=folder,
        session=SimpleNamespace(rank=0),
        data=SimpleNamespace(total_steps=5),
    )
    profile = Profile(*chosen)
    profile.on_start(run)
    return profile


@pytest.mark.parametrize(
    ("chosen", "done", "recorded"),
    [
        ([4, 9], [1, 2, 3, 4, 5], True),  # the run ends before
        ([2, 4], [3, 4, 5], True),  # resumed within
        ([2, 3], [1, 2, 2, 3, 4], True),  # replayed after it ran out of memory
        ([2, 3], [4, 5], False),
    ],
)
def test_a_trace_of_the_steps_that_there_are(chosen, done, recorded, tmp_path):
    profile = profiling(tmp_path, chosen)
    for step, following in zip(done, [*done[1:], None], strict=True):
        profile.before_step(step)
        if step != following:
            profile.on_step(StepReport(step, epoch=0.0))
    profile.close()
    assert profile.profiler is None
    trace = tmp_path / "trace-rank0.json"
    assert trace.exists() is recorded
    if recorded:
        assert json.loads(trace.read_text())["traceEvents"]


def test_steps_behind_the_end_are_named(tmp_path, caplog):
    profiling(tmp_path, [6, 8])
    assert "profile_steps: step 6 is after the run's last step, 5" in caplog.text
