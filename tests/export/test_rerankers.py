"""`vembed export --format onnx` of a reranker: onnxruntime gives the model's scores, and what differs is refused."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification
from typer.testing import CliRunner

import vembed
from tests.rerank.test_rerank import PAIRS, tiny_xlmr_reranker
from tests.tiny import shared, tiny_qwen3, tiny_qwen3_reranker, tiny_reranker
from vembed.cli.main import app
from vembed.inference.serve import ServedInput, open_encoder


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def qwen_reranker(folder):
    """A decoder with one label, which is read at the last token."""
    config = AutoConfig.from_pretrained(shared(tiny_qwen3), num_labels=1)
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(shared(tiny_qwen3)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (tiny_reranker, "float32"),
        (tiny_xlmr_reranker, "float32"),
        (qwen_reranker, "float32"),
        (tiny_xlmr_reranker, "int8"),
    ],
)
def test_onnxruntime_gives_the_scores_of_the_model(make, precision, tmp_path):
    import onnxruntime

    model = make(tmp_path / "model")
    folder = tmp_path / "onnx"
    done = run("export", model, folder, "--format", "onnx", "--precision", precision)
    assert done.exit_code == 0, done.output
    facts = json.loads((folder / "export.json").read_text())
    assert facts["check"]["largest_difference"] <= facts["check"]["tolerance"]
    assert facts["check"]["num_pairs"] == 100
    expected = vembed.Reranker(model).predict(PAIRS)
    tolerance = 1e-5 if precision == "float32" else 0.1 * np.abs(expected).max()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PAIRS, padding=True, return_tensors="np")
    (logits,) = session.run(["logits"], dict(inputs))
    np.testing.assert_allclose(logits[:, 0], expected, atol=tolerance)
    served = [ServedInput(document, query=query) for query, document in PAIRS]
    scores, _ = open_encoder(str(folder)).encode(served)
    np.testing.assert_allclose(scores[:, 0], expected, atol=tolerance)


def test_an_export_that_differs_is_refused(tmp_path):
    model = shared(tiny_reranker)
    words = ["export", model, tmp_path / "onnx", "--format", "onnx"]
    done = run(*words, "--precision", "int8", "--tolerance", "1e-9")
    assert done.exit_code == 2
    assert "1e-09" in str(done.output) and not (tmp_path / "onnx").exists()


def test_what_is_not_exported_says_why(tmp_path):
    answers = shared(tiny_qwen3_reranker)
    done = run("export", answers, tmp_path / "onnx", "--format", "onnx")
    assert done.exit_code == 2 and "reranker_head: label" in done.output
    model = shared(tiny_reranker)
    done = run("export", model, tmp_path / "gguf", "--format", "gguf")
    assert done.exit_code == 2 and "onnx" in done.output


def test_a_reranker_is_copied(tmp_path):
    done = run("export", shared(tiny_reranker), tmp_path / "copy")
    assert done.exit_code == 0, done.output
    expected = vembed.Reranker(shared(tiny_reranker)).predict(PAIRS)
    assert np.array_equal(vembed.Reranker(tmp_path / "copy").predict(PAIRS), expected)
