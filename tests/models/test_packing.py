"""Texts without padding give the numbers and gradients of texts with it, in every model."""

import pytest
import torch

from tests import tiny
from tests.models.families import built, gradients_of, text_inputs
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


def embedded(make, **options):
    """Embeddings in float64 and the gradient of every parameter."""
    model = built(make, **options).double().train()
    (actual,) = model([("text", text_inputs(model.description, SENTENCES))])
    torch.manual_seed(0)
    (actual * torch.randn(actual.shape, dtype=torch.float64)).sum().backward()
    return actual.detach(), gradients_of(model)


def assert_same(first, second):
    torch.testing.assert_close(first[0], second[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first[1], second[1], rtol=1e-8, atol=1e-11)


def test_every_model_that_is_named_is_tried_here():
    tried = set()
    for make in PACKED:
        config = read_config(tiny.shared(make), trust_remote_code=False)
        tried.add(config.model_type)
    assert tried == set(attention.MODEL_TYPES)


@pytest.mark.parametrize("make", PACKED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "pooling": "mean",
            "gradient_checkpointing": True,
            "use_lora": True,
            "lora_dropout": 0.0,
        },
    ],
)
def test_numbers_and_gradients_are_those_of_padded_texts(make, options):
    assert_same(
        embedded(make, padding_free=True, **options),
        embedded(make, padding_free=False, **options),
    )


def test_decoders_that_see_all_tokens():
    options = {"bidirectional_attention": True, "pooling": "mean"}
    packed = embedded(tiny.tiny_qwen3, padding_free=True, **options)
    assert_same(packed, embedded(tiny.tiny_qwen3, padding_free=False, **options))
    causal = embedded(tiny.tiny_qwen3, padding_free=True, pooling="mean")
    assert not torch.allclose(packed[0], causal[0])


def narrow_mistral(folder):
    """A Mistral whose sliding window is shorter than the texts."""
    tiny.tiny_mistral(folder)
    tiny.change_json(folder / "config.json", sliding_window=4)
    return folder


@pytest.mark.parametrize("sees_all", [False, True])
def test_a_sliding_window_shorter_than_the_texts(sees_all):
    options = {"bidirectional_attention": sees_all, "pooling": "mean"}
    packed = embedded(narrow_mistral, padding_free=True, **options)
    padded = embedded(narrow_mistral, padding_free=False, **options)
    assert_same(packed, padded)
    assert not torch.allclose(packed[0], embedded(tiny.tiny_mistral)[0])
