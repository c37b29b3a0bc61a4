"""Small functions on the imitation device, which show that it sees what it should."""

import pytest
import torch

from tests import tiny
from tests.built import model_of
from tests.models.families import config_for, text_inputs
from vembed.models import building

LARGEST_BF16_ERROR = 0.05
"""Relative, of a gradient through two layers in bfloat16."""
NUM_COMPARED_MODELS = 4


def reads_a_number():
    torch.ones(3, device="cuda").sum().item()


def indexes_by_a_mask():
    values = torch.arange(3.0, device="cuda")
    values[values > 1]


def finds_distinct_values():
    torch.arange(3, device="cuda").unique()


def copies_pageable_memory():
    torch.ones(3).to("cuda", non_blocking=True)


def copies_with_blocking():
    torch.ones(3).pin_memory().to("cuda")


def copies_pinned_memory():
    torch.ones(3).pin_memory()[1:].to("cuda", non_blocking=True)


def multiplies():
    weight = torch.nn.Parameter(torch.ones(3, 3, device="cuda"))
    (torch.ones(2, 3, device="cuda") @ weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == torch.device("cuda", 0)


def uses_autocast():
    layer = torch.nn.Linear(3, 3).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(torch.ones(2, 3, device="cuda")).dtype is torch.bfloat16


def mixes_devices():
    torch.ones(3, device="cuda") + torch.ones(3)


def keeps_tied_weights():
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    layers[1].weight = layers[0].weight
    layers.to("cuda")
    assert layers[1].weight is layers[0].weight


def fuses_within_rounding():
    """A Qwen3 with adapters in bfloat16: layers of few kernels are as near to float32 as the plain ones."""
    exact = adapter_gradients(torch.device("cpu"), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building.attention, "fuse_rotary_positions", lambda _: None)
        patch.setattr(building.precision, "fuse_norms", lambda _: None)
        patch.setattr(building, "fuse_adapters", lambda _: None)
        plain = adapter_gradients(torch.device("cuda"), torch.bfloat16)
    fused = adapter_gradients(torch.device("cuda"), torch.bfloat16)
    assert not torch.equal(plain, fused), "nothing is fused"
    scale = exact.norm(dim=1)
    plain_errors = (plain - exact).norm(dim=1) / scale
    fused_errors = (fused - exact).norm(dim=1) / scale
    errors = f"{fused_errors} and {plain_errors}"
    assert float(fused_errors.max()) < LARGEST_BF16_ERROR, errors
    assert float(fused_errors.mean()) < 1.1 * float(plain_errors.mean()), errors


def adapter_gradients(device, dtype):
    """Return the gradients of all adapters of several models with frozen weights in bfloat16, one row for each model."""
    options = {"use_lora": True, "lora_r": 4, "torch_dtype": "bfloat16"}
    config = config_for(tiny.tiny_qwen3, **options, padding_free=True)
    rows = []
    for seed in range(NUM_COMPARED_MODELS):
        embedder = model_of(config, computes_on=device, compute_dtype=dtype)
        torch.manual_seed(seed)
        for name, parameter in embedder.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        if dtype == torch.bfloat16:
            embedder.compute_in_bf16()
        else:
            embedder.float()
        embedder.to(device)
        inputs = {}
        for name, values in text_inputs(embedder.description).items():
            inputs[name] = values.to(device)
        (output,) = embedder([("text", inputs)])
        weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
        (output * weights.to(device)).sum().backward()
        gradients = [
            parameter.grad.cpu().flatten()
            for parameter in embedder.parameters()
            if parameter.grad is not None
        ]
        rows.append(torch.cat(gradients))
    return torch.stack(rows)


PROBES = {
    function.__name__: function
    for function in (
        reads_a_number,
        indexes_by_a_mask,
        finds_distinct_values,
        copies_pageable_memory,
        copies_with_blocking,
        copies_pinned_memory,
        multiplies,
        uses_autocast,
        mixes_devices,
        keeps_tied_weights,
        fuses_within_rounding,
    )
}
