"""`vembed init` on data in other containers and of other kinds: the config it writes trains, and doubts are said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest
from PIL import Image

from tests.cli.conftest import Command
from tests.tiny import shared, tiny_bert
from vembed.config.loading import load_config

ROWS = [
    {"Question": f"where is number {n}?", "Answer": f"number {n} is behind {n + 1}"}
    for n in range(240)
]

SIDES = ("messages", "positive_messages")


def written(kind: str) -> str:
    """Write ROWS; return the path."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    csv = "Question,Answer\n" + "".join(",".join(row.values()) + "\n" for row in ROWS)
    if kind == "saved":
        datasets.DatasetDict(
            train=datasets.Dataset.from_list(ROWS),
            test=datasets.Dataset.from_list(ROWS[:3]),
        ).save_to_disk(kind)
    elif kind in ("jsonl.gz", "csv.gz"):
        Path(f"a.{kind}").write_bytes(
            gzip.compress((lines if kind == "jsonl.gz" else csv).encode())
        )
        return f"a.{kind}"
    else:
        Path("parts").mkdir()
        for number in range(2):
            half = ROWS[number * 120 : number * 120 + 120]
            Path("parts", f"{number}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in half)
            )
    return kind


@pytest.mark.parametrize(
    "kind", ["saved", "jsonl.gz", "csv.gz", "parts", "parts/*.jsonl"]
)
def test_columns_and_sizes_are_looked_at_in_every_container(
    vembed: Command, kind: str
) -> None:
    data = written(kind)
    done = vembed("init", "--data", data, "--model", str(shared(tiny_bert)))
    assert done.code == 0, done.err
    assert "note: GUESSED, please check: Question is the query" in done.err
    config = load_config("vembed.yaml")
    assert config.data.data_path == data and config.data.column_mapping == {
        "Question": "query",
        "Answer": "positive",
    }
    assert config.data.val_split == 0.1 and config.batch.batch_size == 8
    assert "# Data: 240 records" in Path("vembed.yaml").read_text()
    assert vembed("train", "vembed.yaml", "--dry-run").code == 0


def test_files_that_are_not_read_have_a_way_out(vembed: Command) -> None:
    for name, way_out in (
        ("a.feather", "write it as Parquet"),
        ("a.xlsx", "save the sheet as CSV"),
        ("a.txt", "give the file the ending of what is in it"),
        ("a.zip", "unpack it (unzip)"),
    ):
        Path(name).write_bytes(b"PK")
        for words in (
            ("init", "--data", name),
            ("train", "model_name=m", f"data_path={name}", "--dry-run"),
        ):
            done = vembed(*words)
            assert done.code == 2 and way_out in done.err, (words, done.err)


@pytest.mark.parametrize("kind", ["classes", "scores"])
def test_a_tenth_of_labelled_and_of_scored_data_is_held_out_too(
    vembed: Command, kind: str
) -> None:
    rows = (
        [
            {"text": f"{['cat', 'dog', 'cow'][n % 3]} number {n}", "label": n % 3}
            for n in range(240)
        ]
        if kind == "classes"
        else [
            {"sentence1": f"cat {n}", "sentence2": f"dog {n}", "score": n % 7}
            for n in range(240)
        ]
    )
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        vembed("init", "--data", "a.jsonl", "--model", str(shared(tiny_bert))).code == 0
    )
    assert load_config("vembed.yaml").data.val_split == 0.1
    done = vembed("train", "vembed.yaml", "max_steps=1", "report_to=none")
    assert done.code == 0, done.err
    assert ("nDCG@10" if kind == "classes" else "Spearman") in done.err + done.out


@pytest.mark.parametrize(
    ("content", "doubt"),
    [
        (
            "query,positive,label\na b,c d,1\ne f,g h,0\n",
            "label is not read, and every pair is taken for a match",
        ),
        (
            "Where is the cat?,In the house by the river\nWhere is the dog?,There\n",
            "if it is a record, put a line",
        ),
        (
            "sentence1,sentence2,label\na,b,0\nc,d,1\ne,f,2\n",
            "label (0, 1, 2) is taken for a score",
        ),
        (
            "query,positive\na,b\n,d\n",
            "1 of 2 records are invalid and left out, the first: a.csv:3: query is empty",
        ),
        (
            "query,positive,negative1\na,b,c\nd,e,f\n",
            "negative1 is not read: if it holds negatives",
        ),
    ],
)
def test_doubts_are_said_and_stand_in_the_config(
    vembed: Command, content: str, doubt: str
) -> None:
    Path("a.csv").write_text(content)
    done = vembed("init", "--data", "a.csv")
    assert done.code == 0 and doubt in done.err, done.err
    assert (
        f"# CHECK: {doubt}" in Path("vembed.yaml").read_text()
        or "# CHECK: the first line" in Path("vembed.yaml").read_text()
    )


