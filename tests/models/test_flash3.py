"""FlashAttention 3 is used on Hopper where it is there, and never for a model with attention dropout."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch

from vembed.models import attention

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "installed", "config", "said"),
    [
        ((9, 0), True, {"attention_dropout": 0.0}, None),
        (
            (9, 0),
            True,
            {"text_config": {"attention_probs_dropout_prob": 0.1}},
            "it has no attention dropout",
        ),
        ((9, 0), False, {}, "it is not installed"),
        ((8, 0), True, {}, "it is for Hopper GPUs"),
        ((10, 0), True, {}, "it is for Hopper GPUs"),
    ],
)
def test_where_it_is_used(
    capability,
    installed,
    config,
    said,
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(
        attention,
        "find_spec",
        lambda name: ModuleSpec(name, None) if installed else None,
    )
    activated: list[str] = []
    monkeypatch.setattr(
        torch.nn.attention, "activate_flash_attention_impl", activated.append
    )
    monkeypatch.setattr(
        torch.nn.attention,
        "current_flash_attention_impl",
        lambda: activated[-1] if activated else None,
    )
    for _ in range(2):
        reason = attention.use_flash3(config, CUDA)
        assert reason is None if said is None else (reason or "").startswith(said)
    assert activated == (["FA3"] if said is None else [])


def test_cpus_have_other_kernels():
    assert attention.use_flash3({}, torch.device("cpu")) == "it is for Hopper GPUs"
    assert not attention.uses_flash3()
