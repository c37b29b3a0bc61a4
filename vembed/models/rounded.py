"""Linear layers whose weights are rounded to int8 in each forward pass and trained through the rounding."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vembed.errors import UserError
from vembed.models.adapters import linear_names_inside_layers
from vembed.models.names import plain_name

log = logging.getLogger(__name__)

LEVELS = 127
"""Largest absolute value of the integers, which are symmetric about 0."""


class RoundedLinear(nn.Linear):
    """nn.Linear that computes with its weight in int8. The weight itself stays as it is, and so do its names."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer with the rounded weight."""
        weight: Tensor = _StraightThrough.apply(self.weight)  # type: ignore[no-untyped-call]
        return functional.linear(input, weight, self.bias)


class _StraightThrough(torch.autograd.Function):
    """Rounding whose derivative is taken for that of the identity."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        del ctx
        return rounded(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


def rounded(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as whole multiples, from -127 to 127, of a scale for each row, in its own dtype."""
    values = weight.detach()
    # Scales of 16-bit weights are computed in float32: their quotients decide the rounding.
    values = values if values.dtype == torch.float64 else values.float()
    scale = values.abs().amax(dim=1, keepdim=True) / LEVELS
    # A row of zeros would be 0 / 0.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (torch.round(values / scale) * scale).to(weight.dtype)


def round_weights(backbone: nn.Module) -> None:
    """Let the linear layers inside the transformer layers compute with rounded weights."""
    layers = [
        backbone.get_submodule(name) for name in linear_names_inside_layers(backbone)
    ]
    chosen = [layer for layer in layers if type(layer) is nn.Linear]
    if not chosen:
        raise UserError(
            "quantize_weights: int8 rounds linear layers inside transformer layers, and the model has none"
        )
    for layer in chosen:
        layer.__class__ = RoundedLinear
    log.info(
        "weights of %d linear layers: rounded to int8 in the forward pass (quantize_weights)",
        len(chosen),
    )


def store_rounded(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace the weights of rounded layers in a whole state dict by what the layers compute with."""
    for name, module in model.named_modules():
        if isinstance(module, RoundedLinear):
            key = plain_name(f"{name}.weight")
            weights[key] = rounded(weights[key])
