"""`--json`: alone on standard output, or in a file, for every command whose output a program may read."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import write_config
from tests.data.files import write_jsonl
from tests.tiny import read_json, shared, texts, tiny_bert_st


@pytest.fixture
def folder(vembed):
    """Data and a config in the current folder."""
    write_config(Path.cwd(), "batch_size: 8\n")
    return str(shared(tiny_bert_st))


@pytest.fixture
def read(vembed):
    """The JSON of a command; what people read is on standard error."""

    def run(text, *words, code=0):
        return json.loads(vembed(text, "--json", *words, code=code).out)

    return run


def test_versions_config_and_plan(read, folder):
    assert {"vembed", "python", "torch"} <= set(read("version"))
    config = read("config cfg.yaml epochs=2")
    assert config["options"]["epochs"] == 2
    assert config["options"]["batch_size"] == 8
    assert config["origins"]
    plan = read("plan cfg.yaml", "--memory", "80")
    assert plan["fits"] is True
    assert 0 < plan["needed_bytes"] == sum(plan["memory_bytes"].values())
    plan = read("plan cfg.yaml --memory 0.0001", code=1)
    assert plan["fits"] is False and plan["ways_out"]


def test_scores_and_vectors(vembed, read, refused, folder):
    words = f"eval {folder} train.jsonl"
    scores = read(words)
    assert 0 < scores["ndcg@10"] <= 1
    vembed(words, "--json", "scores.json")
    assert read_json("scores.json") == scores
    done = refused(f"{words} --json nowhere/scores.json", "is not a folder")
    assert len(done.err.splitlines()) == 1
    encoded = read(f"encode {folder} train.jsonl vectors.npy --column positive")
    assert encoded["num_dims"] > 0 and Path("vectors.npy").is_file()
    merged = read(f"merge {folder} {folder} --output merged")
    assert merged["model_dir"].endswith("merged")
    assert merged["recipe"]["method"] == "mean"


def test_data_training_and_search(read, folder):
    facts = read("data cfg.yaml")
    assert facts["num_examples"] == facts["sources"][0]["num_examples"] == 16
    assert facts["repetitions"]["queries"]["different"] == 16
    assert facts["lengths"]["queries"]["measured"] == 16
    assert read("train cfg.yaml --dry-run")["options"]["batch_size"] == 8
    words = "cfg.yaml val_data_path=train.jsonl max_steps=1 report_to=none"
    trained = read(f"train {words}")
    assert trained["last_step"] == 1 and trained["metric"] == "ndcg@10"
    assert trained["after"]["ndcg@10"] > 0
    assert (Path(trained["model_dir"]) / "modules.json").is_file()
    tuned = read(f"tune {words} --trials 1")
    assert Path(tuned["best_config"]).is_file()
    assert len(tuned["trials"]) == 1 and tuned["score"] > 0


def test_data_that_are_made(read, folder):
    words = f"data_path=train.jsonl model_name={folder} output_path=mined.jsonl"
    mined = read(f"mine {words}")
    assert mined["num_rows"] == 16 and mined["counts"]["candidates"] > 0
    assert Path(mined["output_path"]).is_file()
    audited = read("audit data_path=train.jsonl output_path=audit.html")
    assert audited["report"] and audited["output_path"] == "audit.html"
    documents = [{"text": f"{text}. And {text}."} for text in texts(8)]
    write_jsonl(Path("documents.jsonl"), documents)
    built = read("generate corpus_path=documents.jsonl output_path=made.jsonl")
    assert built["num_rows"] == sum(built["kept"].values())
