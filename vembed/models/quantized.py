"""4-bit weights: the config to load them, and their dequantised values."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BitsAndBytesConfig

from vembed.errors import UserError
from vembed.models.families.backbones import linear_names_inside_layers, plain_name
from vembed.parallel.devices import quieten_bitsandbytes


def four_bit(dtype: torch.dtype, skip: list[str]) -> BitsAndBytesConfig:
    """Return the config to load linear layers in 4 bits (nf4, double quantisation), except those in `skip`."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "use_qlora: true needs the package bitsandbytes; install it, or set use_qlora: false"
        )
    quieten_bitsandbytes()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
        llm_int8_skip_modules=skip,
    )


def keep_trainable_layout(model: nn.Module) -> None:
    """Keep the layout of 4-bit weights on CPUs: evaluation would repack them into a layout that cannot be trained."""
    for module in model.modules():
        if is_quantized(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def is_quantized(module: nn.Module) -> bool:
    """Return True for a linear layer in 4 bits."""
    return isinstance(module, nn.Linear) and "quant_state" in vars(module)


def dequantized(module: Any, packed: Tensor) -> Tensor:
    """Return the dequantised weight [out, in] of a 4-bit layer in float32."""
    from bitsandbytes.functional import dequantize_4bit

    state = module.quant_state
    whole: Tensor = dequantize_4bit(packed.to(state.absmax.device), state)
    return whole.float().cpu()


def rounded_to_four_bits(weight: Tensor) -> Tensor:
    """Return the weight quantised to 4 bits and dequantised again, in its own dtype."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    rounded: Tensor = dequantize_4bit(packed, state)
    return rounded.to(weight.dtype)


# ---- linear layers that are trained through int8 rounding ----------------------------


log = logging.getLogger(__name__)

INT8_MAX = 127
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
    scale = values.abs().amax(dim=1, keepdim=True) / INT8_MAX
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
