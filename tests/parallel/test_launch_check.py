"""Ranks that were started differently: every option of the schema, files, versions and launches, in one pair of
processes."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import time
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Literal, get_args, get_origin

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert
from vembed.config.loading import resolve_run
from vembed.config.schema import FILE_OPTIONS, option_fields
from vembed.errors import UserError
from vembed.parallel import launch_check
from vembed.parallel.environment import RankInfo, read_rank_info
from vembed.parallel.launch import free_port
from vembed.parallel.launch_check import LaunchCheck
from vembed.training.trainer import MAY_DIFFER, facts_of


def another(annotation, value):
    """Another value of an option, of its type or near it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    choices = [word for word in _words(annotation) if word != value]
    if choices:
        return choices[0]
    if isinstance(value, list):
        return [*value, *value, "more"]
    return "another"


def _words(annotation):
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) is UnionType or get_args(annotation):
        return [word for part in get_args(annotation) for word in _words(part)]
    return []


def changed(run, name):
    field = option_fields()[name]
    value = another(field.annotation, run.config.options()[name])
    return replace(run, config=run.config.changed(**{name: value}))


def sentence(number, facts, **launch):
    """Return the message of one meeting to this rank, in a part of the store of its own."""
    store = dist.PrefixStore(f"meeting-{number}", STORE[0])
    check = LaunchCheck(read_rank_info(), 1)
    try:
        check.check(store, {"num_machines": 1, **launch}, lambda _: facts)
    except UserError as error:
        return str(error)
    return None


STORE = []


def all_meetings(folder):
    """Each option in turn with another value on rank 1, then files, versions, launches and runs."""
    warnings.simplefilter("ignore")  # pydantic's, on values of other types
    rank = int(os.environ["RANK"])
    base = Path(folder)
    launch_check.REFUSAL_SECONDS = 1.0
    launch_check.versions = cache(
        launch_check.versions
    )  # which reads all sources at each meeting
    check = LaunchCheck(read_rank_info(), 1)
    STORE[:] = [check.connect()]
    run = resolve_run(
        {
            "model_name": f"{folder}/model",
            "data_path": f"{folder}/a.jsonl",
            "max_steps": 5,
        }
    )
    said = {}
    for number, name in enumerate(option_fields()):
        said[name] = sentence(number, facts_of(changed(run, name) if rank else run))

    def other(name, **options):
        return facts_of(
            replace(
                run,
                config=run.config.changed(**{name: options[name]} if rank else {}),
            )
        )

    said["same data elsewhere"] = sentence(
        1000, other("data_path", data_path=str(base / "copy.jsonl"))
    )
    said["other order"] = sentence(
        1001, other("data_path", data_path=str(base / "b.jsonl"))
    )
    said["missing data"] = sentence(
        1002, other("data_path", data_path=str(base / "none.jsonl"))
    )
    said["other model"] = sentence(
        1003, other("model_name", model_name=str(base / "other"))
    )
    said["machines"] = sentence(1004, {}, num_machines=2 + rank)
    versions = launch_check.versions
    launch_check.versions = lambda: {
        **versions(),
        **({"torch's version": "1.0"} if rank else {}),
    }
    said["version"] = sentence(1005, {})
    launch_check.versions = versions
    os.environ["VEMBED_RUN_ID"] = f"run-{rank}"
    said["run"] = sentence(1007, {})
    del os.environ["VEMBED_RUN_ID"]
    if rank == 0:
        os.environ["VEMBED_RUN_ID"] = "friday"
    said["run given once"] = sentence(1009, {})
    os.environ.pop("VEMBED_RUN_ID", None)
    said["alike"] = sentence(1008, facts_of(run))
    STORE[0].add("done", 1)
    if rank == 0:  # which keeps the store
        check.poll(lambda: STORE[0].add("done", 0) == 2, str)
    return said


@pytest.fixture(scope="module")
def meetings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meeting")
    lines = ['{"query": "a", "positive": "b"}\n', '{"query": "c", "positive": "d"}\n']
    for name, content in (("a", lines), ("copy", lines), ("b", lines[::-1])):
        (folder / f"{name}.jsonl").write_text("".join(content))
    (folder / "model").symlink_to(shared(tiny_bert))
    (folder / "other").symlink_to(shared(tiny_bert, hidden=16))
    return run_ranks(all_meetings, 2, str(folder), process_group=False)


def test_every_rank_hears_the_same(meetings):
    assert [
        name for name, said in meetings[0].items() if said != meetings[1][name]
    ] == []
    assert meetings[0]["alike"] is None


@pytest.mark.parametrize("name", option_fields())
def test_every_option_is_compared_or_may_differ_for_a_reason(name, meetings):
    said = meetings[0][name]
    if name in MAY_DIFFER:
        assert said is None and MAY_DIFFER[name]
        return
    assert said is not None and said.startswith(
        f"the processes of this run were not started alike: {name} is "
    )
    assert " on rank 0 (" in said and " on rank 1 (" in said and "\n" not in said


