"""The report: what it says for runs of every kind, and that it is one safe file without script or network."""

import html
import math
import re

import pytest
import yaml

from tests.data.files import write_jsonl
from vembed.config.schema import TrainConfig
from vembed.evaluation.report.record import RunSummary, read_run
from vembed.evaluation.report.report import curves, write_report

VOID = {"meta", "br", "path", "use"}


def parsed(path):
    """The text of a page whose tags are in balance."""
    page = path.read_text()
    for tag in {*re.findall(r"<(\w+)", page)} - VOID:
        opened = re.findall(rf"<{tag}\b[^>]*(?<!/)>", page)
        assert len(opened) == page.count(f"</{tag}>"), tag
    text = re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(text).split())


def step(number, **values):
    line = {
        "step": number,
        "epoch": number / 10,
        "loss": 3 / number,
        "learning_rate": 1e-4 / number,
        "grad_norm": 5.0,
        "samples_per_second": 120.0,
        "tokens_per_second": 9000.0,
        "padding_fraction": 0.05,
        "memory": [{"rank": 0, "device": "cpu", "peak_gb": 1.5}],
    } | values
    line["steps"] = [[number, line["loss"], line["learning_rate"], line["grad_norm"]]]
    return line


def write_run(folder, lines, summary=None, **options):
    folder.mkdir(exist_ok=True)
    named = {"model_name": "org/base-model", "data_path": "train.jsonl"} | options
    config = TrainConfig(**named)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    write_jsonl(folder / "metrics.jsonl", lines)
    if summary is not None:
        summary.save(folder)
    return folder


def evaluation(number, score):
    scores = {}
    for metric in ("ndcg", "mrr", "recall", "map"):
        for prefix, loss in (("", 0), ("dim32/", 0.01), ("dim8/", 0.04)):
            scores[f"{prefix}{metric}@10"] = score - loss
    return {"step": number, "epoch": number / 10, "eval": scores}


LINES = [
    evaluation(0, 0.5),
    *[step(number) for number in range(1, 6)],
    evaluation(5, 0.6),
    *[step(number) for number in range(6, 11)],
]
SUMMARY = RunSummary(
    model="base-model: text_encoder",
    data=["train.jsonl: 500 examples"],
    evaluation="40 queries over 80 documents",
    metric="ndcg@10",
    final_step=10,
    num_examples=500,
    num_parameters=1000,
    num_trainable=250,
    num_processes=2,
    strategy="ddp",
    device="cpu",
    precision="no",
    seconds=75.0,
    finished="2030-01-02",
    versions={"torch": "9.9"},
    decided_options=["mrl_dims"],
    warnings=["3 steps were left out"],
)


@pytest.fixture
def run(tmp_path):
    return write_run(
        tmp_path / "my-run",
        [*LINES, evaluation(10, 0.58)],
        SUMMARY,
        learning_rate=3e-4,
        mrl_dims="auto",
    )


def test_page_and_markdown_tell_the_run(run):
    path = write_report(run)
    assert path == run / "report.html"
    text = parsed(path)
    markdown = (run / "report.md").read_text()
    assert markdown.startswith("# nDCG@10 0.500 -> 0.580\n")
    assert "nDCG@10 0.500 → 0.580 +0.080" in text
    for both in (
        "base-model, fine-tuned on 500 examples in 10 steps and 1 min 15 s.",
        "40 queries over 80 documents",
        "3 steps were left out",
        "250 of 1,000 parameters (25%)",
        "train.jsonl: 500 examples",
        "those after step 10",
        "0.5000",
        "0.5800",
        "+0.0800",
        "learning_rate: 0.0003",
        "torch",
        "9.9",
    ):
        assert both in text, both
        assert both in markdown, both
    by_user, decided = re.split("Decided by vembed", markdown)
    assert "learning_rate" in by_user and "mrl_dims" in decided
    assert "mrl_dims" not in by_user
    assert path.read_text().count("<svg") == 7, "six curves and the evaluations"
    assert "| 8 | 0.4600 | 0.5400 | +0.0800 | 93.1% |" in markdown


def test_one_file_without_script_or_network_readable_on_a_phone(run):
    page = write_report(run).read_text()
    assert '<meta name="viewport" content="width=device-width' in page
    assert "<script" not in page
    for link in re.findall(r'(?:src|href|srcset|action|data)="([^"]*)"', page):
        assert link.startswith("#"), "nothing is fetched"
    assert not re.search(r"(?i)\bon\w+\s*=", page)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", page)


def test_the_weights_that_were_kept_count_not_the_last_ones(run):
    RunSummary(final_step=5, metric="ndcg@10").save(run)
    assert read_run(run).after["ndcg@10"] == pytest.approx(0.6)
    write_report(run)
    assert (run / "report.md").read_text().startswith("# nDCG@10 0.500 -> 0.600\n")


def test_what_comes_from_the_user_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>&<b>"
    summary = RunSummary(
        properties=[evil],
        data=[evil],
        evaluation=evil,
        warnings=[evil],
        versions={evil: evil},
    )
    names = dict.fromkeys(["run_name", "query_prompt", "model_name"], evil)
    run = write_run(tmp_path / "run", LINES, summary, **names)
    text = parsed(write_report(run))
    assert "<script" not in (run / "report.html").read_text()
    assert text.count("<script>alert('x')</script>&<b>") >= 6
    markdown, _, settings = (run / "report.md").read_text().partition("```yaml")
    assert "<" not in markdown + settings.partition("```")[2]
    assert markdown.count("&lt;script>alert('x')&lt;/script>&amp;&lt;b>") >= 4


def test_secrets_are_masked_in_both_reports(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKER_TOKEN", "a-token-of-mine")
    address = "https://me:a-password@host/data.jsonl"
    run = write_run(
        tmp_path / "run",
        LINES,
        RunSummary(warnings=["hf_abcdefghijkl is not valid"]),
        query_prompt="a-token-of-mine",
        val_data_path=address,
    )
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["tracker_options"] = {"api_key": "another key"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    write_report(run)
    for name in ("report.html", "report.md"):
        text = (run / name).read_text()
        for secret in ("a-token-of-mine", "a-password", "hf_abc", "another key"):
            assert secret not in text
        assert "query_prompt" in text and "micro_batch_tokens: ***" not in text


@pytest.mark.parametrize(
    ("num_steps", "title"), [(3, "Not evaluated"), (0, "No step was logged")]
)
def test_a_run_without_evaluation_says_so_and_how_to_get_one(
    tmp_path, num_steps, title
):
    lines = [step(number) for number in range(1, num_steps + 1)]
    run = write_run(tmp_path / "run", lines)
    text = parsed(write_report(run))
    assert title in text and "val_split: 0.1" in text
    assert (run / "report.md").read_text().startswith(f"# {title}\n")


def test_a_torn_last_line_and_numbers_that_are_none(tmp_path):
    lines = [step(1), step(2, loss=None, grad_norm=None), step(3)]
    run = write_run(tmp_path / "run", lines)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')
    assert [line["step"] for line in read_run(run).steps] == [1, 2, 3]
    parsed(write_report(run))


def test_long_runs_stay_small(tmp_path):
    lines = [step(number, loss=2 + math.sin(number)) for number in range(1, 5_001)]
    run = write_run(tmp_path / "run", lines)
    assert len(write_report(run).read_text()) < 500_000
    (loss, *_) = curves(read_run(run))
    assert len(loss.steps) <= 151
    assert (loss.steps[-1], loss.values[-1]) == (5_000, 2 + math.sin(5_000))
    assert sum(loss.values) / len(loss.values) == pytest.approx(2, abs=0.01)
