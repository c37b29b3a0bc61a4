"""Files of every format to examples: the good ones in order, several sources, images, names of the Hub."""

import csv
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import (
    RECORDS,
    config,
    open_examples,
    open_path,
    pair,
    pairs_of,
    queries_of,
    refused,
    write_format,
    write_jsonl,
    write_lines,
)
from tests.data.pictures import encoded, write
from vembed.config.schema import DataSource
from vembed.data.examples import ImageRef, Item
from vembed.errors import UserError


def test_lines_are_those_of_an_editor(tmp_path):
    path = write_lines(
        tmp_path / "a.csv", "query,positive", 'q,"two', 'lines"', "r,s", "", "t,u"
    )
    store = open_path(path)
    assert [store[number].where.rpartition(":")[2] for number in range(3)] == [
        "2",
        "4",
        "6",
    ]


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
    store = open_path(path)
    assert pairs_of(store) == [("a", "b"), ("c", "d")]


def test_a_reason_that_all_share_is_said_once(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"premise": "q", "hypothesis": "p"}] * 12)
    first, again, more = refused(path).splitlines()[1:]
    assert first.strip().startswith(
        f"{path}:1: no query and no positive (it has premise, hypothesis)"
    )
    assert (
        again.strip()
        == ", ".join(f"{path}:{line}" for line in range(2, 11)) + ": the same"
    )
    assert more.strip() == "and 2 more"


def test_validation_data_need_not_have_the_columns_of_the_mapping(
    tmp_path,
):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    settings = config(column_mapping={"subject": "query"})
    assert len(open_examples(settings, str(path), role="validation")) == len(RECORDS)
    with pytest.raises(UserError, match="column_mapping names subject"):
        open_examples(settings, str(path))
    empty = write_jsonl(tmp_path / "b.jsonl", [{"query": 1}])
    with pytest.raises(UserError, match="and there is no other"):
        open_examples(config(), str(empty), role="validation")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_fields_may_be_separated_otherwise_than_the_ending_says(
    tmp_path, kind, delimiter
):
    path = tmp_path / f"a.{kind}"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerows(
            [
                ["query", "positive"],
                ['a; "b", c|d', "two\nlines" if kind == "csv" else "x"],
                ["e", "f"],
            ]
        )
    store = open_path(path)
    assert queries_of(store) == ['a; "b", c|d', "e"]


def test_texts_that_look_like_paths_of_images_are_warned_of(tmp_path):
    records = [
        {"query": f"shoe {number}", "positive": f"pics/a b/{number}.JPG"}
        for number in range(30)
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    (hint,) = open_path(path).warnings()
    assert (
        "its positives look like paths of images ('pics/a b/0.JPG')" in hint
        and "set retrieval_mode: i2i, t2i or i2t" in hint
    )
    path = write_jsonl(
        tmp_path / "b.jsonl",
        [*records[:5], pair(positive="a text.png and more")],
    )
    assert open_path(path).warnings() == []
    (hint,) = open_path(path, max_train_examples=5).warnings()
    assert "set retrieval_mode" in hint, "as far as the run reads them"


def test_skip_drops_and_counts(tmp_path):
    records = [pair(query=str(number)) for number in range(30)]
    for bad in (3, 4, 20):
        records[bad] = pair(query=None)
    store = open_path(write_jsonl(tmp_path / "a.jsonl", records), on_bad_record="skip")
    assert queries_of(store) == [
        str(number) for number in range(30) if number not in (3, 4, 20)
    ]
    assert store.num_skipped == 3
    assert "3 bad records left out" in store.summary()[0]
    assert any("a.jsonl:4: query is empty" in line for line in store.summary())
    (warning,) = store.warnings()
    assert "a.jsonl: 3 of 30 records cannot be used and are left out" in warning, (
        "seen without opening the log"
    )


def test_column_mapping_for_all_and_for_one(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "positive": "b"}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"x": "c", "positive": "d"}])
    third = write_jsonl(tmp_path / "c.jsonl", [{"query": "e", "positive": "f"}])
    inputs = [
        str(first),
        DataSource(path=str(second), column_mapping={"x": "query"}),
        str(third),
    ]
    store = open_examples(config(column_mapping={"q": "query"}), inputs)
    assert queries_of(store) == ["a", "c", "e"]
    write_format(tmp_path, "csv", RECORDS)
    assert "column_mapping names y" in refused(
        tmp_path / "data.csv", column_mapping={"y": "negatives"}
    )


def test_several_sources(tmp_path):
    first = write_jsonl(
        tmp_path / "a.jsonl", [pair(query=f"a{number}") for number in range(6)]
    )
    second = write_format(tmp_path, "csv", RECORDS)
    inputs = [str(first), DataSource(path=str(second), weight=0.5, name="table")]
    store = open_examples(config(), inputs)
    assert len(store) == 46
    assert store.sizes == (6, 40)
    assert store.weights == (1.0, 0.5)
    assert store.names == (str(first), "table")
    assert [store.source_of(i) for i in (0, 5, 6, 45)] == [0, 0, 1, 1]
    assert store[6].query.text == RECORDS[0]["query"]


