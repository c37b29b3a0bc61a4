"""Every YAML, every command and every piece of Python in README and docs does what it says."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

import vembed
from tests import tiny
from tests.commands import train_arguments
from tests.data.files import pair, write_jsonl
from tests.docs.pages import ROOT, blocks, commands
from vembed.cli.arguments import NO_FLAGS
from vembed.cli.main import DATA_COMMANDS, app, load_command
from vembed.cli.run_train import run_train
from vembed.config.accelerate_file import read_accelerate_file
from vembed.config.loading import chosen_pipeline, resolve_run
from vembed.errors import UserError
from vembed.mining.options import GenerateConfig, JudgeConfig, MineConfig, load_options
from vembed.parallel.devices import read_hardware
from vembed.pipelines.stages import run_stages

OTHER_PROGRAMS = [
    "cd",
    "cp",
    "curl",
    "git",
    "hf",
    "kubectl",
    "nvidia-smi",
    "pip",
    "sbatch",
    "tee",
    ".venv/bin/pre-commit",
]
"""Commands of others; of them only the paths of the checkout that they name are looked at."""
NOT_RUN = ("import mteb", "localhost:8080", "vembed.Reranker")
"""Python that needs a network, a server, or a trained reranker (tests/rerank has one); tests/docs/test_tutorial.py runs the tutorial's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands of the pages run: a config, data, stages, a trained model, and the checkout's folders."""
    workdir = tmp_path_factory.mktemp("docs")
    for name in ("examples", "configs", "vembed", "Makefile"):
        (workdir / name).symlink_to(ROOT / name)
    (workdir / "data").mkdir()
    (workdir / "demo").mkdir()
    (workdir / "demo" / "data").symlink_to(workdir / "data")
    texts = tiny.texts(48)
    rows = [pair(text, f"found {text}", negatives=["none"]) for text in texts]
    # As many as the processes of the largest command: fewer fill no batch.
    for name, part in (("train", rows[:40]), ("val", rows[40:])):
        write_jsonl(workdir / "data" / f"{name}.jsonl", part)
    config = {
        "model_name": str(tiny.shared(tiny.tiny_bert)),
        "data_path": "data/train.jsonl",
        "val_data_path": "data/val.jsonl",
        "batch_size": 8,
        "report_to": "none",
    }
    (workdir / "tune").mkdir()
    for name in ("cfg.yaml", "tune/best.yaml"):
        (workdir / name).write_text(yaml.safe_dump(config))
    texts = [block.text for block in blocks("yaml")]
    stages = [text for text in texts if re.search("^stages:", text, re.MULTILINE)]
    (workdir / "stages.yaml").write_text(stages[0])
    before = Path.cwd()
    os.chdir(workdir)
    try:
        vembed.train("cfg.yaml", ["max_steps=1"])
        yield workdir
    finally:
        os.chdir(before)
        shutil.rmtree(workdir, ignore_errors=True)


# ---- configs -------------------------------------------------------------------------------------------------------


def missing(error):
    """Required options that a part of a config does not have; the error itself where there is more to it."""
    names = []
    for line in str(error).splitlines():
        match = re.search(r": (model_name|data_path) is missing", line)
        if match is None:
            raise error
        names.append(match[1])
    return names


@pytest.mark.parametrize("block", blocks("yaml", "toml"), ids=str)
@pytest.mark.promise("A09", "B20", "C33")
def test_configs_load(block, tmp_path):
    path = tmp_path / f"block.{block.language}"
    path.write_text(block.text)
    values = yaml.safe_load(block.text) if block.language == "yaml" else {}
    if "distributed_type" in values:
        read_accelerate_file(str(path))
        return
    if "output_path" in values:
        kinds = {
            "round_trip_top_k": GenerateConfig,
            "model_name": MineConfig,
            "judges": JudgeConfig,
        }
        load_options(next(kind for name, kind in kinds.items() if name in values), path)
        return
    pipeline = chosen_pipeline(values) if isinstance(values, dict) else None
    stages = [None]
    if pipeline is not None:
        stages = [stage.name for stage in pipeline.stages if stage.kind == "train"]
    for stage in stages:
        try:
            resolve_run(path, stage=stage)
        except UserError as error:
            words = [f"{name}=some/{name}" for name in missing(error)]
            resolve_run(path, words, stage=stage)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_records_are_json(block):
    for line in block.text.splitlines():
        json.loads(line)


# ---- commands ------------------------------------------------------------------------------------------------------


def without_variables(arguments):
    """The arguments behind NAME=value in front of a command."""
    while arguments and re.match(r"[A-Z_]+=", arguments[0]):
        arguments = arguments[1:]
    return arguments


def check_paths(arguments):
    for word in arguments:
        if word.startswith(("examples/", "configs/", "vembed/")):
            assert (ROOT / word).exists(), word


def dry_run(arguments):
    """What `vembed train` would do with these arguments."""
    parsed = train_arguments([*arguments, "--dry-run"])
    pipeline = chosen_pipeline(parsed.source, parsed.overrides, parsed.stage)
    if pipeline is not None:
        assert run_stages(pipeline, parsed, lambda stage: run_train(stage)[0]) == 0
        return
    assert run_train(parsed, env={})[0] == 0


def started_by(parser, arguments):
    """A launcher takes the arguments, and the script takes the rest."""
    launched = parser.parse_args(arguments)
    check_paths([launched.training_script])
    script = launched.training_script
    if "entrypoints" in script or not script.endswith(".py"):
        dry_run(launched.training_script_args)


def check_vembed(arguments):
    command, *others = arguments
    if command == "train":
        dry_run([word for word in others if not word.startswith("--json")])
    elif command in DATA_COMMANDS:
        if others != ["--help"]:
            assert not app([command, *others, "--dry-run"], standalone_mode=False)
    elif command in ("config", "plan"):
        values = load_command(command).make_context(command, list(others)).params
        read_hardware(values.get("gpu"), values.get("memory"))
        parsed = NO_FLAGS.with_words(values["args"] or ["cfg.yaml"])
        if chosen_pipeline(parsed.source, parsed.overrides, parsed.stage) is None:
            resolve_run(parsed.source)
    elif command != "--help":
        load_command(command).make_context(command, list(others))


@pytest.mark.parametrize(
    ("location", "arguments"),
    commands(),
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60],
)
@pytest.mark.promise("A11", "C22", "C33", "E04", "E05")
def test_commands_are_understood(location, arguments, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = [
        word
        for word in without_variables(arguments)
        if word not in ("2>&1", ">") and not word.endswith(".schema.json")
    ]
    if not arguments:
        return
    name, *others = arguments
    if name == "vembed":
        check_vembed(others)
    elif arguments[:2] == ["accelerate", "launch"]:
        started_by(launch_command_parser(), others[1:])
    elif name == "torchrun":
        started_by(get_args_parser(), others)
    elif arguments[:3] == ["python", "-m", "vembed.entrypoints.train"]:
        dry_run(others[2:])
    elif name == "make":
        makefile = Path("Makefile").read_text().splitlines()
        for target in others:
            is_target = any(line.startswith(f"{target}:") for line in makefile)
            assert is_target or "=" in target, location
    elif name in ("bash", "python", ".venv/bin/python"):
        check_paths(others)
        assert others[0] == "-m" or (ROOT / others[0]).exists(), location
    else:
        assert name in OTHER_PROGRAMS, f"{location}: {arguments}"
        check_paths(others)


# ---- Python --------------------------------------------------------------------------------------------------------


PARTS = "extending.md"
"""Its Python is the text of files: tests/docs/test_extending.py runs it."""


@pytest.mark.parametrize(
    "block", [block for block in blocks("python") if block.page.name != PARTS], ids=str
)
@pytest.mark.promise("C21", "E40")
def test_python_runs_as_printed(block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    code = compile(block.text, str(block), "exec")
    if not any(text in block.text for text in NOT_RUN):
        exec(code, {"__name__": "__docs__"})


def test_the_names_of_the_python_page_are_public():
    page = (ROOT / "docs" / "python-api.md").read_text()
    assert set(vembed.__all__) - {"__version__"} <= set(
        re.findall(r"`vembed\.(\w+)", page)
    )
