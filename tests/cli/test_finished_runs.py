"""Finished runs: nothing replaces one unasked, and every verb that takes a model finds the one inside a run."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import losses, on_ranks, write_config
from vembed.config.loading import expand_output_dir
from vembed.config.schema import DataSource
from vembed.entrypoints.python_train import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with data, a config and a run of 7 steps with checkpoints after steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    more = "batch_size: 8\nmax_steps: 7\nsave_steps: 2\noutput_dir: run\n"
    train(write_config(folder, more), [f"output_dir={folder}/run"])
    return folder


@pytest.fixture
def run(vembed, finished):
    """A copy of the finished run in the current folder."""
    shutil.copytree(finished, ".", dirs_exist_ok=True)
    return "cfg.yaml"


def contents(folder):
    """Checksums of all files but the log."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != "training_log.txt"
    }


@pytest.mark.parametrize("words", [("max_steps=5",), ("max_steps=5", "damaged")])
def test_resuming_a_finished_run_with_nothing_left_changes_no_file(vembed, run, words):
    if "damaged" in words:
        next(Path("run/checkpoint-6").glob("*.safetensors")).write_bytes(b"")
    before = contents("run")
    done = vembed("train", run, "--resume", words[0])
    assert done.code == 0, done.err
    assert "nothing is left to train: a finished run (7 steps" in done.out
    assert "-> auto" not in done.out, "what is decided again has not changed"
    assert contents("run") == before


def test_a_finished_run_goes_on_where_more_steps_are_asked_for(vembed, run):
    before = losses("run")
    done = vembed("train", run, "--resume", "max_steps=8", "lr_scheduler_type=linear")
    assert done.code == 0, done.err
    assert len(losses("run")) == 8
    assert losses("run")[:6] == before[:6]


def test_a_finished_run_is_replaced_only_on_request(vembed, run):
    for path in Path("run").glob("checkpoint-*"):
        shutil.rmtree(path)
    before = contents("run")
    done = vembed("train", run, "save_steps=null")
    assert done.code == 2
    assert "output_dir: run holds a finished run (7 steps, " in done.err
    assert "--overwrite" in done.err and "{model}-{time}" in done.err
    assert contents("run") == before
    done = vembed("train", run, "--resume", "max_steps=9")
    assert (
        done.code == 2
        and "without a checkpoint, so 9 steps cannot go on from it" in done.err
    )
    assert contents("run") == before
    assert vembed("train", run, "--resume", "--overwrite").code == 2
    done = vembed("train", run, "--overwrite", "max_steps=3", "save_steps=null")
    assert done.code == 0, done.err
    assert len(losses("run")) == 3
    assert json.loads(Path("run/run.json").read_text())["num_steps"] == 3


def test_output_dir_may_be_a_template(vembed, run):
    done = vembed(
        "train",
        run,
        "output_dir=runs/{model}-{data}-{seed}-{time}",
        "max_steps=1",
        "save_steps=null",
    )
    assert done.code == 0, done.err
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("tiny_bert_st") and "-train-42-2" in folder.name
    assert (folder / "final").is_dir()
    done = vembed("train", run, "output_dir=runs/{name}")
    assert (
        done.code == 2
        and "{name} is not known; a folder's name may contain {model}, {data}"
        in done.err
    )
    done = vembed("train", run, "output_dir=runs/{time}", "--resume")
    assert done.code == 2 and "{time} names a new folder at each start" in done.err


def test_all_ranks_expand_a_template_to_one_folder(vembed):
    values = {
        "model_name": "org/some-model",
        "data_path": [DataSource(path="a/faq.csv")],
    }
    first = expand_output_dir("{model}-{data}-{time}", values, {"LOCAL_RANK": "0"})
    assert first.startswith("some-model-faq-2")
    assert (
        expand_output_dir("{model}-{data}-{time}", values, {"LOCAL_RANK": "1"}) == first
    )


def test_a_resumed_run_keeps_its_global_batch_on_more_processes(vembed, run):
    whole = losses("run")
    shutil.rmtree("run/final")
    shutil.rmtree("run/checkpoint-6")
    done, _ = on_ranks("train", run, "--resume")
    assert done.code == 0, done.err
    assert (
        "global batch: 8 examples, as in the checkpoint (batch_size: 8 x 2 process(es) would be 16)"
        in done.out
    )
    assert losses("run") == pytest.approx(whole, rel=1e-4)
    refused = on_ranks("train", run, "--resume", "batch_size=6", "max_steps=9")
    assert [done.code for done in refused] == [2, 2]
    assert "global_batch_size 8 -> 12" in refused[0].err


def test_verbs_take_a_run_and_a_checkpoint(vembed, run):
    final = vembed("eval run train.jsonl --json run.json")
    assert final.code == 0, final.err
    assert vembed("eval run/final train.jsonl --json final.json").code == 0
    assert Path("run.json").read_text() == Path("final.json").read_text()
    done = vembed("export run/checkpoint-6 model")
    assert done.code == 0, done.err
    assert vembed("encode model train.jsonl model.npy --column query").code == 0
    done = vembed("encode run/checkpoint-6 train.jsonl out.npy --column query")
    assert done.code == 2 and "vembed export run/checkpoint-6 FOLDER" in done.err
    assert vembed("export run copy").code == 0
    assert sorted(contents("copy").values()) == sorted(contents("run/final").values())
    shutil.rmtree("run/final")
    done = vembed("eval run train.jsonl")
    assert done.code == 2
    assert "is a run that has not finished, so it has no final/: resume it" in done.err
    assert vembed("export run other").code == 2 and not Path("other").exists()
    Path("empty").mkdir()
    Path("empty/config.json").write_text("{}")
    done = vembed("export empty other")
    assert (
        done.code == 2 and "has no weights" in done.err and not Path("other").exists()
    )


def test_a_killed_run_gets_a_report(vembed, run):
    for name in ("run.json", "report.html", "report.md"):
        Path("run", name).unlink()
    shutil.rmtree("run/final")
    done = vembed("report run")
    assert done.code == 0, done.err
    assert "in 7 steps" in Path("run/report.md").read_text()
    done = vembed("report elsewhere")
    assert done.code == 2 and "not the folder of a run" in done.err
