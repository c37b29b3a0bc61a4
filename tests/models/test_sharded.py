"""Every family sharded over two processes: its layers are the units, and its gradient is that of one process."""

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
    gradients_of,
    inputs_for,
    loss_of,
    modality_items,
)
from vembed.models.families.backbones import layers_of
from vembed.parallel.session import start_session

ELSEWHERE = {
    # In tests/parity/test_families_parity.py and test_parity.py.
    tiny.tiny_siglip,
    tiny.tiny_vit,
    tiny.tiny_convnext,
    # Below, with other options.
    tiny.tiny_bert,
    tiny.tiny_clip,
    tiny.tiny_mpnet,
    # Layers of the same kind as those of RoBERTa and Llama.
    tiny.tiny_xlmr,
    tiny.tiny_mistral,
    tiny.tiny_qwen2,
}
LORA = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.0}
CASES = [
    *((make, {}) for make in EVERY if make not in ELSEWHERE),
    *((make, LORA) for make in (tiny.tiny_convnext, tiny.tiny_siglip, COMPOSED)),
    (tiny.tiny_qwen3, {**LORA, "quantize_weights": "nf4"}),
    (tiny.tiny_qwen3_vl, {**LORA, "quantize_weights": "nf4"}),
    (tiny.tiny_bert, {**LORA, "lora_variant": "dora"}),
    (tiny.tiny_clip, {"freeze": ["vision"], "mrl_dims": [8]}),
    (tiny.tiny_bert, {"freeze": ["first_n_layers=1"]}),
    (tiny.tiny_mpnet, {"gradient_checkpointing": False}),
]


def _parts(description, rank):
    """Other items on each rank, and not equally many."""
    parts = []
    for modality in description.modalities:
        items = modality_items(modality)[rank:2]
        parts.append((modality, inputs_for(description, modality, items)))
    return parts


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
            gradients = {}
            for name, shard in gradients_of(prepared).items():
                is_shard = isinstance(shard, DTensor)
                gradient = shard.full_tensor() if is_shard else shard
                gradients[_one_name(name)] = gradient
            units = 0
            for module in prepared.modules():
                layer_class = type(module).__name__.removeprefix("FSDP")
                is_layer = layer_class in description.layer_classes
                units += isinstance(module, FSDPModule) and is_layer
            results.append((units, gradients))
    return results


def test_gradients_of_two_shards_are_those_of_one_process():
    options = {"strategy": "fsdp", "mixed_precision": "no"}
    configs = [config_for(make, **options, **more) for make, more in CASES]
    ranks = run_ranks(_sharded_gradients, 2, configs, timeout=300)
    for number, config in enumerate(configs):
        case = str(CASES[number])
        model = build_case(config).train()
        _adapters_not_at_zero(model)
        losses = [loss_of(model(_parts(model.description, rank))) for rank in (0, 1)]
        (sum(losses) / 2).backward()
        expected = {}
        for name, gradient in gradients_of(model).items():
            expected[_one_name(name)] = gradient
        layers = layers_of(model.backbone)
        units, gradients = ranks[0][number]
        other_units, others = ranks[1][number]
        assert units == other_units == len(layers) > 0, case
        torch.testing.assert_close(gradients, others, rtol=0, atol=0)
        for name, error in gradient_errors(gradients, expected).items():
            assert error < 1e-5, f"{case}: {name} is off by {error:.1e}"
