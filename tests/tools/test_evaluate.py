"""`vembed eval`: what it prints and writes."""

import numpy as np
import pytest

from tests.data.files import pair, write_jsonl
from tests.tiny import shared, tiny_bert_st, tiny_qwen3_reranker, tiny_reranker
from vembed import Embedder, Reranker, UserError, evaluate
from vembed.cli.commands.scores import eval as evaluate_command

WORDS = ("red", "green", "cat", "dog", "house")


@pytest.fixture
def pairs(tmp_path):
    records = [pair(word, f"a {word} thing") for word in WORDS]
    return write_jsonl(tmp_path / "val.jsonl", records)


@pytest.fixture
def printed(capsys):
    def run(*args, **options):
        capsys.readouterr()
        scores = evaluate_command(*args, **options)
        return scores, capsys.readouterr().out

    return run


def test_tables(pairs, printed):
    scores, text = printed(str(shared(tiny_bert_st)), str(pairs), dims="8")
    assert scores == pytest.approx(evaluate(shared(tiny_bert_st), pairs, dims=[8]))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[0] == ["metric", "whole", "8"]
    for name in ("nDCG", "MRR", "Recall", "MAP"):
        for cut in (1, 5, 10, 100):
            key = f"{name}@{cut}".lower()
            values = [scores[key], scores[f"dim8/{key}"]]
            row = [f"{name}@{cut}", *(f"{value:.4f}" for value in values)]
            assert row in lines
    cut = evaluate(Embedder(shared(tiny_bert_st), truncate_dim=8), pairs)
    assert cut["ndcg@10"] == pytest.approx(scores["dim8/ndcg@10"])


def test_scored_pairs_have_one_table(tmp_path, printed):
    sides = {"sentence1": "cat", "sentence2": "dog"}
    records = [{**sides, "score": score} for score in range(4)]
    path = write_jsonl(tmp_path / "sts.jsonl", records)
    scores, text = printed(str(shared(tiny_bert_st)), str(path))
    assert text.split()[:2] == ["metric", "whole"]
    assert f"{scores['spearman']:.4f}" in text


def test_mapping_split_and_bad_records(tmp_path, printed):
    path = tmp_path / "val.jsonl"
    path.write_text('{"q": "red", "a": "a red thing"}\n{"q": "blue", "a": ""}\n')
    mapping = "{q: query, a: positive}"
    with pytest.raises(UserError, match=r"val\.jsonl:2"):
        printed(str(shared(tiny_bert_st)), str(path), column_mapping=mapping)
    options = {"column_mapping": mapping, "on_bad_record": "skip"}
    scores, _ = printed(str(shared(tiny_bert_st)), str(path), **options)
    assert scores["ndcg@10"] == 1.0


@pytest.mark.parametrize("options", [{"dims": "8"}, {"compressed": "page.html"}])
def test_what_a_reranker_does_not_have_is_refused(pairs, printed, options):
    with pytest.raises(UserError, match="is a reranker: leave them out"):
        printed(str(shared(tiny_reranker)), str(pairs), **options)


def test_a_reranker_sorts_what_the_first_stage_finds(tmp_path, printed):
    documents = ["red house", "red dog and cat"]
    records = [pair("red", documents[0]), pair("green", documents[1])]
    data = write_jsonl(tmp_path / "val.jsonl", records)
    model = str(shared(tiny_reranker))
    scores, text = printed(model, str(data))
    best = Reranker(model).rank("red", documents)[0]["index"]
    # BM25 finds both documents for the first query, and none for the second.
    expected = 1.0 if best == 0 else 1 / np.log2(3)
    assert scores["ndcg@10"] == pytest.approx(expected / 2)
    assert scores["first_stage/ndcg@10"] == 0.5
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["metric", "whole", "first", "stage"]
    assert ["nDCG@10", f"{expected / 2:.4f}", "0.5000"] in lines


def test_a_model_that_may_be_either_is_scored_as_an_embedding_model(pairs, caplog):
    scores = evaluate(shared(tiny_qwen3_reranker), pairs)
    assert "first_stage/ndcg@10" not in scores
    assert "scored as an embedding model" in caplog.text
    reranker = Reranker(shared(tiny_qwen3_reranker))
    assert "first_stage/ndcg@10" in evaluate(reranker, pairs)


def test_compressed_documents(pairs, tmp_path, printed):
    """Scores by hand: int8 orders as float does, binary by the number of equal signs; one page, one table."""
    page = tmp_path / "bytes.html"
    options = {"dims": "8", "compressed": str(page)}
    scores, text = printed(str(shared(tiny_bert_st)), str(pairs), **options)
    assert "bytes per document</text>" in page.read_text()
    for size, prefix in ((32, ""), (8, "dim8/")):
        plain = pytest.approx(scores[f"{prefix}ndcg@10"])
        assert scores[f"compressed/float32/{size}/ndcg@10"] == plain
    model = Embedder(shared(tiny_bert_st))
    asked = model.encode(WORDS, "query")
    texts = [f"a {word} thing" for word in WORDS]
    documents = model.encode(texts)
    equal = ((asked[:, None] > 0) == (documents[None] > 0)).sum(axis=2)
    signs = np.where(documents > 0, 1, -1)
    # Equal scores are ordered by a permutation of the numbers.
    places = np.arange(len(texts)) * 0x9E3779B1 % 2**32
    for name, similarity in (("binary", equal), ("binary_rescored", asked @ signs.T)):
        order = np.lexsort((np.broadcast_to(-places, similarity.shape), -similarity))
        ranks = np.nonzero(order == np.arange(len(texts))[:, None])[1]
        expected = np.mean(1 / np.log2(ranks + 2))
        actual = scores[f"compressed/{name}/32/ndcg@10"]
        assert actual == pytest.approx(expected)
    lines = [line.split() for line in text.splitlines()]
    assert ["float32", "32", "128", f"{scores['ndcg@10']:.4f}", "1.000"] in lines
    assert ["binary", "8", "1"] in [line[:3] for line in lines]
