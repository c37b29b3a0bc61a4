"""Every YAML, every command and every piece of Python in README and docs does what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

import vembed
from tests import tiny
from tests.docs.pages import ROOT, Block, blocks, commands
from vembed.cli.commands.mine import run_audit, run_generate, run_judge, run_mine
from vembed.cli.commands.train import run_train
from vembed.cli.main import app, checked_words, run_process
from vembed.cli.support import json_words, taken_flags
from vembed.config.accelerate_file import read_accelerate_file
from vembed.config.arguments import parse_train_arguments
from vembed.config.loading import load_config, resolve_run
from vembed.config.stages import read_road
from vembed.data_tools.config import GenerateConfig, JudgeConfig
from vembed.errors import UserError
from vembed.mining.config import MineConfig
from vembed.mining.options import load_options
from vembed.parallel.hardware import read_hardware
from vembed.pipelines.stages.sequence import road_of_arguments, run_stages

KNOWN_ELSEWHERE = {
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
}
"""Commands of others; of them only the paths of the checkout that they name are looked at."""
NOT_RUN = ("import mteb", "localhost:8080")
"""Python that needs a network, or a server; tests/docs/test_tutorial.py runs the tutorial's."""

DATA_VERBS = {
    "mine": run_mine,
    "judge": run_judge,
    "audit": run_audit,
    "generate": run_generate,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands of the pages run: a config, data, stages, a trained model, and the checkout's folders."""
    place = tmp_path_factory.mktemp("docs")
    for name in ("examples", "configs", "vembed", "Makefile"):
        (place / name).symlink_to(ROOT / name)
    (place / "data").mkdir()
    texts = tiny.texts(24)
    rows = [
        {"query": text, "positive": f"found {text}", "negatives": ["none"]}
        for text in texts
    ]
    for name, some in (("train", rows[:16]), ("val", rows[16:])):
        (place / "data" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some)
        )
    config = {
        "model_name": str(tiny.shared(tiny.tiny_bert)),
        "data_path": "data/train.jsonl",
        "val_data_path": "data/val.jsonl",
        "batch_size": 8,
        "report_to": "none",
    }
    (place / "tune").mkdir()
    for name in ("cfg.yaml", "tune/best.yaml"):
        (place / name).write_text(yaml.safe_dump(config))
    stages = next(
        block.text
        for block in blocks("yaml")
        if re.search("^stages:", block.text, re.MULTILINE)
    )
    (place / "stages.yaml").write_text(stages)
    before = Path.cwd()
    os.chdir(place)
    try:
        vembed.train("cfg.yaml", ["max_steps=1"])
        yield place
    finally:
        os.chdir(before)
        shutil.rmtree(place, ignore_errors=True)


# ---- configs -------------------------------------------------------------------------------------------------------


def missing(error: UserError) -> list[str]:
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
def test_configs_load(block: Block, tmp_path: Path) -> None:
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
    road = read_road(values) if isinstance(values, dict) else None
    stages = (
        [None]
        if road is None
        else [step.name for step in road.steps if step.kind == "train"]
    )
    for stage in stages:
        try:
            resolve_run(path, stage=stage)
        except UserError as error:
            resolve_run(
                path, [f"{name}=some/{name}" for name in missing(error)], stage=stage
            )


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_records_are_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


# ---- commands ------------------------------------------------------------------------------------------------------


def without_variables(words: list[str]) -> list[str]:
    """The words behind NAME=value in front of a command."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def check_paths(words: list[str]) -> None:
    for word in words:
        if word.startswith(("examples/", "configs/", "vembed/")):
            assert (ROOT / word).exists(), word


def dry_run(words: list[str]) -> None:
    """What `vembed train` would do with these words."""
    arguments = parse_train_arguments([*words, "--dry-run"])
    road = road_of_arguments(arguments)
    if road is not None:
        assert (
            run_stages(
                road,
                arguments,
                run_process,
                checked_words,
                env={},
                starts_processes=True,
            )
            == 0
        )
        return
    assert run_train(arguments, env={}) == 0


def started_by(parser: ArgumentParser, words: list[str]) -> None:
    """A launcher takes the words, and the script takes the rest."""
    given: Any = parser.parse_args(words)
    check_paths([given.training_script])
    if (
        given.training_script.endswith(".py")
        and "entrypoints" not in given.training_script
    ):
        return
    dry_run(given.training_script_args)


def check_vembed(words: list[str]) -> None:
    verb, *rest = words
    if verb == "train":
        dry_run(taken_flags(json_words(rest), ("--json",))[0])
    elif verb in DATA_VERBS:
        assert rest == ["--help"] or DATA_VERBS[verb]([*rest, "--dry-run"]) == 0
    elif verb in ("config", "plan"):
        rest, (gpu, memory, _) = taken_flags(
            json_words(rest), ("--gpu", "--memory", "--json")
        )
        read_hardware(gpu, memory)
        resolve_run(parse_train_arguments(rest or ["cfg.yaml"]).config)
    elif verb != "--help":
        found: Any = typer.main.get_command(app)
        found.commands[verb].make_context(verb, list(rest))


@pytest.mark.parametrize(
    ("place", "words"),
    commands(),
    ids=lambda one: one if isinstance(one, str) else " ".join(one)[:60],
)
@pytest.mark.promise("A11", "C22", "C33", "E04", "E05")
def test_commands_are_understood(
    place: str,
    words: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    words = [
        word
        for word in without_variables(words)
        if word not in ("2>&1", ">") and not word.endswith(".schema.json")
    ]
    if not words:
        return
    name, *rest = words
    if name == "vembed":
        check_vembed(rest)
    elif words[:2] == ["accelerate", "launch"]:
        started_by(launch_command_parser(), rest[1:])
    elif name == "torchrun":
        started_by(get_args_parser(), rest)
    elif words[:3] == ["python", "-m", "vembed.entrypoints.train"]:
        dry_run(rest[2:])
    elif name == "make":
        targets = [word for word in rest if "=" not in word]
        assert all(
            re.search(rf"^{target}:", Path("Makefile").read_text(), re.MULTILINE)
            for target in targets
        ), place
    elif name in ("bash", "python"):
        check_paths(rest)
        assert rest[0] == "-m" or (ROOT / rest[0]).exists(), place
    else:
        assert name in KNOWN_ELSEWHERE, f"{place}: {words}"
        check_paths(rest)


# ---- Python --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=str)
@pytest.mark.promise("C21", "E40")
def test_python_runs_as_printed(
    block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code = compile(block.text, str(block), "exec")
    if not any(text in block.text for text in NOT_RUN):
        exec(code, {"__name__": "__docs__"})


def test_the_names_of_the_python_page_are_public() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text()
    assert set(vembed.__all__) - {"__version__"} <= set(
        re.findall(r"`vembed\.(\w+)", page)
    )
    assert load_config({"model_name": "m", "data_path": "d"}).model.model_name == "m"
