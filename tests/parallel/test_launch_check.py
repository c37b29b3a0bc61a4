"""Ranks that were started differently: every option of the schema, files, versions and launches."""

import gc
import os
import re
import socket
import time
from dataclasses import replace
from functools import cache
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
    value = another(field.annotation, run.config.option_values()[name])
    return replace(run, config=run.config.changed(**{name: value}))


def sentence(number, facts):
    """Return the message of one meeting to this rank, in a part of the store of its own."""
    store = dist.PrefixStore(f"meeting-{number}", STORE[0])
    check = LaunchCheck(read_rank_info(), 1)
    try:
        check.check(store, lambda _: facts)
    except UserError as error:
        return str(error)
    return None


STORE = []


def all_meetings(folder):
    """An option with another value on rank 1, then files, versions, launches and runs."""
    rank = int(os.environ["RANK"])
    launch_check.REFUSAL_SECONDS = 1.0
    # It reads all sources at each meeting.
    versions = launch_check.versions = cache(launch_check.versions)
    check = LaunchCheck(read_rank_info(), 1)
    STORE[:] = [check.connect()]
    model = f"{folder}/model"
    inputs = {"model_name": model, "data_path": f"{folder}/a.jsonl", "max_steps": 5}
    run = resolve_run(inputs)
    said = {}

    def meet(name, facts):
        said[name] = sentence(len(said), facts)

    def meet_with(what, **options):
        config = run.config.changed(**(options if rank else {}))
        meet(what, facts_of(replace(run, config=config)))

    meet_with("option", max_steps=6)
    meet_with("same data elsewhere", data_path=f"{folder}/copy.jsonl")
    meet_with("other order", data_path=f"{folder}/b.jsonl")
    meet_with("missing data", data_path=f"{folder}/none.jsonl")
    meet_with("other model", model_name=f"{folder}/other")
    if rank:
        launch_check.versions = lambda: {**versions(), "torch's version": "1.0"}
    meet("version", {})
    launch_check.versions = versions
    os.environ["VEMBED_RUN_ID"] = f"run-{rank}"
    meet("run", {})
    if rank:
        del os.environ["VEMBED_RUN_ID"]
    meet("run given once", {})
    os.environ.pop("VEMBED_RUN_ID", None)
    meet("alike", facts_of(run))
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
    return run_ranks(all_meetings, 2, str(folder))


def test_every_rank_hears_the_same(meetings):
    assert meetings[0] == meetings[1]
    assert meetings[0]["alike"] is None
    assert meetings[0]["same data elsewhere"] is None
    message = meetings[0]["option"]
    assert " were not started alike: max_steps is 5 on rank 0 (" in message
    assert "6 on rank 1 (" in message
    assert "\n" not in message


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # values of other types
def test_every_option_is_compared_or_may_differ_for_a_reason():
    model = str(shared(tiny_bert))
    run = resolve_run({"model_name": model, "data_path": "a.jsonl", "max_steps": 5})
    facts = facts_of(run)
    for name in option_fields():
        others = facts_of(changed(run, name))
        differing = [key for key in others if others[key] != facts.get(key)]
        if name in MAY_DIFFER:
            assert not differing and MAY_DIFFER[name], name
        else:
            assert differing[:1] == [name]


@pytest.mark.parametrize(
    ("value", "compared"), [(True, True), ("force", "force"), ("run/x", "a path")]
)
def test_ranks_that_force_a_resume_differ_from_those_with_a_path(value, compared):
    run = resolve_run({"model_name": "m", "data_path": "d", "resume": value})
    assert facts_of(run)["resume"] == compared


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("other order", "data_path is "),
        ("missing data", "none.jsonl on rank 1"),
        ("other model", "model_name is "),
        ("version", "torch's version is "),
        ("run", "(VEMBED_RUN_ID) is run-0 on rank 0 ("),
        ("run given once", "(VEMBED_RUN_ID) is run-0 on rank 0 ("),
    ],
)
def test_files_versions_and_launches_are_compared(what, named, meetings):
    assert named in str(meetings[0][what])


PLAIN_TEXTS = (
    "model_revision query_prompt document_prompt eval_metric run_name wandb_project push_to_hub log_file output_dir "
    "fsdp_transformer_layer_cls_to_wrap image_root accelerate_config resume sampling wandb_tags freeze"
)
"""Options whose texts are not compared by the content of a file."""


def test_every_option_that_may_name_a_file_is_compared_by_content():
    known = {*FILE_OPTIONS, *PLAIN_TEXTS.split()}
    for name, field in option_fields().items():
        annotation = str(field.annotation)
        if "str" in annotation and not (
            "Literal" in annotation or "dict" in annotation
        ):
            assert name in known, name


# ---- processes that do not find each other, on loopback ----------------------

SHORT = 1.0 / 60
FIRST = RankInfo(0, 2, 0, 1)
SECOND = RankInfo(1, 2, 0, 1)


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
    assert time.monotonic() - began < 30, "near the limit, not the default one"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nobody_listens(port, capsys):
    message = failure(SECOND)
    address = f"127.0.0.1:{port}"
    assert f"Rank 1 did not find all 2 processes at {address}" in message
    line = capsys.readouterr().err.splitlines()[0]
    assert re.match(rf"vembed: rank 1 has waited \d+ s for .* {address} ", line)


def test_a_name_that_cannot_be_resolved(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    assert "(the name nowhere.invalid cannot be resolved: " in failure(SECOND)


@pytest.mark.parametrize(
    ("ranks", "named"),
    [(FIRST, "is in use on this machine"), (SECOND, "that is no run's rank 0")],
)
def test_a_server_of_another_kind(ranks, named, port):
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        assert named in failure(ranks)


def test_rank_0_says_whom_it_waits_for(port, caplog, monkeypatch):
    monkeypatch.setattr(launch_check, "REFUSAL_SECONDS", 0.1)
    check = LaunchCheck(FIRST, SHORT)
    store = check.connect()
    with pytest.raises(UserError, match="rank 1 of 2 did not come"):
        check.check(store, lambda _: {})
    assert re.search(r"has waited \d+ s for rank 1 of 2", caplog.text)


def test_a_place_that_is_taken(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("VEMBED_LAUNCHER", "17")
    launch_check._claim_rank(store, LaunchCheck(SECOND, 1))
    # Another process of the same launcher.
    launch_check._claim_rank(store, LaunchCheck(SECOND, 1))
    monkeypatch.setenv("VEMBED_LAUNCHER", "18")
    with pytest.raises(UserError, match=r"rank 1 .*10.0.0.1:29500 .*process 17\)"):
        launch_check._claim_rank(store, LaunchCheck(SECOND, 1))


def test_the_store_outlives_its_session(port):
    LaunchCheck(FIRST, 1).connect().set("sentence", "yes")
    gc.collect()
    assert LaunchCheck(SECOND, 1).connect().get("sentence") == b"yes", (
        "another rank may come for the next session first"
    )
