"""evaluate(): a model folder and data in, numbers out: those of Sentence Transformers' vectors."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sentence_transformers import SentenceTransformer

from tests.data.files import pair, write_beir, write_jsonl
from tests.evaluation.test_retrieval import plain_metrics
from tests.tiny import shared, tiny_bert_st, tiny_qwen3_st
from tests.tiny_tokenizers import WORDS
from vembed import Embedder, UserError, evaluate
from vembed.evaluation.scores import RetrievalSearch
from vembed.inference import encoding


def sentence(seed, length=5):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, length))


def write_pairs(path, number=30):
    records = [
        pair(sentence(i), [sentence(100 + i), sentence(500 + i)]) for i in range(number)
    ]
    write_jsonl(path, records)
    return records


def plain_ndcg(folder, records, k=10, dim=None):
    model = SentenceTransformer(str(folder), device="cpu", truncate_dim=dim)
    positives = [text for record in records for text in record["positive"]]
    documents = list(dict.fromkeys(positives))
    vectors = model.encode_document(documents, normalize_embeddings=True)
    total = 0.0
    for record in records:
        query = model.encode_query(record["query"], normalize_embeddings=True)
        ranking = np.argsort(-(vectors @ query)).tolist()
        relevant = {documents.index(text): 1 for text in record["positive"]}
        total += plain_metrics(ranking, relevant, k)[f"ndcg@{k}"]
    return total / len(records)


@pytest.mark.parametrize("make", [tiny_bert_st, tiny_qwen3_st])
def test_scores_are_those_of_the_vectors_of_sentence_transformers(make, tmp_path):
    folder = shared(make)
    records = write_pairs(tmp_path / "val.jsonl")
    scores = evaluate(folder, tmp_path / "val.jsonl", dims=[8], ks=[3])
    assert scores["ndcg@10"] == pytest.approx(plain_ndcg(folder, records))
    assert scores["ndcg@3"] == pytest.approx(plain_ndcg(folder, records, k=3))
    assert scores["dim8/ndcg@10"] == pytest.approx(plain_ndcg(folder, records, dim=8))
    assert {key.partition("/")[2] or key for key in scores} == {
        f"{metric}@{k}" for metric in ("ndcg", "mrr", "recall", "map") for k in (3, 10)
    }


def test_documents_are_searched_chunk_by_chunk_and_never_held_together(
    tmp_path, monkeypatch
):
    model = Embedder(shared(tiny_bert_st), device="cpu")
    queries = {f"q{number}": sentence(number) for number in range(15)}
    corpus = {
        f"d{number}": sentence(90 + number, number % 7 + 1) for number in range(50)
    }
    relevant = {f"q{number}": [f"d{2 * number}"] for number in range(15)}
    write_beir(tmp_path, corpus, queries, relevant)
    chunks = []
    original = RetrievalSearch.add

    def add(self, rows, numbers):
        chunks.append((rows, numbers))
        original(self, rows, numbers)

    monkeypatch.setattr(encoding, "INPUTS_PER_CHUNK", 8)
    monkeypatch.setattr(RetrievalSearch, "add", add)
    evaluate(model, tmp_path)
    assert max(len(rows) for rows, _ in chunks) == 8
    distinct = list(dict.fromkeys(corpus.values()))
    numbers = np.concatenate([numbers for _, numbers in chunks])
    assert sorted(numbers) == list(range(len(distinct)))
    texts = [distinct[number] for number in numbers]
    expected = model.encode(texts, kind="document", normalize=False)
    actual = np.concatenate([rows for rows, _ in chunks])
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_scored_pairs_have_the_correlations_of_scipy_at_every_size(tmp_path):
    labels = [number % 5 / 4 for number in range(20)]  # with ties
    texts = [sentence(number) for number in range(21)]
    names = ("sentence1", "sentence2", "score")
    rows = zip(texts, texts[1:], labels, strict=False)
    records = [dict(zip(names, row, strict=True)) for row in rows]
    write_jsonl(tmp_path / "sts.jsonl", records)
    scores = evaluate(shared(tiny_bert_st), tmp_path / "sts.jsonl", dims=[4])
    model = SentenceTransformer(str(shared(tiny_bert_st)), device="cpu")
    assert len(scores) == 4
    for prefix, dim in (("", None), ("dim4/", 4)):
        options = {"truncate_dim": dim, "normalize_embeddings": True}
        vectors = model.encode(texts, **options)
        cosines = (vectors[:-1] * vectors[1:]).sum(axis=1)
        spearman = stats.spearmanr(cosines, labels).statistic
        pearson = stats.pearsonr(cosines, labels).statistic
        assert scores[f"{prefix}spearman"] == pytest.approx(spearman, abs=1e-5)
        assert scores[f"{prefix}pearson"] == pytest.approx(pearson, abs=1e-5)


def test_wrong_dims_and_broken_weights_are_named(tmp_path):
    write_pairs(tmp_path / "val.jsonl")
    model = Embedder(shared(tiny_bert_st), device="cpu")
    with pytest.raises(UserError, match="dimension 4096 is asked for"):
        evaluate(model, tmp_path / "val.jsonl", dims=[8, 4096])
    with torch.no_grad():
        next(model.model.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match=r"non-finite embeddings .*for 30 of 30 inputs"):
        evaluate(model, tmp_path / "val.jsonl")


def test_a_model_that_is_published_cut_is_measured_cut(tmp_path):
    records = write_pairs(tmp_path / "val.jsonl")
    model = Embedder(shared(tiny_bert_st), device="cpu")
    model.featuriser.description = model.description.with_(
        truncate_dim=8, mrl_dims=(32, 8, 4)
    )
    scores = evaluate(model, tmp_path / "val.jsonl")
    assert scores["ndcg@10"] == pytest.approx(
        plain_ndcg(shared(tiny_bert_st), records, dim=8)
    )
    assert {key.split("/")[0] for key in scores if "/" in key} == {"dim8", "dim4"}