def test_data_of_which_no_record_can_be_used_are_refused(vembed: Command) -> None:
    columns = {
        name: {str(n): f"{name} {n}" for n in range(3)}
        for name in ("query", "positive")
    }
    Path("a.json").write_text(
        json.dumps(columns)
    )  # as pandas writes it without orient="records"
    done = vembed("init", "--data", "a.json")
    assert done.code == 2 and "none of the first 1 records can be used" in done.err, (
        done.err
    )
    assert not Path("vembed.yaml").exists()


def test_good_data_raise_no_doubts(vembed: Command) -> None:
    Path("a.csv").write_text("query,positive,page\na,b,1\nc,d,2\n")
    done = vembed("init", "--data", "a.csv")
    assert (
        done.code == 0
        and "note: " not in done.err
        and "CHECK" not in Path("vembed.yaml").read_text()
    )


@pytest.mark.parametrize("kind", ["passages", "conversations", "for_excel", "quotes"])
def test_shapes_of_other_programs(vembed: Command, kind: str) -> None:
    passage = "word " * 60
    name, lines = {
        "passages": (
            "a.jsonl",
            {"query": "q", "positive_passages": [{"title": "t", "text": passage}]},
        ),
        "conversations": (
            "a.jsonl",
            {side: [{"role": "user", "content": passage}] for side in SIDES}
            | {"label": 0.5},
        ),
        "for_excel": ("a.csv", "sep=;\nquery;positive\n" + f"q;{passage}\n" * 60),
        "quotes": (
            "a.tsv",
            "query\tpositive\n" + f'q\t"{passage}\nr\t{passage}"\n' * 30,
        ),
    }[kind]
    Path(name).write_text(
        lines if isinstance(lines, str) else (json.dumps(lines) + "\n") * 60
    )
    done = vembed("init", "--data", name, "--model", str(shared(tiny_bert)))
    assert done.code == 0, done.err
    config = load_config("vembed.yaml")
    assert (config.model.max_length or 0) >= 60, "a text of 60 words is not cut"
    assert (
        config.objective.loss == ("cosent" if kind == "conversations" else "infonce")
        and config.data.column_mapping is None
    )
    assert "# Data: 60 records" in Path("vembed.yaml").read_text()
    done = vembed("train", "vembed.yaml", "val_split=null", "--dry-run")
    assert done.code == 0, done.err


def test_bad_records_and_images_are_counted_as_training_counts_them(
    vembed: Command,
) -> None:
    """35 bad records beyond the first ones, and 5 broken images: the config leaves them out, and trains."""
    rows = [{"query": f"where is {n}?", "positive": f"{n} is here"} for n in range(400)]
    for number in range(200, 235):
        rows[number]["query"] = ""
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = vembed("init", "--data", "a.jsonl", "--model", str(shared(tiny_bert)))
    assert done.code == 0 and "35 of 400 records" in done.err, done.err
    assert load_config("vembed.yaml").data.on_bad_record == "skip"
    done = vembed("train", "vembed.yaml", "max_steps=1", "report_to=none")
    assert done.code == 0, done.err
    for number in range(20):
        Image.new("RGB", (8, 8), "red").save(f"{number}.png")
    for number in range(5):
        Path(f"{number}.png").write_bytes(b"no image")
    lines = [f"picture {number},{number}.png" for number in range(20)]
    Path("b.csv").write_text("\n".join(["text,image", *lines]))
    done = vembed("init", "--data", "b.csv", "--family", "clip", "--output", "b.yaml")
    assert done.code == 0 and "5 of 20 records" in done.err, done.err


@pytest.mark.parametrize("names, used", [(("validation",), True), (("test",), False)])
def test_the_validation_split_of_a_saved_dataset_is_used(
    vembed: Command, names: tuple[str, ...], used: bool
) -> None:
    splits = {name: datasets.Dataset.from_list(ROWS[:30]) for name in names}
    datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS[30:]), **splits
    ).save_to_disk("saved")
    done = vembed("init", "--data", "saved", "--model", str(shared(tiny_bert)))
    assert done.code == 0, done.err
    config = load_config("vembed.yaml")
    assert config.data.val_data_path == ("saved" if used else None)
    assert (config.data.val_split is None) == used
    if used:
        done = vembed("train", "vembed.yaml", "--dry-run")
        assert done.code == 0 and "30 queries over 30 documents" in done.out + done.err


def test_early_stopping_stays_on(vembed: Command) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    Path("a.jsonl").write_text(lines)
    model = str(shared(tiny_bert))
    assert vembed("init", "--data", "a.jsonl", "--model", model).code == 0
    assert load_config("vembed.yaml").optimizer.epochs == "auto"
    assert "passes over" in Path("vembed.yaml").read_text()


def test_the_demo_model_on_german_texts_is_warned_of(vembed: Command) -> None:
    rows = [
        {
            "query": f"Wie ist das mit der {n} und dem Haus?",
            "positive": "Es ist nicht da",
        }
        for n in range(20)
    ]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = vembed("init", "--data", "a.jsonl", "--model", "demo")
    assert done.code == 0 and "multilingual" in done.err and "English" in done.err
