"""Every family sharded over two processes: its layers are the units, and its gradient is that of one process."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests import tiny
from tests.harness import run_ranks
from tests.measure import gradient_errors
from tests.models.families import (
    COMPOSED,
    EVERY,
    build_case,
    config_for,
    inputs_for,
    loss_of,
    modality_items,
)
from vembed.parallel.session import start_session

FULL = [(make, {}) for make in [*EVERY, COMPOSED]]
LORA = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.0}
KINDS = [
    tiny.tiny_bert,
    tiny.tiny_qwen3,
    tiny.tiny_convnext,
    tiny.tiny_siglip,
    tiny.tiny_qwen2_5_vl,
    COMPOSED,
]
OTHERS = [
    *((make, LORA) for make in KINDS),
    (tiny.tiny_qwen3, {**LORA, "quantize_weights": "nf4"}),
    (tiny.tiny_qwen3_vl, {**LORA, "quantize_weights": "nf4"}),
    (tiny.tiny_bert, {**LORA, "lora_variant": "dora"}),
    (tiny.tiny_clip, {"freeze": ["vision"], "mrl_dims": [8]}),
    (tiny.tiny_bert, {"freeze": ["first_n_layers=1"]}),
    (tiny.tiny_mpnet, {"gradient_checkpointing": False}),
]


def _name(case):
    make, options = case
    return "-".join([make if isinstance(make, str) else make.__name__, *options])


def _parts(description, rank):
    """Other items on each rank, and not equally many."""
    rank_rows = slice(rank, rank + 2 - rank)
    return [
        (
            modality,
            inputs_for(description, modality, modality_items(modality)[rank_rows]),
        )
        for modality in description.modalities
    ]


def _adapters_not_at_zero(model):
    draw = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05, generator=draw)


def _one_name(name):
    """T5's embeddings have two names, of which the sharded model lists another one first."""
    return name.replace("backbone.encoder.embed_tokens.", "backbone.shared.")


def _sharded_gradients(configs):
    results = []
    with start_session(configs[0]) as session:
        for config in configs:
            model = build_case(config)
            _adapters_not_at_zero(model)
            description = model.description
            prepared = session.prepare(model, description.layer_classes).train()
            loss_of(prepared(_parts(description, session.rank))).backward()
            gradients = {
                _one_name(name): parameter.grad.full_tensor()
                if isinstance(parameter.grad, DTensor)
                else parameter.grad
                for name, parameter in prepared.named_parameters()
                if parameter.grad is not None
            }
            units = sum(
                isinstance(module, FSDPModule)
                and type(module).__name__.removeprefix("FSDP")
                in description.layer_classes
                for module in prepared.modules()
            )
            results.append((units, gradients))
    return results


@pytest.mark.parametrize("cases", [FULL, OTHERS], ids=["full", "others"])
def test_gradients_of_two_shards_are_those_of_one_process(cases):
    configs = [
        config_for(make, strategy="fsdp", mixed_precision="no", **options)
        for make, options in cases
    ]
    (first, second) = run_ranks(
        _sharded_gradients, 2, configs, timeout=300, process_group=False
    )
    for case, config, (units, gradients), (other_units, others) in zip(
        cases, configs, first, second, strict=True
    ):
        model = build_case(config)
        _adapters_not_at_zero(model)
        model.train()
        (
            sum(loss_of(model(_parts(model.description, rank))) for rank in (0, 1)) / 2
        ).backward()
        expected = {
            _one_name(name): parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        layers = sum(
            type(module).__name__ in model.description.layer_classes
            for module in model.modules()
        )
        assert units == other_units == layers > 0, _name(case)
        assert set(gradients) == set(others) == set(expected), _name(case)
        for name in expected:
            assert torch.equal(gradients[name], others[name]), f"{_name(case)}: {name}"
        for name, error in gradient_errors(gradients, expected).items():
            assert error < 1e-5, f"{_name(case)}: {name} is off by {error:.1e}"
