"""`stages:` from the command: the steps in order, each once, resumed in the middle, with steps between."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

import vembed
from tests.commands import start
from tests.data.files import read_jsonl
from tests.guides import STAGE_ONE
from tests.harness import run_ranks
from tests.tiny import change_json, read_json, shared, tiny_bert, tiny_bert_st
from tests.training.test_run import metric_lines
from tests.weights.variants import pairs
from vembed.cli.arguments import TrainArguments
from vembed.cli.main import run_process
from vembed.config.loading import chosen_pipeline
from vembed.errors import UserError
from vembed.pipelines.stages import _StageRun

COMMON = {
    "model_name": str(shared(tiny_bert_st)),
    "data_path": "train.jsonl",
    "batch_size": 4,
    "max_steps": 2,
    "report_to": "none",
    "strategy": "single",
    "save_steps": 1,
}
MINE = {"data_path": "train.jsonl", "num_negatives": 2}
EVALUATE = {"data": "val.jsonl"}
SCORED = {**EVALUATE, "require": {"nDCG@10": ">= 0.0"}}

# Stages of many of the lists.
BROAD = {"name": "broad"}
NEGATIVES = {"name": "negatives", "mine": MINE}
SHARP = {"name": "sharp"}
CHECK = {"name": "check", "evaluate": SCORED}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pairs(tmp_path / "train.jsonl", 24)
    pairs(tmp_path / "val.jsonl", 8)
    return tmp_path


def written(stages, **options):
    config = {**COMMON, **options, "stages": stages}
    Path("cfg.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


@pytest.fixture
def train(place, capsys):
    """Runs `vembed train cfg.yaml WORDS` in this process; returns what it prints and what it says."""

    def run(*words, code=0, config="cfg.yaml"):
        capsys.readouterr()
        assert run_process("train", [config, *words]) == code
        return capsys.readouterr()

    return run


def states():
    states = {}
    for path in Path("output").glob("*/stage.json"):
        states[path.parent.name] = read_json(path)["state"]
    return states


def assert_done(*names):
    assert states() == dict.fromkeys(names, "done")


def losses(folder):
    rows = metric_lines(folder)
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


# ---- the list --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"name": "a"}, {"name": "a"}], "stage a: give each stage a name"),
        ([{"name": "a", "from": "b"}], "starts from b"),
        ([NEGATIVES, {"name": "a", "from": "negatives"}], "starts from negatives"),
        (["a"], "must be a list of stages with their options"),
    ],
)
def test_mistakes_in_the_list(stages, message):
    with pytest.raises(UserError, match=message):
        chosen_pipeline({"stages": stages})


SOUP = {"models": ["broad", "."], "method": "soup"}
MISTAKES = [
    ({"data_path": "trian.jsonl"}, "data_path: trian.jsonl does not exist"),
    ({"evaluate": {"data": "vall.jsonl"}}, "stage last: data: vall.jsonl"),
    ({"evaluate": {**EVALUATE, "nproc": "two"}}, "'--nproc'"),
    ({"evaluate": {**EVALUATE, "model": "brod"}}, "did you mean 'broad'?"),
    ({"mine": {"data_path": "train.jsonl", "num_negative": 3}}, "'num_negatives'?"),
    (
        {"loss": "relational", "teacher": "broad"},
        "stage last: teacher: broad is a stage: give its model, output/broad/final",
    ),
    ({"merge": SOUP}, "a soup chooses by evaluation data"),
]


@pytest.mark.parametrize(("step", "message"), MISTAKES)
def test_a_mistake_in_the_last_step_ends_the_command_before_the_first_one(
    train, step, message
):
    written([BROAD, {"name": "last", **step}])
    output = train(code=2).err
    assert message in output and output.count("error:") == 1
    assert not Path("output").exists()


def test_steps_before_any_training_take_the_model_of_the_config(
    place, train, monkeypatch
):
    """From another folder: their paths are also found beside the config."""
    model = str(shared(tiny_bert_st))
    check = {**EVALUATE, "ks": [10], "require": {"nDCG@10": 0.0}}
    retrieved = {"data_path": "train.jsonl", "retrievers": [model]}
    base = {"name": "base", "evaluate": check}
    written([{"name": "both", "mine": retrieved}, base, NEGATIVES])
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    for words, name in (((), model), (("model_name=other",), "other")):
        printed = train("--dry-run", *words, config="../cfg.yaml").out
        assert f"would run: vembed eval {name} ../val.jsonl" in printed
    train(config="../cfg.yaml")
    assert_done("both", "base", "negatives")
    # Those that take the model of the config run again with another one.
    shutil.copytree(model, "other")
    change_json(Path("other/config_sentence_transformers.json"), prompts={"query": "q"})
    log = train("model_name=other", config="../cfg.yaml").err
    assert re.findall(r"stage (\w+): what it", log) == ["base", "negatives"]
    assert "stage both: done already" in log


# ---- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("C20")
def test_stages_run_once_in_order_and_again_where_something_changed(place, train):
    sharp = {**SHARP, "learning_rate": 1e-3, "mixed_precision": "no"}
    merge = {"models": ["broad", "sharp"], "method": "slerp"}
    stages = [BROAD, sharp, {"name": "mix", "merge": merge}, CHECK]
    written(stages)
    train()
    assert_done("broad", "sharp", "mix", "check")
    config = vembed.load_config("output/sharp/config.yaml")
    assert config.model.model_name == "output/broad/final"
    merged = read_json("output/mix/final/merge.json")
    assert merged["models"] == ["output/broad/final", "output/sharp/final"]
    report = Path("output/stages.md").read_text()
    assert "| check | evaluate | done |" in report and "ndcg@10" in report
    weights = Path("output/broad/final/model.safetensors")
    written_at = weights.stat().st_mtime_ns
    assert train().err.count("done already") == 4
    assert weights.stat().st_mtime_ns == written_at
    assert "done already" not in train("--until", "sharp", "overwrite=yes").err
    written_at = weights.stat().st_mtime_ns
    sharp["learning_rate"] = 2e-3
    written(stages)
    assert train().err.count("done already") == 1
    assert Path("output/sharp.old-1/final").is_dir()
    assert weights.stat().st_mtime_ns == written_at
    pairs(place / "train.jsonl", 20)  # other data: everything anew
    assert "done already" not in train("--until", "broad").err
    assert Path("output/broad.old-1").is_dir()


def test_a_stage_runs_again_where_what_it_left_is_damaged(train):
    soup = {"models": ["broad", str(shared(tiny_bert_st))]}
    written([BROAD, NEGATIVES, {"name": "soup", "merge": soup}])
    train()
    weights = Path("output/broad/final/model.safetensors")
    mined = Path("output/negatives/mined.jsonl")
    merged = Path("output/soup/final/model.safetensors")
    whole = {path: path.read_bytes() for path in (weights, mined, merged)}

    def repairs(*stages_that_run):
        log = train().err
        assert log.count("done already") == 3 - len(stages_that_run)
        for stage in stages_that_run:
            assert f"stage {stage}: output/{stage}" in log
        assert {path: path.read_bytes() for path in whole} == whole

    flipped = bytearray(whole[weights])
    flipped[-5] ^= 1
    weights.write_bytes(flipped)
    # The user may have changed it on purpose.
    assert "delete output/broad/final" in train(code=2).err
    shutil.rmtree("output/broad/final")
    mined.write_bytes(whole[mined][: len(whole[mined]) // 2])
    repairs("broad", "negatives")
    shutil.rmtree("output/soup/final")
    repairs("soup")
    repairs()


def test_a_stage_runs_again_where_what_ends_it_or_its_teacher_has_changed(place, train):
    teacher = place / "teacher"
    shutil.copytree(shared(tiny_bert_st), teacher)
    guard = {"path": "val.jsonl", "max_drop": 1.0}
    patient = {"name": "patient", "patience": 9, "load_best_model_at_end": False}
    guarded = {"name": "guarded", "from": "patient", "guards": [guard]}
    taught = {"name": "taught", "from": "patient", "loss": "relational"}
    taught["teacher"] = str(teacher)

    def run_again():
        """Return the stages that run again."""
        stages = [patient, guarded, taught]
        written(stages, val_data_path="val.jsonl", eval_steps=1)
        return re.findall(r"stage (\w+): what it depends on", train().err)

    assert run_again() == run_again() == []
    guard["max_drop"] = 0.9
    assert run_again() == ["guarded"]
    path = teacher / "config_sentence_transformers.json"
    change_json(path, prompts={"query": "find: "})
    assert run_again() == ["taught"]
    patient["patience"] = 8
    assert run_again() == ["patient", "guarded", "taught"]


def test_other_names_of_options_say_where_stages_are_and_what_they_start_from(
    place, train
):
    other = place / "other"
    shutil.copytree(shared(tiny_bert_st), other)
    last = {"name": "c", "model": str(other)}
    stages = [{"name": "a"}, {"name": "b"}, {"evaluate": EVALUATE}, last]
    written(stages, output="there")

    def planned(*words):
        """The model that each training would start from."""
        printed = train("--dry-run", *words).out
        return re.findall(r"^model_name: (\S+)", printed, re.MULTILINE)

    base = str(shared(tiny_bert_st))
    assert planned() == [base, "there/a/final", str(other)]
    words = ("output=moved", f"model={other}", "--until", "b")
    assert planned(*words) == [str(other), "moved/a/final"]


def road_on_a_rank(folder):
    """Called on every rank, in an environment as torchrun sets it."""
    os.chdir(folder)
    return run_process("train", ["cfg.yaml"])


@pytest.mark.promise("C20")
def test_under_torchrun_all_steps_run_in_the_processes_that_are_there(place):
    stages = [
        {**BROAD, "strategy": "ddp"},
        NEGATIVES,
        {**SHARP, "strategy": "fsdp"},
        {"name": "mix", "merge": {"models": ["broad", "sharp"]}},
        CHECK,
    ]
    written(stages, strategy="auto")
    assert run_ranks(road_on_a_rank, 2, str(place)) == [0, 0]
    assert_done("broad", "negatives", "sharp", "mix", "check")
    config = vembed.load_config("output/sharp/config.yaml")
    assert config.data.data_path == "output/negatives/mined.jsonl"
    for stage, strategy in (("broad", "ddp"), ("sharp", "fsdp")):
        facts = read_json(f"output/{stage}/run.json")
        assert (facts["num_processes"], facts["strategy"]) == (2, strategy)
    scores = read_json("output/check/stage.json")["scores"]
    assert f"ndcg@10 {scores['ndcg@10']:.4f}" in Path("output/stages.md").read_text()


def test_a_run_that_falls_short_stops_there_and_says_so(train):
    scored = {**EVALUATE, "require": {"nDCG@10": "> 1.0"}}
    written([BROAD, {"name": "check", "evaluate": scored}, SHARP])
    messages = train(code=1).err
    assert "stage check: nDCG@10 is" in messages and "> 1 is required" in messages
    assert states() == {"broad": "done", "check": "started"}
    assert "broad" in Path("output/stages.md").read_text()


def test_parts_of_the_list_and_a_dry_run(train):
    merge = {"models": ["broad"], "base": "b", "interpolate": 0.5}
    written([BROAD, {"merge": merge}, SHARP])
    messages = train("--dry-run").out
    assert (
        messages.index("==== broad (train)")
        < messages.index("would run: vembed merge")
        < messages.index("==== sharp (train)")
    )
    assert "model_name: output/merge-2/final" in messages
    assert not Path("output").exists()
    train("--stage", "broad", "output_dir=one")
    assert Path("one/broad/final").is_dir()
    said = train("--from", "broad", "--until", "broad", "output_dir=two").err
    assert "stages: broad done, 1 of 3; report: " in said
    assert Path("two/broad/final").is_dir()
    for words, message in (
        ("--from sharp --until broad", "stands after --until"),
        ("--until nowhere", "has the stages broad, merge-2, sharp"),
        ("--stage nowhere", "--stage NAME: broad, sharp"),
    ):
        assert message in train(*words.split(), code=2).err


def test_a_teacher_of_another_output_dir_is_named(train):
    taught = {"name": "last", "loss": "relational", "teacher": "output/broad/final"}
    written([BROAD, taught])
    train("--stage", "broad")
    assert "another run" not in train("--dry-run").err
    said = train("--dry-run", "output_dir=other").err
    assert "another run: stage broad of this one leaves other/broad/final" in said


def test_a_step_whose_earlier_one_has_not_run_names_it(train):
    written([BROAD, NEGATIVES, CHECK])
    for name in ("negatives", "check"):
        error = train("--from", name, code=2).err
        assert f"stage {name}" in error
        assert "output/broad/final" in error
        assert "--from broad" in error
    assert not Path("output").exists()


def test_a_plan_of_one_stage(place, capsys):
    written([BROAD, NEGATIVES, {**SHARP, "batch_size": 8}, CHECK])
    assert run_process("plan", ["cfg.yaml"]) == 2
    assert "choose with --stage NAME: broad, sharp" in capsys.readouterr().err
    # What earlier stages make is not there yet.
    model = f"model_name={shared(tiny_bert_st)}"
    words = ["cfg.yaml", "--stage", "sharp", model, "data_path=train.jsonl"]
    json_words = ["--json", "plan.json", "--gpu", "A100-80GB"]
    assert run_process("plan", [*words, *json_words]) == 0
    assert read_json("plan.json")["fits"]
    assert re.search(r"rows of each process +8\n", capsys.readouterr().out)
    assert not Path("output").exists()
    assert run_process("plan", [*words, "--memory", "0.001"]) == 1
    assert ": does not fit" in capsys.readouterr().out


@pytest.fixture
def started(monkeypatch):
    """The commands that are started on several processes. Each fails at once."""
    commands = []

    def note(command, _):
        commands.append(command)
        return 1

    monkeypatch.setattr("vembed.parallel.launch.run_ranks", note)
    monkeypatch.setattr("sys.argv", ["vembed", "train", "cfg.yaml"])
    return commands


def test_a_step_between_on_several_processes_gets_its_own_words(train, started):
    check = {**EVALUATE, "nproc": 2}
    written([BROAD, {"name": "check", "evaluate": check}])
    train(code=1)
    words = "output/broad/final val.jsonl --json output/check/scores.json --nproc 2"
    assert started[0][2:] == ["vembed", "eval", *words.split()]


def test_a_mining_takes_several_files_and_processes(train, started):
    paths = ["train.jsonl", "val.jsonl"]
    mine = {**MINE, "data_path": paths, "retrievers": ["bm25"], "nproc": 2}
    written([{"name": "negatives", "mine": mine}, BROAD])
    train(code=1)
    assert started[0][2:4] == ["vembed", "mine"]
    assert {"--nproc=2", f"data_path={json.dumps(paths)}"} <= set(started[0])


def test_a_mining_reads_the_data_of_the_run_as_the_run_does(place):
    del place
    mine = {"num_negatives": 2, "retrievers": ["bm25"]}
    judge = {"judges": [{"model": "broad"}]}
    stages = [
        BROAD,
        {"name": "negatives", "mine": mine},
        {"name": "judged", "judge": judge},
        {**BROAD, "name": "narrow"},
    ]
    mapping = {"question": "query"}
    written(stages, retrieval_mode="t2t", column_mapping=mapping)
    pipeline = chosen_pipeline("cfg.yaml", ())
    arguments = TrainArguments(source="cfg.yaml", overrides=("data_path=val.jsonl",))
    runs = [_StageRun(pipeline, stage, arguments) for stage in pipeline.stages]
    _, words = runs[1].command()
    assert "data_path=val.jsonl" in words
    reading = {"retrieval_mode=t2t", f"column_mapping={json.dumps(mapping)}"}
    assert reading <= set(words)
    assert reading <= set(runs[2].command()[1])
    # The first training reads the command line's data, and the last one what was mined of them.
    assert "data_path=val.jsonl" in runs[0].arguments.overrides
    assert "data_path=val.jsonl" not in runs[3].arguments.overrides


def test_a_mining_before_any_training_reads_inputs_as_the_run_does(train):
    entries = [{"path": "train.jsonl", "query_prompt": "ask: "}, "val.jsonl"]
    first = {"name": "first", "mine": {"num_negatives": 2}}
    prompts = {"query_prompt": "query: ", "max_length": 64}
    written([first, BROAD, NEGATIVES], data_path=entries, **prompts)
    first, trained = re.findall("would run: vembed mine (.*)", train("--dry-run").out)
    assert f"data_path={json.dumps(entries)}" in first
    assert " query_prompt=query:  max_length=64 " in first
    # The model that is trained has them.
    assert "_prompt" not in trained and "max_length" not in trained


def test_stages_are_named_among_retrievers_and_judges(train):
    retrievers = ["bm25", {"model": "broad", "weight": 2.0}, "soup"]
    judges = [{"model": "broad"}, {"model": "soup", "base_url": "http://127.0.0.1:1"}]
    merge = {"models": ["broad"], "base": "broad", "interpolate": 0.5}
    stages = [
        BROAD,
        {"name": "soup", "merge": merge},
        {"name": "negatives", "mine": {"retrievers": retrievers, "judges": judges}},
        {"name": "again", "mine": {"model_name": "broad"}},
    ]
    written(stages)
    commands = train("--dry-run").out
    assert "--base output/broad/final" in commands
    words = commands.partition("vembed mine ")[2].partition(" output_path")[0]
    assert (
        '{"model": "output/broad/final", "weight": 2.0}, "output/soup/final"]' in words
    )
    assert '[{"model": "output/broad/final"}, {"model": "soup", "base_url"' in words
    assert "model_name=output/broad/final" in commands
    retrievers[2] = "soop"
    written(stages)
    error = train(code=2).err
    assert "stage negatives: retrievers: soop" in error
    assert "did you mean 'soup'" in error


def test_python_runs_all_stages_and_mines_between(place, monkeypatch):
    monkeypatch.setattr("vembed.cli.run_train.run_ranks", None)  # all in this process
    records = read_jsonl("train.jsonl")
    pairs_only = [{key: row[key] for key in ("query", "positive")} for row in records]
    stages = [
        {**BROAD, "data_path": pairs_only},
        NEGATIVES,
        {**SHARP, "max_negatives": 2},
    ]
    config = {**COMMON, "stages": stages}
    steps = []
    result = vembed.train(config, on_step=lambda info: steps.append(info.step))
    assert result.model_dir == Path("output/sharp/final")
    assert result.steps == 2
    assert steps == [1, 2, 1, 2]
    assert_done("broad", "negatives", "sharp")
    mined = read_jsonl("output/negatives/mined.jsonl")
    assert len(mined) == len(records)
    for row in mined:
        assert row["negatives"] and row["positive"] not in row["negatives"]
    sharp = vembed.load_config("output/sharp/config.yaml")
    assert sharp.data.data_path == "output/negatives/mined.jsonl"
    assert sharp.model.model_name == "output/broad/final"
    assert vembed.train(config) == result, "done already"


# ---- the guide's file, killed and resumed ----------------------------------------------------------------------

GUIDE = (
    """\
