"""`vembed audit`: each finding on data that have it, the page, the JSON, and the data that are cleaned."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from tests.mining.data import documents, model, read_lines, write_lines
from vembed import UserError, audit
from vembed.cli.commands.make_data import audit as run_audit

LONG = "the quick way to sort a list of numbers in place without a copy of the list"


@pytest.fixture
def options(tmp_path):
    found = documents()
    rows = [{"query": text.rpartition(" ")[0], "positive": text} for text in found[:40]]
    rows.append({"query": rows[3]["query"].upper(), "positive": rows[3]["positive"]})
    rows.append(
        {"query": LONG, "positive": f"{LONG} and more of it", "negatives": [found[60]]}
    )
    rows.append({"query": f"Now {LONG}", "positive": f"{LONG} and more of it"})
    rows.append({"query": found[50], "positive": found[60]})
    rows.append({"query": found[50], "positive": found[61], "negatives": [found[60]]})
    validation = [
        {"query": rows[5]["query"], "positive": "anything"},
        {"query": f"{LONG}!", "positive": "anything"},
    ]
    return {
        "data_path": str(write_lines(tmp_path / "train.jsonl", rows)),
        "val_data_path": str(write_lines(tmp_path / "val.jsonl", validation)),
        "output_path": str(tmp_path / "audit.html"),
    }


def run(options, **changes):
    lines = []
    result = audit({**options, **changes}, log=lines.append)
    return result, {one.kind: one for one in result.findings}


class Text(HTMLParser):
    """The visible text of a page, and its tags that would need a network."""

    def __init__(self, page):
        super().__init__()
        self.words = []
        self.foreign = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "link", "img", "iframe"):
            self.foreign.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def test_pairs_with_a_column_that_says_which_match(options, tmp_path):
    rows = [
        {"query": f"q {one}", "positive": f"p {one}", "is_duplicate": number % 2}
        for number, one in enumerate(documents()[:6])
    ]
    pairs = write_lines(tmp_path / "pairs.jsonl", rows)
    _, found = run(options, data_path=str(pairs), val_data_path=None)
    one = found["unread_judgement"]
    assert (one.severity, one.count, one.share) == ("warning", 6, 1.0)
    assert "is_duplicate is not read, and every pair is taken for a match" in one.text
    assert [example["is_duplicate"] for example in one.examples] == ["0", "1"] * 3
    _, found = run(
        options,
        data_path=str(pairs),
        val_data_path=None,
        column_mapping={"is_duplicate": "score"},
    )
    assert "unread_judgement" not in found, "it is read"


def test_findings_without_a_model(options):
    result, found = run(options)
    assert {kind: one.count for kind, one in found.items()} == {
        "duplicates": 1,
        "near_duplicates": 1,
        "leakage": 4 - 1,
        "contradictions": 1,
    }
    assert found["leakage"].severity == "error"
    assert found["duplicates"].examples[0]["the same as row"] == "4"
    assert all(one.fix.startswith("vembed ") for one in result.findings)
    report = json.loads(result.output_path.with_suffix(".json").read_text())
    assert report["num_rows"] == 45
    assert report["data"][3]["figures"]["lengths"]["queries"]["measured"] == 45
    assert report["scripts"]["queries"] == {"LATIN": 1.0}
    page = Text(result.output_path.read_text())
    assert not page.foreign
    text = " ".join(page.words)
    assert "Rows that occur more than once" in text
    assert text.index(
        "Samples, without prompts and special tokens, since no model is named"
    ) < text.index("Findings")


def test_cleaned_data_have_none_of_it(options, tmp_path):
    cleaned = tmp_path / "cleaned.jsonl"
    result, _ = run(
        options,
        cleaned_path=str(cleaned),
        drop=["duplicates", "near_duplicates", "leakage", "contradictions"],
    )
    assert (
        result.num_cleaned == len(read_lines(cleaned)) == 45 - len({40, 41, 42, 5, 44})
    )
    _, again = run(options, data_path=str(cleaned))
    assert not again


def test_findings_with_a_model(options, tmp_path):
    found = documents()
    rows = read_lines(Path(options["data_path"]))[:40]
    rows[7]["positive"] = "zzz"
    write_lines(tmp_path / "train.jsonl", rows)
    corpus = write_lines(tmp_path / "corpus.jsonl", found)
    result, kinds = run(
        options, model_name=model(), corpus_path=str(corpus), val_data_path=None
    )
    assert "8" in {example["row"] for example in kinds["low_positives"].examples}
    assert "8" in {example["row"] for example in kinds["weak_queries"].examples}
    assert kinds["false_negatives"].examples
    assert "threshold=auto" in kinds["false_negatives"].fix
    (source,) = result.report["sources"].values()
    assert source["rows"] == 40
    assert source["found_first"] < source["found_in_10"] <= 1.0
    cleaned = tmp_path / "cleaned.jsonl"
    run(
        options,
        model_name=model(),
        corpus_path=str(corpus),
        cleaned_path=str(cleaned),
        drop=["weak_queries"],
    )
    assert rows[7] not in read_lines(cleaned)


def test_bad_records_and_images(tmp_path):
    for name, colour in (("a", "red"), ("b", "red"), ("c", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows = [
        {"query": f"picture {name}", "positive": {"image": f"{name}.png"}}
        for name in ("a", "b", "c", "broken")
    ]
    path = write_lines(tmp_path / "rows.jsonl", [*rows, {"query": "", "positive": "x"}])
    _, found = run(
        {"data_path": str(path), "output_path": str(tmp_path / "audit.html")}
    )
    assert found["bad_records"].count == 2
    assert {example["place"] for example in found["bad_records"].examples} == {
        f"{path}:4",
        f"{path}:5",
    }
    assert found["repeated_images"].count == 1


def test_all_rows_that_are_near_to_one_validation_query_leak(tmp_path):
    """1,500 rows: a bucket of so many near texts was once compared with its first 50 alone."""
    rows = [
        {"query": f"{LONG} as number {n}", "positive": f"p{n}"} for n in range(1500)
    ]
    rows.append({"query": documents()[0], "positive": "another"})
    data = write_lines(tmp_path / "train.jsonl", rows)
    val = write_lines(tmp_path / "val.jsonl", [{"query": f"{LONG}!", "positive": "x"}])
    cleaned = tmp_path / "cleaned.jsonl"
    result, found = run(
        {"data_path": str(data), "val_data_path": str(val)},
        output_path=str(tmp_path / "audit.html"),
        cleaned_path=str(cleaned),
        drop=["leakage"],
    )
    assert found["leakage"].count == 1500 and result.num_cleaned == 1
    assert [row["positive"] for row in read_lines(cleaned)] == ["another"]


def test_the_command(options, tmp_path, capsys):
    words = [f"{name}={value}" for name, value in options.items()]
    run_audit([*words, "--dry-run"])
    assert "45 rows" in capsys.readouterr().out
    run_audit(words)
    assert (
        "error: Queries of the validation data in the training data: 3"
        in capsys.readouterr().err
    )
    with pytest.raises(UserError, match=r"must end in .html"):
        run_audit([*words, "output_path=audit.txt"])
