"""Finished runs: nothing replaces one unasked, and every verb that takes a model finds the one inside a run."""

import hashlib
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import on_ranks, write_config
from tests.commands import command
from tests.tiny import read_json
from tests.training.test_run import metrics
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


@pytest.mark.parametrize("is_damaged", [False, True])
def test_resuming_a_finished_run_with_nothing_left_changes_no_file(
    vembed, run, is_damaged
):
    if is_damaged:
        next(Path("run/checkpoint-6").glob("*.safetensors")).write_bytes(b"")
    before = contents("run")
    done = vembed("train", run, "--resume", "max_steps=5")
    assert "nothing is left to train: a finished run (7 steps" in done.out
    assert "-> auto" not in done.out, "what is decided again has not changed"
    assert contents("run") == before


def test_a_finished_run_goes_on_where_more_steps_are_asked_for(vembed, run):
    before = metrics("run")
    vembed("train", run, "--resume", "max_steps=8", "lr_scheduler_type=linear")
    after = metrics("run")
    assert len(after) == 8
    assert after[:6] == before[:6]


def test_a_finished_run_is_replaced_only_on_request(vembed, refused, run):
    for path in Path("run").glob("checkpoint-*"):
        shutil.rmtree(path)
    before = contents("run")
    refused(
        f"train {run} save_steps=null",
        "output_dir: run holds a finished run (7 steps, ",
        "--overwrite",
        "{model}-{time}",
    )
    refused(f"train {run} --resume max_steps=9", "so 9 steps cannot go on from it")
    refused(f"train {run} --resume --overwrite")
    assert contents("run") == before
    vembed("train", run, "--overwrite", "max_steps=3", "save_steps=null")
    assert len(metrics("run")) == 3
    assert read_json("run/run.json")["num_steps"] == 3


def test_output_dir_may_be_a_template(vembed, refused, run):
    words = f"train {run} max_steps=1 save_steps=null output_dir=runs/"
    vembed(words + "{model}-{data}-{seed}-{time}")
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("tiny_bert_st") and "-train-42-2" in folder.name
    assert (folder / "final").is_dir()
    refused(words + "{name}", "{name} is not known", "{model}, {data}")
    refused(words + "{time} --resume", "{time} names a new folder at each start")
    shutil.rmtree("runs")
    several = f"{words}{{time}} --nproc 2 --json"
    started = command(*several.split(), code=0)
    (folder,) = Path("runs").iterdir()
    assert str(folder / "final") in started.stdout


def test_all_ranks_expand_a_template_to_one_folder():
    sources = [DataSource(path="a/faq.csv")]
    values = {"model_name": "org/some-model", "data_path": sources}
    folders = set()
    for rank in ("0", "1"):
        env = {"LOCAL_RANK": rank}
        folders.add(expand_output_dir("{model}-{data}-{time}", values, env))
    (folder,) = folders
    assert folder.startswith("some-model-faq-2")
    several = {"LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match="between the machines"):
        expand_output_dir("{time}", values, several)


def test_a_resumed_run_keeps_its_global_batch_on_more_processes(run):
    whole = metrics("run")
    shutil.rmtree("run/final")
    shutil.rmtree("run/checkpoint-6")
    done, _ = on_ranks("train", run, "--resume")
    assert done.code == 0, done.err
    assert "global batch: 8 examples, as in the checkpoint" in done.out
    assert metrics("run") == pytest.approx(whole, rel=1e-4)
    ranks = on_ranks("train", run, "--resume", "batch_size=6", "max_steps=9")
    assert [done.code for done in ranks] == [2, 2]
    assert "global_batch_size 8 -> 12" in ranks[0].err


def test_verbs_take_a_run_and_a_checkpoint(vembed, refused, run):
    vembed("eval run train.jsonl --json run.json")
    vembed("eval run/final train.jsonl --json final.json")
    assert Path("run.json").read_text() == Path("final.json").read_text()
    vembed("export run/checkpoint-6 model")
    words = "train.jsonl vectors.npy --column query"
    vembed(f"encode model {words}")
    said = "vembed export run/checkpoint-6 FOLDER"
    refused(f"encode run/checkpoint-6 {words}", said)
    vembed("export run copy")
    assert sorted(contents("copy").values()) == sorted(contents("run/final").values())
    shutil.rmtree("run/final")
    refused("eval run train.jsonl", "run is a run that has not finished")
    refused("export run other")
    Path("empty").mkdir()
    Path("empty/config.json").write_text("{}")
    refused("export empty other", "has no weights")
    assert not Path("other").exists()


def test_a_killed_run_gets_a_report(vembed, refused, run):
    for name in ("run.json", "report.html", "report.md"):
        Path("run", name).unlink()
    shutil.rmtree("run/final")
    vembed("report run")
    assert "in 7 steps" in Path("run/report.md").read_text()
    refused("report elsewhere", "not the folder of a run")