model_name: {model}
data_path: train.jsonl
output_dir: {output}
global_batch_size: 4
max_steps: 6
save_steps: 1
logging_steps: 1
report_to: none
training_stages:
  stage1:
"""
    + STAGE_ONE
    + """\
  stage2:
    learning_rate: 1.0e-4
    distributed:
      strategy: "ddp"
      devices: 8
      num_nodes: 1
      sync_batchnorm: true
"""
)


def guide(output):
    Path(f"{output}.yaml").write_text(
        GUIDE.format(model=shared(tiny_bert), output=output)
    )
    return ["train", f"{output}.yaml"]


@pytest.mark.promise("C01", "C20")
def test_the_guides_stages_on_two_ranks_killed_in_stage_two_and_resumed_on_one(train):
    guide("whole")
    train("devices=1", config="whole.yaml")
    started = start(*guide("cut"), "devices=2")
    metrics = Path("cut/stage2/metrics.jsonl")
    deadline = time.monotonic() + 80
    while not metrics.is_file() or metrics.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) in (0, 143)
    said = train("devices=1", config="cut.yaml").err
    assert "stage stage1: done already" in said
    for stage in ("stage1", "stage2"):
        actual = losses(f"cut/{stage}")
        assert list(actual) == [1, 2, 3, 4, 5, 6]
        assert actual == pytest.approx(losses(f"whole/{stage}"), rel=1e-5)
    first = vembed.load_config("cut/stage1/config.yaml")
    assert first.parallel.strategy == "fsdp"
    second = vembed.load_config("cut/stage2/config.yaml")
    assert second.model.model_name == "cut/stage1/final"
