"""The contract of every pooling in POOLINGS: padded as alone, packed as padded, saved as loaded; and a trained one."""

import pydoc

import numpy as np
import pytest
import torch
from torch import nn

import vembed.models.poolings
from tests import tiny
from tests.built import model_of
from tests.files.saving import load_in_sentence_transformers, ours
from tests.models.families import config_for, text_inputs
from tests.parts import unlisted_classes
from vembed.errors import UserError
from vembed.inference.embedder import Embedder
from vembed.models.embedding_model import pool
from vembed.models.poolings.base import Pooling
from vembed.models.poolings.table import POOLINGS, check_poolings
from vembed.saving.files import save_model
from vembed.training.optimizer import build_optimizer

LENGTHS = [5, 1, 9, 3]
TEXTS = ["red cat", "the list of every old house in this city", "parse"]
UNTRAINED = [name for name, pooling in POOLINGS.items() if not pooling.is_trained]


class TestedAttention(Pooling):
    """The mean with weights by a learned direction."""

    name = "tested_attention"
    is_trained = True

    def build(self, hidden_dim):
        return AttentionModule(hidden_dim)


class AttentionModule(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.direction = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, hidden, mask):
        scores = hidden @ self.direction
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return (scores.softmax(dim=1).unsqueeze(-1) * hidden).sum(dim=1)


def config_of(pooling, **options):
    config = config_for(tiny.tiny_bert, **options)
    # The option's values are fixed when the config is imported.
    model = config.model.model_copy(update={"pooling": pooling})
    return config.model_copy(update={"model": model})