def test_ranks_that_force_a_resume_differ_from_those_with_a_path():
    resumes = {
        True: True,
        "auto": "auto",
        "force": "force",
        "run/checkpoint-2": "a path",
    }
    for value, compared in resumes.items():
        run = resolve_run({"model_name": "m", "data_path": "d", "resume": value})
        assert facts_of(run)["resume"] == compared


PLAIN_TEXTS = frozenset(
    [
        "model_revision",
        "query_prompt",
        "document_prompt",
        "eval_metric",
        "run_name",
        "wandb_project",
        "push_to_hub",
        "log_file",
        "output_dir",
        "fsdp_transformer_layer_cls_to_wrap",
        "image_root",
        "accelerate_config",
        "resume",
        "sampling",
        "wandb_tags",
        "freeze",
    ]
)
"""Options whose texts are not compared by the content of a file."""


def test_every_option_that_may_name_a_file_is_compared_by_content():
    for name, field in option_fields().items():
        if "str" in str(field.annotation) and "Literal" not in str(field.annotation):
            is_known = name in FILE_OPTIONS or name in PLAIN_TEXTS
            assert is_known or "dict" in str(field.annotation), name


def test_lists_of_options_name_options():
    assert set(MAY_DIFFER) | set(FILE_OPTIONS) <= set(option_fields())
    assert not set(MAY_DIFFER) & set(FILE_OPTIONS)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("other order", "data_path is "),
        ("missing data", "none.jsonl on rank 1"),
        ("other model", "model_name is "),
        ("machines", "num_machines is 2 on rank 0"),
        ("version", "torch's version is "),
        ("run", "(VEMBED_RUN_ID) is run-0 on rank 0 ("),
        ("run given once", "(VEMBED_RUN_ID) is friday on rank 0 ("),
    ],
)
def test_files_versions_and_launches_are_compared(what, named, meetings):
    assert named in str(meetings[0][what])


def test_the_same_data_in_another_place_are_the_same(meetings):
    assert meetings[0]["same data elsewhere"] is None


# ---- processes that do not find each other, on loopback ----------------------

SHORT = 1.0 / 60
FIRST = RankInfo(0, 2, 0, 1, launched=True)
SECOND = RankInfo(1, 2, 0, 1, launched=True)


@pytest.fixture
def port(monkeypatch):
    number = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setattr(launch_check, "LINE_SECONDS", 0.05)
    yield number


def failure(ranks):
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        LaunchCheck(ranks, SHORT).connect()
    assert time.monotonic() - began < 30, (
        "near the limit, not two to three times the default one"
    )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nobody_listens(port, capsys):
    said = failure(SECOND)
    assert said.startswith(
        f"Rank 1 did not find all 2 processes at 127.0.0.1:{port} within 0.0166667 minutes (nothing "
    )
    lines = capsys.readouterr().err.splitlines()
    place = re.escape(f"127.0.0.1:{port}")
    assert re.match(
        rf"vembed: rank 1 has waited \d+ s for the store at {place} \(dist_timeout",
        lines[0],
    )


def test_a_name_that_cannot_be_resolved(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    assert "(the name nowhere.invalid cannot be resolved: " in failure(SECOND)


def test_a_port_in_use(port):
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        assert failure(FIRST).startswith(
            f"MASTER_PORT: port {port} is in use on this machine"
        )


def test_a_server_of_another_kind(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert "something listens there that is no run's rank 0" in failure(SECOND)


def test_rank_0_says_whom_it_waits_for(port, caplog, monkeypatch):
    monkeypatch.setattr(launch_check, "REFUSAL_SECONDS", 0.1)
    check = LaunchCheck(FIRST, SHORT)
    store = check.connect()
    with (
        caplog.at_level(logging.WARNING, "vembed"),
        pytest.raises(UserError, match="rank 1 of 2 did not come"),
    ):
        check.check(store, {}, lambda _: {})
    assert re.search(r"has waited \d+ s for rank 1 of 2", "\n".join(caplog.messages))


def test_a_place_that_is_taken(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("VEMBED_LAUNCHER", "17")
    launch_check._claim_rank(store, LaunchCheck(SECOND, 1))
    launch_check._claim_rank(
        store, LaunchCheck(SECOND, 1)
    )  # another process of the same launcher
    monkeypatch.setenv("VEMBED_LAUNCHER", "18")
    with pytest.raises(
        UserError,
        match=r"rank 1 of the run at 10.0.0.1:29500 is taken already \(by .*process 17\)",
    ):
        launch_check._claim_rank(store, LaunchCheck(SECOND, 1))


def test_the_store_outlives_its_session(port):
    LaunchCheck(FIRST, 1).connect().set("sentence", "yes")
    gc.collect()
    assert LaunchCheck(SECOND, 1).connect().get("sentence") == b"yes", (
        "another rank may come for the next session first"
    )
