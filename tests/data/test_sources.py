"""Files of every format to examples: the good ones in order, several sources, images, names of the Hub."""

import csv
import os

import datasets
import numpy as np
import pytest

from tests.data.files import (
    RECORDS,
    numbered,
    open_path,
    open_rows,
    pair,
    pairs_of,
    places_of,
    queries_of,
    refused,
    refused_rows,
    write_format,
    write_jsonl,
    write_lines,
    write_parquet,
)
from tests.data.pictures import encoded, write
from vembed.config.schema import DataSource
from vembed.data.examples import ImageRef, Item


def test_lines_are_those_of_an_editor(tmp_path):
    path = write_lines(
        tmp_path / "a.csv", "query,positive", 'q,"two', 'lines"', "r,s", "", "t,u"
    )
    assert places_of(open_path(path)) == [f"{path}:{line}" for line in (2, 4, 6)]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv"])
def test_byte_order_mark_and_line_ends(tmp_path, kind, begin, ending):
    text = {
        "jsonl": '{"query": "a", "positive": "b"}\n\n{"query": "c", "positive": "d"}\n',
        "json": '\n[{"query": "a", "positive": "b"},\n\n {"query": "c", "positive": "d"}]\n\n',
        "csv": 'query,positive\na,"b"\n\n"c",d\n',
        "tsv": 'query\tpositive\na\tb\n\nc\t"d"\n',
    }[kind]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(begin + text.replace("\n", ending).encode())
    assert pairs_of(open_path(path)) == [("a", "b"), ("c", "d")]


def test_a_reason_that_all_share_is_said_once(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"premise": "q", "hypothesis": "p"}] * 12)
    first, again, more = refused(path).splitlines()[1:]
    assert f"{path}:1: no query and no positive" in first
    assert "premise, hypothesis" in first
    places = ", ".join(f"{path}:{line}" for line in range(2, 11))
    assert again.strip() == f"{places}: the same"
    assert more.strip() == "and 2 more"


def test_validation_data_need_not_have_the_columns_of_the_mapping(tmp_path):
    mapping = {"subject": "query"}
    store = open_rows(tmp_path, RECORDS, role="validation", column_mapping=mapping)
    assert len(store) == len(RECORDS)
    assert "no other" in refused_rows(tmp_path, [{"query": 1}], role="validation")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_fields_may_be_separated_otherwise_than_the_ending_says(
    tmp_path, kind, delimiter
):
    path = tmp_path / f"a.{kind}"
    answer = "two\nlines" if kind == "csv" else "x"
    rows = [("query", "positive"), ('a; "b", c|d', answer), ("e", "f")]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    assert pairs_of(open_path(path)) == rows[1:]


def test_texts_that_look_like_paths_of_images_are_warned_of(tmp_path):
    records = [pair(f"shoe {number}", f"pics/a b/{number}.JPG") for number in range(30)]
    (hint,) = open_rows(tmp_path, records).warnings()
    assert "'pics/a b/0.JPG'" in hint
    assert "set retrieval_mode: i2i, t2i or i2t" in hint
    records[5:] = [pair(positive="a text.png and more")]
    assert open_rows(tmp_path, records).warnings() == []
    (hint,) = open_rows(tmp_path, records, max_train_examples=5).warnings()
    assert "set retrieval_mode" in hint, "as far as the run reads them"


def test_skip_drops_and_counts(tmp_path):
    records = numbered(30)
    for bad in (3, 4, 20):
        records[bad]["query"] = None
    store = open_rows(tmp_path, records, on_bad_record="skip")
    good = [record["query"] for record in records if record["query"]]
    assert queries_of(store) == good
    assert store.counts["bad"] == 3
    assert "3 bad records left out" in store.summary()[0]
    assert any("rows.jsonl:4: query is empty" in line for line in store.summary())
    (warning,) = store.warnings()
    assert "rows.jsonl: 3 of 30 records" in warning, "seen without opening the log"


