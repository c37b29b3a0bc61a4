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


def talk(**fields):
    return {"messages": [said("q")], "positive_messages": [[said("p")]], **fields}


def shown(example):
    """query > positives | negatives (scores), with images in brackets."""
    parts = []
    for items in ([example.query], example.positives, example.negatives):
        words = []
        for item in items:
            names = []
            for image in item.images:
                name = image.path or str(image.data)
                names.append(name.removeprefix(f"{ROOT}/"))
            images = f"[{' '.join(names)}]" if names else ""
            words.append(f"{item.text or ''}{images}")
        parts.append(", ".join(words))
    scores = f" {example.scores}" if example.scores else ""
    query, positives, negatives = parts
    return f"{query} > {positives} | {negatives}{scores}"


SIDES = {"sentence1": "a", "sentence2": "b"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (pair(negatives=["n", "m"]), "q > p | n, m"),
        (pair(negative_1="a", negative_2="b", negative_10="c"), "q > p | a, b, c"),
        (
            talk(
                positive_messages=[[said("p")], [said("r"), said("s")]],
                negative_messages=[[said("n")]],
            ),
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
        (
            pair("a/b.jpg", "https://x.org/y.png"),
            "a/b.jpg > https://x.org/y.png | ",
        ),
        (
            pair(
                {"text": "in red", "image": "s.jpg"},
                {"images": ["r.jpg", "t.jpg"]},
            ),
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
    assert shown(read(pair("x", ["x"], negative="x"), mode=mode)) == expected


def test_a_mode_says_nothing_about_objects_and_keeps_both_parts_of_a_record():
    record = pair({"text": "q"}, [{"text": "p"}, "c.jpg"])
    assert shown(read(record, mode="i2i")) == "q > p, [c.jpg] | "
    record = pair("in red", "r.jpg", query_image="s.jpg")
    assert shown(read(record, mode="m2i")) == "in red[s.jpg] > [r.jpg] | "


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "a list, and a record is an object"),
        ({"id": 1, "text": "x"}, "no query and no positive .*id, text.*column_mapping"),
        ({"query": "q", "doc": "x"}, "no positive .*query, doc.*column_mapping"),
        (pair(" \n\t"), "query is empty"),
        (pair(5), r"query is a number \(5\), not a text"),
        (pair(positive=["p", ""]), "positive 2 is empty"),
        (pair(positive={"txt": "p"}), "positive is an object without text or image"),
        (pair("a\ud800b"), "query has a lone surrogate"),
        (pair(score=-1e39), r"score is -1e\+39"),
        (pair(positive=["p", "r"], scores=[1]), "scores has 1 .* 2 positives"),
        (
            pair(positive=["p", "r"], positive_image=["c.jpg"]),
            "positive and positive_image .* 2 and 1",
        ),
        (
            talk(messages=[said("q", "assistant")]),
            "a message of role 'assistant'.*query_prompt",
        ),
        (talk(messages=[said(["q"])]), "a message without a text in `content`"),
        (
            talk(messages=[said("<image><image>")], images=["a.png"]),
            "has 2 <image> and 1 images",
        ),
        (
            talk(positive_images=[["a"], ["b"]]),
            "positive_messages has 1 conversations, and positive_images 2 lists",
        ),
        (
            talk(positive_messages=5),
            "positive_messages and positive_images have to be lists",
        ),
    ],
)
def test_bad_records(record, message):
    with pytest.raises(BadRecord, match=message) as caught:
        read(record)
    # Whatever the record holds, the message can be printed.
    str(caught.value).encode("utf-8")
    assert len(str(caught.value)) < 400


def test_long_and_odd_names_do_not_flood_the_message():
    record = {f"{'x' * 500}\ud800{number}": 1 for number in range(500)}
    with pytest.raises(BadRecord, match="no query") as caught:
        read(record)
    assert len(str(caught.value).encode("utf-8")) < 900


