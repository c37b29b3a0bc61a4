"""`vembed generate`: each kind of pair, written queries, the round trip, and the same for any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.pictures import write
from tests.mining.data import (
    documents,
    model,
    on_ranks,
    read_jsonl,
    training_examples,
    write_jsonl,
)
from tests.mining.test_judges import endpoint, serve
from tests.tiny import shared, tiny_qwen3
from vembed import UserError, generate
from vembed.data_tools.generate import cleaned, crop, docstring_function

__all__ = ["serve"]

FUNCTION = '''def area(width, height):
    """Return the area of a rectangle.

    More about it.
    """
    return width * height
'''
RECORDS = [
    {"_id": "f", "text": FUNCTION},
    {"_id": "i", "text": "a red square", "image": "red.png"},
    {
        "_id": "t",
        "title": "Sorting",
        "text": "Python sorts lists in place with a method.",
    },
    {
        "_id": "h",
        "text": "# Files\nOpen a file and read its lines.\n\n## Errors\nA missing file raises an error here.",
    },
    {"_id": "s", "text": "Cats sleep a lot. They do so because they hunt at night."},
    {"_id": "c", "text": " ".join(f"word{number}" for number in range(40))},
    {"_id": "n", "text": "short"},
]
WANTED = {
    "f": (
        "docstring_function",
        "Return the area of a rectangle.",
        "def area(width, height):\n    return width * height",
    ),
    "i": ("caption_image", "a red square", {"image": "red.png"}),
    "t": ("title_body", "Sorting", "Python sorts lists in place with a method."),
    "s": (
        "first_sentence",
        "Cats sleep a lot.",
        "They do so because they hunt at night.",
    ),
}


@pytest.fixture
def options(tmp_path):
    write(tmp_path / "red.png", "PNG")
    return {
        "corpus_path": str(write_jsonl(tmp_path / "corpus.jsonl", RECORDS)),
        "output_path": str(tmp_path / "pairs.jsonl"),
    }


def run(options, **changes):
    lines = []
    result = generate({**options, **changes}, log=lines.append)
    return read_jsonl(result.output_path), result


def test_each_document_gets_the_first_kind_that_fits(options, tmp_path):
    rows, result = run(options)
    names = ("document_id", "kind", "query", "positive")
    pairs = [tuple(row[name] for name in names) for row in rows]
    for identity, value in WANTED.items():
        assert (identity, *value) in pairs
    headings = [pair[1:3] for pair in pairs if pair[0] == "h"]
    assert headings == [("heading_section", "Files"), ("heading_section", "Errors")]
    (kind,) = [pair[1] for pair in pairs if pair[0] == "c"]
    assert kind == "crop"
    assert result.left_out == {"no kind fits": 1}
    assert sum(result.kept.values()) == result.num_rows == 7
    assert len(training_examples(tmp_path / "pairs.jsonl")) == 7


@pytest.mark.parametrize("before", ["import os\n\x0c\n", 'A = "one\u2028two"\r\n'])
def test_lines_of_a_source_are_those_that_python_counts(before):
    (query, positive), *_ = docstring_function(before + FUNCTION)
    assert (query, positive.strip()) == WANTED["f"][1:]


@pytest.mark.parametrize("num_words", [16, 300])
def test_the_spans_of_a_crop_do_not_overlap(num_words):
    text = " ".join(f"word{number}" for number in range(num_words))
    is_earlier = set()
    for seed in range(30):
        ((query, positive),) = crop(text, np.random.default_rng(seed))
        query_words = query.split()
        positive_words = positive.split()
        assert query in text and positive in text
        assert not set(query_words) & set(positive_words)
        assert 8 <= len(query_words) <= 64 and 8 <= len(positive_words) <= 64
        is_earlier.add(text.index(query) < text.index(positive))
    assert is_earlier == {True, False}
    assert crop("word " * 15, np.random.default_rng(0)) == []


def test_an_endpoint_writes_queries(options, serve, tmp_path):
    def decide(prompt, number):
        if "short" in prompt.partition("Document: ")[2]:
            return "\n"
        return f'Question: "what about {prompt.rpartition("Document: ")[2][:9]}?"'

    server = serve(decide)
    example = {"query": "my own query", "positive": "my own text"}
    examples = write_jsonl(tmp_path / "mine.jsonl", [example])
    more = {
        "language": "German",
        "personas": ["a student", "a lawyer"],
        "examples_path": str(examples),
    }
    rows, result = run(options, writer=endpoint(server), **more)
    assert {row["kind"] for row in rows} == {"question"}
    assert "what about Cats slee?" in {row["query"] for row in rows}
    assert result.left_out == {"question: nothing usable was written": 1}
    prompts = [prompt for prompt, _ in server.asked]
    assert all("German" in prompt and "my own query" in prompt for prompt in prompts)
    for persona in more["personas"]:
        assert any(persona in prompt for prompt in prompts)
    num_asked = len(prompts)
    assert run(options, writer=endpoint(server), **more)[0] == rows
    assert len(server.asked) == num_asked, "what is written is kept"
    chosen = {"kinds": ["claim", "title_body"]}
    prompts = {"claim": "Claim! Document: {document}"}
    rows, _ = run(options, writer=endpoint(server), prompts=prompts, **chosen)
    assert {row["kind"] for row in rows} == {"claim", "title_body"}
    assert server.asked[-1][0].startswith("Claim! ")


def test_a_local_model_writes_queries(options, tmp_path):
    corpus = write_jsonl(tmp_path / "texts.jsonl", documents()[:10])
    options["corpus_path"] = str(corpus)
    folder = str(tmp_path / "writer")
    # The folder has no head, which would be drawn at each start.
    AutoModelForCausalLM.from_pretrained(shared(tiny_qwen3)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shared(tiny_qwen3)).save_pretrained(folder)
    writer = {"model": folder, "max_new_tokens": 6, "max_length": 100}
    rows, result = run(options, writer=writer)
    assert len(rows) + sum(result.left_out.values()) == 10
    writer["temperature"] = 1.0
    drawn, _ = run(options, writer=writer, work_dir=str(tmp_path / "a"))
    again, _ = run(options, writer=writer, work_dir=str(tmp_path / "b"))
    assert drawn == again


def titled(texts):
    return [{"_id": text, "title": text, "text": f"{text} and so on"} for text in texts]


def test_the_round_trip_keeps_what_is_found(options, tmp_path):
    corpus = titled(documents()[:60])
    corpus[9]["title"] = "zzz"
    options["corpus_path"] = str(write_jsonl(tmp_path / "titled.jsonl", corpus))
    rows, result = run(options, model_name=model(), round_trip_top_k=5)
    assert 10 < len(rows) < 60
    assert "zzz" not in {row["query"] for row in rows}
    assert result.left_out == {"round trip: not among the first 5": 60 - len(rows)}
    everything, _ = run(options, model_name=model(), round_trip_top_k=60)
    assert len(everything) == 60


def made(options):
    return generate(options).kept


def test_the_same_for_any_number_of_ranks(options, tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", titled(documents()[:150]))
    options |= {"corpus_path": str(corpus), "model_name": model()}
    rows, result = run(options)
    assert on_ranks(made, options, 2, tmp_path) == ([result.kept] * 2, rows)


@pytest.mark.parametrize(
    "text, expected",
    [
        (' "What is it?" \nBecause ...', "What is it?"),
        ("Query: what?", "what?"),
        ("\n \n", ""),
        ("x" * 999, ""),
        ("<think>\nOkay, what is it?\n</think>\n\nWhat?", "What?"),
        ("<think>\nOkay, the user wants", ""),
    ],
)
def test_what_models_write_is_cleaned(text, expected):
    assert cleaned(text) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kinds": ["question"]}, "kinds: question needs writer"),
        ({"prompts": {"poem": "x"}}, "prompts: poem is none of question"),
        ({"prompts": {"claim": "A { of {document}"}}, "prompts: claim holds braces"),
    ],
)
def test_mistakes(options, changes, message):
    with pytest.raises(UserError, match=message):
        generate({**options, **changes})


def test_documents_of_which_nothing_can_be_made(options, tmp_path):
    corpus = tmp_path / "short.jsonl"
    corpus.write_text('{"text": "six short words make no pair"}\n' * 3)
    with pytest.raises(UserError, match="no pair was made of 1 documents"):
        generate({**options, "corpus_path": str(corpus)})
    assert not Path(options["output_path"]).exists()
