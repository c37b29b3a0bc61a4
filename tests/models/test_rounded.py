"""quantize_weights: layers compute with int8 weights, gradients pass through the rounding, final/ holds the result."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

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
        (entry(values) - 1).square().mean().backward()
    torch.testing.assert_close(layer(values), plain(values))
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    weight = plain.weight.detach()
    scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / INT8_MAX
    steps = weight / scale.clamp(min=1e-30)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-9)
    assert float(steps.abs().max()) == pytest.approx(INT8_MAX)
    assert not steps[1].any()
    error = (layer.weight - weight).abs().max()
    assert error <= 0.5001 * scale.max(), "the nearest level"
    torch.testing.assert_close(rounded_to_int8(weight), weight)


def test_a_run_ends_with_the_weights_it_was_scored_with(tmp_path):
    result = vembed.train(
        settings(tmp_path, quantize_weights="int8", max_steps=3, save_steps=2)
    )
    weights = load_file(result.model_dir / "model.safetensors")
    num_rounded = 0
    for name, weight in weights.items():
        is_lookup = "word_embeddings" in name
        if is_lookup or (".layer." in name and name.endswith("dense.weight")):
            rounded = rounded_to_int8(weight)
            # Lookups are no matrix products.
            assert torch.allclose(rounded, weight, rtol=1e-6, atol=0) is not is_lookup
            num_rounded += not is_lookup
    assert num_rounded > 0
    scores = vembed.evaluate(result.model_dir, tmp_path / "val.jsonl")
    assert scores["ndcg@10"] == pytest.approx(result.metrics["ndcg@10"], abs=1e-6)
    log = (result.output_dir / "training_log.txt").read_text()
    assert "12 linear layers are rounded to int8" in log


def test_mistakes():
    config = {"model_name": "m", "data_path": "d", "use_lora": True}
    with pytest.raises(UserError, match=r"quantize_weights: int8 .* use_lora: true"):
        load_config({**config, "quantize_weights": "int8"})
    with pytest.raises(UserError, match="and the model has none"):
        round_weights(AutoModel.from_pretrained(shared(tiny_resnet)))
