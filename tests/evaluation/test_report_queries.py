"""The report compares the queries before and after, says what chance can do, and draws every step."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

import vembed
from tests.data.pictures import encoded
from tests.training.test_run import settings
from vembed.data.examples import ImageRef, Item
from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.query_results import (
    NO_DIFFERENCE,
    Changed,
    QueryResults,
    compare_results,
    paired_intervals,
    path_of,
    read_queries,
)
from vembed.evaluation.report.page import TEMPLATES
from vembed.evaluation.report.record import read_run
from vembed.evaluation.report.report import changed_table, curves
from vembed.files import short_name
from vembed.training.hooks.base import Evaluation
from vembed.training.hooks.evaluations import QueryRecord


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queries")
    options = settings(
        folder, max_steps=11, logging_steps=5, eval_steps=4, report_to=["tensorboard"]
    )
    return vembed.train(options).output_dir


def test_the_results_of_the_queries_are_those_of_the_evaluation(run):
    assert (
        sorted(path.name for path in (run / "evaluations").iterdir())[0]
        == "step-0.json"
    )
    record = read_run(run)
    assert record.final is not None
    for step, scores in ((0, record.before), (record.final.step, record.after)):
        content = read_queries(path_of(run, step))
        assert content is not None and len(content["values"]) == 39, (
            "equal queries are one"
        )
        means = dict(
            zip(content["metrics"], np.mean(content["values"], axis=0), strict=True)
        )
        for name, value in means.items():
            assert scores[name] == pytest.approx(value, abs=1e-5)
        assert all(
            len(query["found"]) == 3 and query["query"]["text"]
            for query in content["queries"]
        )


def test_the_report_shows_queries_intervals_and_meanings(run):
    page = (run / "report.html").read_text()
    text = (run / "report.md").read_text()
    first, last = (read_queries(path_of(run, step)) for step in (0, 11))
    actual = compare_results(first, last, "ndcg@10")
    assert actual is not None and actual.num_queries == 39
    for report in (page, text):
        assert "95 % interval of the change" in report
        assert "Queries that got " in report
        assert "1 if all relevant documents come first" in report
        assert str(run.parent) not in report, "no absolute paths"
    interval = actual.intervals["ndcg@10"]
    assert (NO_DIFFERENCE in text.split("95 % interval")[0]) == (not interval.is_clear)
    printed = (actual.better or actual.worse)[0]
    assert printed.query["text"] in text and printed.found_after[0][0]["text"] in text


def test_the_model_is_told_as_in_the_card(run):
    page = (run / "report.html").read_text()
    text = (run / "report.md").read_text()
    card = (run / "final" / "README.md").read_text()
    name = short_name(read_run(run).config["model_name"])
    assert (
        f"Tuned by vembed from `{name}`" in card and f"| model_name | {name} |" in card
    )
    assert (
        f"Model: {name}; Embedding size: 32; Inputs: text; " in text
        and f"model_name: {name}\n" in text
    )
    for inner in ("text_encoder", "BertLayer", "modules.json"):
        assert inner not in text and inner not in page and inner not in card


def test_curves_have_every_step_where_lines_are_rarer(run):
    lines = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "loss" in line] == [1, 5, 10, 11]
    assert [
        step[0] for line in lines if "loss" in line for step in line["steps"]
    ] == list(range(1, 12))
    assert all(line["time"] > 1e9 for line in lines)
    drawn = {curve.title: curve for curve in curves(read_run(run))}
    assert len(drawn["Loss"].steps) == 11 and len(drawn["Learning rate"].steps) == 11
    assert all(any(curve.values) for curve in drawn.values()), "no empty charts"


def test_hyperparameters_are_in_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    content = events.summary_metadata[
        "_hparams_/session_start_info"
    ].plugin_data.content
    assert b"learning_rate" in content


def test_intervals_cover_chance_and_find_differences():
    draw = np.random.default_rng(1)
    noise = draw.normal(0, 1, 400)
    chance = paired_intervals((noise - noise.mean() + 0.01)[:, None])[0]
    assert not chance.is_clear and NO_DIFFERENCE in str(chance)
    clear = paired_intervals((noise - noise.mean() + 0.5)[:, None])[0]
    assert clear.is_clear and clear.difference == pytest.approx(0.5)
    half = 1.96 * noise.std(ddof=1) / 20
    assert clear.low == pytest.approx(0.5 - half, abs=0.2 * half)
    many = np.tile(noise, 30)
    (interval,) = paired_intervals(many[:, None])
    assert interval.high - interval.low == pytest.approx(2 * half / 30**0.5, rel=0.05)


def test_images_are_shown_as_thumbnails(tmp_path):
    names = [str(tmp_path / name) for name in ("red.png", "blue.png", "gone.png")]
    for name, colour in zip(names, ("red", "blue"), strict=False):
        Image.new("RGB", (300, 200), colour).save(name)
    red, blue, gone = ({"text": "", "images": [name]} for name in names)
    changed = Changed(
        {"text": "a red wall", "images": []},
        [red],
        0.1,
        0.9,
        [(blue, False)],
        [(red, True)],
    )
    table = changed_table([changed])
    assert table.rows[0][:4] == (
        "a red wall",
        "red.png",
        "blue.png",
        "[relevant] red.png",
    )
    assert [len(table.pictures[0, column]) for column in range(4)] == [0, 1, 1, 1]
    page = TEMPLATES.get_template("parts.html.j2").module.queries(table)
    assert (
        page.count('<img src="data:image/jpeg;base64,') == 3
        and str(tmp_path) not in page
    )
    picture = Image.open(
        io.BytesIO(base64.b64decode(table.pictures[0, 1][0].partition(",")[2]))
    )
    assert picture.size == (96, 64)
    lost = Changed(gone, [gone], 0.1, 0.9, [], [])
    table = changed_table([lost])
    assert table.pictures[0, 0] == () and table.rows[0][:3] == (
        "gone.png",
        "gone.png",
        "nothing",
    )


def test_images_that_the_data_hold_themselves_are_shown_too(tmp_path):
    """As Parquet files and datasets with an image column give them: bytes without a path."""
    documents = [
        Item(images=(ImageRef(data=encoded("PNG", seed=seed)),)) for seed in range(3)
    ]
    queries = (
        Item(text="first"),
        Item(images=(ImageRef(data=encoded("PNG", seed=7)),)),
    )
    data = RetrievalData("val", queries, tuple(documents), ({0: 1}, {1: 1}))
    record = QueryRecord()
    record._data = data
    record._output = tmp_path
    record._best_step = None
    for step, values, entry in (
        (0, [[0.0], [1.0]], [[2], [1]]),
        (5, [[1.0], [0.0]], [[0], [2]]),
    ):
        results = QueryResults(["ndcg@10"], np.array(values), np.array(entry))
        record.on_evaluation(
            Evaluation(step, 1.0, {"ndcg@10": 0.5}, "ndcg@10", False, results)
        )
    first, last = (read_queries(path_of(tmp_path, step)) for step in (0, 5))
    changes = compare_results(first, last, "ndcg@10")
    assert changes is not None
    better, worse = (changed_table(entry) for entry in (changes.better, changes.worse))
    assert better.rows[0][:4] == (
        "first",
        "image of document 0",
        "image of document 2",
        "[relevant] image of document 0",
    )
    assert [len(better.pictures[0, column]) for column in range(4)] == [0, 1, 1, 1]
    assert [len(worse.pictures[0, column]) for column in range(4)] == [1, 1, 1, 1]
    content = read_queries(path_of(tmp_path, 0))
    assert content is not None and content["pictures"] == {}, (
        "only those of queries that changed"
    )