def test_bad_records_of_all_sources_are_named_together(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [pair(), {}]) for name in "ab"]
    with pytest.raises(UserError, match=r"2 of 4 records") as caught:
        open_examples(config(), [str(path) for path in paths])
    assert all(f"{path}:2" in str(caught.value) for path in paths)


def test_max_train_examples_and_negatives_are_for_training(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [pair(query=f"{number}", neg=["a", "b"]) for number in range(50)],
    )
    settings = config(max_train_examples=20, max_negatives=1)
    store = open_examples(settings, str(path))
    assert len(store) == 20
    assert queries_of(store) == [str(number) for number in range(20)]
    assert len(store[0].negatives) == 1
    assert "20 of 50 examples" in store.summary()[0]
    validation = open_examples(settings, str(path), role="validation")
    assert (len(validation), len(validation[0].negatives)) == (50, 2)
    small = write_jsonl(
        tmp_path / "b.jsonl", [pair(query=f"{number}") for number in range(10)]
    )
    both = open_examples(config(max_train_examples=24), [str(path), str(small)])
    assert both.sizes == (20, 4)


def test_what_the_loss_needs_is_checked_in_training_alone(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"sentence1": "a", "sentence2": "b", "score": 0.5}] * 3
    )
    assert "loss: infonce would take each pair for a match" in refused(path)
    for store in (
        open_examples(config(), str(path), role="validation"),
        open_path(path, loss="cosent"),
    ):
        assert store.summary()[0].endswith(", 3 scored")


def test_keys_know_equal_content(tmp_path):
    records = [
        {"query": "a", "positive": "b", "negatives": ["c", "a"]},
        {"query": "d", "positive": "b"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    both = open_examples(
        config(no_duplicates=True, max_train_examples=3), [str(path), str(path)]
    )
    keys = both.all_keys()
    assert both.sizes == (1, 1) or sum(both.sizes) == 3
    assert [
        keys.of_all(np.array([number]))[0].tolist() for number in range(len(both))
    ] == [
        list(dict.fromkeys(item.key() for item in both[number].items))
        for number in range(len(both))
    ]


def test_fingerprint_is_of_the_content(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "elsewhere").mkdir()
    moved = write_jsonl(tmp_path / "elsewhere" / "b.jsonl", RECORDS)
    shorter = write_jsonl(tmp_path / "c.jsonl", RECORDS[:-1])
    assert open_path(path).fingerprint == open_path(moved).fingerprint
    others = {
        open_path(shorter).fingerprint,
        open_path(path, max_negatives=0).fingerprint,
        open_path(path, max_train_examples=7).fingerprint,
        open_examples(config(), [DataSource(path=str(path), weight=2.0)]).fingerprint,
        open_path(path).fingerprint,
    }
    assert len(others) == 5


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_that_changes_while_it_is_used(tmp_path, kind):
    path = write_format(tmp_path, kind, RECORDS)
    store = open_path(path)
    path.write_bytes(b"now something shorter")
    with pytest.raises(
        UserError, match=r"has changed since the run began .*: start again"
    ):
        store[30]


# ---- paths and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "guess"),
    [
        ("trains.jsonl", "train.jsonl"),
        ("validation.jsonl", "validation.jsonl.gz"),
        ("nope.jsonl", None),
    ],
)
def test_a_guess_at_a_path_needs_more_than_the_same_ending(tmp_path, missing, guess):
    for name in ("train.jsonl", "train.csv", "validation.jsonl.gz", "rows.jsonl"):
        write_jsonl(tmp_path / name, RECORDS)
    message = refused(tmp_path / missing)
    if guess is None:
        assert "did you mean" not in message
    else:
        assert message.endswith(f"did you mean {tmp_path / guess}?")


def test_paths_that_lead_nowhere(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", RECORDS)
    assert f"did you mean {tmp_path / 'train.jsonl'}?" in refused(
        tmp_path / "trian.jsonl"
    )
    (tmp_path / "circle.jsonl").symlink_to(tmp_path / "circle.jsonl")
    assert "circle.jsonl cannot be read" in refused(tmp_path / "circle.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is not a regular file" in refused(tmp_path / "pipe.jsonl")
    (tmp_path / "memory.jsonl").symlink_to("/proc/self/mem")
    assert "memory.jsonl is empty" in refused(tmp_path / "memory.jsonl")
    (tmp_path / "memory.jsonl").unlink()
    (tmp_path / "more.csv").write_text("query,positive\na,b\n")
    said = "not saved by `datasets`; it holds circle.jsonl, more.csv, pipe.jsonl, train.jsonl"
    assert said in refused(tmp_path), "files of several kinds are not one source"
    assert "cannot be read" in refused("a\0b.jsonl")
    assert "cannot be read" in refused(f"{tmp_path}/{'n' * 300}.jsonl")
    assert "cannot be read" in refused(tmp_path / "train.jsonl" / "x.jsonl")
    with pytest.raises(UserError, match="data_path is an empty list"):
        open_examples(config(), [])


def test_a_name_of_the_hub_without_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "as a dataset of the Hub it cannot be loaded" in refused(
        "nobody/no-such-dataset:default:train"
    )


def test_a_name_of_the_hub(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        rows = datasets.Dataset.from_list(RECORDS)
        return (
            rows
            if split
            else datasets.DatasetDict({"train": rows, "test": rows.select(range(5))})
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(open_path("owner/name")) == 40
    assert len(open_examples(config(), "owner/name:en", role="validation")) == 5
    assert open_path("owner/name:en:dev")[7].where == "owner/name:en:dev:8"
    assert open_path("owner/name::dev")[7].query == Item(RECORDS[7]["query"])
    assert asked == [
        ("owner/name", None, None),
        ("owner/name", "en", None),
        ("owner/name", "en", "dev"),
        ("owner/name", None, "dev"),
    ]


def test_a_saved_dict_of_splits(tmp_path):
    import datasets

    splits = {"train": RECORDS[:30], "dev": RECORDS[30:]}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    )
    saved.save_to_disk(str(tmp_path / "both"))
    assert len(open_path(tmp_path / "both")) == 30
    assert len(open_examples(config(), str(tmp_path / "both"), role="validation")) == 10
    datasets.DatasetDict({"a": saved["train"], "b": saved["dev"]}).save_to_disk(
        str(tmp_path / "odd")
    )
    assert "has the splits a, b, and none is called train" in refused(tmp_path / "odd")


# ---- images --------------------------------------------------------------------------------------------------------


def test_images_start_from_the_folder_of_the_file(tmp_path):
    picture = write(tmp_path / "pictures" / "cat.jpg")
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"query": "a cat", "positive": {"image": "pictures/cat.jpg"}}],
    )
    store = open_path(path)
    assert store[0].positives == (Item(images=(ImageRef(path=str(picture)),)),)
    assert "1 documents with images" in store.summary()[0]
    path = write_jsonl(
        tmp_path / "b.jsonl", [{"query": "a cat", "positive": "cat.jpg"}]
    )
    store = open_path(path, image_root=str(tmp_path / "pictures"), retrieval_mode="t2i")
    assert store[0].positives == (Item(images=(ImageRef(path=str(picture)),)),)


def test_bad_images_are_named_with_their_lines(tmp_path):
    write(tmp_path / "good.jpg")
    whole = encoded("JPEG", size=(200, 100))
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "zero.jpg").write_bytes(b"")
    names = ["good.jpg"] * 11 + [
        "cut.jpg",
        "zero.jpg",
        "gone.jpg",
        "good.jpg",
        "../x.jpg",
        "cut.jpg",
    ]
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [pair(positive={"image": name}) for name in names],
    )
    message = refused(path)
    assert message.startswith("5 of 17 records")
    assert f"{path}:12: image {tmp_path / 'cut.jpg'} is broken" in message
    assert f"{path}:13: image {tmp_path / 'zero.jpg'} is empty" in message
    assert f"{path}:14: image {tmp_path / 'gone.jpg'} does not exist" in message
    assert (
        f"{path}:16: positive: image path ../x.jpg leads out of image_root" in message
    )
    store = open_path(path, on_bad_record="skip")
    assert [store[number].where for number in range(len(store))] == [
        f"{path}:{line}" for line in (*range(1, 12), 15)
    ]


