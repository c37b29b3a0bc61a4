"""Each family's forward: Transformers' numbers, whatever the items are batched with, and no parameter left out."""

from collections import Counter

import pytest
import torch
from transformers import AutoModel, T5EncoderModel

from tests import tiny
from tests.built import described
from tests.measure import gradient_errors
from tests.models.families import (
    COMPOSED,
    EVERY,
    SENTENCES,
    TEXT_DECODERS,
    TEXT_ENCODERS,
    TWO_TOWERS,
    VISION_LANGUAGE,
    built,
    config_for,
    gradients_of,
    inputs_for,
    loss_of,
    modality_items,
    parts_for,
    pictures,
    text_inputs,
)
from vembed.models.families.backbones import layers_of

NUM_LAYERS = {
    tiny.tiny_modernbert: 3,
    tiny.tiny_convnext: 3,
    **dict.fromkeys([*TWO_TOWERS, *VISION_LANGUAGE], 4),
}


def _plain(make):
    chosen = T5EncoderModel if make is tiny.tiny_t5 else AutoModel
    return chosen.from_pretrained(tiny.shared(make), dtype=torch.float32).eval()


@pytest.mark.parametrize("make", TEXT_ENCODERS)
def test_text_encoders_are_the_mean_of_their_tokens(make):
    model = built(make).eval()
    plain = _plain(make)
    inputs = text_inputs(model.description)
    with torch.no_grad():
        hidden = plain(**inputs).last_hidden_state
        expected = torch.stack(
            [
                row[mask.bool()].mean(dim=0)
                for row, mask in zip(hidden, inputs["attention_mask"], strict=True)
            ]
        )
        (actual,) = model([("text", inputs)])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", TEXT_DECODERS)
def test_decoders_are_their_last_token(make):
    model = built(make).eval()
    plain = _plain(make)
    with torch.no_grad():
        (actual,) = model([("text", text_inputs(model.description))])
        for row, text in zip(actual, SENTENCES, strict=True):
            alone = plain(**text_inputs(model.description, [text])).last_hidden_state[
                0, -1
            ]
            torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [*EVERY, COMPOSED])
def test_an_item_is_the_same_whatever_it_is_batched_with(make):
    model = built(make).eval()
    description = model.description
    with torch.no_grad():
        for modality in description.modalities:
            items = modality_items(modality)
            (together,) = model([(modality, inputs_for(description, modality, items))])
            for row, item in zip(together, items, strict=True):
                (alone,) = model(
                    [(modality, inputs_for(description, modality, [item]))]
                )
                torch.testing.assert_close(alone[0], row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "make", [tiny.tiny_qwen3, tiny.tiny_mistral, tiny.tiny_gemma, tiny.tiny_qwen3_vl]
)
def test_padding_on_the_left_and_on_the_right_give_the_same(make):
    model = built(make).eval()
    right, left = (
        model.description.with_(padding_side=side) for side in ("right", "left")
    )
    with torch.no_grad():
        model.description = right
        (first,) = model([("text", text_inputs(right))])
        model.description = left
        (other,) = model([("text", text_inputs(left))])
    torch.testing.assert_close(first, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [tiny.tiny_qwen3, tiny.tiny_mistral, tiny.tiny_gemma])
def test_bidirectional_attention_lets_the_first_token_see_the_last(make):
    causal = built(make).eval()
    open_ = built(make, bidirectional_attention=True, pooling="cls").eval()
    assert described(config_for(make, bidirectional_attention=True)).pooling == "mean"
    first_tokens = ["red cat of the house", "red dog over the bridge"]
    for texts in (
        first_tokens,
        [first_tokens[0]],
        ["red", first_tokens[1]],
    ):  # without padding and with it
        inputs = text_inputs(open_.description, texts)
        with torch.no_grad():
            hidden = causal.backbone(**inputs).last_hidden_state
            (recorded,) = open_([("text", inputs)])
        start = inputs["attention_mask"].argmax(dim=1)
        unseen = hidden[torch.arange(len(texts)), start]
        assert not torch.allclose(recorded, unseen, atol=1e-3)
    with torch.no_grad():
        (first,), (other,) = (
            open_([("text", text_inputs(open_.description, [text]))])
            for text in first_tokens
        )
    assert not torch.allclose(first, other, atol=1e-3)


@pytest.mark.parametrize("make", [tiny.tiny_vitmae, tiny.tiny_dinov3])
def test_what_pretraining_did_at_random_is_off(make):
    model = built(make)
    inputs = inputs_for(model.description, "image", pictures())
    state = torch.random.get_rng_state()
    for training in (True, False):
        model.train(training)
        (first,) = model([("image", inputs)])
        (again,) = model([("image", inputs)])
        assert torch.equal(first, again)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("make", [*EVERY, COMPOSED])
def test_every_trained_parameter_gets_a_gradient_and_each_layer_is_a_unit(make):
    model = built(make).train()
    loss_of(model(parts_for(model.description))).backward()
    assert [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ] == []
    layers = layers_of(model.backbone)
    assert len(layers) == (4 if make == COMPOSED else NUM_LAYERS.get(make, 2))
    assert {type(layer).__name__ for layer in layers} == set(
        model.description.layer_classes
    )


@pytest.mark.parametrize("make", [*EVERY, COMPOSED])
def test_gradient_checkpointing_recomputes_each_layer_and_changes_nothing(make):
    plain = built(make).train()
    saving = built(make, gradient_checkpointing=True).train()
    parts = parts_for(plain.description)
    micro_batches = Counter()
    for number, layer in enumerate(layers_of(saving.backbone)):
        for inner in list(layer.modules())[1:]:
            inner.register_forward_hook(
                lambda module, *_, of=number: micro_batches.update([(of, id(module))])
            )
    outputs = saving(parts)
    before = micro_batches.copy()
    loss_of(outputs).backward()
    for number in range(len(layers_of(saving.backbone))):
        # The recomputation ends with the last thing that the backward pass wants, so not every inner module runs again.
        assert any(
            micro_batches[key] == 2 * before[key]
            for key in micro_batches
            if key[0] == number
        )
    loss_of(plain(parts)).backward()
    assert (
        max(gradient_errors(gradients_of(saving), gradients_of(plain)).values()) < 1e-5
    )


def test_parts_of_one_call_are_the_calls_by_themselves():
    model = built(tiny.tiny_clip).eval()
    parts = parts_for(model.description)
    with torch.no_grad():
        together = model([*parts, parts[0]])
        apart = [model([part])[0] for part in (*parts, parts[0])]
    for entry, other in zip(together, apart, strict=True):
        assert torch.equal(entry, other)


def test_embeddings_are_float32_from_half_precision_and_float64_from_double():
    half = built(tiny.tiny_bert, torch_dtype="pure_bfloat16")
    double = built(tiny.tiny_bert).double()
    inputs = text_inputs(half.description)
    assert half.backbone.dtype == torch.bfloat16
    assert half([("text", inputs)])[0].dtype == torch.float32
    assert double([("text", inputs)])[0].dtype == torch.float64


def test_a_mask_of_ones_may_be_left_out():
    model = built(tiny.tiny_qwen3).eval()
    inputs = text_inputs(model.description, ["red cat", "red dog"])
    assert inputs["attention_mask"].all()
    with torch.no_grad():
        (first,) = model([("text", inputs)])
        (other,) = model([("text", {"input_ids": inputs["input_ids"]})])
        masked = model.backbone(**inputs, use_cache=False).last_hidden_state[:, -1]
    assert torch.equal(first, other)
    torch.testing.assert_close(first, masked, atol=1e-6, rtol=1e-6)
