"""Embedder with the arguments of Sentence Transformers, and mistakes of its users as UserError."""

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
def model():
    return vembed.Embedder(Path(shared(tiny_bert_st)), device="cpu")


def test_arguments_named_as_in_sentence_transformers(model):
    theirs = SentenceTransformer(str(shared(tiny_bert_st)), device="cpu")
    options = {
        "prompt": "find this: ",
        "normalize_embeddings": True,
        "show_progress_bar": False,
    }
    mine = model.encode(TEXTS, **options)
    np.testing.assert_allclose(mine, theirs.encode(TEXTS, **options), atol=1e-5)
    tensor = model.encode(TEXTS, convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), model.encode(TEXTS))
    queries = model.encode_query(TEXTS)
    np.testing.assert_array_equal(queries, model.encode(TEXTS, "query"))
    document = model.encode_document(TEXTS[0])
    np.testing.assert_array_equal(document, model.encode(TEXTS[0]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precision_is_that_of_sentence_transformers(model, precision):
    full = model.encode(TEXTS)
    mine = model.encode(TEXTS, precision=precision)
    expected = quantization.quantize_embeddings(full, precision=precision)
    assert mine.dtype == expected.dtype
    np.testing.assert_array_equal(mine, expected)


def test_mistakes_are_user_errors(model, tmp_path):
    mistakes = [
        ("the config is 3", lambda: vembed.train(3)),
        ("'int4'", lambda: model.encode(TEXTS, precision="int4")),
        ("data is a list", lambda: vembed.evaluate(model, [1])),
        (
            "device is 'gpu'",
            lambda: vembed.Embedder(shared(tiny_bert_st), device="gpu"),
        ),
    ]
    if not torch.cuda.is_available():
        load = lambda: vembed.Embedder(shared(tiny_bert_st), device="cuda")  # noqa: E731
        mistakes.append((r"device is 'cuda'.* 0 GPU\(s\)", load))
    for message, call in mistakes:
        with pytest.raises(vembed.UserError, match=message):
            call()
