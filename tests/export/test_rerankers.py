"""`vembed export --format onnx` of a reranker: onnxruntime gives the model's scores, and what differs is refused."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

import vembed
from tests.export.test_export import as_traced, check_of, export, refused
from tests.rerank.test_rerank import tiny_xlmr_reranker
from tests.tiny import shared, texts, tiny_qwen3, tiny_qwen3_reranker, tiny_reranker
from vembed.inference.serve import ServedInput, open_encoder

PAIRS = list(zip(texts(40, seed=1), texts(40, seed=2), strict=True))


def qwen_reranker(folder):
    """A decoder with one label, which is read at the last token."""
    config = AutoConfig.from_pretrained(shared(tiny_qwen3, layers=1), num_labels=1)
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(shared(tiny_qwen3)).save_pretrained(folder)
    return folder


def assert_scores(folder, model, precision="float32"):
    """The export's check, its graph alone and its server give the scores of the model."""
    import onnxruntime

    check = check_of(folder)
    assert check["largest_difference"] <= check["tolerance"]
    assert check["num_pairs"] == 100
    expected = vembed.Reranker(model).predict(PAIRS)
    atol = 1e-5 if precision == "float32" else 0.1 * np.abs(expected).max()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PAIRS, padding=True, return_tensors="np")
    (logits,) = session.run(["logits"], dict(inputs))
    np.testing.assert_allclose(logits[:, 0], expected, atol=atol)
    served = [ServedInput(document, query=query) for query, document in PAIRS]
    scores, _ = open_encoder(str(folder)).encode(served)
    np.testing.assert_allclose(scores[:, 0], expected, atol=atol)


@pytest.mark.parametrize("make", [tiny_reranker, qwen_reranker])
def test_onnxruntime_gives_the_scores_of_the_model(make, tmp_path):
    model = make(tmp_path / "model")
    export(model, tmp_path / "onnx", "--format", "onnx")
    assert_scores(tmp_path / "onnx", model)


def test_int8_is_close_and_an_export_that_differs_is_refused(tmp_path, monkeypatch):
    model = tiny_xlmr_reranker(tmp_path / "model")
    export(model, tmp_path / "onnx", "--format", "onnx")
    assert_scores(tmp_path / "onnx", model)
    as_traced(tmp_path / "onnx", monkeypatch)
    words = ("--format", "onnx", "--precision", "int8")
    export(model, tmp_path / "int8", *words)
    assert_scores(tmp_path / "int8", model, "int8")
    refusal = refused("export", model, tmp_path / "out", *words, "--tolerance", "1e-9")
    assert "1e-09" in refusal
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "form", "way"),
    [
        (tiny_qwen3_reranker, "onnx", "reranker_head: label"),
        (tiny_reranker, "gguf", "onnx"),
    ],
)
def test_what_is_not_exported_says_why(make, form, way, tmp_path):
    words = [shared(make), tmp_path / "out", "--format", form]
    assert way in refused("export", *words)


def test_a_reranker_is_copied(tmp_path):
    model = shared(tiny_reranker)
    export(model, tmp_path / "copy")
    expected = vembed.Reranker(model).predict(PAIRS)
    assert np.array_equal(vembed.Reranker(tmp_path / "copy").predict(PAIRS), expected)
