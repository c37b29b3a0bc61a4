"""Embedder: the numbers of Sentence Transformers, and every form of input."""

import io

import numpy as np
import pytest
from PIL import Image
from sentence_transformers import SentenceTransformer

from tests.built import described
from tests.tiny import change_json, shared, tiny_bert_st, tiny_qwen3_st
from vembed import Embedder, UserError
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.evaluation.scores import evaluate
from vembed.inference.embedder import to_item

TEXTS = ["red cat", "the old house by the river " * 9, "", "bird", "red cat"]


@pytest.fixture(scope="module", params=[tiny_bert_st, tiny_qwen3_st])
def folder(request):
    return shared(request.param)


@pytest.fixture(scope="module")
def model(folder):
    return Embedder(folder, device="cpu")


def assert_close(vectors, expected):
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["query", "document"])
def test_same_numbers_as_sentence_transformers(folder, model, kind):
    theirs = SentenceTransformer(str(folder), device="cpu")
    encode = theirs.encode_query if kind == "query" else theirs.encode_document
    assert_close(model.encode(TEXTS, kind=kind), encode(TEXTS))
    assert_close(model.encode(TEXTS, kind=kind, batch_size=1), encode(TEXTS))
    assert_close(model.encode(TEXTS[0], kind=kind), encode(TEXTS[0]))


def test_same_numbers_when_cut(folder, model):
    theirs = SentenceTransformer(str(folder), device="cpu", truncate_dim=8)
    expected = theirs.encode(TEXTS)
    unit = theirs.encode(TEXTS, normalize_embeddings=True)
    assert_close(model.encode(TEXTS, truncate_dim=8), expected)
    assert_close(model.encode(TEXTS, truncate_dim=8, normalize=True), unit)
    cut = Embedder(folder, device="cpu", truncate_dim=8)
    assert_close(cut.encode(TEXTS), expected)


def test_a_length_that_only_the_tokenizer_names_holds_in_both(tmp_path):
    """Sentence Transformers writes no other one any more."""
    folder = tiny_qwen3_st(tmp_path)
    change_json(folder / "config.json", max_position_embeddings=1024)
    change_json(folder / "tokenizer_config.json", model_max_length=1024)
    (folder / "sentence_bert_config.json").unlink()
    text = "red bird garden " * 250
    model = Embedder(folder, device="cpu")
    assert model.description.max_length == 1024
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert_close(model.encode(text), theirs.encode_document(text))


@pytest.mark.parametrize("measure", ["dot", "cosine", "euclidean"])
def test_similarity_of_a_folder_that_names_one(tmp_path, measure, caplog):
    folder = tiny_bert_st(tmp_path, normalize=False, similarity=measure)
    model = Embedder(folder, device="cpu")
    inputs = ["red cat", "the old house"]
    vectors = model.encode(inputs)
    products = vectors @ vectors.T
    assert ("cosine is used" in caplog.text) == (measure == "euclidean")
    if measure != "dot":
        products /= np.sqrt(np.outer(products.diagonal(), products.diagonal()))
    np.testing.assert_allclose(model.similarity(vectors, vectors), products, rtol=1e-5)
    score = model.score([tuple(inputs)])
    np.testing.assert_allclose(score, products[0, 1:], rtol=1e-5)


def test_a_model_that_normalises_scores_its_dot_product_by_unit_vectors(tmp_path):
    model = Embedder(tiny_bert_st(tmp_path, similarity="dot"), device="cpu")
    inputs = ["red cat", "the old house"]
    vectors = model.encode(inputs)
    np.testing.assert_allclose(
        model.score([tuple(inputs)]), vectors[:1] @ vectors[1], rtol=1e-5
    )


def test_long_texts_of_a_folder_that_names_a_length(tmp_path):
    folder = tiny_qwen3_st(tmp_path, max_seq_length=600)
    change_json(folder / "config.json", max_position_embeddings=1024)
    long = ["red cat " * 280, "the old house " * 300]
    model = Embedder(folder, device="cpu")
    assert model.description.max_length == 600
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert_close(model.encode(long), theirs.encode(long))
    config = TrainConfig(model_name=str(folder), data_path="-")
    assert described(config).max_length == 512


def test_forms_of_input(model):
    expected = model.encode(["red cat"])
    for entry in ([{"text": "red cat"}], [Item(text="red cat")], ("red cat",)):
        assert (model.encode(entry) == expected).all()
    assert model.encode({"text": "red cat"}).shape == expected[0].shape
    assert model.encode([]).shape == (0, expected.shape[1])


def test_images_become_items():
    picture = Image.new("RGB", (3, 2), (255, 0, 0))
    item = to_item({"text": "in blue", "image": picture})
    assert item.text == "in blue"
    assert Image.open(io.BytesIO(item.images[0].data)).getpixel((1, 1)) == (255, 0, 0)
    assert to_item(picture).images == item.images
    printed = to_item(Image.new("CMYK", (2, 2)))
    assert Image.open(io.BytesIO(printed.images[0].data)).mode == "RGB"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"txt": "a"}, "'txt'"),
        ({"text": None}, "neither text nor image"),
        ({"image": 3}, "an image is of type int"),
        ("a \ud800", "a lone surrogate"),
    ],
)
def test_what_is_no_input_is_named(value, message):
    with pytest.raises(UserError, match=message):
        to_item(value)


def test_an_input_that_is_none_is_named_by_its_place(model):
    for encode in (model.encode, model.hidden_states):
        with pytest.raises(UserError, match=r"inputs\[2\]: .* of type NoneType"):
            encode(["a", "b", None])


def test_wrong_settings_are_named(folder, model):
    for name in ("mixed_precision", "torch_dtype"):
        with pytest.raises(UserError, match=f"{name} is 'bf61', and not one of auto"):
            Embedder(folder, device="cpu", **{name: "bf61"})
    with pytest.raises(UserError, match=r"ks: \[0\]"):
        evaluate(model, "nowhere.jsonl", ks=[0])
    for options, message in (
        ({"kind": "passage"}, "kind is 'passage'"),
        ({"truncate_dim": 4096}, "truncate_dim is 4096"),
    ):
        with pytest.raises(UserError, match=message):
            model.encode(["a"], **options)
    with pytest.raises(UserError, match="truncate_dim is 0"):
        Embedder(folder, device="cpu", truncate_dim=0)
