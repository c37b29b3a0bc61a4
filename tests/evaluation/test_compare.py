"""`vembed compare`: several runs on one page and as JSON, finished and stopped ones."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

import vembed
from tests.training.test_run import settings
from vembed.cli.main import app
from vembed.evaluation.query_results import path_of, read_queries


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two finished runs, one stopped before its end and one with other validation data."""
    folder = tmp_path_factory.mktemp("several")
    options = settings(folder, max_steps=8, eval_steps=4)
    vembed.train(
        {**options, "output_dir": str(folder / "small"), "learning_rate": 1e-5}
    )
    vembed.train(
        {**options, "output_dir": str(folder / "large"), "learning_rate": 3e-3}
    )
    shutil.copytree(folder / "large", folder / "stopped")
    for name in ("run.json", "report.html", "report.md"):
        (folder / "stopped" / name).unlink()
    shutil.rmtree(folder / "stopped" / "final")
    with (folder / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # killed while it wrote
    shutil.copytree(folder / "large", folder / "elsewhere")
    for path in (folder / "elsewhere" / "evaluations").iterdir():
        content = json.loads(path.read_text())
        content["queries"][0]["query"]["text"] = "another query"
        path.write_text(json.dumps(content))
    return folder


def compare(*words):
    done = CliRunner().invoke(app, ["compare", *words])
    return done.exit_code, done.stdout, done.stderr


def test_the_json_has_scores_paired_differences_settings_and_queries(runs):
    code, out, err = compare(
        str(runs / "small"), str(runs / "large"), str(runs / "stopped"), "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert [run["name"] for run in report["runs"]] == ["small", "large", "stopped"]
    assert [run["is_finished"] for run in report["runs"]] == [True, True, False]
    rates = {"small": 1e-5, "large": 3e-3, "stopped": 3e-3}
    assert report["settings"] == {"learning_rate": rates}
    scores = []
    for run in report["runs"][:2]:
        results = read_queries(path_of(runs / run["name"], run["scored_step"]))
        column = results["metrics"].index("ndcg@10")
        scores.append(np.array(results["values"])[:, column])
    change = scores[1] - scores[0]
    large = report["differences"][0]
    interval = large["metrics"]["ndcg@10"]
    assert interval["difference"] == pytest.approx(change.mean())
    assert interval["low"] <= change.mean() <= interval["high"]
    assert large["num_better"] == (change > 0).sum()
    assert large["num_worse"] == (change < 0).sum()
    assert large["wins"]
    for win in large["wins"]:
        assert win["this"]["score"] > win["first"]["score"]
    for loss in large["losses"]:
        assert loss["this"]["score"] < loss["first"]["score"]


def test_an_option_that_one_run_alone_has_is_a_setting_that_differs(runs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs / "small", other)
    with (other / "config.yaml").open("a") as file:
        file.write("column_mapping: {question: query}\n")
    folders = (str(runs / "small"), str(other))
    settings = json.loads(compare(*folders, "--json")[1])["settings"]
    mapping = {"small": None, "other": {"question": "query"}}
    assert settings["column_mapping"] == mapping


def test_the_page_shows_all_of_it_in_one_file(runs, tmp_path):
    target = tmp_path / "both.html"
    folders = [str(runs / name) for name in ("small", "large", "stopped")]
    code, out, err = compare(*folders, "--output", str(target))
    assert code == 0, err
    assert f"wrote {target}" in out and "nDCG@10" in out
    page = target.read_text()
    for text in (
        "Settings that differ",
        "learning_rate",
        "stopped after step 8",
        "Queries: large against small",
        "Won",
    ):
        assert text in page, text
    loss = page.partition('aria-label="Loss by step')[2].partition("</svg>")[0]
    for number in range(3):
        assert f"var(--run-{number})" in loss, "all runs in one chart"
    assert "http" not in page.replace("http://www.w3.org", ""), "needs no network"


def test_runs_with_other_queries_are_not_paired(runs, tmp_path):
    folders = (str(runs / "small"), str(runs / "elsewhere"))
    page = tmp_path / "page.html"
    report = json.loads(compare(*folders, "--json", "--output", str(page))[1])
    assert set(report["differences"][0]) == {"run", "not_paired"}
    assert report["best"] == "small", "scores of other queries decide nothing"
    assert "evaluated on other data" in page.read_text()


def test_runs_over_another_corpus_are_not_paired(runs, tmp_path):
    wider = tmp_path / "wider"
    shutil.copytree(runs / "large", wider)
    for path in (wider / "evaluations").iterdir():
        content = json.loads(path.read_text())
        content["num_documents"] += 59
        path.write_text(json.dumps(content))
    report = json.loads(compare(str(runs / "small"), str(wider), "--json")[1])
    not_paired = report["differences"][0]["not_paired"]
    assert "wider was evaluated on other data than small" in not_paired
    assert report["best"] == "small", "scores over another corpus decide nothing"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("small",), "needs two or more"),
        (("small", "nowhere"), "has no config.yaml"),
    ],
)
def test_mistakes_are_one_sentence(runs, words, says):
    code, _, err = compare(*(str(runs / word) for word in words))
    assert code == 2 and says in err and len(err.splitlines()) == 1


def test_a_card_that_was_lost_is_written_again_as_it_was(runs):
    path = runs / "large" / "final" / "README.md"
    before = path.read_text()
    for model in (runs / "large", runs / "large" / "final"):
        path.unlink()
        done = CliRunner().invoke(app, ["card", str(model)])
        assert done.exit_code == 0, done.stderr
        assert path.read_text() == before
    done = CliRunner().invoke(app, ["card", str(runs / "stopped")])
    assert done.exit_code == 2 and "neither the folder of a finished run" in done.stderr
