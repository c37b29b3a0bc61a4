"""Each family's forward: the same numbers whatever the items are batched with, and no parameter left out."""

from collections import Counter

import pytest
import torch
import transformers

from tests import tiny
from tests.built import described
from tests.measure import gradient_errors
from tests.models.families import (
    COMPOSED,
    TWO_TOWERS,
    VISION_LANGUAGE,
    built,
    config_for,
    every_model,
    gradients_of,
    inputs_for,
    loss_of,
    modality_items,
    parts_for,
    pictures,
    text_inputs,
)
from tests.tiny_tokenizers import llama_tokenizer, wordpiece_tokenizer
from vembed.errors import UserError
from vembed.inference.embedder import Embedder
from vembed.models.families.backbones import layers_of

NUM_LAYERS = {
    COMPOSED: 4,
    tiny.tiny_modernbert: 3,
    tiny.tiny_convnext: 3,
    **dict.fromkeys([*TWO_TOWERS, *VISION_LANGUAGE], 4),
}


@every_model
def test_an_item_is_the_same_whatever_it_is_batched_with(make):
    model = built(make).eval()
    description = model.description
    parts = parts_for(description)
    with torch.no_grad():
        for modality, together in zip(
            description.modalities, model(parts), strict=True
        ):
            for row, item in zip(together, modality_items(modality), strict=True):
                inputs = inputs_for(description, modality, [item])
                (alone,) = model([(modality, inputs)])
                torch.testing.assert_close(alone[0], row, atol=1e-5, rtol=1e-5)


def test_a_model_that_reads_padding_is_warned_of(tmp_path, caplog):
    tokenizer = wordpiece_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    config = transformers.FNetConfig(**sizes, vocab_size=len(tokenizer))
    transformers.FNetModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = Embedder(tmp_path)
    (warning,) = [log for log in caplog.records if log.levelname == "WARNING"]
    assert "fnet reads padding" in warning.getMessage()
    alone = model.encode(["red"])[0]
    beside = model.encode(["red", "cat " * 20])[0]
    assert abs(alone - beside).max() > 1e-3


def gpt_neo(folder):
    """A decoder with a fixed causal mask."""
    tokenizer = llama_tokenizer()
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "attention_types": [[["global"], 2]]}
    config = transformers.GPTNeoConfig(**sizes, bos_token_id=1, eos_token_id=2)
    transformers.GPTNeoModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_decoder_that_stays_causal_refuses_to_be_bidirectional():
    described(config_for(gpt_neo))
    with pytest.raises(UserError, match="bidirectional_attention: true has no effect"):
        described(config_for(gpt_neo, bidirectional_attention=True))


@pytest.mark.parametrize("make", [tiny.tiny_qwen3, tiny.tiny_mistral, tiny.tiny_gemma])
def test_bidirectional_attention_lets_the_first_token_see_the_last(make):
    assert described(config_for(make, bidirectional_attention=True)).pooling == "mean"
    model = built(make, bidirectional_attention=True, pooling="cls").eval()
    first = "red cat of the house"
    second = "red dog over the bridge"
    outputs = []
    # Without padding and with it.
    for texts in ([first, second], [first], ["red", second]):
        with torch.no_grad():
            (output,) = model([("text", text_inputs(model.description, texts))])
        outputs += output
    of_first, of_second, first_alone, of_red, second_padded = outputs
    torch.testing.assert_close(first_alone, of_first, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second_padded, of_second, atol=1e-5, rtol=1e-5)
    for other in (of_second, of_red):
        assert not torch.allclose(other, of_first, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"padding_free": False}, {"attn_implementation": "sdpa"}]
)
def test_a_layer_alone_sees_all_tokens_too(options):
    """Transformers 5.0 tells its layers nothing of the config's is_causal, as newer versions do."""
    for sees_all in (True, False):
        model = built(tiny.tiny_qwen3, bidirectional_attention=sees_all, **options)
        hidden = torch.randn(1, 5, 32)
        positions = model.backbone.rotary_emb(hidden, torch.arange(5)[None])
        layer = model.backbone.layers[0].eval()
        outputs = []
        for states in (hidden, torch.cat([hidden[:, :4], -hidden[:, 4:]], dim=1)):
            with torch.no_grad():
                output = layer(states, position_embeddings=positions)
            outputs.append(output[0, 0])
        assert torch.allclose(*outputs, atol=1e-5) != sees_all


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


@every_model
def test_gradients_of_every_parameter_with_and_without_checkpointed_layers(make):
    plain = built(make).train()
    saving = built(make, gradient_checkpointing=True).train()
    parts = parts_for(plain.description)
    calls = Counter()
    layers = layers_of(saving.backbone)
    assert len(layers) == NUM_LAYERS.get(make, 2)
    classes = {type(layer).__name__ for layer in layers}
    assert classes == set(saving.description.layer_classes)
    for layer in layers:
        for inner in list(layer.modules())[1:]:
            inner.register_forward_hook(lambda module, *_: calls.update([module]))
    outputs = saving(parts)
    forward_calls = calls.copy()
    loss_of(outputs).backward()
    for layer in layers:
        # The recomputation ends with the last thing that the backward pass wants, so not every inner module runs again.
        assert any(calls[inner] > forward_calls[inner] for inner in layer.modules())
    loss_of(plain(parts)).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name
    errors = gradient_errors(gradients_of(saving), gradients_of(plain))
    assert max(errors.values()) < 1e-5


def test_embeddings_are_float32_from_half_precision_and_float64_from_double():
    half = built(tiny.tiny_bert, torch_dtype="pure_bfloat16")
    double = built(tiny.tiny_bert).double()
    inputs = text_inputs(half.description)
    assert half.backbone.dtype == torch.bfloat16
    assert half([("text", inputs)])[0].dtype == torch.float32
    assert double([("text", inputs)])[0].dtype == torch.float64
