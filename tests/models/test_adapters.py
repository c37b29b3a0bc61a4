"""Adapters: which layers get one, that they alone are trained, and that merged, saved and read they score the same."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests import tiny
from tests.models.families import (
    COMPOSED,
    EVERY,
    TEXT_DECODERS,
    built,
    every_model,
    loss_of,
    parts_for,
    text_inputs,
)
from vembed.errors import UserError
from vembed.models.adapters import (
    has_adapters,
    merged_state,
    save_adapter,
)
from vembed.models.building import empty_backbone, load_embedder
from vembed.models.precision import is_quantized

ADAPTED_LAYERS = {
    **dict.fromkeys(EVERY, 2 * 6),
    **dict.fromkeys(TEXT_DECODERS, 2 * 7),
    tiny.tiny_gpt2: 2 * 4,
    tiny.tiny_modernbert: 3 * 4,
    tiny.tiny_convnext: 3 * 2,
    tiny.tiny_clip: 4 * 6 + 2,
    tiny.tiny_siglip: 4 * 6 + 1,
    tiny.tiny_siglip2: 4 * 6 + 1,
    tiny.tiny_qwen3_vl: 2 * 7 + 2 * 4,
    tiny.tiny_qwen2_vl: 2 * 7 + 2 * 4,
    tiny.tiny_qwen2_5_vl: 2 * 7 + 2 * 5,
    COMPOSED: 4 * 6,
}
"""Linear layers inside the transformer layers, and the projections behind them."""


def _trained(model):
    """As after some training: an adapter that starts as nothing would prove nothing."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.mul_(1.2) if "magnitude" in name else parameter.add_(
                    0.1 * noise
                )
    return model.eval()


def _backbone_state(model):
    return {
        name.removeprefix("backbone."): tensor
        for name, tensor in model.state_dict().items()
    }


def _adapted_names(model):
    return {
        match[1]
        for name, _ in model.named_parameters()
        if (match := re.match(r"backbone\.(.*)\.lora_A", name))
    }


@every_model
def test_adapters_alone_are_trained_and_all_of_them_are(make):
    model = built(make, use_lora=True, lora_r=4)
    assert len(_adapted_names(model)) == ADAPTED_LAYERS[make]
    new = set()
    if make == COMPOSED:
        new = {"backbone.text_projection.weight", "backbone.visual_projection.weight"}
    model.train()
    loss_of(model(parts_for(model.description))).backward()
    others = set()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name
        if parameter.requires_grad and ".lora_" not in name:
            others.add(name)
    assert others == new


