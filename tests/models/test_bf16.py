"""Arithmetic in bfloat16 on CPUs: close to float64 relative to the summed terms, with float32 weights and gradients, on
any processor."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import vembed
from tests import tiny
from tests.models.families import (
    built,
    config_for,
    every_model,
    gradients_of,
    loss_of,
    parts_for,
)
from tests.training.test_run import metrics, settings
from vembed.config.loading import resolve_run
from vembed.models.families.backbones import layers_of
from vembed.models.precision import (
    WeightCopies,
    bf16_weights_of,
    use_bf16,
)
from vembed.parallel import placement
from vembed.parallel.environment import RankInfo

STEP = 2.0**-8
"""Largest relative rounding error of one number in bfloat16."""
CPU = torch.device("cpu")


def assert_close(actual, expected, terms, roundings):
    """Compare with the float64 result. `terms`: the sum of the absolute values of what each number is a sum of."""
    errors = (actual.double() - expected).abs()
    assert (errors <= roundings * STEP * terms + 1e-12).all()


def test_linear_layers():
    torch.manual_seed(0)
    layer = nn.Linear(48, 80)
    values = torch.randn(2, 31, 48).bfloat16()
    gradient = torch.randn(2, 31, 80).bfloat16()
    model = nn.Sequential(layer)
    use_bf16(model)
    leaf = values.clone().requires_grad_()
    with bf16_weights_of(model).held():
        output = model(leaf)
        output.backward(gradient)
    assert output.dtype == leaf.grad.dtype == torch.bfloat16
    assert layer.weight.grad is not None
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32

    weight = layer.weight.detach().double()
    bias = layer.bias.detach().double()
    x = values.double()
    g = gradient.double()
    assert_close(output, x @ weight.T + bias, x.abs() @ weight.abs().T + bias.abs(), 2)
    assert_close(leaf.grad, g @ weight, g.abs() @ weight.abs(), 2)
    rows = x.flatten(0, 1)
    sums = g.flatten(0, 1)
    assert_close(layer.weight.grad, sums.T @ rows, sums.abs().T @ rows.abs(), 1)
    assert_close(layer.bias.grad, sums.sum(0), sums.abs().sum(0), 1)


def test_layer_norms_went_through_float32_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    torch.manual_seed(0)
    norm = nn.LayerNorm(64)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    exact = copy.deepcopy(norm).double()
    use_bf16(nn.Sequential(norm))
    values = torch.randn(50, 64).bfloat16().requires_grad_()
    kept_dtypes = set()

    def keep(tensor):
        if tensor.numel() >= values.numel():
            kept_dtypes.add(tensor.dtype)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        actual = norm(values)
    assert actual.dtype == torch.bfloat16
    assert kept_dtypes == {torch.bfloat16}, "half of the memory"
    # Weight and output are rounded to 8 bits each, the products between them to none.
    expected = exact(values.double()).detach()
    assert_close(actual.detach(), expected, expected.abs().max(), 2)
    actual.sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.float32


def results(make, in_bf16):
    """Embeddings and gradients of a tiny model."""
    model = built(make, mixed_precision="no").train()
    if in_bf16:
        model.compute_in_bf16()
    outputs = model(parts_for(model.description))
    loss_of(outputs).backward()
    return outputs, gradients_of(model)


@every_model
def test_every_family_computes_in_bf16(make):
    expected, gradients = results(make, in_bf16=False)
    outputs, actual = results(make, in_bf16=True)
    for output, exact in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32
        assert torch.cosine_similarity(output, exact).min() > 0.99
    assert {value.dtype for value in actual.values()} == {torch.float32}
    assert actual.keys() == gradients.keys()
    whole = torch.cat([actual[name].flatten() for name in gradients])
    exact = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert torch.cosine_similarity(whole, exact, dim=0) > 0.98


def test_a_decoder_hands_on_bf16():
    model = built(tiny.tiny_qwen3, mixed_precision="no").train()
    model.compute_in_bf16()
    dtypes = set()
    for layer in layers_of(model.backbone):
        layer.register_forward_hook(
            lambda _, inputs, output: dtypes.update({inputs[0].dtype, output.dtype})
        )
    model(parts_for(model.description))
    assert dtypes == {torch.bfloat16}, "norms and embeddings widen nothing"


def test_a_run_in_bf16_learns_as_in_float32_with_and_without_gradient_cache(tmp_path):
    def losses_of(name, **options):
        output = str(tmp_path / name)
        run = settings(tmp_path, max_steps=3, output_dir=output, **options)
        return metrics(vembed.train(run).output_dir)

    exact = losses_of("float32", mixed_precision="no")
    rounded = losses_of("bf16", mixed_precision="bf16")
    cache = {"use_gradient_cache": True, "micro_batch_tokens": 64}
    cached = losses_of("cached", mixed_precision="bf16", **cache)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    assert cached == pytest.approx(rounded, rel=0.02)


@pytest.mark.parametrize(
    ("instructions", "options", "value"),
    [
        (None, {}, "no"),
        ("AMX", {}, "bf16"),
        ("AMX", {"torch_compile": True}, "no"),
        ("AMX", {"mixed_precision": "no"}, "no"),
    ],
)
def test_auto_takes_bf16_where_it_pays(instructions, options, value, monkeypatch):
    run = resolve_run(config_for(tiny.tiny_bert, **options), env={})

    def placed():
        ranks = RankInfo(0, 1, 0, 1)
        return placement.place(run, ranks, CPU, 2**34, instructions=instructions)

    assert placed().precision.value == "no", "the hidden size is too small"
    monkeypatch.setattr(placement, "MIN_BF16_HIDDEN_DIM", 32)
    assert placed().precision.value == value
    assert placed().copies_weights == (value == "bf16")


class NormTwice(nn.Module):
    """A norm that runs twice in each forward pass, behind a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = LlamaRMSNorm(8)

    def forward(self, values):
        return self.norm(self.linear(self.norm(values)))


def test_grouped_gradients_are_those_of_autograd():
    torch.manual_seed(0)
    model = NormTwice()
    use_bf16(model)
    copies = bf16_weights_of(model)
    batches = torch.randn(3, 4, 8)
    gradients = {}
    for grouping in (False, True):
        model.zero_grad(set_to_none=True)
        for batch in batches:
            outputs = model(batch)
            context = nullcontext()
            if grouping:
                context = copies.grouped_gradients(model.parameters())
            with context:
                outputs.float().square().sum().backward()
        gradients[grouping] = [weight.grad for weight in model.parameters()]
    for grouped, plain in zip(gradients[True], gradients[False], strict=True):
        assert grouped.dtype == torch.float32
        torch.testing.assert_close(grouped, plain, rtol=1e-6, atol=1e-6)


def test_parameters_without_a_new_gradient_keep_the_earlier_one():
    used = nn.Parameter(torch.ones(2))
    unused = nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    (used + unused).sum().backward()
    with WeightCopies().grouped_gradients([used, unused, frozen]):
        (3 * used).sum().backward()
    assert used.grad.tolist() == [4, 4]
    assert unused.grad.tolist() == [1, 1]
    assert frozen.grad is None
