"""`vembed judge`: negatives that rows have already, left out, made positives or kept, with every other field."""

import json
from pathlib import Path

import pytest

from tests.mining.data import on_ranks, read_jsonl, training_examples, write_jsonl
from tests.mining.test_judges import endpoint, serve  # noqa: F401 - a fixture
from tests.tiny import tiny_reranker
from vembed.cli.commands.make_data import DataFlags
from vembed.cli.commands.make_data import judge as run_judge
from vembed.errors import UserError
from vembed.mining.judges import judge

GOOD = "a cat that sleeps"
ROWS = [
    {
        "query": "q1",
        "positive": "p1",
        "negatives": ["a dog", GOOD, "a bird"],
        "negative_ids": [1, 2, 3],
        "id": 7,
    },
    {
        "anchor": "q2",
        "pos": ["p2", "p3"],
        "neg": [GOOD],
        "negative_1": "a fish",
        "neg_scores": [0.9, 0.1],
    },
    {"query": "q3", "positive": "p4"},
    {"query": "q1", "positive": "p5", "negative": "a dog", "note": "none is relevant"},
    {
        "query": "q4",
        "positive": "p6",
        "negatives": [GOOD, "a dog"],
        "scores": [1.0, 0.8, 0.2],
    },
]


def says(prompt, _):
    document = prompt.partition("Document:")[2].split("\n")[0]
    return "who knows" if "bird" in document else "yes" if "cat" in document else "no"


@pytest.fixture
def options(tmp_path, cache_home):
    data = write_jsonl(tmp_path / "train.jsonl", ROWS)
    return {"data_path": str(data), "output_path": str(tmp_path / "judged.jsonl")}


def judged_by(server, options, log=print, **changes):
    judges = [endpoint(server, timeout_seconds=60)]
    return judge({**options, "judges": judges, **changes}, log=log)


def test_relevant_negatives_are_left_out_and_every_field_stays(options, serve):  # noqa: F811
    server = serve(says)
    result = judged_by(server, options, scores=True)
    assert read_jsonl(result.output_path) == [
        {
            "query": "q1",
            "positive": "p1",
            "negatives": ["a dog"],
            "negative_ids": [1],
            "id": 7,
            "negative_judge_scores": [0.0],
        },
        {
            "anchor": "q2",
            "pos": ["p2", "p3"],
            "negatives": ["a fish"],
            "negative_scores": [0.1],
            "negative_judge_scores": [0.0],
        },
        ROWS[2],
        {**ROWS[3], "negative_judge_scores": [0.0]},
        {
            "query": "q4",
            "positive": "p6",
            "negatives": ["a dog"],
            "positive_scores": [1.0],
            "negative_scores": [0.2],
            "negative_judge_scores": [0.0],
        },
    ]
    assert len({prompt for prompt, _ in server.asked}) == 7
    assert (result.num_rows, result.num_negatives, result.num_judged) == (5, 8, 7)
    assert (result.num_relevant, result.num_undecided, result.num_kept) == (3, 1, 4)
    examples = training_examples(result.output_path)
    assert [len(example.negatives) for example in examples] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(("answer", "warns"), [("yes", True), ("no", False)])
def test_a_judge_that_leaves_no_negative_is_warned_of(options, serve, answer, warns):  # noqa: F811
    lines = []
    result = judged_by(serve(lambda *_: answer), options, log=lines.append)
    assert result.num_kept == (0 if warns else result.num_negatives)
    warnings = [line for line in lines if line.startswith("warning: no negative stays")]
    assert len(warnings) == warns
    assert all("false_negatives: keep" in line for line in warnings)


def test_relevant_negatives_become_positives_or_stay(options, serve):  # noqa: F811
    server = serve(says)
    judged_by(server, options, false_negatives="relabel")
    built = read_jsonl(Path(options["output_path"]))
    positives = [row.get("positive") for row in built]
    assert positives == [["p1", GOOD], ["p2", "p3", GOOD], "p4", "p5", "p6"]
    assert "pos" not in built[1]
    negatives = [row.get("negatives") for row in built]
    assert negatives == [["a dog"], ["a fish"], None, None, ["a dog"]]
    server.asked.clear()
    judged_by(server, options, false_negatives="keep")
    assert read_jsonl(Path(options["output_path"])) == ROWS
    assert all("bird" in prompt for prompt, _ in server.asked), "others are known"


def judged(options):
    result = judge(options)
    return result.num_judged, result.num_relevant, result.num_kept


def test_the_command_and_two_ranks(options, tmp_path, capsys):
    judges = [{"model": str(tiny_reranker(tmp_path / "reranker"))}]
    words = [f"{name}={value}" for name, value in options.items()]
    words.append(f"judges={json.dumps(judges)}")
    run_judge(words, DataFlags(is_dry_run=True))
    out = capsys.readouterr().out
    assert "5 rows with 8 negatives, 7 distinct pairs" in out and "would write" in out
    assert not Path(options["output_path"]).exists()
    run_judge([*words, "--false-negatives", "relabel"])
    alone = read_jsonl(Path(options["output_path"]))
    changes = {"judges": judges, "false_negatives": "relabel"}
    outcomes, rows = on_ranks(judged, options, 2, tmp_path, **changes)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] + outcomes[0][2] == 8
    assert rows == alone


@pytest.mark.parametrize(
    "changes, rows, message",
    [
        ({}, ROWS, "judges is missing: add `judges: ...`"),
        ({"judges": [{"model": "m"}]}, ROWS[2:3], "no row has a negative to judge"),
    ],
)
def test_mistakes_are_one_sentence(options, tmp_path, changes, rows, message):
    write_jsonl(tmp_path / "train.jsonl", rows)
    with pytest.raises(UserError, match=message) as error:
        judge({**options, **changes})
    assert len(str(error.value).splitlines()) == 1
