"""Evaluation data: what counts as relevant, what counts as the same, and what is wrong with a file, by line."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import pair
from vembed.config.schema import DataSection
from vembed.data.examples import Example, Item, ReadAs
from vembed.errors import UserError
from vembed.evaluation.dataset import (
    Corpus,
    RetrievalData,
    ScoredPairs,
    from_examples,
    open_eval_data,
)
from vembed.evaluation.scores import evaluate, retrieval_metrics


def write_lines(path, records):
    """Write a record as JSON, and a text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for record in records:
            line = record if isinstance(record, str) else json.dumps(record)
            file.write(f"{line}\n")
    return path


def opened(path, on_bad_record="stop", **options):
    data = DataSection(data_path="d", on_bad_record=on_bad_record)
    return open_eval_data(data, str(path), **options)


def refuses(message, path, **options):
    with pytest.raises(UserError, match=message):
        opened(path, **options)


def found(data):
    """Query text -> {document text: grade}."""
    return {
        query.text: {
            data.documents[index].text: grade for index, grade in relevant.items()
        }
        for query, relevant in zip(data.queries, data.relevance, strict=True)
    }


def example(query, *positives, scores=None):
    items = tuple(Item(text=positive) for positive in positives)
    return Example(Item(text=query), items, (), scores)


# ---- pairs -----------------------------------------------------------------------------------------------------


def test_every_positive_is_the_corpus_and_negatives_are_not(tmp_path):
    path = write_lines(
        tmp_path / "val.jsonl",
        [pair("a", "A", negatives=["B", "only a negative"]), pair("b", ["B", "BB"])],
    )
    data = opened(path)
    assert isinstance(data, RetrievalData)
    assert {item.text for item in data.documents} == {"A", "B", "BB"}
    assert found(data) == {"a": {"A": 1}, "b": {"B": 1, "BB": 1}}
    summary = f"2 queries over 3 documents, 3 relevant pairs, from {path}"
    assert data.summary() == summary


def graded(*records):
    """The grades of records: a query, its positives, and their scores or None."""
    examples = []
    for query, positives, scores in records:
        examples.append(example(query, *positives, scores=scores))
    return from_examples(examples, "test", "retrieval")


def test_equal_contents_are_one_document_and_equal_queries_one_query():
    data = graded(("a", "A", None), ("b", "A", None), ("a", "CA", None))
    assert found(data) == {"a": {"A": 1, "C": 1}, "b": {"A": 1}}
    assert len(data.documents) == 2
    again = graded(("a", "AB", (1.0, 1.0)), ("a", "A", (2.0,)))
    assert found(again) == {"a": {"A": 2, "B": 1}}, "the higher grade counts"


@pytest.mark.parametrize(
    ("scores", "grades"),
    [
        ((3.0, 1.0), {"A": 3, "B": 1}),
        # Fractions and large scores keep their proportions.
        ((0.8, 0.2), {"A": 1000, "B": 250}),
        ((8e9, 2e9), {"A": 1000, "B": 250}),
        # A positive without a positive score is a document that nobody should find.
        ((-1.0, 2.0), {"B": 2}),
    ],
)
def test_scores_of_positives_are_grades(scores, grades):
    data = graded(("a", "AB", scores))
    assert found(data) == {"a": grades}
    assert {item.text for item in data.documents} == {"A", "B"}
    assert bool(data.notes) == (min(scores) <= 0)


def test_logits_of_a_teacher_are_no_grades():
    positives = (Item("A"), Item("B"))
    logits = (Example(Item("a"), positives, (Item("C"),), (-0.7, 9.1), "", (-4.2,)),)
    assert found(from_examples(logits, "x")) == {"a": {"A": 1, "B": 1}}


def test_a_positive_that_equals_its_query_does_not_count():
    data = graded(("a", "aB", None), ("c", "c", None))
    assert found(data) == {"a": {"B": 1}}
    assert "2 positives equal their query" in data.notes[-1]


def test_equal_scores_do_not_favour_relevant_documents():
    """A collapsed model finds a relevant document by chance alone."""
    examples = [example(f"q{number}", f"d{number}") for number in range(50)]
    others = [Item(text=f"other {number}") for number in range(450)]
    data = from_examples(examples, "test", documents=others)
    queries = np.ones((50, 2), np.float32)
    documents = np.ones((500, 2), np.float32)
    scores = retrieval_metrics(queries, documents, data, [100])
    assert 0.1 < scores["recall@100"] < 0.4


# ---- scored pairs ----------------------------------------------------------------------------------------------


def test_one_positive_and_a_score_each_are_scored_pairs(tmp_path):
    path = write_lines(
        tmp_path / "sts.jsonl",
        [
            {"sentence1": "a", "sentence2": "b", "score": 0.5},
            {"sentence1": "c", "sentence2": "d", "score": 1},
        ],
    )
    data = opened(path)
    assert isinstance(data, ScoredPairs)
    assert data.scores == (0.5, 1.0)
    assert [item.text for item in data.queries] == ["a", "c"]
    assert [item.text for item in data.documents] == ["b", "d"]
    assert data.summary() == f"2 scored pairs from {path}"


