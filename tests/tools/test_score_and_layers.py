"""`vembed score`, hidden states by layer, and models in shards that encode and evaluate, against one process."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AlbertConfig, AlbertModel, AutoModel, AutoTokenizer

from tests.data.files import pair, read_jsonl, write_jsonl
from tests.data.pictures import write
from tests.harness import result_of, run_cases
from tests.tiny import (
    shared,
    tiny_bert,
    tiny_bert_st,
    tiny_clip,
    tiny_distilbert,
    tiny_qwen3_st,
    tiny_vit,
)
from tests.tiny_tokenizers import wordpiece_tokenizer
from tests.weights.variants import pairs
from vembed import Embedder, UserError, evaluate
from vembed.cli.commands import encode
from vembed.cli.commands import scores as scoring
from vembed.cli.commands.scores import eval as evaluate_command
from vembed.cli.support import ModelUse
from vembed.parallel.parameters import local_tensor
from vembed.parallel.session import start_command_session

TEXTS = [
    "red cat",
    "the old house by the river and a bridge",
    "bird",
    "red cat",
    "fast train",
    "a green dog",
    "boat",
]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


@pytest.fixture
def records(tmp_path):
    rows = [
        pair(text, [f"{text} here", "bird"], negatives=["train"]) for text in TEXTS[:3]
    ]
    return write_jsonl(tmp_path / "pairs.jsonl", rows)


def in_order():
    """The pairs of `records`, as they stand in the file."""
    ordered = []
    for text in TEXTS[:3]:
        ordered += [(text, f"{text} here"), (text, "bird"), (text, "train")]
    return ordered


# ---- hidden states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_distilbert, tiny_qwen3_st])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.promise("B16")
def test_hidden_states_are_those_of_transformers(make, pooling):
    folder = shared(make)
    embedder = Embedder(folder, device="cpu")
    prompt = embedder.description.document_prompt
    actual = embedder.hidden_states(TEXTS, pooling=pooling)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    for row, text in enumerate(TEXTS):
        inputs = tokenizer(prompt + text, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        rows = [state[0, -1] for state in states]
        if pooling == "mean":
            rows = [state[0].mean(dim=0) for state in states]
        expected = np.stack(rows)
        # With Qwen3 the last of Transformers is behind the last norm.
        number = len(states) - (make is tiny_qwen3_st)
        np.testing.assert_allclose(actual[row, :number], expected[:number], atol=1e-5)
    subset = embedder.hidden_states(TEXTS, [0, -1], pooling=pooling)
    np.testing.assert_array_equal(subset, actual[:, [0, -1]])
    assert embedder.hidden_states([]).shape == (0, len(states), 32)


def test_hidden_states_that_cannot_be(tmp_path):
    embedder = Embedder(shared(tiny_bert), device="cpu")
    with pytest.raises(UserError, match=r"layers 0 .* to 2, and .3. are asked for"):
        embedder.hidden_states(["a"], [3])
    with pytest.raises(UserError, match="are of texts"):
        embedder.hidden_states([{"image": "a.png"}])
    clip = Embedder(shared(tiny_clip), device="cpu")
    assert len(clip.hidden_states(["a cat"])) == 1
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = AlbertConfig(vocab_size=999, hidden_size=32, embedding_size=16, **sizes)
    AlbertModel(config).save_pretrained(tmp_path)
    wordpiece_tokenizer().save_pretrained(tmp_path)
    albert = Embedder(tmp_path, device="cpu")
    for layers in ([0], [-1]):
        with pytest.raises(UserError, match="share their weights"):
            albert.hidden_states(["a cat"], layers)


# ---- similarities ----------------------------------------------------------------------------------------------


def test_similarities_of_pairs_in_the_order_of_the_file(
    records, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(scoring, "SCORE_CHUNK", 2)
    folder = str(shared(tiny_bert_st))
    embedder = Embedder(folder, device="cpu")
    expected = embedder.score(iter(in_order()))
    queries, documents = zip(*in_order(), strict=True)
    query = embedder.encode(list(queries), "query", normalize=True)
    document = embedder.encode(list(documents), "document", normalize=True)
    np.testing.assert_allclose(expected, (query * document).sum(axis=1), atol=1e-6)
    scoring.score(folder, str(records), str(tmp_path / "out.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)
    assert "out.npy: scores of " in capsys.readouterr().err
    scoring.score(folder, str(records), str(tmp_path / "out.jsonl"))
    lines = read_jsonl(tmp_path / "out.jsonl")
    roles = [(line["record"], line["role"]) for line in lines[:4]]
    assert roles == [(0, "positive"), (0, "positive"), (0, "negative"), (1, "positive")]
    scores = [line["score"] for line in lines]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    capsys.readouterr()
    scoring.score(folder, str(records))
    printed = [float(line) for line in capsys.readouterr().out.split()]
    np.testing.assert_allclose(printed, expected, atol=1e-5)


def test_a_target_that_cannot_be_written_is_said_first(records, tmp_path):
    with pytest.raises(UserError, match=r"writes \.npy, \.jsonl"):
        scoring.score("no model", str(records), str(tmp_path / "out.csv"))


# ---- several processes, copies and shards ----------------------------------------------------------------------


def _on_a_rank(folder, texts, records, val, out, strategy):
    """Everything at once, since a start costs more than the work."""
    use = ModelUse(strategy=strategy)
    encode.encode(folder, texts, f"{out}/vectors.npy", use=use)
    encode.encode(folder, texts, f"{out}/all.npy", layers="all", use=use)
    encode.CHUNK_ROWS = 40  # two lines at once
    layers = {"layers": "0,2", "pooling": "cls"}
    encode.encode(folder, texts, f"{out}/two.npy", **layers, use=use)
    scoring.score(folder, records, f"{out}/scores.npy", use=use)
    scores = evaluate_command(folder, val, use=use)
    with start_command_session(folder, strategy=strategy) as session:
        embedder = Embedder(folder, session=session)
        held = map(local_tensor, embedder.model.parameters())
        return scores, sum(tensor.numel() for tensor in held)


@pytest.mark.promise("A22", "B14", "B15", "B16", "B17")
def test_processes_write_what_one_writes(texts, records, tmp_path):
    folder = str(shared(tiny_qwen3_st))
    val = str(pairs(tmp_path / "val.jsonl"))
    cases = {}
    for strategy in ("ddp", "fsdp"):
        out = tmp_path / strategy
        out.mkdir()
        files = (str(texts), str(records), val, str(out))
        cases[strategy] = (folder, *files, strategy)
    actual = run_cases(_on_a_rank, 2, cases)
    for strategy in cases:
        _assert_as_one_writes(
            folder, val, tmp_path / strategy, strategy, result_of(actual, strategy)
        )


def _assert_as_one_writes(folder, val, out, strategy, ends):
    first = Embedder(folder, device="cpu")
    for name, expected in (
        ("vectors", first.encode(TEXTS)),
        ("all", first.hidden_states(TEXTS)),
        ("two", first.hidden_states(TEXTS, [0, 2], pooling="cls")),
        ("scores", first.score(in_order())),
    ):
        np.testing.assert_allclose(np.load(out / f"{name}.npy"), expected, atol=1e-5)
    for scores, _ in ends:
        assert scores == pytest.approx(evaluate(folder, val))
    total = sum(parameter.numel() for parameter in first.model.parameters())
    held = [count for _, count in ends]
    if strategy == "ddp":
        assert held == [total] * len(ends)
    else:
        assert sum(held) == total
        assert max(held) < 1.3 * total / len(ends)


def test_pairs_of_sentences_with_given_scores_are_scored(tmp_path):
    path = tmp_path / "sts.csv"
    output = tmp_path / "scores.npy"
    path.write_text("sentence1,sentence2,score\nred cat,bird,0.5\n")
    scoring.score(str(shared(tiny_bert)), str(path), str(output))
    embedder = Embedder(shared(tiny_bert), device="cpu")
    expected = embedder.score([("red cat", "bird")])
    np.testing.assert_allclose(np.load(output), expected, rtol=1e-5, atol=1e-6)


def test_paths_of_images_are_read_as_in_the_run_of_the_model(tmp_path, capsys):
    """A model of images alone, whose data are plain paths: its run says so, and a model without one is told."""
    run = tmp_path / "run"
    shutil.copytree(shared(tiny_vit), run / "final")
    (run / "config.yaml").write_text("retrieval_mode: i2i\n")
    lines = []
    for number in range(4):
        # The same picture in another file: one that is its own positive would not count.
        names = (f"{number}.png", f"{number}.bmp")
        for name, form in zip(names, ("PNG", "BMP"), strict=True):
            write(tmp_path / name, form, seed=number)
        lines.append(pair(*names))
    data = write_jsonl(tmp_path / "pairs.jsonl", lines)
    for model, options in (
        (run / "final", {}),
        (shared(tiny_vit), {"retrieval_mode": "i2i"}),
    ):
        assert evaluate(model, data, **options)["ndcg@10"] == pytest.approx(1.0)
        scoring.score(str(model), str(data), **options)
        scores = [float(line) for line in capsys.readouterr().out.split()]
        np.testing.assert_allclose(scores, 1.0, atol=1e-5)
    with pytest.raises(UserError, match="retrieval_mode"):
        scoring.score(str(shared(tiny_vit)), str(data))
