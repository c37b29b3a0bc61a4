"""What a record means: every accepted form, and one sentence for each one that is not."""

import pytest

from tests.data.files import pair
from vembed.data.examples import BadRecord, ImageRoot
from vembed.data.records import COLUMNS, Columns, RecordFormat
from vembed.errors import UserError

ROOT = "/images"


def record_format(mapping=None, **options):
    return RecordFormat(Columns(mapping), ImageRoot(ROOT, allow_urls=False), **options)


def read(record, **options):
    return record_format(**options).example(record, "here:1")


def said(content, role="user"):
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
        ({"messages": []}, "is empty"),
        (
            {"positive_images": [["a"], ["b"]]},
            "positive_messages has 1 conversations, and positive_images 2 lists",
        ),
        (
            {"positive_messages": 5},
            "positive_messages and positive_images have to be lists",
        ),
    ],
)
def test_conversations_that_mean_nothing(fields, reason):
    record = {"messages": [said("q")], "positive_messages": [[said("p")]], **fields}
    with pytest.raises(BadRecord, match=reason):
        read(record)


def shown(example):
    """query > positives | negatives (scores), with images in brackets."""
    parts = []
    for items in ([example.query], example.positives, example.negatives):
        words = []
        for item in items:
            names = [
                (image.path or str(image.data)).removeprefix(f"{ROOT}/")
                for image in item.images
            ]
            images = f"[{' '.join(names)}]" if names else ""
            words.append(f"{item.text or ''}{images}")
        parts.append(", ".join(words))
    scores = f" {example.scores}" if example.scores else ""
    return f"{parts[0]} > {parts[1]} | {parts[2]}{scores}"


SIDES = {"sentence1": "a", "sentence2": "b"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (pair(positive=["p", "r"]), "q > p, r | "),
        (pair(negatives=["n", "m"]), "q > p | n, m"),
        (pair(negative_1="a", negative_2="b", negative_10="c"), "q > p | a, b, c"),
        (
            {
                "messages": [said("q")],
                "positive_messages": [[said("p")], [said("r"), said("s")]],
                "negative_messages": [[said("n")]],
            },
            "q > p, r\ns | n",
        ),
        (
            {
                "messages": [said("<image>in red")],
                "images": ["a.png"],
                "positive_messages": [[said("<image>")]],
                "positive_images": [["b.png"]],
                "negative_messages": [said("plain text")],
            },
            "in red[a.png] > [b.png] | plain text",
        ),
        (pair(positive=["p", "r"], scores=[2, 1.5]), "q > p, r |  (2.0, 1.5)"),
        ({**SIDES, "score": 0.8}, "a > b |  (0.8,)"),
        (SIDES, "a > b | "),
        (
            pair(query="a/b.jpg", positive="https://x.org/y.png"),
            "a/b.jpg > https://x.org/y.png | ",
        ),
        (
            {
                "query": {"text": "in red", "image": "s.jpg"},
                "positive": {"images": ["r.jpg", "t.jpg"]},
            },
            "in red[s.jpg] > [r.jpg t.jpg] | ",
        ),
        (
            pair(positive={"text": "p"}, negatives=[{"image": "d.jpg"}, "n"]),
            "q > p | [d.jpg], n",
        ),
        ({"query": "q", "image": "c.jpg"}, "q > [c.jpg] | "),
        (
            {"query_images": ["s.jpg", "t.jpg"], "positive": "p"},
            "[s.jpg t.jpg] > p | ",
        ),
        (
            {
                "query": "q",
                "positive_image": ["c.jpg", "d.jpg"],
                "negative_image": "e.jpg",
            },
            "q > [c.jpg], [d.jpg] | [e.jpg]",
        ),
        (
            pair(positive=["p", "r"], positive_image=["c.jpg", "d.jpg"]),
            "q > p[c.jpg], r[d.jpg] | ",
        ),
        (pair(positive={"bytes": b"x", "path": "y"}), "q > [b'x'] | "),
        (pair(label=7), "q > p | "),
    ],
)
def test_forms(record, expected):
    actual = read(record)
    assert shown(actual) == expected
    assert actual.where == "here:1"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("auto", "x > x | x"),
        ("t2i", "x > [x] | [x]"),
        ("i2t", "[x] > x | x"),
        ("m2i", "x > [x] | [x]"),
    ],
)
def test_what_plain_strings_are(mode, expected):
    record = {"query": "x", "positive": ["x"], "negative": "x"}
    assert shown(read(record, mode=mode)) == expected