def test_column_mapping():
    roles = ["query", "positive", "negatives", "negatives"]
    mapping = dict(zip("abcd", roles, strict=True))
    record = {"a": "1", "b": ["2"], "c": "3", "d": ["4"], "query": "unused"}
    assert shown(read(record, mapping=mapping)) == "1 > 2 | 3, 4"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"q": "querry"}, "{q: querry}.*'query'"),
        ({"query": "Frage"}, "is the wrong way round: .*{Frage: query}"),
        ({"a": "query", "b": "anchor"}, "a and b both become query"),
    ],
)
def test_a_mapping_that_means_nothing(mapping, message):
    with pytest.raises(UserError, match=f"column_mapping.*{message}"):
        record_format(mapping)


def test_unused_columns_are_known():
    form = record_format()
    for record in (
        pair(positive={"text": "p", "lang": "t"}, id=3, question="z"),
        pair(source=3),
    ):
        form.example(record, "")
    unused = ["id", "lang (inside of an item)", "question", "source"]
    assert sorted(form.columns.unused) == unused


def test_a_passage_has_its_title_before_its_text():
    record = {
        "query": "q",
        "positive_passages": [
            {"docid": "7", "title": "Rome", "text": "A city."},
            {"title": "", "text": "B"},
            {"text": "C"},
        ],
        "negative_passages": [{"title": "T", "text": ""}],
    }
    assert shown(read(record)) == "q > Rome A city., B, C | T"


def test_at_most_so_many_negatives_but_all_are_checked():
    record = pair(negatives=["a", "b", "c"])
    assert shown(read(record, max_negatives=2)) == "q > p | a, b"
    with pytest.raises(BadRecord, match="negatives 3 is empty"):
        read(pair(negatives=["a", "b", " "]), max_negatives=1)


@pytest.mark.parametrize(
    ("record", "loss", "message"),
    [
        (pair(), "cosent", "no score, which loss: cosent needs"),
        (
            pair(scor=0.5, id=3),
            "cosent",
            r"not read: id, scor\): .*{scor: score}$",
        ),
        (pair(), "triplet", "no negative, which loss: triplet needs"),
        ({**SIDES, "score": 0.1}, "infonce", "scored sentence pair.*infonce.*cosent"),
        (pair(score=0.1), "infonce", None),
        (SIDES, "infonce", None),
        ({**SIDES, "score": 0.1}, "cosine", None),
    ],
)
def test_what_a_loss_needs(record, loss, message):
    if message is None:
        read(record, losses=(loss,))
        return
    with pytest.raises(BadRecord, match=message):
        read(record, losses=(loss,))


def test_cells_of_a_table_are_text():
    actual = read({**SIDES, "score": " 0.25 "}, numbers_in_text=True)
    assert actual.scores == (0.25,)
    for cell in ("0,25", "nan", "x", "1_0"):
        with pytest.raises(BadRecord, match="score is"):
            read({**SIDES, "score": cell}, numbers_in_text=True)
    actual = read(pair(negative_1="c", negative_2=None), numbers_in_text=True)
    assert shown(actual) == "q > p | c"


@pytest.mark.parametrize(
    ("columns", "mapping", "message"),
    [
        (["x", "y"], None, "no query and no positive .*x, y.*your_query: query"),
        (["text", "category"], None, "classes have the columns text and label"),
        (["caption", "image"], None, "no query .*your_query: query}"),
        (["query", "positive"], {"c": "negatives"}, "column_mapping names c, .*query"),
    ],
)
def test_missing_columns_of_a_table(columns, mapping, message):
    with pytest.raises(UserError, match=message):
        record_format(mapping).columns.of_table(columns)


def test_columns_that_are_needed():
    columns = record_format().columns
    needed = ["query", "positive", "negative_2"]
    assert columns.of_table([*needed, "other"]) == needed


@pytest.mark.parametrize("role", sorted(set(COLUMNS) - {"text", "label"}))
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