def test_the_task_can_be_said():
    examples = [example("a", "A", scores=(1.0,)), example("b", "B", scores=(2.0,))]
    assert isinstance(from_examples(examples, "test"), ScoredPairs)
    assert isinstance(from_examples(examples, "test", "retrieval"), RetrievalData)
    with_several = [example("a", "A", "B", scores=(1.0, 0.5))]
    assert isinstance(from_examples(with_several, "test"), RetrievalData)
    assert from_examples(with_several, "test", "similarity").scores == (1.0, 0.5)


def test_scores_that_are_all_equal_allow_no_correlation():
    examples = [example(text, "A", scores=(1.0,)) for text in "ab"]
    with pytest.raises(UserError, match="2 scored pairs with 1 different scores"):
        from_examples(examples, "test")


# ---- BEIR folders ----------------------------------------------------------------------------------------------

CORPUS = [
    {"_id": "d1", "title": "Title", "text": "of one"},
    {"_id": "d2", "title": "", "text": "two"},
    {"_id": "d3", "text": "three"},
]
QUERIES = [
    {"_id": "q1", "text": "first"},
    {"_id": 2, "text": "second"},
    {"_id": "q3", "text": "not judged"},
]


def beir(folder, qrels, corpus=CORPUS, queries=QUERIES, split="test"):
    write_lines(folder / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", queries)
    write_lines(
        folder / "qrels" / f"{split}.tsv", ["query-id\tcorpus-id\tscore", *qrels]
    )
    return folder


def test_a_beir_folder_has_no_scored_pairs(tmp_path):
    folder = beir(tmp_path, ["q1\td1\t2"])
    for path in (folder, folder / "qrels" / "test.tsv"):
        with pytest.raises(UserError, match=rf"{path}.* give a file of scored pairs"):
            evaluate("no model", str(path), task="similarity")


@pytest.mark.parametrize("is_of_hub", [False, True], ids=["files", "hub"])
def test_beir_folder_in_parquet(tmp_path, is_of_hub):
    """Single files, or as the Hub has it: shards in folders, the judgements as records."""
    folder = beir(tmp_path / "lines", ["q1\td1\t2", "q1\td2\t0", "2\td3\t1"])
    tables = tmp_path / "tables"
    qrels = tables / "qrels"
    qrels.mkdir(parents=True)
    for part, records in (("corpus", CORPUS), ("queries", QUERIES)):
        rows = [{"title": "", **row, "_id": str(row["_id"])} for row in records]
        if is_of_hub:
            write_table(tables / part / "train-00000-of-00002.parquet", rows[:2])
            write_table(tables / part / "train-00001-of-00002.parquet", rows[2:])
        else:
            write_table(tables / f"{part}.parquet", rows)
    if is_of_hub:
        names = ("query-id", "corpus-id", "score")
        judged = [("q1", "d1", 2.0), ("2", "d3", 1.0)]
        rows = [dict(zip(names, row, strict=True)) for row in judged]
        write_table(qrels / "test-00000-of-00001.parquet", rows)
    else:
        shutil.copy(folder / "qrels" / "test.tsv", qrels)
    expected = opened(folder)
    for path in (tables, next(qrels.iterdir())):
        data = opened(path, splits=("test",))
        assert found(data) == found(expected)
        assert data.documents.keys.tolist() == expected.documents.keys.tolist()


def write_table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_bad_record_of_parquet_is_named_by_its_row(tmp_path):
    folder = beir(tmp_path, ["q1\td1\t1"])
    (folder / "corpus.jsonl").unlink()
    rows = [{"_id": "d1", "title": "", "text": text} for text in ("x", "y")]
    write_table(folder / "corpus.parquet", rows)
    refuses(r"corpus\.parquet:2: _id d1 occurs twice", folder)


@pytest.mark.parametrize(
    "lines",
    [
        "q1\td1\t2\n2\td3\t1\n",  # no header
        "q1\td1\t2.0\nq1\td2\t0.0\n2\td3\t1\n",
        "q1 0 d1 2\nq1 0 d2 0\n2 Q0 d3 1\n",  # as trec_eval has them
        "q1\t0\td1\t2\nq1\t0\td2\t0\n2\tQ0\td3\t1\n",  # MS MARCO's
    ],
)
def test_forms_of_qrels(tmp_path, lines):
    folder = beir(tmp_path, [])
    (folder / "qrels" / "test.tsv").write_text(lines)
    relevant = {"first": {"Title of one": 2}, "second": {"three": 1}}
    assert found(opened(folder)) == relevant


def test_grades_under_another_name_are_not_taken_for_one(tmp_path):
    folder = beir(tmp_path, [])
    (folder / "qrels" / "test.tsv").unlink()
    row = {"query-id": "q1", "corpus-id": "d1", "label": 0}
    write_lines(folder / "qrels" / "test.jsonl", [row])
    refuses(r"test\.jsonl:1: no score, and label is not", folder)


def test_texts_of_a_corpus_stay_in_their_file(tmp_path):
    texts = [f"text {number} " + "word " * number for number in range(100)]
    documents = [
        {"_id": f"d{number}", "text": text} for number, text in enumerate(texts)
    ]
    lines = [f"q1\td{number}\t1" for number in (3, 70, 99)]
    folder = beir(tmp_path, lines, corpus=documents)
    data = opened(folder)
    corpus = data.documents
    assert isinstance(corpus, Corpus)
    expected = [Item(text=text.strip()) for text in texts]
    assert list(corpus) == expected
    assert corpus.keys.tolist() == [item.key() for item in expected]
    assert corpus.lengths.tolist() == [len(item.text) for item in expected]
    assert data.relevance == ({3: 1, 70: 1, 99: 1},)
    assert corpus.numbers.nbytes + corpus.keys.nbytes <= 28 * len(documents)
    prompted = data.read_as(ReadAs(document_prompt="passage: ", max_length=8))
    assert prompted.documents[5] == Item(expected[5].text, (), "passage: ", 8)
    path = folder / "corpus.jsonl"
    path.write_text(path.read_text().replace("text 5 ", "text 6 "))
    assert corpus[4] == expected[4]
    with pytest.raises(UserError, match=r"corpus\.jsonl has changed since"):
        corpus[5]


def test_equal_contents_of_a_corpus_are_one_document(tmp_path):
    corpus = [*CORPUS, {"_id": "d4", "text": "two"}]
    data = opened(beir(tmp_path, ["q1\td1\t1", "2\td4\t2"], corpus=corpus))
    assert found(data) == {"first": {"Title of one": 1}, "second": {"two": 2}}
    assert data.notes[-1] == "joined 1 document with equal content"


def test_choice_of_qrels(tmp_path):
    folder = beir(tmp_path, ["q1\td1\t1"])
    beir(tmp_path, ["q1\td2\t1"], split="dev")
    of_dev = {"first": {"two": 1}}
    of_test = {"first": {"Title of one": 1}}
    assert found(opened(folder)) == of_dev, "in training dev comes first"
    assert found(opened(folder, splits=("test",))) == of_test
    assert found(opened(folder / "qrels" / "test.tsv")) == of_test
    refuses(r"holds dev, test, and none of train", folder, splits=("train",))
    (folder / "qrels" / "dev.tsv").rename(folder / "qrels" / "extra.tsv")
    (folder / "qrels" / "test.tsv").unlink()
    assert found(opened(folder)) == of_dev, "the only one needs no name"


def test_pairs_have_no_splits(tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", [pair("a", "b")])
    with pytest.raises(UserError, match="it has no qrels of a split dev"):
        evaluate("no model", path, split="dev")


def test_missing_files_are_named(tmp_path):
    folder = beir(tmp_path, ["q1\td1\t1"])
    (folder / "queries.jsonl").unlink()
    refuses(r"neither queries\.jsonl nor queries\.parq", folder)
    (folder / "qrels" / "test.tsv").unlink()
    refuses("qrels holds no qrels", folder)


BAD_CORPUS = [
    *CORPUS,
    "{broken",
    {"_id": "d5", "text": "  "},
    {"text": "no id"},
    {"_id": "d1", "text": "again"},
    ["a list"],
    {"_id": "x", "text": "half an emoji \ud83d"},
]
BAD_QRELS = ["q1\td1\t1", "q1\td1", "q9\td1\t1", "q1\td9\t1"]
BAD_QRELS += [f"q1\td1\t{score}" for score in ("high", "--1", "3000000000", "0.5")]


def test_bad_records_are_named_with_file_and_line_or_left_out(tmp_path):
    folder = beir(tmp_path, BAD_QRELS, corpus=BAD_CORPUS)
    with pytest.raises(UserError) as raised:
        opened(folder)
    message = str(raised.value)
    corpus = folder / "corpus.jsonl"
    qrels = folder / "qrels" / "test.tsv"
    assert message.startswith(f"13 bad records in {folder}")
    for part in (
        f"{corpus}:4: not JSON",
        f"{corpus}:5: d5 has no text",
        f"{corpus}:6: no id (_id, ",
        f"{corpus}:7: _id d1 occurs twice",
        f"{corpus}:8: no id",
        f"{corpus}:9: x has a lone surrogate",
        f"{qrels}:3: not query-id, corpus-id and a whole score",
        f"{qrels}:4: query q9 is not in the queries",
        f"{qrels}:5: document d9 is not in the corpus",
        f"{qrels}:6: not query-id",
    ):
        assert part in message
    data = opened(folder, on_bad_record="skip")
    assert found(data) == {"first": {"Title of one": 1}}
    assert "left out 13 bad records, the first:" in data.notes[0]


def test_nothing_relevant_is_an_error(tmp_path):
    refuses("no query with a relevant document", beir(tmp_path, ["q1\td1\t0"]))


def test_text_that_is_no_utf8(tmp_path):
    folder = beir(tmp_path, [])
    (folder / "qrels" / "test.tsv").write_bytes(b"q1\td\xff\t1\n")
    refuses(r"test\.tsv is damaged.* not UTF-8", folder)