def test_column_mapping_for_all_and_for_one(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "positive": "b"}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"x": "c", "positive": "d"}])
    third = write_jsonl(tmp_path / "c.jsonl", [pair("e")])
    mapped = DataSource(path=str(second), column_mapping={"x": "query"})
    store = open_path([first, mapped, third], column_mapping={"q": "query"})
    assert queries_of(store) == ["a", "c", "e"]


def test_several_sources(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", numbered(6))
    second = write_format(tmp_path, "csv", RECORDS)
    store = open_path([first, DataSource(path=str(second), weight=0.5, name="table")])
    assert len(store) == 46
    assert store.sizes == (6, 40)
    assert store.weights == (1.0, 0.5)
    assert store.names == (str(first), "table")
    assert [store.source_of(i) for i in (0, 5, 6, 45)] == [0, 0, 1, 1]
    assert store[6].query.text == RECORDS[0]["query"]


def test_bad_records_of_all_sources_are_named_together(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [pair(), {}]) for name in "ab"]
    said = refused(paths)
    assert "2 of 4 records" in said
    assert all(f"{path}:2" in said for path in paths)


def test_max_train_examples_and_negatives_are_for_training(tmp_path):
    rows = numbered(50, neg=["a", "b"])
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    options = {"max_train_examples": 20, "max_negatives": 1}
    store = open_path(path, **options)
    assert queries_of(store) == [row["query"] for row in rows[:20]]
    assert len(store[0].negatives) == 1
    assert "20 of 50 examples" in store.summary()[0]
    validation = open_path(path, role="validation", **options)
    assert len(validation) == 50
    assert len(validation[0].negatives) == 2
    small = write_jsonl(tmp_path / "b.jsonl", rows[:10])
    assert open_path([path, small], max_train_examples=24).sizes == (20, 4)


def test_scores_that_a_loss_cannot_follow_are_refused(tmp_path):
    rows = [{"query": "a", "positive": "b", "score": 1}]
    rows.append({"query": "c", "positive": "d", "score": 3})
    said = refused_rows(tmp_path, rows, loss="bce")
    assert "rows.jsonl:2: score is 3, and loss: bce takes scores from 0 to 1" in said
    assert len(open_rows(tmp_path, rows, loss="ranknet")) == 2
    rows[1] = {"query": "c", "positive": "d", "neg": ["e"], "score": [1, 3]}
    said = refused_rows(tmp_path, rows, loss="bce")
    assert "rows.jsonl:2: score is 3, and loss: bce takes scores from 0 to 1" in said
    rows[1]["score"] = [-3, 128]
    said = refused_rows(tmp_path, rows, loss="lambda")
    assert "score is 128, and loss: lambda takes scores from -inf to 100" in said
    # A batch of both would give the negative e the label 0.
    rows[0] = {"query": "a", "positive": "b", "neg": ["f"], "score": 1}
    rows[1]["score"] = [1, 0.4]
    said = refused_rows(tmp_path, rows, loss="bce")
    assert "loss: bce" in said and "1 of 2 negatives" in said
    for scores in (1, [1, 0.5]):
        rows[1]["score"] = scores
        said = refused_rows(tmp_path, rows, loss="mse", teacher="scores")
        assert "loss: mse" in said and "of 2 negatives" in said
    # A batch of both would give the first record the label 1.
    rows[1] = {"query": "c", "positive": "d"}
    said = refused_rows(tmp_path, rows, loss="bce")
    assert "loss: bce" in said and "1 of 2 records" in said


@pytest.mark.parametrize("options", [{"role": "validation"}, {"loss": "cosent"}])
def test_what_the_loss_needs_is_checked_in_training_alone(tmp_path, options):
    rows = [{"sentence1": "a", "sentence2": "b", "score": 0.5}] * 3
    assert "loss: infonce" in refused_rows(tmp_path, rows)
    assert open_rows(tmp_path, rows, **options).summary()[0].endswith(", 3 scored")


