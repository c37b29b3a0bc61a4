"""Values that are not finite: on_nonfinite: skip gives up, good checkpoints stay, and final/ is not replaced."""

import pytest
import torch

import vembed
from tests.training.test_run import (
    metrics,
    settings,
    settings_without_validation,
)
from vembed.errors import RunError
from vembed.training.hooks.base import Hook
from vembed.training.hooks.metrics import MAX_SKIPPED_STEPS


class Breaks(Hook):
    """Sets a weight to NaN after a step, or before final/ is written."""

    def __init__(self, after=None, part="word_embeddings"):
        self.after = after
        self.part = part

    def on_start(self, run):
        embeddings = run.components.model.backbone.embeddings
        self.weight = embeddings.get_submodule(self.part).weight

    def _break(self):
        self.weight.detach().fill_(torch.nan)

    def on_step(self, report):
        if report.step == self.after:
            self._break()

    def on_finish(self, run):
        if self.after is None:
            self._break()


def test_skipping_gives_up_and_keeps_what_was_saved_before(tmp_path):
    options = settings_without_validation(
        tmp_path, max_steps=60, save_steps=1, save_total_limit=2, on_nonfinite="skip"
    )
    message = rf"{MAX_SKIPPED_STEPS} steps .* skipped .*checkpoint-4 is untouched"
    with pytest.raises(RunError, match=message):
        vembed.train(options, hooks=[Breaks(after=4)])
    output = tmp_path / "run"
    names = {path.name for path in output.glob("checkpoint-*")}
    assert names == {"checkpoint-3", "checkpoint-4"}
    assert not (output / "final").exists()
    assert len(metrics(output)) <= 4 + MAX_SKIPPED_STEPS


@pytest.mark.parametrize("part", ["word_embeddings", "position_embeddings"])
def test_a_model_whose_weights_are_not_finite_does_not_replace_final(tmp_path, part):
    options = settings(tmp_path, max_steps=2, eval_steps=None)
    result = vembed.train(options)
    before = (result.model_dir / "model.safetensors").read_bytes()
    message = r"final/ is not written: .* not finite; .* \(now 0\.002\)"
    with pytest.raises(RunError, match=message):
        vembed.train({**options, "overwrite": True}, hooks=[Breaks(part=part)])
    assert (result.model_dir / "model.safetensors").read_bytes() == before