def padded(side, dtype=torch.float64):
    """Hidden states of texts one by one, padded, and the mask of the real ones."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randn(length, 6, dtype=dtype, generator=draw) for length in LENGTHS]
    longest = max(LENGTHS)
    hidden = torch.full((len(texts), longest, 6), 1e3, dtype=dtype)
    mask = torch.zeros(len(texts), longest, dtype=torch.int64)
    for row, text in enumerate(texts):
        start = 0 if side == "right" else longest - len(text)
        hidden[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = 1
    return texts, hidden.requires_grad_(), mask


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    """Each text gets the vector that it gets alone."""
    texts, hidden, mask = padded(side)
    parameters = {}
    if name in UNTRAINED:
        expected = torch.cat([pool(name, text[None], None) for text in texts])
        vectors = pool(name, hidden, mask)
    else:
        module = POOLINGS[name].build(6).double()
        parameters = dict(module.named_parameters())
        assert parameters, f"{name} has no parameter, so nothing is trained"
        for parameter in parameters.values():
            weights = torch.linspace(-1, 1, parameter.numel())
            parameter.data += weights.view_as(parameter)
        expected = torch.cat([module(text[None], None) for text in texts])
        vectors = module(hidden, mask)
        # What it draws itself and does not save would be another one in a loaded model.
        loaded = POOLINGS[name].build(6).double()
        loaded.load_state_dict(module.state_dict())
        assert torch.equal(loaded(hidden, mask), vectors), f"{name} has unsaved state"
    torch.testing.assert_close(vectors, expected, atol=1e-9, rtol=1e-9)
    vectors.square().sum().backward()
    assert (hidden.grad[mask == 0] == 0).all(), "padding gets no gradient"
    assert hidden.grad.isfinite().all()
    for parameter_name, parameter in parameters.items():
        assert parameter.grad.any(), f"{parameter_name} of {name} gets no gradient"


@pytest.mark.parametrize("name", UNTRAINED)
def test_no_mask_is_a_mask_of_ones_and_16_bits_are_pooled_in_float32(name):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 4, dtype=torch.float64, generator=draw)
    ones = torch.ones(3, 7, dtype=torch.int64)
    torch.testing.assert_close(pool(name, hidden, None), pool(name, hidden, ones))
    _, narrow, mask = padded("right", torch.bfloat16)
    vectors = pool(name, narrow, mask)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, pool(name, narrow.float(), mask))


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_pooling_that_depends_on_the_order_says_so(name):
    """Image tokens have no order. A class token is the only one with a place."""
    (text, *_), _, _ = padded("right")
    pooling = POOLINGS[name]
    vector = pool(name, text[None], None)
    is_same = torch.allclose(vector, pool(name, text[None].flip(1), None))
    answer = pooling.refusal(is_causal=False, is_image=True, has_class_token=False)
    assert is_same or answer, f"set `needs_order` in {name}"


def test_every_pooling_is_in_the_table():
    listed = [type(pooling) for pooling in POOLINGS.values()]
    named = unlisted_classes(vembed.models.poolings, Pooling, listed)
    missing = [name for name in named if hasattr(pydoc.locate(name), "name")]
    assert not missing, f"list these in vembed/models/poolings/table.py: {missing}"


def test_a_pooling_declares_how_it_pools():
    kind = type("NoPool", (Pooling,), {"__doc__": "A pooling.", "name": "no_pool"})
    with pytest.raises(TypeError, match=r"NoPool .*`pool`"):
        check_poolings((kind,))


def text_vectors(model, texts):
    with torch.no_grad():
        (vectors,) = model([("text", text_inputs(model.description, texts))])
    return vectors


@pytest.mark.parametrize("name", POOLINGS)
def test_a_pooling_is_the_same_packed_padded_and_saved(name, tmp_path):
    model = model_of(config_of(name, padding_free=True)).eval()
    plain = model_of(config_of(name, padding_free=False)).eval()
    assert model.packs_texts() and not plain.packs_texts()
    expected = text_vectors(plain, TEXTS)
    singles = torch.cat([text_vectors(plain, [text]) for text in TEXTS])
    packed = text_vectors(model, TEXTS)
    for vectors in (singles, packed):
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
    if model.pooling is not None:
        for parameter in model.pooling.parameters():
            parameter.data.mul_(1.5)
        expected = text_vectors(model, TEXTS)
    saved = save_model(tmp_path / "final", model, model.state_dict())
    vectors = Embedder(saved, mixed_precision="no").encode(TEXTS, normalize=False)
    assert vectors.shape[1] == model.description.embedding_dim
    np.testing.assert_allclose(vectors, expected.numpy(), atol=1e-5)
    if POOLINGS[name].modes:
        theirs = load_in_sentence_transformers(saved).encode(TEXTS)
        np.testing.assert_allclose(
            ours(saved, TEXTS, "document"),
            theirs,
            atol=1e-5,
            err_msg=f"{name} is not what Sentence Transformers does by its `modes`",
        )
    else:
        with pytest.raises(Exception, match=name):
            load_in_sentence_transformers(saved)


def test_a_trained_pooling_trains_beside_a_frozen_tower(monkeypatch, tmp_path):
    monkeypatch.setitem(POOLINGS, "tested_attention", TestedAttention())
    config = config_of(
        "tested_attention", freeze=["text"], head_learning_rate=0.5, learning_rate=0.1
    )
    model = model_of(config).train()
    assert model.frozen_modalities() == []
    (group,) = build_optimizer(model, nn.Module(), config.optimizer).param_groups
    (trained,) = group["params"]
    assert trained is model.pooling.direction and group["lr"] == 0.5
    assert model.modules_behind_towers() == {"pooling": model.pooling}
    (vectors,) = model([("text", text_inputs(model.description, TEXTS))])
    vectors.square().sum().backward()
    assert trained.grad.abs().sum() > 0


def test_a_pooling_that_this_version_does_not_have_is_refused(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setitem(POOLINGS, "tested_attention", TestedAttention())
        model = model_of(config_of("tested_attention"))
        folder = save_model(tmp_path / "final", model, model.state_dict())
    with pytest.raises(UserError, match="tested_attention"):
        Embedder(folder)


def test_vectors_of_another_size_than_declared_are_refused(monkeypatch):
    class Wide(TestedAttention):
        name = "wide"

        def width(self, hidden_dim):
            return 2 * hidden_dim

    monkeypatch.setitem(POOLINGS, "wide", Wide())
    model = model_of(config_of("wide"))
    with pytest.raises(UserError, match=r"32 .* 64 .*pooling wide"):
        model([("text", text_inputs(model.description, TEXTS))])


def test_state_that_no_part_saves_is_refused_by_name(tmp_path):
    model = model_of(config_of("mean"))
    for name in ("extra.scale", "pooling.scale", "head.0.scale"):
        state = {**model.state_dict(), name: torch.ones(1)}
        with pytest.raises(RuntimeError, match="scale"):
            save_model(tmp_path / "final", model, state)
    assert not (tmp_path / "final").exists()
