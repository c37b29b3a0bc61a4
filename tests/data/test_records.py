"""What a record means: every accepted form, and one sentence for each one that is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.data.files import pair
from vembed.data.columns import COLUMNS, Columns
from vembed.data.examples import BadRecord, Example, ImageRef, Item
from vembed.data.images.files import ImageRoot
from vembed.data.records import RecordFormat
from vembed.errors import UserError

ROOT = "/images"


def record_format(
    mapping: dict[str, str] | None = None, **options: Any
) -> RecordFormat:
    return RecordFormat(Columns(mapping), ImageRoot(ROOT, allow_urls=False), **options)


def read(record: Any, **options: Any) -> Example:
    return record_format(**options).example(record, "here:1")


def picture(*names: str, text: str | None = None) -> Item:
    return Item(
        text=text, images=tuple(ImageRef(path=f"{ROOT}/{name}") for name in names)
    )


def texts(*values: str) -> tuple[Item, ...]:
    return tuple(Item(text=value) for value in values)


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"messages": [said("q", "assistant")]},
            "a message of role 'assistant'.*query_prompt",
        ),
        ({"messages": [said(["q"])]}, "a message without a text in `content`"),
        (
            {"messages": [said("<image><image>")], "images": ["a.png"]},
            "has 2 <image> and 1 images",
        ),
        ({"messages": [said(" ")]}, "is empty"),
        ({"messages": []}, "is empty"),
        (
            {"positive_images": [["a"], ["b"]]},
            "positive_messages has 1 conversations, and positive_images 2 lists",
        ),
        (
            {"positive_messages": 5},
            "positive_messages and positive_images have to be lists",
        ),
        ({"positive_messages": said("p")}, "positive_messages .* have to be lists"),
        ({"positive_images": 5}, "positive_images have to be lists"),
    ],
)
def test_conversations_that_mean_nothing(fields: dict[str, Any], reason: str) -> None:
    record = {"messages": [said("q")], "positive_messages": [[said("p")]], **fields}
    with pytest.raises(BadRecord, match=reason):
        read(record)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (pair(), Example(Item("q"), texts("p"))),
        (pair(positive=["p", "r"]), Example(Item("q"), texts("p", "r"))),
        (
            pair(negatives=["n", "m"]),
            Example(Item("q"), texts("p"), texts("n", "m")),
        ),
        (
            pair(negatives=None),
            Example(Item("q"), texts("p")),
        ),
        (
            pair(negative_1="a", negative_2="b", negative_10="c"),
            Example(Item("q"), texts("p"), texts("a", "b", "c")),
        ),
        (
            {
                "messages": [said("q")],
                "positive_messages": [[said("p")], [said("r"), said("s")]],
                "negative_messages": [[said("n")]],
            },
            Example(Item("q"), texts("p", "r\ns"), texts("n")),
        ),
        (
            {
                "messages": [said("<image>in red")],
                "images": ["a.png"],
                "positive_messages": [[said("<image>")]],
                "positive_images": [["b.png"]],
                "negative_messages": [said("plain text")],
            },
            Example(
                picture("a.png", text="in red"),
                (picture("b.png"),),
                texts("plain text"),
            ),
        ),
        (
            {"messages": [said("q")], "positive_messages": [[said("p")]], "label": 0.5},
            Example(Item("q"), texts("p"), scores=(0.5,)),
        ),
        (
            pair(positive=["p", "r"], scores=[2, 1.5]),
            Example(Item("q"), texts("p", "r"), (), (2.0, 1.5)),
        ),
        (
            {"sentence1": "a", "sentence2": "b", "score": 0.8},
            Example(Item("a"), texts("b"), (), (0.8,)),
        ),
        (
            {"sentence1": "a", "sentence2": "b", "label": 1},
            Example(Item("a"), texts("b"), (), (1.0,)),
        ),
        ({"sentence1": "a", "sentence2": "b"}, Example(Item("a"), texts("b"))),
        (
            {"query": "a/b.jpg", "positive": "https://x.org/y.png"},
            Example(Item("a/b.jpg"), texts("https://x.org/y.png")),
        ),
        (
            pair(positive={"image": "c.jpg"}),
            Example(Item("q"), (picture("c.jpg"),)),
        ),
        (
            {
                "query": {"text": "in red", "image": "s.jpg"},
                "positive": {"images": ["r.jpg", "t.jpg"]},
            },
            Example(picture("s.jpg", text="in red"), (picture("r.jpg", "t.jpg"),)),
        ),
        (
            pair(positive={"text": "p"}, negatives=[{"image": "d.jpg"}, "n"]),
            Example(Item("q"), texts("p"), (picture("d.jpg"), Item("n"))),
        ),
        (
            pair(query={"text": None, "image": "s.jpg"}),
            Example(picture("s.jpg"), texts("p")),
        ),
        ({"query": "q", "image": "c.jpg"}, Example(Item("q"), (picture("c.jpg"),))),
        (
            pair(query_image="s.jpg"),
            Example(picture("s.jpg", text="q"), texts("p")),
        ),
        (
            {"query_images": ["s.jpg", "t.jpg"], "positive": "p"},
            Example(picture("s.jpg", "t.jpg"), texts("p")),
        ),
        (
            {
                "query": "q",
                "positive_image": ["c.jpg", "d.jpg"],
                "negative_image": "e.jpg",
            },
            Example(
                Item("q"), (picture("c.jpg"), picture("d.jpg")), (picture("e.jpg"),)
            ),
        ),
        (
            pair(positive=["p", "r"], positive_image=["c.jpg", "d.jpg"]),
            Example(
                Item("q"), (picture("c.jpg", text="p"), picture("d.jpg", text="r"))
            ),
        ),
        (
            pair(positive={"bytes": b"x", "path": "y"}),
            Example(Item("q"), (Item(images=(ImageRef(data=b"x"),)),)),
        ),
        (
            pair(positive={"bytes": None, "path": "y.jpg"}),
            Example(Item("q"), (picture("y.jpg"),)),
        ),
        (
            pair(positive=b"x"),
            Example(Item("q"), (Item(images=(ImageRef(data=b"x"),)),)),
        ),
        (pair(label=7), Example(Item("q"), texts("p"))),
    ],
)
def test_forms(record: dict[str, Any], expected: Example) -> None:
    found = read(record)
    assert (found.query, found.positives, found.negatives, found.scores) == (
        expected.query,
        expected.positives,
        expected.negatives,
        expected.scores,
    )
    assert found.where == "here:1"


@pytest.mark.parametrize(
    ("mode", "query", "document"),
    [
        ("auto", Item("x"), Item("x")),
        ("t2t", Item("x"), Item("x")),
        ("t2i", Item("x"), picture("x")),
        ("i2t", picture("x"), Item("x")),
        ("i2i", picture("x"), picture("x")),
        ("m2i", Item("x"), picture("x")),
        ("m2t", Item("x"), Item("x")),
    ],
)
def test_what_plain_strings_are(mode: str, query: Item, document: Item) -> None:
    found = read({"query": "x", "positive": ["x"], "negative": "x"}, mode=mode)
    assert (found.query, found.positives, found.negatives) == (
        query,
        (document,),
        (document,),
    )


def test_a_mode_says_nothing_about_objects() -> None:
    found = read(
        {"query": {"text": "q"}, "positive": [{"text": "p"}, "c.jpg"]}, mode="i2i"
    )
    assert (found.query, found.positives) == (Item("q"), (Item("p"), picture("c.jpg")))


def test_both_parts_of_a_record_with_text_and_image() -> None:
    found = read(
        {"query": "in red", "query_image": "s.jpg", "positive": "r.jpg"}, mode="m2i"
    )
    assert (found.query, found.positives) == (
        picture("s.jpg", text="in red"),
        (picture("r.jpg"),),
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "a list, and a record is an object"),
        (None, "null, and a record is an object"),
        ({}, r"no query and no positive \(it has no fields\)"),
        (
            {"id": 1, "text": "x"},
            r"no query and no positive .it has id, text.: .*column_mapping: .text: positive, your_query: query",
        ),
        (
            {"query": "q", "doc": "x"},
            r"no positive \(it has query, doc\): .*column_mapping",
        ),
        (pair(query=""), "query is empty"),
        (pair(query=" \n\t"), "query is empty"),
        (pair(query=None), "query is null"),
        (pair(query=5), r"query is a number \(5\), not a text"),
        (
            pair(query=["q"]),
            "query is a list, and one item is expected",
        ),
        (pair(positive=None), "positive is null"),
        (pair(positive=[]), "positive is an empty list"),
        (pair(positive=["p", ""]), "positive 2 is empty"),
        (pair(positive=["p", None]), "positive 2 is null"),
        (pair(positive=[["p"]]), "positive is a list inside of a list"),
        (
            pair(negatives=["n", 3]),
            r"negatives 2 is a number \(3\)",
        ),
        (
            pair(positive={}),
            r"positive is an object without text or image \(it has no fields\)",
        ),
        (
            pair(positive={"txt": "p"}),
            r"positive is an object without text or image \(it has txt\)",
        ),
        (
            pair(positive={"text": 3}),
            r"positive is a number \(3\), not a text",
        ),
        (
            pair(positive={"image": 3}),
            r"positive has a number \(3\) for an image",
        ),
        (pair(positive={"image": ""}), "positive: an image path is empty"),
        (
            pair(positive={"images": []}),
            "positive has an empty list of images",
        ),
        (
            pair(positive={"image": {"bytes": None, "path": None}}),
            "positive has an image without bytes and path",
        ),
        (
            pair(positive={"image": "../x.jpg"}),
            "positive: image path ../x.jpg leads out of image_root",
        ),
        (
            pair(positive={"image": "http://x.org/y.png"}),
            "positive: .*allow_image_urls",
        ),
        (
            pair(positive={"image": "\ud800.png"}),
            "positive: an image path .*surrogate",
        ),
        (
            {"query": "q", "image": "data:image/png;base64," + "A" * 60},
            "image: data:image/png.* is an image in base64",
        ),
        (pair(query="a\0b"), "query has a NUL character"),
        (pair(query="a\ud800b"), "query has a lone surrogate"),
        (
            pair(score="0.5"),
            r"score is the text '0.5', not a number",
        ),
        (
            pair(score=True),
            r"score is true, not a number",
        ),
        (pair(score=math.nan), "score is nan"),
        (pair(score=10**400), "score is inf"),
        (
            pair(score=-1e39),
            r"score is -1e\+39, and losses compute with finite numbers up to 3.4e\+38",
        ),
        (
            pair(scores=[]),
            "scores has 0 numbers for 1 positive",
        ),
        (
            pair(positive=["p", "r"], scores=[1]),
            "scores has 1 number for 2 positives",
        ),
        (
            pair(positive=["p", "r"], positive_image=["c.jpg"]),
            "positive and positive_image belong together, but they are 2 and 1",
        ),
    ],
)
def test_bad_records(record: Any, message: str) -> None:
    with pytest.raises(BadRecord, match=message) as caught:
        read(record)
    str(caught.value).encode(
        "utf-8"
    )  # whatever the record holds, the message can be printed
    assert len(str(caught.value)) < 400


def test_long_and_odd_names_do_not_flood_the_message() -> None:
    record = {f"{'x' * 500}\ud800{number}": 1 for number in range(500)}
    with pytest.raises(BadRecord, match="no query") as caught:
        read(record)
    assert len(str(caught.value).encode("utf-8")) < 900


def test_column_mapping() -> None:
    mapping = {
        "q": "query",
        "docs": "positive",
        "bad": "negatives",
        "worse": "negatives",
    }
    found = read(
        {"q": "a", "docs": ["b"], "bad": "c", "worse": ["d"], "query": "unused"},
        mapping=mapping,
    )
    assert (found.query, found.positives, found.negatives) == (
        Item("a"),
        texts("b"),
        texts("c", "d"),
    )


def test_column_mapping_to_a_name_that_nobody_reads() -> None:
    with pytest.raises(UserError, match=r"column_mapping: \{q: querry\}.*'query'"):
        record_format(mapping={"q": "querry"})
    with pytest.raises(
        UserError, match=r"is the wrong way round: .* comes first, \{Frage: query\}"
    ):
        record_format(mapping={"query": "Frage"})


def test_two_columns_for_one_query() -> None:
    with pytest.raises(UserError, match="column_mapping: a and b both become query"):
        record_format(mapping={"a": "query", "b": "anchor"})


def test_unused_columns_are_known() -> None:
    form = record_format()
    form.example(
        pair(positive={"text": "p", "lang": "t"}, id=3, question="z"),
        "",
    )
    form.example(pair(source=3), "")
    assert form.columns.unused == [
        "id",
        "lang (inside of an item)",
        "question",
        "source",
    ]


def test_a_passage_has_its_title_before_its_text() -> None:
    passages = [
        {"docid": "7", "title": "Rome", "text": "A city."},
        {"title": "", "text": "B"},
        {"text": "C"},
    ]
    found = read(
        {
            "query": "q",
            "positive_passages": passages,
            "negative_passages": [{"title": "T", "text": ""}],
        }
    )
    assert (found.positives, found.negatives) == (
        texts("Rome A city.", "B", "C"),
        texts("T"),
    )


def test_mapped_columns_that_never_come() -> None:
    form = record_format(mapping={"q": "query", "gone": "negatives"})
    form.example({"q": "a", "positive": "b"}, "")
    assert form.columns.mapped_but_missing == ["gone"]


def test_at_most_so_many_negatives_but_all_are_checked() -> None:
    record = pair(negatives=["a", "b", "c"])
    assert read(record, max_negatives=2).negatives == texts("a", "b")
    assert read(record, max_negatives=0).negatives == ()
    with pytest.raises(BadRecord, match="negatives 3 is empty"):
        read({**record, "negatives": ["a", "b", " "]}, max_negatives=1)


def test_what_a_loss_needs() -> None:
    with pytest.raises(BadRecord, match="no score, which loss: cosent needs"):
        read(pair(), losses=("cosent",))
    with pytest.raises(BadRecord, match="no negative, which loss: triplet needs"):
        read(pair(), losses=("triplet",))
    with pytest.raises(BadRecord, match=r"scored sentence pair.*loss: infonce.*cosent"):
        read({"sentence1": "q", "sentence2": "p", "score": 0.1}, losses=("infonce",))
    read(pair(score=0.1), losses=("infonce",))
    read({"sentence1": "q", "sentence2": "p"}, losses=("infonce",))
    read({"sentence1": "q", "sentence2": "p", "score": 0.1}, losses=("cosine",))


def test_cells_of_a_table_are_text() -> None:
    found = read(
        {"sentence1": "a", "sentence2": "b", "score": " 0.25 "}, numbers_in_text=True
    )
    assert found.scores == (0.25,)
    for cell in ("0,25", "nan", "x", "1_0"):
        with pytest.raises(BadRecord, match="score is"):
            read(
                {"sentence1": "a", "sentence2": "b", "score": cell},
                numbers_in_text=True,
            )
    found = read(
        {"query": "a", "positive": "b", "negative_1": "c", "negative_2": None},
        numbers_in_text=True,
    )
    assert found.negatives == texts("c")


def test_a_cell_without_a_class_is_called_empty() -> None:
    with pytest.raises(BadRecord, match="label is empty"):
        read({"text": "a", "label": None}, numbers_in_text=True)


def test_missing_columns_of_a_table() -> None:
    for columns, advice in (
        (
            ("x", "y"),
            "no query and no positive .it has x, y.: .* {your_query: query, your_positive: positive}$",
        ),
        (
            ("Ticket ID", "Subject", "Resolution"),
            "{Subject: query, Resolution: positive}$",
        ),
        (("text1", "text2"), "{text1: query, text2: positive}$"),
        (("Question", "Answer"), "{Question: query, Answer: positive}$"),
        ((" Anchor ", "Positive "), "{' Anchor ': query, 'Positive ': positive}$"),
        (("sentence-A", "Sentence B"), "{sentence-A: query, Sentence B: positive}$"),
        (("text", "category"), "or, if these are texts and their classes"),
        (("caption", "file_name"), "{caption: query, file_name: positive_image}$"),
        (
            ("caption", "image"),
            "no query .it has caption, image.: .* {caption: query}$",
        ),
        (("query",), "no positive .it has query.: .* {your_positive: positive}$"),
        (("text", "image"), "no query .it has text, image.: .* {text: query}$"),
        (
            ("image", "answer"),
            "no query .it has image, answer.: .* {image: query_image}$",
        ),
        (
            ("messages", "id"),
            "messages without positive_messages .it has messages, id.: ",
        ),
    ):
        with pytest.raises(UserError, match=advice):
            record_format().columns.check(columns)
    with pytest.raises(
        UserError, match=r"column_mapping names c, .*has query, positive"
    ):
        record_format(mapping={"c": "negatives"}).columns.check(["query", "positive"])
    record_format().columns.check(["query", "positive", "other"])
    assert record_format().columns.needed(
        ["query", "positive", "other", "negative_2"]
    ) == [
        "query",
        "positive",
        "negative_2",
    ]


@pytest.mark.parametrize(
    "role", [role for role in COLUMNS if role not in ("text", "label")]
)
def test_every_name_is_read(role: str) -> None:
    record = pair()
    record.pop(role, None)
    for name in COLUMNS[role]:
        layout = Columns().layout((*record, name))
        assert layout.problem is None
        assert name in layout.read


def test_every_name_has_one_meaning() -> None:
    names = [name for names in COLUMNS.values() for name in names]
    assert len(set(names)) == len(names)
    for role, accepted in COLUMNS.items():
        assert role == accepted[0]