def test_keys_know_equal_content(tmp_path):
    records = [pair("a", "b", negatives=["c", "a"]), pair("d", "b")]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    both = open_path([path, path], no_duplicates=True, max_train_examples=3)
    assert sum(both.sizes) == 3
    keys = both.all_keys()
    for number, example in enumerate(both):
        expected = dict.fromkeys(item.key() for item in example.items)
        assert keys.of(np.array([number])).values.tolist() == list(expected)


def test_fingerprint_is_of_the_content(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    moved = write_jsonl(tmp_path / "b.jsonl", RECORDS)
    whole = open_path(path).fingerprint
    assert open_path(moved).fingerprint == whole
    others = (
        open_path(path, max_negatives=0),
        open_path([DataSource(path=str(path), weight=2.0)]),
    )
    assert whole not in [store.fingerprint for store in others]


# ---- paths and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "guess"),
    [
        ("trian.jsonl", "train.jsonl"),
        ("validation.jsonl", "validation.jsonl.gz"),
        ("nope.jsonl", None),
    ],
)
def test_a_guess_at_a_path_needs_more_than_the_same_ending(tmp_path, missing, guess):
    for name in ("train.jsonl", "train.csv", "validation.jsonl.gz", "rows.jsonl"):
        (tmp_path / name).touch()
    _, is_guessed, name = refused(tmp_path / missing).partition("did you mean ")
    assert name == (f"{tmp_path / guess}?" if is_guessed else "")
    assert bool(is_guessed) == (guess is not None)


def test_paths_that_lead_nowhere(tmp_path):
    circle = tmp_path / "circle.jsonl"
    circle.symlink_to(circle)
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    (tmp_path / "train.csv").touch()
    for path, said in (
        (circle, "circle.jsonl cannot be read"),
        (pipe, "is not a regular file"),
        (tmp_path, "it holds circle.jsonl, pipe.jsonl, train.csv"),
        ("a\0b.jsonl", "cannot be read"),
        (f"{tmp_path}/{'n' * 300}.jsonl", "cannot be read"),
        (tmp_path / "train.csv" / "x.jsonl", "cannot be read"),
        ([], "data_path is an empty list"),
    ):
        assert said in refused(path)
    memory = tmp_path / "memory.jsonl"
    memory.symlink_to("/proc/self/mem")
    assert "memory.jsonl is empty" in refused(memory)


def test_a_name_of_the_hub_without_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refused("nobody/no-such-dataset:default:train")
    assert "as a dataset of the Hub it cannot be loaded" in said


