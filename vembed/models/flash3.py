"""FlashAttention 3, through torch: on Hopper GPUs where its package is, for models without attention dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch

PACKAGE = "flash_attn_interface"
"""The module that FlashAttention 3 installs."""
HOPPER = (9, 0)
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attention_dropout_prob",
)


def why_not(config: Mapping[str, Any], device: torch.device) -> str | None:
    """Return the reason for other kernels; None: FlashAttention 3 can be used. `config`: of the model."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return "it is for Hopper GPUs"
    if find_spec(PACKAGE) is None:
        return "it is not installed"
    if "activate_flash_attention_impl" not in vars(torch.nn.attention):
        return "this torch cannot use it"
    if any(_attention_dropouts(config)):
        # It takes the place of torch's kernel for all calls, and refuses those with dropout.
        return "it has no attention dropout, and the model has"
    return None


def activate() -> None:
    """Let torch compute flash attention by FlashAttention 3, in this process from now on."""
    if torch.nn.attention.current_flash_attention_impl() != "FA3":
        torch.nn.attention.activate_flash_attention_impl("FA3")


def is_active() -> bool:
    """Return True if torch computes flash attention by FlashAttention 3."""
    known = "current_flash_attention_impl" in vars(torch.nn.attention)
    return known and torch.nn.attention.current_flash_attention_impl() == "FA3"


def _attention_dropouts(config: Mapping[str, Any]) -> Iterator[float]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _attention_dropouts(value)
        elif name in _DROPOUTS:
            yield float(value or 0.0)