def test_a_mode_says_nothing_about_objects_and_keeps_both_parts_of_a_record():
    record = {"query": {"text": "q"}, "positive": [{"text": "p"}, "c.jpg"]}
    assert shown(read(record, mode="i2i")) == "q > p, [c.jpg] | "
    record = {"query": "in red", "query_image": "s.jpg", "positive": "r.jpg"}
    assert shown(read(record, mode="m2i")) == "in red[s.jpg] > [r.jpg] | "


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "a list, and a record is an object"),
        (
            {"id": 1, "text": "x"},
            r"no query and no positive .it has id, text.: .*column_mapping: .your_query: query, your_positive: positive",
        ),
        (
            {"query": "q", "doc": "x"},
            r"no positive \(it has query, doc\): .*column_mapping",
        ),
        (pair(query=" \n\t"), "query is empty"),
        (pair(query=5), r"query is a number \(5\), not a text"),
        (
            pair(query=["q"]),
            "query is a list, and one item is expected",
        ),
        (pair(positive=[]), "positive is empty"),
        (pair(positive=["p", ""]), "positive 2 is empty"),
        (pair(positive=[["p"]]), "positive is a list inside of a list"),
        (
            pair(positive={"txt": "p"}),
            r"positive is an object without text or image \(it has txt\)",
        ),
        (
            pair(positive={"image": 3}),
            r"positive has a number \(3\) for an image",
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
        (pair(query="a\ud800b"), "query has a lone surrogate"),
        (
            pair(score="0.5"),
            r"score is '0.5', not a number",
        ),
        (pair(score=10**400), "score is inf"),
        (
            pair(score=-1e39),
            r"score is -1e\+39, and losses compute with finite numbers up to 3.4e\+38",
        ),
        (
            pair(positive=["p", "r"], scores=[1]),
            "scores has 1 numbers for 2 positives",
        ),
        (
            pair(positive=["p", "r"], positive_image=["c.jpg"]),
            "positive and positive_image belong together, but they are 2 and 1",
        ),
    ],
)
def test_bad_records(record, message):
    with pytest.raises(BadRecord, match=message) as caught:
        read(record)
    str(caught.value).encode(
        "utf-8"
    )  # whatever the record holds, the message can be printed
    assert len(str(caught.value)) < 400


def test_long_and_odd_names_do_not_flood_the_message():
    record = {f"{'x' * 500}\ud800{number}": 1 for number in range(500)}
    with pytest.raises(BadRecord, match="no query") as caught:
        read(record)
    assert len(str(caught.value).encode("utf-8")) < 900


def test_column_mapping():
    mapping = {
        "q": "query",
        "docs": "positive",
        "bad": "negatives",
        "worse": "negatives",
    }
    record = {"q": "a", "docs": ["b"], "bad": "c", "worse": ["d"], "query": "unused"}
    assert shown(read(record, mapping=mapping)) == "a > b | c, d"


def test_column_mapping_to_a_name_that_nobody_reads():
    with pytest.raises(UserError, match=r"column_mapping: \{q: querry\}.*'query'"):
        record_format(mapping={"q": "querry"})
    with pytest.raises(
        UserError, match=r"is the wrong way round: .* comes first, \{Frage: query\}"
    ):
        record_format(mapping={"query": "Frage"})


def test_two_columns_for_one_query():
    with pytest.raises(UserError, match="column_mapping: a and b both become query"):
        record_format(mapping={"a": "query", "b": "anchor"})


def test_unused_columns_are_known():
    form = record_format()
    form.example(
        pair(positive={"text": "p", "lang": "t"}, id=3, question="z"),
        "",
    )
    form.example(pair(source=3), "")
    assert sorted(form.columns.unused) == [
        "id",
        "lang (inside of an item)",
        "question",
        "source",
    ]


def test_a_passage_has_its_title_before_its_text():
    passages = [
        {"docid": "7", "title": "Rome", "text": "A city."},
        {"title": "", "text": "B"},
        {"text": "C"},
    ]
    record = {
        "query": "q",
        "positive_passages": passages,
        "negative_passages": [{"title": "T", "text": ""}],
    }
    assert shown(read(record)) == "q > Rome A city., B, C | T"


def test_at_most_so_many_negatives_but_all_are_checked():
    record = pair(negatives=["a", "b", "c"])
    assert shown(read(record, max_negatives=2)) == "q > p | a, b"
    assert shown(read(record, max_negatives=0)) == "q > p | "
    with pytest.raises(BadRecord, match="negatives 3 is empty"):
        read({**record, "negatives": ["a", "b", " "]}, max_negatives=1)


def test_what_a_loss_needs():
    for record, loss, message in (
        (pair(), "cosent", "no score, which loss: cosent needs"),
        (pair(), "triplet", "no negative, which loss: triplet needs"),
        (
            {**SIDES, "score": 0.1},
            "infonce",
            r"scored sentence pair.*loss: infonce.*cosent",
        ),
    ):
        with pytest.raises(BadRecord, match=message):
            read(record, losses=(loss,))
    read(pair(score=0.1), losses=("infonce",))
    read(SIDES, losses=("infonce",))
    read({**SIDES, "score": 0.1}, losses=("cosine",))


def test_cells_of_a_table_are_text():
    actual = read({**SIDES, "score": " 0.25 "}, numbers_in_text=True)
    assert actual.scores == (0.25,)
    for cell in ("0,25", "nan", "x", "1_0"):
        with pytest.raises(BadRecord, match="score is"):
            read({**SIDES, "score": cell}, numbers_in_text=True)
    actual = read(pair(negative_1="c", negative_2=None), numbers_in_text=True)
    assert shown(actual) == "q > p | c"


def test_missing_columns_of_a_table():
    for columns, advice in (
        (
            ("x", "y"),
            "no query and no positive .it has x, y.: .* {your_query: query, your_positive: positive}, or let `vembed init` guess it$",
        ),
        (("text", "category"), "texts with classes have the columns text and label"),
        (
            ("caption", "image"),
            "no query .it has caption, image.: .* {your_query: query}",
        ),
    ):
        with pytest.raises(UserError, match=advice):
            record_format().columns.check(columns)
    with pytest.raises(
        UserError, match=r"column_mapping names c, .*has 'query', 'positive'"
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
def test_every_name_is_read(role):
    record = pair()
    record.pop(role, None)
    for name in COLUMNS[role]:
        layout = Columns().layout((*record, name))
        assert layout.problem is None
        assert name in layout.read


def test_every_name_has_one_meaning():
    names = [name for names in COLUMNS.values() for name in names]
    assert len(set(names)) == len(names)
    for role, accepted in COLUMNS.items():
        assert role == accepted[0]
