"""quantize_weights: layers compute with int8 weights, gradients pass through the rounding, final/ holds the result."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import vembed
from tests.tiny import shared, tiny_resnet
from tests.training.test_run import settings
from vembed.config.loading import load_config
from vembed.errors import UserError
from vembed.models.precision import (
    INT8_MAX,
    RoundedLinear,
    round_weights,
    rounded_to_int8,
)


def test_values_and_gradients_are_those_of_the_rounded_weight():
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.weight[1] = 0
    plain = nn.Linear(6, 4, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    plain.weight.data = rounded_to_int8(layer.weight)
    layer.__class__ = RoundedLinear
    values = torch.randn(3, 6, dtype=torch.float64)
    for entry in (layer, plain):
        functional.mse_loss(
            entry(values), torch.ones(3, 4, dtype=torch.float64)
        ).backward()
    torch.testing.assert_close(layer(values), plain(values))
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / INT8_MAX
    steps = (
        plain.weight.detach() / torch.where(scale > 0, scale, torch.ones_like(scale))
    ).numpy()
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-9)
    assert np.abs(steps).max() == pytest.approx(INT8_MAX) and not steps[1].any()
    assert (layer.weight - plain.weight).abs().max() <= 0.5001 * scale.max(), (
        "the nearest level"
    )
    torch.testing.assert_close(rounded_to_int8(plain.weight), plain.weight.detach())


def test_a_run_ends_with_the_weights_it_was_scored_with(tmp_path):
    result = vembed.train(
        settings(tmp_path, quantize_weights="int8", max_steps=3, save_steps=2)
    )
    weights = load_file(result.model_dir / "model.safetensors")
    names = [
        name for name in weights if ".layer." in name and name.endswith("dense.weight")
    ]
    assert names
    for name in names:
        torch.testing.assert_close(
            rounded_to_int8(weights[name]), weights[name], rtol=1e-6, atol=0
        )
    embeddings = weights[next(name for name in weights if "word_embeddings" in name)]
    assert not torch.allclose(
        rounded_to_int8(embeddings), embeddings, rtol=1e-6, atol=0
    ), "lookups are no matrix products"
    scores = vembed.evaluate(result.model_dir, tmp_path / "val.jsonl")
    assert scores["ndcg@10"] == pytest.approx(result.metrics["ndcg@10"], abs=1e-6)
    log = (result.output_dir / "training_log.txt").read_text()
    assert "12 linear layers are rounded to int8" in log


def test_mistakes(tmp_path):
    with pytest.raises(
        UserError,
        match="quantize_weights: int8 rounds weights that are trained, and use_lora: true",
    ):
        load_config(
            {
                "model_name": "m",
                "data_path": "d",
                "quantize_weights": "int8",
                "use_lora": True,
            }
        )
    from transformers import AutoModel

    with pytest.raises(UserError, match="and the model has none"):
        round_weights(AutoModel.from_pretrained(shared(tiny_resnet)))
