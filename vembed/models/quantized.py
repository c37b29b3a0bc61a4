"""4-bit weights: the config to load them, and their dequantised values."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from vembed.errors import UserError


def quieten_bitsandbytes() -> None:
    """Silence bitsandbytes' import warning about a kernel on the Hub. Call this before bitsandbytes is imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


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


def settle(model: nn.Module) -> None:
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
