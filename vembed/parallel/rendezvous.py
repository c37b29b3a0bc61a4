"""Rendezvous: the store through which the processes of a run find each other, within a time limit."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from vembed.errors import UserError
from vembed.parallel.environment import RankInfo

log = logging.getLogger("vembed")

LINE_SECONDS = 30.0
"""Time between two lines of a process that waits for others."""
ATTEMPT_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 0.2
POLL_SECONDS = 0.02
SLOWEST_POLL_SECONDS = 0.5


@dataclass(slots=True)
class Limit:
    """Time limit of the rendezvous."""

    minutes: float
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit; not below 0."""
        return max(0.0, self.began + 60 * self.minutes - time.monotonic())

    @property
    def is_over(self) -> bool:
        """True after the limit."""
        return self.seconds_left == 0.0


def address() -> str:
    """Return the address of the store, as the launcher gives it."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


class Waiting:
    """Context that says every 30 s what this process waits for, also while the main thread is blocked.

    `state` gives the text. Rank 0 logs the line; of another machine, the first process writes it to its console.
    """

    def __init__(self, ranks: RankInfo, limit: Limit, state: Callable[[], str]) -> None:
        self._ranks = ranks
        self._limit = limit
        self._state = state
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._ranks.rank == 0 or self._ranks.local_rank == 0:
            self._thread = threading.Thread(
                target=self._tell, name="vembed-waiting", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _tell(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(LINE_SECONDS):
            line = (
                f"rank {self._ranks.rank} has waited {time.monotonic() - began:.0f} s for {self._state()} "
                f"(dist_timeout_minutes: {self._limit.minutes:g})"
            )
            if self._ranks.rank == 0:
                log.warning("%s", line)
            else:  # the other processes have no log on the console
                with suppress(OSError, AttributeError, ValueError):
                    sys.stderr.write(f"vembed: {line}\n")
                    sys.stderr.flush()


def connect(ranks: RankInfo, limit: Limit) -> Store:
    """Return the store at MASTER_ADDR:MASTER_PORT. Rank 0 keeps it, unless torchrun does."""
    state = f"the store at {address()}"
    with Waiting(ranks, limit, lambda: state):
        if (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        ):  # torchrun's own store, which is up already
            store: Store = next(
                iter(
                    rendezvous("env://", timeout=timedelta(seconds=limit.seconds_left))
                )
            )[0]
            return store
        return _host(ranks, limit) if ranks.rank == 0 else _visit(ranks, limit)


def poll(limit: Limit, is_done: Callable[[], bool]) -> bool:
    """Ask until the answer is True or the time is up; return the answer."""
    began = time.monotonic()
    while not is_done():
        if limit.is_over:
            return False
        # Seldom where the wait is long: many ranks ask one store. The answer is late by a tenth of the wait at most.
        time.sleep(
            min(
                max(POLL_SECONDS, 0.1 * (time.monotonic() - began)),
                SLOWEST_POLL_SECONDS,
            )
        )
    return True


def not_found(ranks: RankInfo, limit: Limit, why: str) -> UserError:
    """Return the error of a process that did not find the others in time."""
    return UserError(
        f"Rank {ranks.rank} did not find all {ranks.world_size} processes at {address()} within "
        f"{limit.minutes:g} minutes ({why}): check that each is started with the same MASTER_ADDR, "
        "MASTER_PORT and WORLD_SIZE and a RANK of its own"
    )


_kept: dict[int, Store] = {}
"""Rank 0's stores by port, up to the end of the process: where a launch holds several sessions, the others may come for
the next one before rank 0 has left this one, and a store that was about to close would answer them."""


def _host(ranks: RankInfo, limit: Limit) -> Store:
    port = int(os.environ["MASTER_PORT"])
    try:
        # Through loopback: the server listens on all interfaces, and whether the others reach it they will say.
        _kept[port] = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=max(limit.seconds_left, 1.0)),
        )
        return _kept[port]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "EACCES" not in str(error):
            raise not_found(ranks, limit, str(error).splitlines()[0]) from error
        why = (
            "is in use on this machine"
            if "EADDRINUSE" in str(error)
            else "may not be used by this user"
        )
        raise UserError(
            f"MASTER_PORT: port {port} {why}, so rank 0 cannot meet the others there: end what uses it (another run, "
            "perhaps), or give all machines another (--main-process-port)"
        ) from error


def _visit(ranks: RankInfo, limit: Limit) -> Store:
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # torch's own client would print tracebacks and take two to three times the limit, so it starts once rank 0 listens.
    problem = _await_listener(host, port, limit)
    if problem is not None:
        raise not_found(ranks, limit, problem)
    answer: list[Store | Exception] = []

    def join() -> None:
        try:
            seconds = max(limit.seconds_left, 1.0)
            answer.append(
                TCPStore(
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=seconds),
                )
            )
        except RuntimeError as error:
            answer.append(error)

    # In a thread: with a server of another kind at the address, torch waits without a limit for its answer.
    thread = threading.Thread(target=join, name="vembed-rendezvous", daemon=True)
    thread.start()
    thread.join(limit.seconds_left)
    if answer and not isinstance(answer[0], Exception):
        return answer[0]
    why = (
        str(answer[0]).splitlines()[0]
        if answer
        else "something listens there that is no run's rank 0"
    )
    raise not_found(ranks, limit, why)


def _await_listener(host: str, port: int, limit: Limit) -> str | None:
    """Wait until something listens at the address. Return the reason if nothing has within the limit."""
    problem = "nothing answers there"
    pause = POLL_SECONDS
    while not limit.is_over:
        try:
            socket.create_connection(
                (host, port), timeout=min(ATTEMPT_SECONDS, max(limit.seconds_left, 0.1))
            ).close()
            return None
        except socket.gaierror as error:
            problem = f"the name {host} cannot be resolved: {error.strerror or error}"
        except OSError as error:
            problem = f"nothing answers there: {error.strerror or error}"
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
    return problem
