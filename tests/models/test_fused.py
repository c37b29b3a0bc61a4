"""Layers that GPUs compute by fewer kernels give what the plain ones give."""

import importlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests import tiny
from tests.harness import run_ranks
from tests.models.families import built, gradients_of, loss_of, parts_for
from vembed.models import attention
from vembed.models.adapters import fuse_adapters
from vembed.models.families.backbones import layers_of
from vembed.models.precision import fuse_norms
from vembed.models.vision import add_at_images

BF16_STEP = 2.0**-8
"""Largest relative rounding error of one number in bfloat16."""
LORA = {"use_lora": True, "lora_r": 4}


def with_gradient(function, values, *others):
    """Return the output of a function, and the gradient of its first argument."""
    values = values.clone().requires_grad_()
    output = function(values, *others)
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype)
    output.backward(weights.view_as(output))
    assert values.grad is not None
    return [output.detach(), values.grad]


@pytest.mark.parametrize("model", attention._ROTARY_MODELS)
def test_rotary_positions(model):
    """In float64, and in bfloat16 as near to it as the plain formula."""
    library = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    torch.manual_seed(0)
    query = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    angles = torch.randn(2, 5, 4, dtype=torch.float64).repeat(1, 1, 2)
    cos = angles.cos()
    sin = angles.sin()

    def plain(values, cos, sin):
        return library.apply_rotary_pos_emb(values, values, cos, sin)[0]

    def fused(values, cos, sin):
        return attention._Rotated.apply(values, cos[:, None], sin[:, None])

    # ModernBERT's formula is in float32 whatever its input.
    tolerance = 1e-6 if model == "modernbert" else 1e-12
    exact = with_gradient(fused, query, cos, sin)
    for entry, result in zip(with_gradient(plain, query, cos, sin), exact, strict=True):
        torch.testing.assert_close(result, entry, atol=tolerance, rtol=tolerance)
    half = [tensor.bfloat16() for tensor in (query, cos, sin)]
    for entry, result in zip(exact, with_gradient(fused, *half), strict=True):
        assert result.dtype == torch.bfloat16
        # Rounded are the input, cos and sin, the first product and the sum.
        limit = 5 * BF16_STEP * float(entry.abs().max())
        assert float((result.double() - entry).abs().max()) <= limit


def test_features_added_at_images():
    language_model = built(tiny.tiny_qwen3_vl).backbone.language_model
    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 8)
    is_image = torch.tensor([[False, True, True, False], [True, False, False, True]])
    features = torch.randn(4, 8)

    def plain(features):
        return language_model._deepstack_process(hidden, is_image, features)

    def fused(features):
        return add_at_images(hidden, is_image, features)

    expected = with_gradient(plain, features)
    actual = with_gradient(fused, features)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def gradients(embedder):
    """Return the gradients of all trained parameters on some texts."""
    torch.manual_seed(2)
    loss_of(embedder(parts_for(embedder.description))).backward()
    return gradients_of(embedder)


def adapted(**options):
    """A Qwen3 with adapters that change its output, in float32."""
    embedder = built(tiny.tiny_qwen3, **LORA, **options)
    torch.manual_seed(1)
    for name, parameter in embedder.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return embedder


def assert_gradients_close(actual, expected):
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, atol=1e-5 * scale, rtol=1e-4)


def fuse(embedder):
    fuse_norms(embedder.backbone)
    fuse_adapters(embedder.backbone)
    return embedder


@pytest.mark.parametrize(
    "options",
    [{}, {"lora_variant": "rslora"}, {"lora_variant": "dora"}, {"lora_dropout": 0.1}],
    ids=str,
)
def test_adapted_layers_and_norms(options):
    """Also where a part of them stays plain."""
    expected = gradients(adapted(**options))
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert_gradients_close(gradients(fuse(adapted(**options))), expected)


def sharded_gradients():
    """Return the gradients of a fused Qwen3 under FSDP2."""
    embedder = fuse(adapted())
    for layer in layers_of(embedder.backbone):
        fully_shard(layer)
    fully_shard(embedder)
    whole = {}
    for name, gradient in gradients(embedder).items():
        whole[name] = gradient.full_tensor()
    return whole


def test_under_fsdp2():
    expected = gradients(adapted())
    for actual in run_ranks(sharded_gradients, 2, process_group=True):
        assert_gradients_close(actual, expected)
