"""The report compares the queries before and after, says what chance can do, and draws every step."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import vembed
from tests.data.pictures import encoded
from tests.training.test_run import metric_lines, settings
from vembed.data.examples import ImageRef, Item
from vembed.evaluation.query_results import (
    NO_DIFFERENCE,
    Changed,
    compare_results,
    item_content,
    paired_intervals,
    read_queries,
)
from vembed.evaluation.report.page import TEMPLATES
from vembed.evaluation.report.record import read_run
from vembed.evaluation.report.report import changed_table, curves


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queries")
    options = settings(
        folder, max_steps=11, logging_steps=5, eval_steps=4, report_to=["tensorboard"]
    )
    return vembed.train(options).output_dir


def test_the_results_of_the_queries_are_those_of_the_evaluation(run):
    record = read_run(run)
    for step, scores in ((0, record.before), (record.final.step, record.after)):
        content = read_queries(run, step)
        assert len(content["values"]) == 39, "equal queries are one"
        means = np.mean(content["values"], axis=0)
        for name, value in zip(content["metrics"], means, strict=True):
            assert scores[name] == pytest.approx(value, abs=1e-5)
        for query in content["queries"]:
            assert len(query["found"]) == 3 and query["query"]["text"]


def test_the_report_shows_queries_intervals_and_meanings(run):
    page = (run / "report.html").read_text()
    text = (run / "report.md").read_text()
    first, last = (read_queries(run, step) for step in (0, 11))
    actual = compare_results(first, last, "ndcg@10")
    for report in (page, text):
        assert "95 % interval of the change" in report
        assert "Queries that got " in report
        assert str(run.parent) not in report, "no absolute paths"
    interval = actual.intervals["ndcg@10"]
    assert (NO_DIFFERENCE in text.split("95 % interval")[0]) == (not interval.is_clear)
    printed = (actual.better or actual.worse)[0]
    assert (
        printed.query["text"] in text and printed.documents_after[0][0]["text"] in text
    )


def test_curves_have_every_step_where_lines_are_rarer(run):
    lines = metric_lines(run)
    assert [line["step"] for line in lines if "loss" in line] == [1, 5, 10, 11]
    drawn = {curve.title: curve for curve in curves(read_run(run))}
    assert len(drawn["Loss"].steps) == 11 and len(drawn["Learning rate"].steps) == 11


def test_hyperparameters_are_in_tensorboard(run):
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    metadata = events.summary_metadata["_hparams_/session_start_info"]
    assert b"learning_rate" in metadata.plugin_data.content


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


def test_intervals_of_few_queries():
    """Those of Student's t distribution, and none that says something of fewer than six."""
    differences = np.array([0.3, 0.1, 0.4, -0.1, 0.2, 0.25])
    (interval,) = paired_intervals(differences[:, None])
    bounds = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx(tuple(bounds))
    for num_queries in (1, 5):
        (interval,) = paired_intervals(np.full((num_queries, 1), 0.5))
        assert (interval.low, interval.high) == (-1, 1)


def test_images_of_changed_queries_are_shown_as_thumbnails(tmp_path):
    """Images of files. Those of files that are gone, and those that the data hold, have their names alone."""
    Image.new("RGB", (300, 200), "red").save(tmp_path / "red.png")
    images = [
        ImageRef(data=encoded("PNG")),
        ImageRef(path=str(tmp_path / "red.png")),
        ImageRef(path=str(tmp_path / "gone.png")),
    ]
    held, red, gone = (
        item_content(Item(images=(image,)), "document 0") for image in images
    )
    query = item_content(Item(text="first"), "query 0")
    changed = Changed(query, [held], 0.0, 1.0, [(red, False)], [(gone, True)])
    table = changed_table([changed])
    cells = ("first", "image of document 0", "red.png", "[relevant] gone.png")
    assert table.rows[0][:4] == cells
    pictures = [table.pictures[0, column] for column in range(4)]
    assert [len(cell) for cell in pictures] == [0, 0, 1, 0]
    (data_url,) = pictures[2]
    thumbnail = Image.open(io.BytesIO(base64.b64decode(data_url.partition(",")[2])))
    assert thumbnail.size == (96, 64)
    page = TEMPLATES.get_template("parts.html.j2").module.queries(table)
    assert page.count(data_url) == 1 and str(tmp_path) not in page