DORA = {"lora_variant": "dora"}
QLORA = {"quantize_weights": "nf4"}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((make, QLORA) for make in [*EVERY, COMPOSED] if make != tiny.tiny_gpt2),
        # Linear layers, transposed ones and convolutions; one tower, two, and a model of texts with images.
        (tiny.tiny_bert, DORA),
        (tiny.tiny_gpt2, DORA),
        (tiny.tiny_convnext, DORA),
        (tiny.tiny_clip, DORA),
        (tiny.tiny_qwen3_vl, DORA),
    ],
)
def test_merged_weights_score_as_the_adapter_does(make, options):
    model = _trained(built(make, use_lora=True, **options))
    state = merged_state(model.backbone, _backbone_state(model))
    empty = empty_backbone(model.description)
    assert not has_adapters(empty) and not any(map(is_quantized, empty.modules()))
    plain = built(make).eval()
    assert set(plain.backbone.state_dict()) == set(empty.state_dict()) == set(state)
    plain.backbone.load_state_dict(state)
    parts = parts_for(model.description)
    with torch.no_grad():
        torch.testing.assert_close(plain(parts), model(parts), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing.:FutureWarning"
)  # peft's use of an older name
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": "lora_only", "modules_to_save": ["word_embeddings"]},
        {"trainable_token_indices": {"word_embeddings": list(range(5, 40))}},
        {
            "rank_pattern": {"query": 8},
            "alpha_pattern": {r"layer\.1\..*query": 32},
            "use_rslora": True,
        },
    ],
    ids=["plain", "other-weights", "tokens", "patterns"],
)
def test_an_adapter_of_peft_scores_the_same(options, tmp_path):
    backbone = AutoModel.from_pretrained(tiny.shared(tiny.tiny_bert))
    names = set(backbone.state_dict())
    lora = LoraConfig(r=4, target_modules=["query", "value"], **options)
    adapted = _trained(get_peft_model(backbone, lora))
    adapted.save_pretrained(tmp_path)
    model = load_embedder(tmp_path)
    inputs = text_inputs(model.description)
    with torch.no_grad():
        expected = adapted(**inputs).last_hidden_state
        actual = model.backbone(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert set(model.backbone.state_dict()) == names


def test_adapters_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(UserError, match="GPT2Model stores its layers transposed"):
        built(tiny.tiny_gpt2, use_lora=True, **QLORA)
    model = built(tiny.tiny_bert, use_lora=True)
    save_adapter(tmp_path, model.backbone, _backbone_state(model))
    options = {"model_name": str(tmp_path), "use_lora": True}
    with pytest.raises(UserError, match="merge it first"):
        built(tiny.tiny_bert, **options, quantize_weights="nf4")
    path = tmp_path / "adapter_model.safetensors"
    save_file({**load_file(path), "encoder.lora_E": torch.ones(2)}, path)
    with pytest.raises(UserError, match=r"no low-rank matrices .* BertModel"):
        load_embedder(tmp_path)


@pytest.mark.parametrize(
    ("make", "options", "prefixes", "count"),
    [
        (tiny.tiny_clip, {"freeze": ["vision"]}, ("text_model.", "text_p", "vis"), 14),
        (tiny.tiny_qwen3_vl, {"freeze": ["text"]}, ("visual.",), 8),
        (tiny.tiny_bert, {"freeze": ["first_n_layers=1"]}, ("encoder.layer.1.",), 6),
        (
            tiny.tiny_qwen3,
            {"lora_target_modules": ["q_proj", "layers.1.mlp.up_proj"]},
            ("layers.0.self_attn.q_", "layers.1.self_attn.q_", "layers.1.mlp.up_"),
            3,
        ),
    ],
)
def test_adapters_go_where_they_are_asked_for_and_not_into_frozen_parts(
    make, options, prefixes, count
):
    names = _adapted_names(built(make, use_lora=True, **options))
    assert len(names) == count
    assert all(name.startswith(prefixes) for name in names), names


def test_all_linear_layers():
    options = {"use_lora": True, "lora_target_modules": "all-linear"}
    outside = set()
    for name in _adapted_names(built(tiny.tiny_qwen3_vl, **options)):
        if not name.startswith(("language_model.layers.", "visual.blocks.")):
            outside.add(name)
    expected = set()
    for merger in ("merger", "deepstack_merger_list.0"):
        expected |= {f"visual.{merger}.linear_fc1", f"visual.{merger}.linear_fc2"}
    assert outside == expected


def test_adapters_are_float32_above_frozen_half_precision_weights():
    model = built(tiny.tiny_qwen3, use_lora=True, torch_dtype="bfloat16")
    for name, parameter in model.named_parameters():
        is_float32 = parameter.dtype == torch.float32
        assert is_float32 == parameter.requires_grad, name
    assert model(parts_for(model.description))[0].dtype == torch.float32


def test_four_bit_weights_are_in_the_computed_dtype_and_outlast_an_evaluation():
    options = {"quantize_weights": "nf4", "mixed_precision": "bf16"}
    model = built(tiny.tiny_qwen3, use_lora=True, **options)
    packed = [module for module in model.modules() if is_quantized(module)]
    assert len(packed) == 2 * 7
    assert {module.weight.dtype for module in packed} == {torch.bfloat16}
    num_weights = 32 * 32
    assert packed[0].weight.nbytes == num_weights / 2
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.eval()(parts_for(model.description))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
