"""Texts without padding give the numbers and gradients of texts with it, in every model and by every kernel."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from tests import tiny
from tests.models.families import built, text_inputs
from vembed.errors import UserError
from vembed.models import attention
from vembed.models.families.backbones import read_config

PACKED = [
    tiny.tiny_bert,
    tiny.tiny_distilbert,
    tiny.tiny_roberta,
    tiny.tiny_xlmr,
    tiny.tiny_qwen3,
    tiny.tiny_qwen2,
    tiny.tiny_llama,
    tiny.tiny_mistral,
]
SENTENCES = [
    "red cat",
    "the list of every old house in this city, first and last",
    "parse",
    "a b c d e f g h i j k",
]


def embedded(make, inputs_of=text_inputs, **options):
    """Embeddings in float64 and the gradient of every parameter."""
    model = built(make, **options).double().train()
    (actual,) = model([("text", inputs_of(model.description, SENTENCES))])
    torch.manual_seed(0)
    (actual * torch.randn(actual.shape, dtype=torch.float64)).sum().backward()
    return actual.detach(), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same(first, second):
    torch.testing.assert_close(first[0], second[0], rtol=1e-9, atol=1e-12)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        torch.testing.assert_close(
            gradient, second[1][name], rtol=1e-8, atol=1e-11, msg=name
        )


def test_every_model_that_is_named_is_tried_here():
    tried = {
        read_config(tiny.shared(make), trust_remote_code=False).model_type
        for make in PACKED
    }
    assert tried == set(attention.MODEL_TYPES)


@pytest.mark.parametrize("make", PACKED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pooling": "mean"},
        {"gradient_checkpointing": True},
        {"use_lora": True, "lora_dropout": 0.0},
    ],
)
def test_numbers_and_gradients_are_those_of_padded_texts(make, options):
    assert_same(
        embedded(make, padding_free=True, **options),
        embedded(make, padding_free=False, **options),
    )


def test_decoders_that_see_all_tokens():
    options = {"bidirectional_attention": True, "pooling": "mean"}
    both = [
        embedded(tiny.tiny_qwen3, padding_free=free, **options)
        for free in (True, False)
    ]
    assert_same(*both)
    assert not torch.allclose(
        both[0][0], embedded(tiny.tiny_qwen3, padding_free=True, pooling="mean")[0]
    )


def test_a_sliding_window_shorter_than_the_texts(tmp_path):
    def narrow(folder):
        built = tiny.tiny_mistral(folder)
        text = (built / "config.json").read_text()
        assert '"sliding_window": 64' in text
        (built / "config.json").write_text(
            text.replace('"sliding_window": 64', '"sliding_window": 4')
        )
        return built

    assert_same(
        embedded(narrow, padding_free=True), embedded(narrow, padding_free=False)
    )
    assert not torch.allclose(embedded(narrow)[0], embedded(tiny.tiny_mistral)[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_and_none(side):
    model = built(tiny.tiny_qwen3, padding_free=True).eval()
    description = model.description.with_(padding_side=side)
    inputs = text_inputs(description, SENTENCES)
    with torch.no_grad():
        (whole,) = model([("text", inputs)])
        (with_index,) = model(
            [
                (
                    "text",
                    {
                        **inputs,
                        attention.TOKEN_INDEX: attention.real_tokens(
                            inputs["attention_mask"]
                        ),
                    },
                )
            ]
        )
        alone = torch.cat(
            [
                model([("text", text_inputs(description, [text]))])[0]
                for text in SENTENCES
            ]
        )
    assert torch.equal(whole, with_index)
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-6)


def text_by_text(query, key, value, starts, scale, sides):
    """What a GPU's kernel computes, by its documentation."""
    parts = []
    for start, end in pairwise(starts.tolist()):
        queries, keys, values = (
            entry[start:end].transpose(0, 1) for entry in (query, key, value)
        )
        ahead = torch.arange(end - start)[None, :] - torch.arange(end - start)[:, None]
        left, right = (len(ahead) if side < 0 else side for side in sides)
        visible = (ahead <= right) & (ahead >= -left)
        parts.append(
            functional.scaled_dot_product_attention(
                queries, keys, values, visible, scale=scale, enable_gqa=True
            )
        )
    return torch.cat([part.transpose(0, 1) for part in parts])


@pytest.mark.parametrize("make", [tiny.tiny_bert, tiny.tiny_qwen3, tiny.tiny_mistral])
@pytest.mark.parametrize("kernel", ["torch", "torch without groups"])
def test_kernels_of_gpus_are_asked_for_the_same(make, kernel, monkeypatch):
    """No GPU is needed: the kernels are stood in for by attention text by text, with the signatures they have."""
    micro_batches = []

    def varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        *,
        scale,
        window_size,
        enable_gqa=False,
    ):
        micro_batches.append(kernel)
        assert enable_gqa or q.shape[1] == k.shape[1]
        assert cu_q is cu_k and max_q == max_k == int(cu_q.diff().max())
        return text_by_text(q, k, v, cu_q, scale, window_size)

    def older(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        *,
        scale,
        window_size,
    ):
        return varlen(
            q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size
        )

    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn",
        varlen if kernel == "torch" else older,
    )
    expected = embedded(make, padding_free=False)

    def on_gpu(
        module,
        query,
        key,
        value,
        _mask,
        **options,
    ):
        parts = (entry[0].transpose(0, 1) for entry in (query, key, value))
        causal = bool(vars(module).get("is_causal", False))
        packed = options["packed"]
        window = options.get("sliding_window")
        window = window if window and window < packed.longest else None
        scaling = options["scaling"]
        return attention.by_kernel(*parts, packed, 0.0, scaling, causal, window)[
            None
        ], None

    monkeypatch.setattr(attention, "attention", on_gpu)
    assert_same(embedded(make, padding_free=True), expected)
    assert micro_batches


def test_what_cannot_be_had_is_said():
    with pytest.raises(
        UserError,
        match=r"padding_free: true is not possible: modernbert is not.*leave it out",
    ):
        built(tiny.tiny_modernbert, padding_free=True)