def test_images_inside_of_parquet_and_datasets(tmp_path):
    import datasets

    good = encoded("PNG")
    cut = encoded("PNG")[:100]
    write(tmp_path / "named.png", "PNG")
    rows = [
        {"query": "a", "image": {"bytes": good, "path": None}},
        {"query": "b", "image": {"bytes": cut, "path": "x"}},
    ]
    rows.append({"query": "c", "image": {"bytes": None, "path": "named.png"}})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    features = datasets.Features(
        {"query": datasets.Value("string"), "image": datasets.Image()}
    )
    datasets.Dataset.from_list(rows[:2], features=features).save_to_disk(
        str(tmp_path / "folder")
    )
    for name, num_good in (("a.parquet", 2), ("folder", 1)):
        assert f"{tmp_path / name}:2: image of 100 bytes is broken" in refused(
            tmp_path / name
        )
        store = open_path(tmp_path / name, on_bad_record="skip")
        assert len(store) == num_good
        assert store[0].positives[0].images[0].data == good


def test_prompts_and_length_of_a_source_and_of_a_record(tmp_path):
    rows = [
        {"query": "a", "positive": "b"},
        {"query": "c", "positive": "d", "query_prompt": "own: "},
    ]
    first = write_jsonl(tmp_path / "a.jsonl", rows)
    second = write_jsonl(tmp_path / "b.jsonl", rows[:1])
    source = DataSource(
        path=str(first), query_prompt="find: ", document_prompt="", max_length=9
    )
    store = open_examples(config(), [source, str(second)])
    assert [store[number].query.prompt for number in range(3)] == [
        "find: ",
        "own: ",
        None,
    ]
    assert [store[number].positives[0].prompt for number in range(3)] == ["", "", None]
    assert [store[number].query.max_length for number in range(3)] == [9, 9, None]
    plain = open_examples(config(), [str(first), str(second)])
    assert store.fingerprint != plain.fingerprint
