"""`vembed audit`: each finding on data that have it, the page, the JSON, and the data that are cleaned."""

import shlex
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.data.files import write_beir
from tests.data.pictures import write
from tests.mining.data import documents, model, pair, pairs_of, read_jsonl, write_jsonl
from tests.tiny import read_json
from vembed import UserError, audit
from vembed.cli.commands.make_data import DataFlags
from vembed.cli.commands.make_data import audit as run_audit

LONG = "the quick way to sort a list of numbers in place without a copy of the list"


@pytest.fixture
def options(tmp_path):
    actual = documents()
    rows = pairs_of(actual[:40])
    more = f"{LONG} and more of it"
    rows += [
        pair(rows[3]["query"].upper(), actual[3]),
        pair(LONG, more, negatives=[actual[60]]),
        pair(f"Now {LONG}", more),
        pair(actual[50], actual[60]),
        pair(actual[50], actual[61], negatives=[actual[60]]),
    ]
    validation = [pair(rows[5]["query"], "anything"), pair(f"{LONG}!", "anything")]
    return {
        "data_path": str(write_jsonl(tmp_path / "train.jsonl", rows)),
        "val_data_path": str(write_jsonl(tmp_path / "val.jsonl", validation)),
        "output_path": str(tmp_path / "audit.html"),
    }


def run(options, **changes):
    lines = []
    result = audit({**options, **changes}, log=lines.append)
    return result, {finding.kind: finding for finding in result.findings}


def test_findings_without_a_model(options):
    result, actual = run(options)
    assert {kind: value.count for kind, value in actual.items()} == {
        "duplicates": 1,
        "near_duplicates": 1,
        "leakage": 4 - 1,
        "contradictions": 1,
    }
    leakage = actual["leakage"]
    assert (leakage.severity, leakage.share) == ("error", 3 / 45)
    assert "1 rows have the same query and 2 a similar one" in leakage.text
    assert "Of the 2 validation queries, 1 are in the training data" in leakage.text
    assert actual["duplicates"].examples[0]["the same as row"] == "4"
    assert all(finding.fix.startswith("vembed ") for finding in result.findings)
    report = read_json(result.output_path.with_suffix(".json"))
    assert report["num_rows"] == 45
    page = result.output_path.read_text()
    for tag in ("<script", "<link", "<img", "<iframe"):
        assert tag not in page, "needs no network"
    assert "Rows that occur more than once" in page
    assert "Sources and the model" not in page


def test_cleaned_data_have_none_of_it(options, tmp_path):
    cleaned = tmp_path / "cleaned.jsonl"
    result, _ = run(
        options,
        cleaned_path=str(cleaned),
        drop=["duplicates", "near_duplicates", "leakage", "contradictions"],
    )
    assert (
        result.num_cleaned == len(read_jsonl(cleaned)) == 45 - len({40, 41, 42, 5, 44})
    )
    _, again = run(options, data_path=str(cleaned))
    assert not again


def test_the_command_that_is_advised_cleans_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"frage": f"q {n % 9}", "antwort": f"a {n % 9}"} for n in range(12)]
    # An advised command does not write over the data.
    write_jsonl(Path("cleaned.jsonl"), [*rows, {"frage": ""}])
    mapping = {"frage": "query", "antwort": "positive"}
    options = {"data_path": "cleaned.jsonl", "column_mapping": mapping}
    _, kinds = run({**options, "on_bad_record": "skip"})
    _, *words = shlex.split(kinds["duplicates"].fix)
    invoke(*words)
    assert len(read_jsonl(Path("new-cleaned.jsonl"))) == 9


