"""`vembed eval`: what it prints and writes."""

import numpy as np
import pytest

from tests.data.files import write_jsonl
from tests.tiny import shared, tiny_bert_st, tiny_reranker
from vembed import Embedder, Reranker, UserError, evaluate, train
from vembed.cli.commands.scores import eval as evaluate_command

WORDS = ("red", "green", "cat", "dog", "house")


@pytest.fixture
def pairs(tmp_path):
    records = [{"query": word, "positive": f"a {word} thing"} for word in WORDS]
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
    by_metric = {line[0]: line[1:] for line in lines[1:]}
    for name in ("nDCG", "MRR", "Recall", "MAP"):
        for cut in (1, 5, 10, 100):
            key = f"{name.lower()}@{cut}"
            assert by_metric[f"{name}@{cut}"] == [
                f"{scores[f'{prefix}{key}']:.4f}" for prefix in ("", "dim8/")
            ]


def test_each_matryoshka_size_has_a_row(pairs, tmp_path, printed):
    """Embeddings of 32 dimensions with the sizes 32 and 16: the whole ones are those of 32."""
    config = {
        "model_name": str(shared(tiny_bert_st)),
        "data_path": str(pairs),
        "output_dir": str(tmp_path / "run"),
        "mrl_dims": [32, 16],
        "max_steps": 1,
        "report_to": [],
    }
    final = train(config).model_dir
    scores, text = printed(str(final), str(pairs))
    assert scores["dim32/ndcg@10"] == scores["ndcg@10"]
    assert scores["dim16/mrr@10"] != scores["mrr@10"]
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[0] == ["metric", "whole", "32", "16"]


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
    scores, _ = printed(
        str(shared(tiny_bert_st)),
        str(path),
        column_mapping=mapping,
        on_bad_record="skip",
    )
    assert scores["ndcg@10"] == 1.0


@pytest.mark.parametrize("options", [{"dims": "8"}, {"compressed": "page.html"}])
def test_what_a_reranker_does_not_have_is_refused(pairs, printed, options):
    with pytest.raises(UserError, match="is a reranker: leave them out"):
        printed(str(shared(tiny_reranker)), str(pairs), **options)


def test_a_reranker_sorts_what_the_first_stage_finds(tmp_path, printed):
    records = [
        {"query": "red", "positive": "red house"},
        {"query": "green", "positive": "red dog"},
    ]
    data = write_jsonl(tmp_path / "val.jsonl", records)
    model = str(shared(tiny_reranker))
    scores, text = printed(model, str(data))
    best = Reranker(model).rank("red", ["red house", "red dog"])[0]["index"]
    # BM25 finds both documents for the first query, and none for the second.
    expected = 1.0 if best == 0 else 1 / np.log2(3)
    assert scores["ndcg@10"] == pytest.approx(expected / 2)
    assert scores["first_stage/ndcg@10"] == 0.5
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["metric", "whole", "first", "stage"]
    assert ["nDCG@10", f"{expected / 2:.4f}", "0.5000"] in lines


def test_compressed_documents(pairs, tmp_path, printed):
    """Scores by hand: int8 orders as float does, binary by the number of equal signs; one page, one table."""
    page = tmp_path / "bytes.html"
    scores, text = printed(
        str(shared(tiny_bert_st)), str(pairs), dims="8", compressed=str(page)
    )
    assert "bytes per document</text>" in page.read_text()
    for size, prefix in ((32, ""), (8, "dim8/")):
        assert scores[f"compressed/float32/{size}/ndcg@10"] == pytest.approx(
            scores[f"{prefix}ndcg@10"]
        )
    model = Embedder(shared(tiny_bert_st))
    asked = model.encode(WORDS, "query")
    documents = model.encode([f"a {word} thing" for word in WORDS])
    equal = ((asked[:, None] > 0) == (documents[None] > 0)).sum(axis=2)
    ranks = [
        int((row > row[query]).sum() + (row[:query] == row[query]).sum())
        for query, row in enumerate(equal)
    ]
    expected = np.mean([1 / np.log2(rank + 2) for rank in ranks])
    assert scores["compressed/binary/32/ndcg@10"] == pytest.approx(expected)
    order = np.argsort(-(asked @ np.where(documents > 0, 1, -1).T), axis=1)
    rescored = np.mean(
        [1 / np.log2(list(row).index(query) + 2) for query, row in enumerate(order)]
    )
    assert scores["compressed/binary_rescored/32/ndcg@10"] == pytest.approx(rescored)
    lines = [line.split() for line in text.splitlines()]
    assert ["float32", "32", "128", f"{scores['ndcg@10']:.4f}", "1.000"] in lines
    assert ["binary", "8", "1"] in [line[:3] for line in lines]
