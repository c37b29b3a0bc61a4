"""Embedder with the arguments of Sentence Transformers, and mistakes of its users as UserError."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantization

import vembed
from tests.tiny import shared, texts, tiny_bert_st

TEXTS = texts(12, seed=3)


@pytest.fixture(scope="module")
def model() -> vembed.Embedder:
    return vembed.Embedder(Path(shared(tiny_bert_st)), device="cpu")


def test_arguments_named_as_in_sentence_transformers(model: vembed.Embedder) -> None:
    theirs = SentenceTransformer(str(shared(tiny_bert_st)), device="cpu")
    options = {
        "prompt": "find this: ",
        "normalize_embeddings": True,
        "show_progress_bar": False,
    }
    mine = model.encode(TEXTS, **options)  # type: ignore[arg-type]
    np.testing.assert_allclose(mine, theirs.encode(TEXTS, **options), atol=1e-5)
    for options in (
        {"normalize_embeddings": False},
        {"normalize_embeddings": False, "truncate_dim": 8},
    ):
        np.testing.assert_allclose(
            model.encode(TEXTS, **options), theirs.encode(TEXTS, **options), atol=1e-5
        )  # type: ignore[arg-type]
    tensor = model.encode(TEXTS, convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), model.encode(TEXTS))
    np.testing.assert_array_equal(
        model.encode_query(TEXTS), model.encode(TEXTS, "query")
    )
    np.testing.assert_array_equal(
        model.encode_document(TEXTS[0]), model.encode(TEXTS[0])
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precision_is_that_of_sentence_transformers(
    model: vembed.Embedder, precision: str
) -> None:
    full = model.encode(TEXTS)
    mine = model.encode(TEXTS, precision=precision)  # type: ignore[arg-type]
    expected = quantization.quantize_embeddings(full, precision=precision)  # type: ignore[arg-type]
    assert mine.dtype == expected.dtype
    np.testing.assert_array_equal(mine, expected)


def test_it_can_be_pickled_and_says_what_it_is(model: vembed.Embedder) -> None:
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))
    assert "text_encoder, text, 32 dimensions" in repr(model) and "on cpu" in repr(
        model
    )


def test_mistakes_are_user_errors(model: vembed.Embedder, tmp_path: Path) -> None:
    with pytest.raises(vembed.UserError, match="similarity takes embeddings"):
        model.similarity("a", model.encode(TEXTS))  # type: ignore[arg-type]
    with pytest.raises(vembed.UserError, match="a has 32 dimensions and b has 16"):
        model.similarity(model.encode(TEXTS), model.encode(TEXTS, truncate_dim=16))
    with pytest.raises(
        vembed.UserError,
        match="the inputs are 3: give a text, an image, a record, or a list",
    ):
        model.encode(3)  # type: ignore[arg-type]
    with pytest.raises(
        vembed.UserError, match="the config is 3: give a path, a dict or a TrainConfig"
    ):
        vembed.train(3)  # type: ignore[arg-type]
    with pytest.raises(
        vembed.UserError, match="precision is 'int4'; give one of float32"
    ):
        model.encode(TEXTS, precision="int4")  # type: ignore[arg-type]
    with pytest.raises(vembed.UserError, match="data is a list; give the path"):
        vembed.evaluate(model, [1])  # type: ignore[arg-type]
    with pytest.raises(vembed.UserError, match="model is a int"):
        vembed.evaluate(3, str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(vembed.UserError, match="device is 'gpu'; give cpu, cuda"):
        vembed.Embedder(shared(tiny_bert_st), device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(
            vembed.UserError,
            match=r"device is 'cuda', and this machine shows 0 GPU\(s\)",
        ):
            vembed.Embedder(shared(tiny_bert_st), device="cuda")
