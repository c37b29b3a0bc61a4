"""Files that are broken: the bad records named with their lines, the good ones kept."""

import re

import pytest

from tests.data.files import (
    open_path,
    pairs_of,
    places_of,
    queries_of,
    refused,
    write_lines,
)
from vembed.data.formats import base, delimited

GOOD = '{"query": "a", "positive": "b"}'
BAD_LINES = [
    (
        '{"query": "a" "positive": "b"}',
        "not JSON .Expecting ',' delimiter: column 15",
    ),
    (GOOD + " trailing", "more text after its end at column 32"),
    ('{"query": "a", "positive": NaN}', "NaN is no number in JSON"),
    ('{"query": "a", "positive": "b", "score": 1e999}', "score is inf"),
    ("[" * 100_000, "not JSON .maximum recursion depth"),
    ('{"query": "a", "positive": "b", "id": ' + "9" * 5000 + "}", "not JSON"),
    (b'{"query": "\xff\xfe", "positive": "b"}', "not UTF-8 .byte 12 of the line"),
    (b'{"query": "a\0", "positive": "b"}', "not JSON"),
]


@pytest.mark.parametrize("number", range(len(BAD_LINES)))
def test_bad_lines_of_json(tmp_path, number):
    line, message = BAD_LINES[number]
    path = write_lines(tmp_path / "a.jsonl", GOOD, line, GOOD)
    assert re.search(rf"a\.jsonl:2: .*{message}", refused(path))
    store = open_path(path, on_bad_record="skip")
    assert store.counts["bad"] == 1
    assert places_of(store) == [f"{path}:1", f"{path}:3"]


def test_a_line_that_does_not_end(tmp_path, monkeypatch):
    for module in (base, delimited):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 1000)
    long = GOOD.replace("a", "x" * 5000)
    path = write_lines(tmp_path / "a.jsonl", GOOD, long, GOOD, "y" * 1000, "z" * 1001)
    store = open_path(path, on_bad_record="skip")
    assert store.counts["bad"] == 3
    assert places_of(store) == [f"{path}:1", f"{path}:3"]
    assert "a line of more than 1,000 bytes" in store.summary()[1]
    path = write_lines(
        tmp_path / "a.csv",
        "query,positive",
        "a,b",
        f"{'x' * 3000},b",
        "c,d",
        f'"{"x" * 900}',
        "y" * 900,
        "e,f",
        "g,h",
    )
    store = open_path(path, on_bad_record="skip")
    assert queries_of(store) == ["a", "c", "e", "g"]
    assert "not closed within 1,000 bytes" in "".join(store.summary())


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "csv",
            "question,answers\na,b\n",
            "no positive .it has question, answers.*column_mapping",
        ),
        ("csv", b"query,positive\n\xfc,b\n", r"a\.csv:2: not UTF-8 .*save the file"),
        ("csv", b"query,positive\ra,b\rc,d\r", "a.csv:1: the header .*new-line"),
        ("csv", "query,positive,query\na,b,c\n", "more than one column named query"),
        ("csv", b"query,\xff\na,b\n", "header cannot be read: not UTF-8"),
        ("jsonl", "", "is empty"),
        ("csv", b"\xef\xbb\xbf", "there is no header"),
        ("json", "[]", "holds no records"),
        ("json", f"[{GOOD} {GOOD}", "not JSON .Expecting ',' .*: line 1 column 34"),
        ("json", f"[{GOOD},\n{{}}]]", "not JSON .*line 2 column 4"),
        ("json", f"[{GOOD}]\n\n[]", "not JSON .Extra data: line 3 column 1"),
        ("json", "[" * 100_000, "not JSON .maximum recursion depth"),
        ("parquet", b"PAR1 is not enough", "cannot be read as Parquet"),
        ("txt", "query", r"has the ending \.txt, and vembed reads JSON Lines"),
        ("jsonl.gz", "x", "cannot be unpacked as gzip"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, kind, text, message):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for mode in ("stop", "skip"):
        said = refused(path, on_bad_record=mode)
        assert str(path) in said
        assert re.search(message, said)


def test_bad_elements_of_a_json_array_are_records(tmp_path):
    path = write_lines(
        tmp_path / "a.json",
        f"[{GOOD},",
        "5, null,",
        f"{GOOD}]",
    )
    store = open_path(path, on_bad_record="skip")
    assert store.counts["bad"] == 2
    assert places_of(store) == [f"{path}:1", f"{path}:4"], "the fourth record"


def test_quotes_in_csv(tmp_path):
    path = write_lines(
        tmp_path / "a.csv",
        "query,positive",
        '"a ""quoted"" word",5" disk',
        "b,c",
        'd,"never closed',
        "e,f",
        'g,"h" i',
        "j,k,l",
        "m",
        '"n\nn",o',
    )
    store = open_path(path, on_bad_record="skip")
    assert pairs_of(store) == [
        ('a "quoted" word', '5" disk'),
        ("b", "c"),
        ("e", "f"),
        ("n\nn", "o"),
    ]
    problems = "\n".join(store.summary())
    assert "a.csv:4: not CSV" in problems
    assert "a.csv:7: the number of cells is 3, and the header has 2" in problems


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [
                '"The Godfather" cast\ta',
                '"quoted\ttab"\tb',
                '"unclosed\tb',
                "c\td",
                '"e\tf',
                '"two\nlines"\tg',
                'h\t5"',
            ],
            [
                ('"The Godfather" cast', "a"),
                ("quoted\ttab", "b"),
                ('"unclosed', "b"),
                ("c", "d"),
                ('"e', "f"),
                ("two\nlines", "g"),
                ("h", '5"'),
            ],
        ),
        # Lines that are rows are not joined by quotes.
        (
            ['a\t"he said', "b\tc", 'd\tthe end"', '"e"\t"two\nlines"'],
            [("a", '"he said'), ("b", "c"), ("d", 'the end"'), ("e", "two\nlines")],
        ),
    ],
)
def test_quotes_in_tsv_may_be_letters(tmp_path, lines, expected):
    store = open_path(write_lines(tmp_path / "a.tsv", "query\tpositive", *lines))
    assert pairs_of(store) == expected
