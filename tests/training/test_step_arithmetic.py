"""What a step computes with: no padding where none is needed, and a loss that is whole float32 beside TF32."""

import pytest
import torch

import vembed
from tests.training.test_run import metrics, settings
from vembed.losses.build import TermModule
from vembed.parallel.devices import matmul_precision


def test_a_run_without_padding_is_the_run_with_it(tmp_path):
    runs = {}
    for free in (True, False):
        (tmp_path / str(free)).mkdir()
        runs[free] = vembed.train(
            settings(tmp_path / str(free), padding_free=free, micro_batch_tokens=120)
        )
    packed, padded = (runs[free].output_dir for free in (True, False))
    assert set(metrics(packed, "padding_fraction")) == {0.0}
    assert min(metrics(padded, "padding_fraction")) > 0.0
    assert metrics(packed) == pytest.approx(metrics(padded), rel=1e-5)
    assert metrics(packed, "grad_norm") == pytest.approx(
        metrics(padded, "grad_norm"), rel=1e-4
    )
    assert "texts: without padding" in (packed / "training_log.txt").read_text()
    assert (
        "texts: padded (padding_free: false)"
        in (padded / "training_log.txt").read_text()
    )


def test_the_loss_is_exact_where_the_model_is_not(tmp_path, monkeypatch):
    recorded = set()
    original = TermModule.forward

    def forward(self, batch):
        recorded.add(torch.get_float32_matmul_precision())
        return original(self, batch)

    monkeypatch.setattr(TermModule, "forward", forward)
    with matmul_precision("high"):
        vembed.train(settings(tmp_path, max_steps=1, val_data_path=None))
        assert torch.get_float32_matmul_precision() == "high"
    assert recorded == {"highest"}
