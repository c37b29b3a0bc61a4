"""evaluate(): a model folder and data in, numbers out: those of Sentence Transformers' vectors, and those of mteb."""

import json
import math

import numpy as np
import pytest
import torch

from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert_st, tiny_qwen3_st
from tests.tiny_tokenizers import WORDS
from vembed import Embedder, UserError, evaluate
from vembed.config.schema import TrainConfig
from vembed.evaluation.dataset import open_eval_data
from vembed.evaluation.scores import RetrievalSearch, evaluate_model
from vembed.inference import encoding
from vembed.parallel.session import start_session


def sentence(seed, length=5):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, length))


def write_pairs(path, number=30):
    records = [
        {"query": sentence(i), "positive": [sentence(100 + i), sentence(500 + i)]}
        for i in range(number)
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return records


def plain_ndcg(folder, records, k=10, dim=None):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", truncate_dim=dim)
    documents = list(
        dict.fromkeys(text for record in records for text in record["positive"])
    )
    vectors = model.encode_document(documents, normalize_embeddings=True)
    total = 0.0
    for record in records:
        scores = vectors @ model.encode_query(
            record["query"], normalize_embeddings=True
        )
        ranking = sorted(range(len(documents)), key=lambda i: -scores[i])
        ranking = [
            i
            for i in ranking
            if documents[i] != record["query"] or documents[i] in record["positive"]
        ][:k]
        gains = [
            1 / math.log2(place + 2)
            for place, i in enumerate(ranking)
            if documents[i] in record["positive"]
        ]
        total += sum(gains) / sum(
            1 / math.log2(place + 2) for place in range(len(set(record["positive"])))
        )
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
    texts = {
        "queries": [sentence(number) for number in range(15)],
        "corpus": [sentence(90 + number, number % 7 + 1) for number in range(50)],
    }
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text(
        "".join(f"{number}\t{2 * number}\t1\n" for number in range(15))
    )
    for name, entry in texts.items():
        lines = (
            json.dumps({"_id": number, "text": text})
            for number, text in enumerate(entry)
        )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    inputs = []
    original = RetrievalSearch.add
    monkeypatch.setattr(encoding, "INPUTS_PER_CHUNK", 8)

    def add(self, rows, numbers):
        inputs.append((rows, numbers))
        original(self, rows, numbers)

    monkeypatch.setattr(RetrievalSearch, "add", add)
    scores = evaluate(model, tmp_path, dims=[8])
    assert {"ndcg@10", "dim8/ndcg@10"} <= set(scores)
    assert max(len(rows) for rows, _ in inputs) == 8
    distinct = list(dict.fromkeys(texts["corpus"]))
    numbers = np.concatenate([numbers for _, numbers in inputs])
    assert sorted(numbers) == list(range(len(distinct)))
    actual = np.concatenate([rows for rows, _ in inputs])
    expected = model.encode(
        [distinct[number] for number in numbers], kind="document", normalize=False
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_scored_pairs(tmp_path):
    from scipy import stats
    from sentence_transformers import SentenceTransformer

    records = [
        {
            "sentence1": sentence(number),
            "sentence2": sentence(number + 1),
            "score": number % 5 / 4,
        }
        for number in range(20)
    ]
    (tmp_path / "sts.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    scores = evaluate(shared(tiny_bert_st), tmp_path / "sts.jsonl", dims=[4])
    model = SentenceTransformer(str(shared(tiny_bert_st)), device="cpu")
    first = model.encode([record["sentence1"] for record in records])
    second = model.encode([record["sentence2"] for record in records])
    expected = stats.spearmanr(
        (first * second).sum(1), [record["score"] for record in records]
    ).statistic
    assert scores["spearman"] == pytest.approx(expected, abs=1e-5)
    assert set(scores) == {"spearman", "pearson", "dim4/spearman", "dim4/pearson"}


# mteb leaves files open.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_equal_files_give_equal_numbers_as_mteb(tmp_path):
    """mteb runs on the folder as it is, and finds what we find."""
    import warnings

    import mteb
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata
    from sentence_transformers import SentenceTransformer

    rng = np.random.default_rng(0)
    queries = {f"q{number}": sentence(number) for number in range(12)}
    corpus = {f"d{number}": sentence(1000 + number, 8) for number in range(40)}
    qrels = {
        name: {f"d{j}": 1 for j in rng.choice(40, 2, replace=False)} for name in queries
    }

    class Task(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="VembedTest",
            description="a test",
            reference=None,
            dataset={"path": "none", "revision": "1"},
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            date=("2020-01-01", "2020-12-31"),
            domains=["Written"],
            task_subtypes=[],
            license="mit",
            annotations_creators="derived",
            dialect=[],
            sample_creation="found",
            bibtex_citation="",
        )

        def load_data(self, **_):
            self.dataset = {
                "default": {
                    "test": {
                        "corpus": Dataset.from_list(
                            [
                                {"id": name, "title": "", "text": text}
                                for name, text in corpus.items()
                            ]
                        ),
                        "queries": Dataset.from_list(
                            [
                                {"id": name, "text": text}
                                for name, text in queries.items()
                            ]
                        ),
                        "relevant_docs": qrels,
                        "top_ranked": None,
                    }
                }
            }
            self.data_loaded = True

    (tmp_path / "qrels").mkdir()
    for name, texts in (("corpus", corpus), ("queries", queries)):
        lines = [
            json.dumps({"_id": name, "text": text}) for name, text in texts.items()
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    lines = [
        f"{query}\t{document}\t1"
        for query, documents in qrels.items()
        for document in documents
    ]
    (tmp_path / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "\n".join(lines)
    )
    ours = evaluate(shared(tiny_bert_st), tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of mteb, about Sentence Transformers' renamed methods
        model = SentenceTransformer(str(shared(tiny_bert_st)), device="cpu")
        actual = mteb.evaluate(model, [Task()], cache=None, show_progress_bar=False)
    theirs = actual.task_results[0].scores["test"][0]
    assert theirs["ndcg_at_10"] == pytest.approx(ours["ndcg@10"], abs=1e-4)
    assert theirs["recall_at_100"] == pytest.approx(ours["recall@100"], abs=1e-4)
    assert theirs["map_at_10"] == pytest.approx(ours["map@10"], abs=1e-4)
    assert theirs["mrr_at_10"] == pytest.approx(ours["mrr@10"], abs=1e-4)


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


def _evaluate_on_a_rank(folder, path):
    config = TrainConfig(
        model_name="m", data_path="d", strategy="ddp", micro_batch_tokens=64
    )
    with start_session(config) as session:
        model = Embedder(folder, device=session.device)
        data = open_eval_data(config.data, path)
        return evaluate_model(
            model.model, model.featuriser, data, config.evaluation, session, dims=[8]
        )


def test_ranks_together_give_the_numbers_of_one(tmp_path):
    write_pairs(tmp_path / "val.jsonl", 31)
    expected = evaluate(
        shared(tiny_bert_st), tmp_path / "val.jsonl", dims=[8], batch_tokens=64
    )
    path = str(tmp_path / "val.jsonl")
    for scores in run_ranks(
        _evaluate_on_a_rank, 2, shared(tiny_bert_st), path, process_group=False
    ):
        assert scores == pytest.approx(expected)


def test_an_evaluation_can_be_ended_while_it_scores(tmp_path):
    write_pairs(tmp_path / "val.jsonl")
    config = TrainConfig(model_name="m", data_path="d")
    data = open_eval_data(config.data, str(tmp_path / "val.jsonl"))
    model = Embedder(shared(tiny_bert_st), device="cpu")
    micro_batches = []
    forwards = []

    def between():
        micro_batches.append(len(forwards))

    with model.model.register_forward_pre_hook(lambda *_: forwards.append(1)):
        evaluate_model(
            model.model,
            model.featuriser,
            data,
            config.evaluation,
            None,
            dims=[8],
            check_interrupt=between,
        )
    assert micro_batches == [
        *range(1, len(forwards) + 1),
        len(forwards),
        len(forwards),
    ]  # a tile at each of two sizes
