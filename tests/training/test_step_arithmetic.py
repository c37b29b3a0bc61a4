"""What a step computes with: no padding where none is needed, and a loss that is whole float32 beside TF32."""

import torch

import vembed
from tests.training.test_run import settings
from vembed.losses.build import TermModule
from vembed.parallel.devices import matmul_precision


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