def test_findings_with_a_model(options, tmp_path):
    actual = documents()
    rows = read_jsonl(Path(options["data_path"]))[:40]
    rows[7]["positive"] = "zzz"
    write_jsonl(tmp_path / "train.jsonl", rows)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", actual)
    cleaned = tmp_path / "cleaned.jsonl"
    result, kinds = run(
        options,
        model_name=model(),
        corpus_path=str(corpus),
        val_data_path=None,
        cleaned_path=str(cleaned),
        drop=["weak_queries"],
    )
    assert "8" in {example["row"] for example in kinds["low_positives"].examples}
    assert "8" in {example["row"] for example in kinds["weak_queries"].examples}
    assert kinds["false_negatives"].examples
    assert "threshold=auto" in kinds["false_negatives"].fix
    (source,) = result.report["sources"].values()
    assert source["rows"] == 40
    assert source["found_first"] < source["found_in_10"] <= 1.0
    assert "positive found first" in result.output_path.read_text()
    assert rows[7] not in read_jsonl(cleaned)


def test_bad_records_and_images(tmp_path):
    write(tmp_path / "red.png", "PNG")
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows = [pair("", "x")]
    for name in ("red", "broken"):
        rows.append(pair(f"a {name}", {"image": f"{name}.png"}))
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    page = tmp_path / "audit.html"
    _, actual = run({"data_path": str(path), "output_path": str(page)})
    assert actual["bad_records"].count == 2
    places = {example["place"] for example in actual["bad_records"].examples}
    assert places == {f"{path}:1", f"{path}:3"}


def test_equal_questions_about_different_images_are_not_near(tmp_path):
    rows = []
    for number in range(6):
        write(tmp_path / f"{number}.png", "PNG", seed=number)
        query = {"text": LONG, "image": f"{number}.png"}
        rows.append({"query": query, "positive": f"{LONG} {number}"})
    validation = write_jsonl(tmp_path / "val.jsonl", rows[4:])
    options = {
        "data_path": str(write_jsonl(tmp_path / "rows.jsonl", rows[:4])),
        "output_path": str(tmp_path / "audit.html"),
    }
    assert not run(options, val_data_path=str(validation))[1]


def test_validation_data_are_read_as_training_reads_them(tmp_path):
    """Of a BEIR-style folder the test queries, and of a file vembed's own names beside those of the mapping."""
    texts = documents()[:3]
    queries = {f"q{number}": text for number, text in enumerate(texts)}
    folder = tmp_path / "beir"
    write_beir(folder, {"d": "a document"}, queries, {"q2": ["d"]})
    (folder / "qrels/train.tsv").write_text("q0\td\t1\nq1\td\t1\n")
    rows = [{"frage": text, "positive": f"p {text}"} for text in texts]
    options = {
        "data_path": str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        "column_mapping": {"frage": "query"},
        "output_path": str(tmp_path / "audit.html"),
    }
    file = write_jsonl(tmp_path / "val.jsonl", [pair(texts[2])])
    for validation in (folder, folder / "qrels/test.tsv", file):
        _, actual = run(options, val_data_path=str(validation))
        assert [leak["row"] for leak in actual["leakage"].examples] == ["3"]


def test_all_rows_that_are_near_to_one_validation_query_leak(tmp_path):
    """1,500 rows: a bucket of so many near texts was once compared with its first 50 alone."""
    rows = [pair(f"{LONG} as number {number}", f"p{number}") for number in range(1500)]
    rows.append(pair(documents()[0], "another"))
    data = write_jsonl(tmp_path / "train.jsonl", rows)
    val = write_jsonl(tmp_path / "val.jsonl", [pair(f"{LONG}!", "x")])
    cleaned = tmp_path / "cleaned.jsonl"
    result, actual = run(
        {"data_path": str(data), "val_data_path": str(val)},
        output_path=str(tmp_path / "audit.html"),
        cleaned_path=str(cleaned),
        drop=["leakage"],
    )
    assert actual["leakage"].count == 1500 and result.num_cleaned == 1
    assert [row["positive"] for row in read_jsonl(cleaned)] == ["another"]


def test_the_command(options, tmp_path, capsys):
    words = [f"{name}={value}" for name, value in options.items()]
    run_audit(words, DataFlags(is_dry_run=True))
    assert "45 rows" in capsys.readouterr().out
    run_audit(words)
    assert (
        "finding (error): Training rows with a query of the validation data: 3 ("
        in capsys.readouterr().err
    )
    with pytest.raises(UserError, match=r"must end in .html"):
        run_audit([*words, "output_path=audit.txt"])
