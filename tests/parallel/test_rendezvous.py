"""Processes that do not find each other: one sentence within the limit, and lines meanwhile. All on loopback."""

from __future__ import annotations

import gc
import logging
import re
import socket
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from vembed.errors import UserError
from vembed.parallel import launch_check, rendezvous
from vembed.parallel.environment import RankInfo
from vembed.parallel.launch import free_port
from vembed.parallel.rendezvous import Limit, connect

SHORT = 1.0 / 60
FIRST, SECOND = RankInfo(0, 2, 0, 1, launched=True), RankInfo(1, 2, 0, 1, launched=True)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    number = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setattr(rendezvous, "LINE_SECONDS", 0.05)
    yield number


def failure(ranks: RankInfo) -> str:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        connect(ranks, Limit(SHORT))
    assert time.monotonic() - began < 30, (
        "near the limit, not two to three times the default one"
    )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nobody_listens(port: int, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_name_that_cannot_be_resolved(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    assert "(the name nowhere.invalid cannot be resolved: " in failure(SECOND)


def test_a_port_in_use(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        assert failure(FIRST).startswith(
            f"MASTER_PORT: port {port} is in use on this machine, so rank 0 cannot meet"
        )


def test_a_server_of_another_kind(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert "something listens there that is no run's rank 0" in failure(SECOND)


def test_rank_0_says_whom_it_waits_for(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = connect(FIRST, Limit(SHORT))
    with (
        caplog.at_level(logging.WARNING, "vembed"),
        pytest.raises(UserError, match="rank 1 of 2 did not come"),
    ):
        launch_check.REFUSAL_SECONDS, before = 0.1, launch_check.REFUSAL_SECONDS
        try:
            launch_check.check_launch(store, FIRST, Limit(SHORT), {}, lambda _: {})
        finally:
            launch_check.REFUSAL_SECONDS = before
    assert re.search(r"has waited \d+ s for rank 1 of 2", "\n".join(caplog.messages))


def test_a_place_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("VEMBED_LAUNCHER", "17")
    launch_check._claim_rank(store, SECOND)
    launch_check._claim_rank(store, SECOND)  # another process of the same launcher
    monkeypatch.setenv("VEMBED_LAUNCHER", "18")
    with pytest.raises(
        UserError,
        match=r"rank 1 of the run at 10.0.0.1:29500 is taken already \(by .*process 17\)",
    ):
        launch_check._claim_rank(store, SECOND)


def test_the_store_outlives_its_session(port: int) -> None:
    connect(FIRST, Limit(1)).set("sentence", "yes")
    gc.collect()
    assert connect(SECOND, Limit(1)).get("sentence") == b"yes", (
        "another rank may come for the next session first"
    )
