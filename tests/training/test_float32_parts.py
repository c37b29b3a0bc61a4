"""Parts that stay exact beside 16-bit arithmetic: pooling, retrieval scores, attention's dtype; adapters' inputs."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import vembed
from tests.built import model_of
from tests.tiny import shared, tiny_qwen3
from tests.training.test_run import settings_without_validation
from tests.training.tiny_run import config_for
from vembed.config.loading import resolve_run
from vembed.errors import RunError
from vembed.evaluation.top_k import top_k
from vembed.losses.build import TermModule
from vembed.models.poolings.table import POOLINGS
from vembed.parallel.devices import matmul_precision
from vembed.parallel.session import start_session
from vembed.training.hooks.base import StepReport
from vembed.training.hooks.metrics import Watch
from vembed.training.optimizer import Outcome
from vembed.training.step import TrainingStep


class Precisions(TorchFunctionMode):
    """The precision that each matrix product is computed with."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in (
            "matmul",
            "__matmul__",
            "__rmatmul__",
            "mm",
        ):
            self.seen.add(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pooling", ["mean", "weighted_mean"])
def test_pooling_was_rounded_to_bfloat16_under_autocast(pooling):
    hidden = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(50) < torch.tensor([[50], [20], [7]])).long()
    expected = POOLINGS[pooling].pool(hidden.double(), mask)
    with torch.autocast("cpu", torch.bfloat16):
        pooled = POOLINGS[pooling].pool(hidden, mask)
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-6, atol=1e-6)


def test_retrieval_scores_were_computed_in_tf32():
    vectors = np.eye(4, dtype=np.float32)
    with matmul_precision("high"), Precisions() as precisions:
        assert top_k(vectors, vectors, 1).ravel().tolist() == [0, 1, 2, 3]
    assert precisions.seen == {"highest"}


def test_the_loss_is_exact_where_the_model_is_not(tmp_path, monkeypatch):
    recorded = set()
    original = TermModule.forward

    def forward(self, batch):
        recorded.add(torch.get_float32_matmul_precision())
        return original(self, batch)

    monkeypatch.setattr(TermModule, "forward", forward)
    with matmul_precision("high"):
        vembed.train(settings_without_validation(tmp_path, max_steps=1))
        assert torch.get_float32_matmul_precision() == "high"
    assert recorded == {"highest"}


def test_adapters_widened_every_input_to_float32_under_autocast(tmp_path):
    config = config_for(
        tmp_path,
        model_name=str(shared(tiny_qwen3)),
        use_lora=True,
        mixed_precision="bf16",
        torch_dtype="bfloat16",
    )
    dtypes = set()
    with start_session(resolve_run(config)) as session:
        model = session.prepare(model_of(config, compute_dtype=torch.bfloat16))
        for name, module in model.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_pre_hook(
                    lambda _, inputs: dtypes.add(inputs[0].dtype)
                )
        model([("text", {"input_ids": torch.arange(5, 25).view(2, 10)})])
    assert dtypes == {torch.bfloat16}


def test_a_run_went_on_without_any_gradient(tmp_path, monkeypatch):
    watch = Watch()
    for loss, norm in ((0.0, 0.0), (2.0, 1e-9)):
        report = StepReport(1, 0.0)
        report.outcome = Outcome(loss, norm, applied=True)
        watch.on_step(report)

    def lose_gradients(step, loss_share):
        step.model.zero_grad()
        return loss_share

    monkeypatch.setattr(TrainingStep, "synchronise", lose_gradients)
    options = settings_without_validation(tmp_path, max_steps=2)
    with pytest.raises(RunError, match=r"step 1: .* the gradient norm exactly 0"):
        vembed.train(options)
