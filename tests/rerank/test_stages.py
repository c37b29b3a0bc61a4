"""examples/rerank: mining, a reranker, its judgement and an embedder that learns from it, by one command."""

import yaml

from tests.commands import command
from tests.data.files import text_records, write_jsonl
from tests.docs.pages import ROOT
from tests.tiny import shared, tiny_bert
from tests.training.test_run import metrics


def test_the_example_runs_and_resumes(tmp_path):
    folder = tmp_path / "demo" / "data"
    folder.mkdir(parents=True)
    records = text_records(48)
    write_jsonl(folder / "train.jsonl", records[:32])
    write_jsonl(folder / "val.jsonl", records[32:])
    example = (ROOT / "examples" / "rerank" / "stages.yaml").read_text()
    model = str(shared(tiny_bert))
    example = example.replace("sentence-transformers/all-MiniLM-L6-v2", model)
    example = example.replace("max_length: 128", "max_length: 64")
    for size in (32, 64):
        example = example.replace(f"batch_size: {size}", "batch_size: 8")
    (tmp_path / "stages.yaml").write_text(example)

    def train(*more):
        options = ("max_steps=2", "report_to=none", "strategy=single")
        words = ("train", "stages.yaml", *options, *more)
        done = command(*words, folder=tmp_path, code=0)
        return done.stdout + done.stderr

    train("--dry-run")
    train("--until", "reranker")
    output = train()
    assert output.count("done already") == 3
    runs = tmp_path / "runs" / "rerank"
    for name in ("retriever", "reranker", "distilled"):
        config = yaml.safe_load((runs / name / "config.yaml").read_text())
        assert config["model_name"] == model
    for name in ("negatives/mined.jsonl", "judged/judged.jsonl"):
        assert len((runs / name).read_text().splitlines()) == 32
    assert metrics(runs / "reranker", "eval")[-1]["first_stage/ndcg@10"] > 0
    report = (runs / "stages.md").read_text()
    assert "| judged | judge | done |" in report
    assert "ndcg@10" in report.split("| distilled |")[1]