def test_a_name_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        rows = datasets.Dataset.from_list(RECORDS)
        if split:
            return rows
        return datasets.DatasetDict({"train": rows, "test": rows.select(range(5))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(open_path("owner/name")) == 40
    assert len(open_path("owner/name:en", role="validation")) == 5
    assert open_path("owner/name:en:dev")[7].where == "owner/name:en:dev:8"
    assert open_path("owner/name::dev")[7].query == Item(RECORDS[7]["query"])
    assert asked == [
        ("owner/name", None, None),
        ("owner/name", "en", None),
        ("owner/name", "en", "dev"),
        ("owner/name", None, "dev"),
    ]


def test_a_saved_dict_of_splits(tmp_path):
    train = datasets.Dataset.from_list(RECORDS[:30])
    dev = datasets.Dataset.from_list(RECORDS[30:])
    path = tmp_path / "saved"
    datasets.DatasetDict(train=train, dev=dev).save_to_disk(path)
    assert len(open_path(path)) == 30
    assert len(open_path(path, role="validation")) == 10
    odd = tmp_path / "odd"
    datasets.DatasetDict(a=train, b=dev).save_to_disk(odd)
    assert "has the splits a, b, and none is called train" in refused(odd)


# ---- images --------------------------------------------------------------------------------------------------------


def test_images_start_from_the_folder_of_the_file(tmp_path):
    picture = write(tmp_path / "pictures" / "cat.jpg")
    expected = (Item(images=(ImageRef(path=str(picture)),)),)
    store = open_rows(tmp_path, [pair(positive={"image": "pictures/cat.jpg"})])
    assert store[0].positives == expected
    assert "1 documents with images" in store.summary()[0]
    options = {"image_root": str(picture.parent), "retrieval_mode": "t2i"}
    store = open_rows(tmp_path, [pair(positive="cat.jpg")], **options)
    assert store[0].positives == expected
    # Of several files in the folder of each.
    pictures = [write(tmp_path / name / "cat.jpg") for name in "ab"]
    for picture in pictures:
        row = pair(positive={"image": "cat.jpg"})
        write_jsonl(picture.parent / "rows.jsonl", [row])
    shards = list(open_path(tmp_path / "?/rows.jsonl"))
    actual = [example.positives[0].images[0].path for example in shards]
    assert actual == list(map(str, pictures))
    rows = [pair(positive={"image": "https://x.org/y.png"})]
    assert "allow_image_urls: true" in refused_rows(tmp_path, rows)
    assert len(open_rows(tmp_path, rows, allow_image_urls=True)) == 1


def test_bad_images_are_named_with_their_lines(tmp_path):
    write(tmp_path / "good.jpg")
    whole = encoded("JPEG", size=(200, 100))
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "zero.jpg").touch()
    names = ["cut.jpg", "zero.jpg", "gone.jpg", "good.jpg", "../x.jpg", "cut.jpg"]
    records = [pair(positive={"image": name}) for name in ["good.jpg"] * 11 + names]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    message = refused(path)
    assert message.startswith("5 of 17 records")
    for line, reason in (
        (12, f"image {tmp_path}/cut.jpg is broken"),
        (13, f"image {tmp_path}/zero.jpg is empty"),
        (14, f"image {tmp_path}/gone.jpg does not exist"),
        (16, "positive: image path ../x.jpg leads out of image_root"),
    ):
        assert f"{path}:{line}: {reason}" in message
    places = places_of(open_path(path, on_bad_record="skip"))
    assert places == [f"{path}:{line}" for line in (*range(1, 12), 15)]


def test_images_inside_of_parquet_and_datasets(tmp_path):
    good = encoded("PNG")
    write(tmp_path / "named.png", "PNG")
    rows = [
        {"query": "a", "image": {"bytes": good, "path": None}},
        {"query": "b", "image": {"bytes": good[:100], "path": "x"}},
        {"query": "c", "image": {"bytes": None, "path": "named.png"}},
    ]
    write_parquet(tmp_path / "a.parquet", rows)
    kinds = {"query": datasets.Value("string"), "image": datasets.Image()}
    saved = datasets.Dataset.from_list(rows[:2], features=datasets.Features(kinds))
    saved.save_to_disk(tmp_path / "folder")
    for name, num_good in (("a.parquet", 2), ("folder", 1)):
        path = tmp_path / name
        assert f"{path}:2: image of 100 bytes is broken" in refused(path)
        store = open_path(path, on_bad_record="skip")
        assert len(store) == num_good
        assert store[0].positives[0].images[0].data == good


def test_prompts_and_length_of_a_source_and_of_a_record(tmp_path):
    rows = [pair(), pair(query_prompt="own: ")]
    first = write_jsonl(tmp_path / "a.jsonl", rows)
    second = write_jsonl(tmp_path / "b.jsonl", rows[:1])
    options = {"query_prompt": "find: ", "document_prompt": "", "max_length": 9}
    store = open_path([DataSource(path=str(first), **options), second])
    examples = list(store)
    queries = [example.query for example in examples]
    assert [query.prompt for query in queries] == ["find: ", "own: ", None]
    assert [query.max_length for query in queries] == [9, 9, None]
    documents = [example.positives[0] for example in examples]
    assert [document.prompt for document in documents] == ["", "", None]
    assert store.fingerprint != open_path([first, second]).fingerprint
