"""`--json`: alone on standard output, or in a file, for every command whose output a program may read."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import write_config
from tests.tiny import shared, texts, tiny_bert_st
from vembed.cli.support import with_json_target


@pytest.fixture
def folder(vembed):
    """Data and a config in the current folder."""
    write_config(Path.cwd(), "batch_size: 8\n")
    return str(shared(tiny_bert_st))


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["run", "--json", "--nproc", "2"], ["run", "--json=-", "--nproc", "2"]),
        (["run", "--json", "out.json"], ["run", "--json", "out.json"]),
    ],
)
def test_a_file_may_follow(words, value):
    assert with_json_target(words) == value


def read(vembed, *words, code=0):
    """The JSON of a command; what people read is on standard error."""
    done = vembed(*words, "--json")
    assert done.code == code, done.err
    return json.loads(done.out)


def test_versions_config_and_plan(vembed, folder):
    assert {"vembed", "python", "torch"} <= set(read(vembed, "version"))
    config = read(vembed, "config cfg.yaml epochs=2")
    assert (
        config["options"]["epochs"] == 2
        and config["options"]["batch_size"] == 8
        and config["origins"]
    )
    plan = read(vembed, "plan cfg.yaml --memory 80")
    assert plan["fits"] is True and 0 < plan["needed_bytes"] == sum(
        plan["memory_bytes"].values()
    )
    plan = read(vembed, "plan cfg.yaml --memory 0.0001", code=1)
    assert plan["fits"] is False and plan["ways_out"]


def test_scores_and_vectors(vembed, folder):
    scores = read(vembed, "eval", folder, "train.jsonl")
    assert 0 < scores["ndcg@10"] <= 1
    assert vembed("eval", folder, "train.jsonl", "--json", "scores.json").code == 0
    assert json.loads(Path("scores.json").read_text()) == scores
    done = vembed("eval", folder, "train.jsonl", "--json", "nowhere/scores.json")
    assert (
        done.code == 2
        and "is not a folder" in done.err
        and len(done.err.splitlines()) == 1
    )
    encoded = read(
        vembed, "encode", folder, "train.jsonl", "vectors.npy", "--column", "positive"
    )
    assert encoded["num_dims"] > 0 and Path("vectors.npy").is_file()
    merged = read(vembed, "merge", folder, folder, "--output", "merged")
    assert (
        merged["model_dir"].endswith("merged") and merged["recipe"]["method"] == "mean"
    )


def test_data_training_and_search(vembed, folder):
    facts = read(vembed, "data cfg.yaml")
    assert facts["num_examples"] == 16 and facts["sources"][0]["num_examples"] == 16
    assert (
        facts["repetitions"]["queries"]["different"] == 16
        and facts["lengths"]["queries"]["measured"] == 16
    )
    assert read(vembed, "train cfg.yaml --dry-run")["options"]["batch_size"] == 8
    short = ["val_data_path=train.jsonl", "max_steps=1", "report_to=none"]
    trained = read(vembed, "train cfg.yaml", *short)
    assert (
        trained["last_step"] == 1
        and trained["metric"] == "ndcg@10"
        and trained["after"]["ndcg@10"] > 0
    )
    assert (Path(trained["model_dir"]) / "modules.json").is_file()
    actual = read(vembed, "tune cfg.yaml", *short, "--trials", "1")
    assert (
        Path(actual["best_config"]).is_file()
        and len(actual["trials"]) == 1
        and actual["score"] > 0
    )


def test_data_that_are_made(vembed, folder):
    mined = read(
        vembed,
        "mine data_path=train.jsonl",
        f"model_name={folder}",
        "output_path=mined.jsonl",
    )
    assert (
        mined["num_rows"] == 16
        and mined["counts"]["candidates"] > 0
        and Path(mined["output_path"]).is_file()
    )
    audited = read(vembed, "audit data_path=train.jsonl output_path=audit.html")
    assert audited["report"] and audited["output_path"] == "audit.html"
    Path("documents.jsonl").write_text(
        "".join(f'{{"text": "{text}. And {text}."}}\n' for text in texts(8))
    )
    built = read(vembed, "generate corpus_path=documents.jsonl output_path=made.jsonl")
    assert built["num_rows"] == sum(built["kept"].values())
