"""`vembed compare`: several runs on one page and as JSON, finished and stopped ones."""

import json
import shutil

import numpy as np
import pytest

import vembed
from tests.commands import invoke
from tests.tiny import change_json, read_json
from tests.training.test_run import settings
from vembed.evaluation.query_results import read_queries


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two finished runs, and one stopped before its end."""
    folder = tmp_path_factory.mktemp("several")
    options = settings(folder, max_steps=8, eval_steps=4, use_lora=True)
    for name, rate in (("small", 1e-5), ("large", 3e-3)):
        output = str(folder / name)
        vembed.train({**options, "output_dir": output, "learning_rate": rate})
    shutil.copytree(folder / "large", folder / "stopped")
    for name in ("run.json", "report.html", "report.md"):
        (folder / "stopped" / name).unlink()
    shutil.rmtree(folder / "stopped" / "final")
    with (folder / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # killed while it wrote
    return folder


def test_the_json_has_scores_paired_differences_settings_and_queries(runs):
    names = ["small", "large", "stopped"]
    folders = [runs / name for name in names]
    report = json.loads(invoke("compare", *folders, "--json").stdout)
    assert [run["name"] for run in report["runs"]] == names
    assert [run["is_finished"] for run in report["runs"]] == [True, True, False]
    rates = {"small": 1e-5, "large": 3e-3, "stopped": 3e-3}
    assert report["settings"] == {"learning_rate": rates}
    scores = []
    for run in report["runs"][:2]:
        results = read_queries(runs / run["name"], run["scored_step"])
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
    done = invoke("compare", runs / "small", other, "--json")
    mapping = {"small": None, "other": {"question": "query"}}
    assert json.loads(done.stdout)["settings"]["column_mapping"] == mapping


def test_the_page_shows_all_of_it_in_one_file(runs, tmp_path):
    target = tmp_path / "both.html"
    folders = [runs / name for name in ("small", "large", "stopped")]
    out = invoke("compare", *folders, "--output", target).stdout
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


def other_query(content):
    content["queries"][0]["query"]["text"] = "another query"


def larger_corpus(content):
    content["num_documents"] += 59


@pytest.mark.parametrize(
    ("data", "best"), [("40 pairs", "large"), ("9 pairs", "small")]
)
def test_runs_without_results_per_query_are_told_apart_by_their_data(
    runs, tmp_path, data, best
):
    folders = []
    for name, evaluation in (("small", "40 pairs"), ("large", data)):
        folder = tmp_path / name
        folders.append(folder)
        shutil.copytree(runs / name, folder)
        shutil.rmtree(folder / "evaluations")
        change_json(folder / "run.json", evaluation=f"{evaluation}, from {name}.jsonl")
    report = json.loads(invoke("compare", *folders, "--json").stdout)
    assert report["best"] == best


@pytest.mark.parametrize("change", [other_query, larger_corpus])
def test_runs_over_other_data_are_not_paired(runs, tmp_path, change):
    other = tmp_path / "other"
    shutil.copytree(runs / "large", other)
    for path in (other / "evaluations").iterdir():
        content = read_json(path)
        change(content)
        path.write_text(json.dumps(content))
    page = tmp_path / "page.html"
    words = (runs / "small", other, "--json", "--output", page)
    report = json.loads(invoke("compare", *words).stdout)
    message = report["differences"][0]["not_paired"]
    assert "other was evaluated on other data than small" in message
    assert report["best"] == "small", "scores on other data decide nothing"
    assert "evaluated on other data" in page.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [(("small",), "needs two or more"), (("small", "nowhere"), "has no config.yaml")],
)
def test_mistakes_are_one_sentence(runs, words, says):
    folders = [runs / word for word in words]
    err = invoke("compare", *folders, code=2).stderr
    assert says in err and len(err.splitlines()) == 1


def test_a_card_that_was_lost_is_written_again_as_it_was(runs):
    path = runs / "large" / "final" / "README.md"
    before = path.read_text()
    for model in (runs / "large", runs / "large" / "final"):
        path.unlink()
        invoke("card", model)
        assert path.read_text() == before
    done = invoke("card", runs / "stopped", code=2)
    assert "neither the folder of a finished run" in done.stderr
