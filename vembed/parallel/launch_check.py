"""Launch check: the processes of a run find each other, and compare how each was started, before anything is built. Heartbeats:
which rank hangs later, in place of the name of a rank that merely noticed it.

Rank 0 keeps a store. Each rank writes its record there: its machine, and what must be equal, and compares it with that
of rank 0. The first that finds a difference writes one sentence, with which all of them end.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

import vembed
from vembed.errors import UserError
from vembed.parallel import collectives
from vembed.parallel.environment import RankInfo, machine_name
from vembed.parallel.launch import LAUNCHER_VARIABLE, RUN_ID

RankFacts = Callable[[RankInfo], Mapping[str, Any]]
"""Facts of a rank about its run: values by name, equal on all ranks. It may raise UserError, which then ends all."""

COMPARED_PACKAGES = ("torch", "transformers", "accelerate")
"""Beside vembed itself."""
ADVICE = (
    "start every machine with the same config, data, model, packages and --run-id, and two runs on two ports "
    "(--main-process-port)"
)
LINE_SECONDS = 30.0
"""Time between two lines of a process that waits for others."""
REFUSAL_SECONDS = 5.0
"""Time for which rank 0 keeps the store after a refusal, for ranks that have not read it yet."""
ATTEMPT_SECONDS = 2.0
POLL_SECONDS = 0.1
MAX_DIFFERENCES = 3
MAX_VALUE_CHARACTERS = 100

_kept: dict[int, Store] = {}
"""Rank 0's stores by port, up to the end of the process: where a launch holds several sessions, the others may come for
the next one before rank 0 has left this one, and a store that was about to close would answer them."""


class LaunchCheck:
    """This process among those that come together, within a time limit."""

    def __init__(self, ranks: RankInfo, minutes: float) -> None:
        self.ranks = ranks
        self.minutes = minutes
        self.host = os.environ["MASTER_ADDR"]
        self.port = int(os.environ["MASTER_PORT"])
        self.address = f"{self.host}:{self.port}"
        self._end = time.monotonic() + 60 * minutes

    @property
    def time_left(self) -> timedelta:
        """Time until the limit; at least a second."""
        return timedelta(seconds=max(self._end - time.monotonic(), 1.0))

    def not_found(self, why: str) -> UserError:
        """Return the error of a process that did not find the others in time."""
        return UserError(
            f"Rank {self.ranks.rank} did not find all {self.ranks.world_size} processes at {self.address} within "
            f"{self.minutes:g} minutes ({why}): check that each is started with the same MASTER_ADDR, MASTER_PORT and "
            "WORLD_SIZE and a RANK of its own"
        )

    def poll(self, is_done: Callable[[], bool], waited_for: Callable[[], str]) -> bool:
        """Ask until the answer is True or the time is up; return the answer. Say every 30 s what is waited for."""
        began = time.monotonic()
        next_line = LINE_SECONDS
        while not is_done():
            current_time = time.monotonic()
            waited = current_time - began
            if current_time > self._end:
                return False
            if waited >= next_line:
                next_line += LINE_SECONDS
                if self.ranks.local_rank == 0:  # one line for each machine
                    collectives.log_from(
                        self.ranks.rank,
                        f"rank {self.ranks.rank} has waited {waited:.0f} s for {waited_for()} "
                        f"(dist_timeout_minutes: {self.minutes:g})",
                    )
            time.sleep(POLL_SECONDS)
        return True

    def connect(self) -> Store:
        """Return the store at MASTER_ADDR:MASTER_PORT. Rank 0 keeps it, unless torchrun does."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store: Store = next(iter(rendezvous("env://", timeout=self.time_left)))[0]
            return store
        return self._keep_store() if self.ranks.rank == 0 else self._join_store()

    def _keep_store(self) -> Store:
        # torch would try again for the whole time limit.
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            try:
                socket.create_connection(address, timeout=ATTEMPT_SECONDS).close()
            except OSError as error:
                problem = error.strerror or error
                raise UserError(
                    f"This machine cannot reach itself at 127.0.0.1 ({problem}), and the processes of a run meet there: "
                    "turn on the loopback interface (`ip link set lo up`), or start one process (--nproc 1)"
                ) from error
        try:
            # Through loopback: the server listens on all interfaces. Whether others reach it, they will say.
            _kept[self.port] = TCPStore(
                "127.0.0.1",
                self.port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=self.time_left,
            )
            return _kept[self.port]
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) and "EACCES" not in str(error):
                raise self.not_found(str(error).splitlines()[0]) from error
            raise UserError(
                f"MASTER_PORT: port {self.port} is in use on this machine, or this user may not use it, so rank 0 "
                "cannot meet the others there: end what uses it (another run, perhaps), or give all machines another "
                "(--main-process-port)"
            ) from error

    def _join_store(self) -> Store:
        problem = "nothing answers there"
        stores = []

        def is_listening() -> bool:
            nonlocal problem
            address = self.host, self.port
            try:
                socket.create_connection(address, timeout=ATTEMPT_SECONDS).close()
                return True
            except socket.gaierror as error:
                problem = f"the name {self.host} cannot be resolved: {error}"
            except OSError as error:
                problem = f"nothing answers there: {error.strerror or error}"
            return False

        def join() -> None:
            nonlocal problem
            try:
                store = TCPStore(
                    self.host,
                    self.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=self.time_left,
                )
                stores.append(store)
            except RuntimeError as error:
                problem = str(error).splitlines()[0]

        # torch's own client would print tracebacks and take two to three times the limit, so it starts once rank 0
        # listens.
        if not self.poll(is_listening, lambda: f"the store at {self.address}"):
            raise self.not_found(problem)
        problem = "something listens there that is no run's rank 0"
        # In a thread: with a server of another kind at the address, torch waits without a limit for its answer.
        thread = threading.Thread(target=join, name="vembed-join", daemon=True)
        thread.start()
        thread.join(self.time_left.total_seconds())
        if not stores:
            raise self.not_found(problem)
        return stores[0]

    def check(
        self,
        store: Store,
        rank_facts: RankFacts,
    ) -> tuple[str, RankInfo]:
        """Compare this rank with rank 0; return the run's id, and the rank info with the processes of this machine.

        Raise the same UserError on every rank if they differ.
        """
        ranks = self.ranks
        _claim_rank(store, self)
        keys = [f"record-{rank}" for rank in range(ranks.world_size)]
        record: dict[str, Any] = {
            "rank": ranks.rank,
            "host": socket.gethostname(),
            "machine": machine_name(),
            "run": os.environ.get(RUN_ID) or uuid.uuid4().hex[:12],
            "facts": {
                "WORLD_SIZE": ranks.world_size,
                **versions(),
                # By which the machine of another run is told apart.
                f"the run id ({RUN_ID})": os.environ.get(RUN_ID) or None,
            },
        }

        def refuse(problem: str) -> None:
            store.compare_set("error", "", problem)  # of several, the first one counts

        def has_first() -> bool:
            return bool(store.check(["error"]) or store.check(keys[:1]))

        def has_all() -> bool:
            num_arrived: int = store.add("arrived", 0)
            return bool(store.check(["error"])) or num_arrived >= ranks.world_size

        def absent_ranks() -> str:
            absent = [
                str(rank) for rank, key in enumerate(keys) if not store.check([key])
            ]
            return f"rank {', '.join(absent)} of {ranks.world_size}"

        try:
            try:
                # On rank 0 it takes the lock on output_dir: another run's folder must not be waited for.
                record["facts"] |= rank_facts(ranks)
                store.set(keys[ranks.rank], json.dumps(record))
            except UserError as error:
                where = f" (rank {ranks.rank}, {record['host']})" if ranks.rank else ""
                refuse(f"{error}{where}")
            if not self.poll(has_first, lambda: f"rank 0 at {self.address}"):
                raise self.not_found("rank 0 did not answer")
            if not store.check(["error"]):
                first = json.loads(store.get(keys[0]))
                rank_record = json.loads(store.get(keys[ranks.rank]))
                problem = rank_difference(first, rank_record)
                if problem is not None:
                    refuse(f"{problem}: {ADVICE}")
            store.add("arrived", 1)
            if not self.poll(has_all, absent_ranks):
                refuse(str(self.not_found(f"{absent_ranks()} did not come")))
            refusal = None
            if store.check(["error"]):
                refusal = store.get("error").decode()
            store.set(f"read-{ranks.rank}", "1")
        except dist.DistNetworkError as error:
            raise UserError(
                f"Rank {ranks.rank} lost the connection to rank 0, which ended during the launch check: its own "
                "message says why; start all machines again"
            ) from error
        if refusal is not None:
            if ranks.rank == 0:
                names = [f"read-{rank}" for rank in range(ranks.world_size)]
                with suppress(dist.DistStoreError):
                    store.wait(names, timedelta(seconds=REFUSAL_SECONDS))
            raise UserError(refusal)
        if not ranks.is_counted:
            machines = [json.loads(value)["machine"] for value in store.multi_get(keys)]
            count = machines.count(record["machine"])
            ranks = replace(ranks, local_world_size=count, is_counted=True)
        return first["run"], ranks


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    versions = {"vembed's version": vembed.__version__}
    for name in COMPARED_PACKAGES:
        versions[f"{name}'s version"] = metadata.version(name)
    return versions


def require_equal(
    name: str,
    value: Any,
    advice: str,
) -> None:
    """Raise the same UserError on every rank unless all have the same value. Collective."""
    record = {
        "rank": collectives.rank(),
        "host": socket.gethostname(),
        "facts": {name: value},
    }
    first, *others = collectives.gather_objects(record)
    for other in others:
        problem = rank_difference(first, other)
        if problem is not None:
            raise UserError(f"{problem}: {advice}")


def rank_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return what differs between the records of two ranks, with the values. None if nothing does.

    A record: "rank", "host", and values by name under "facts". Names that one of them lacks are not compared.
    """
    sentences = []
    for name, value in first["facts"].items():
        other_value = other["facts"].get(name, value)
        if other_value != value:
            sentences.append(
                f"{name} is {_shown(value)} on rank {first['rank']} ({first['host']}) but {_shown(other_value)} on rank "
                f"{other['rank']} ({other['host']})"
            )
    if not sentences:
        return None
    num_more = len(sentences) - MAX_DIFFERENCES
    more = f"; and {num_more} more differ" if num_more > 0 else ""
    return f"the processes of this run were not started alike: {'; '.join(sentences[:MAX_DIFFERENCES])}{more}"


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    # The end matters too: long values may differ there alone.
    half = MAX_VALUE_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


def _claim_rank(store: Store, check: LaunchCheck) -> None:
    """Take the place of this machine, or of this rank, in the run. Raise UserError if another has it."""
    ranks = check.ranks
    launcher = os.environ.get(
        LAUNCHER_VARIABLE
    )  # has started all processes of this machine
    place = ranks.rank if launcher is None else ranks.rank - ranks.local_rank
    process = f"{socket.gethostname()}, process {launcher or os.getpid()}"
    # Writes only where nothing stands: the first process wins, and all others read its name.
    holder = store.compare_set(f"claim-{place}", "", process).decode()
    if holder != process:
        raise UserError(
            f"rank {ranks.rank} of the run at {check.address} is taken already (by {holder}), so this process "
            f"({process}) has no place in it: give each machine its own --machine-rank (RANK), and each run its own "
            "port (--main-process-port)"
        )


# ---- heartbeats -----------------------------------------------------------------

BEAT_SECONDS = 5.0
STILL_SECONDS = 15.0
"""Time inside one collective from which a rank looks whom it waits for."""
SILENT_SECONDS = 20.0
"""Time without a new record, or without an answer of the store, from which a rank counts as silent."""
LOGGED_SECONDS = 60.0
"""Time of waiting from which the log says for whom."""
MAX_NAMED_RANKS = 3
_TORCH = f"{os.sep}torch{os.sep}"
_TORCH_DISTRIBUTED = f"{_TORCH}distributed{os.sep}"


@dataclass(frozen=True)
class Beat:
    """State of a rank, as the others see it."""

    step: int = 0
    calls: int = 0
    """Collectives begun so far."""
    waits: bool = False
    """True inside a collective."""
    place: str = "its start"
    """Function and line of the thread that runs the run."""
    process: str = ""
    """Machine and number of the process."""

    def __str__(self) -> str:
        return f"in step {self.step:,d}, at {self.place}"


class Heartbeats:
    """Heartbeats of this rank, and what it knows of the others.

    Every few seconds each rank writes into the store its step, the number of its collectives, and where the thread of its
    run is. A rank that stays inside one collective reads those of all, and names the ranks that it waits for.
    """

    def __init__(self, ranks: RankInfo, store: Store) -> None:
        """Begin. All ranks do so."""
        self.step = 0
        """Step of the run, for the records; 0 before the first."""
        self._rank = ranks.rank
        self._num_ranks = ranks.world_size
        self._thread_id = threading.get_ident()
        self._beat = Beat()
        self._still_since = time.monotonic()
        self._answered = self._still_since
        self._hanging: dict[int, str] = {}
        self._ended = threading.Event()
        # A connection of its own: a thread that waits for an answer would block the others that use the store.
        own_store = store.clone()  # type: ignore[attr-defined]
        own_store.set_timeout(timedelta(seconds=SILENT_SECONDS))
        own_store.set(f"heartbeat-{ranks.rank}", json.dumps([0, asdict(self._beat)]))
        threading.Thread(
            target=self._watch, args=[own_store], name="vembed-heartbeat", daemon=True
        ).start()

    def stop(self) -> None:
        """End the thread. Not waited for."""
        self._ended.set()

    def hang_report(self, error: BaseException) -> str | None:
        """Return the sentence on the ranks that hang, if this error is a collective in which this rank waited for them.
        None otherwise."""
        frames = list(traceback.walk_tb(error.__traceback__))
        if not frames or not _is_collective(frames[-1][0]):
            return None
        hanging = self._hanging
        silence = time.monotonic() - self._answered
        if not hanging and self._rank and silence > SILENT_SECONDS:
            # Rank 0 keeps the store, so a halted rank 0 answers nobody, and the thread waits for it.
            sign = f"has given no sign of life for {silence:.0f} s"
            hanging = {0: f"rank 0, which {sign}"}
        return self._sentence(hanging) if hanging else None

    def _sentence(self, hanging: Mapping[int, str]) -> str:
        waited = time.monotonic() - self._still_since
        named = list(hanging.values())[:MAX_NAMED_RANKS]
        return f"rank {self._rank} has waited {waited:.0f} s, {self._beat}, for {'; and for '.join(named)}"

    def _watch(self, store: Store) -> None:
        """Write this rank's records, and log what it waits for. Runs in a thread of its own."""
        process = f"{socket.gethostname()}, process {os.getpid()}"
        keys = [f"heartbeat-{rank}" for rank in range(self._num_ranks)]
        last_changes: dict[int, tuple[bytes, float]] = {}
        number = 0
        is_logged = False
        while not self._ended.wait(BEAT_SECONDS):
            # From outside, without the run's cooperation: a thread blocked inside a C call is seen too.
            waits, place = _place(sys._current_frames()[self._thread_id])
            calls = list(collectives.calls.values())  # a copy: the run counts on
            beat = Beat(self.step, sum(calls), waits, place, process)
            if beat != self._beat:
                self._beat = beat
                self._still_since = time.monotonic()
                self._hanging = {}
                is_logged = False
                last_changes.clear()
            waited = time.monotonic() - self._still_since
            number += 1
            values = []
            # Of the store: rank 0 has ended, or does not answer in time.
            with suppress(RuntimeError):
                store.set(keys[self._rank], json.dumps([number, asdict(beat)]))
                # Only those that wait read: many ranks share one store.
                if waits and waited >= STILL_SECONDS:
                    values = store.multi_get(keys)
                self._answered = time.monotonic()
            if not values:
                continue
            others = {}
            for rank, value in enumerate(values):
                # By the own clock, and from the first look on: clocks of machines differ.
                if rank not in last_changes or last_changes[rank][0] != value:
                    last_changes[rank] = (value, self._answered)
                silence = self._answered - last_changes[rank][1]
                others[rank] = (Beat(**json.loads(value)[1]), silence)
            hanging = hanging_ranks(others)
            self._hanging = hanging
            if not hanging or is_logged or waited < LOGGED_SECONDS:
                continue
            # One line for all: of the first rank that is not waited for.
            if self._rank == min(others.keys() - hanging.keys()):
                is_logged = True
                collectives.log_from(self._rank, self._sentence(hanging))


def hanging_ranks(beats: Mapping[int, tuple[Beat, float]]) -> dict[int, str]:
    """Return the ranks that those inside a collective wait for, each with its place.

    A rank that writes nothing any more is halted, or its machine is gone. One outside of all collectives is in a loop, or
    slow. `beats`: the last record of each rank, and the seconds since it came.
    """
    hanging = {}
    for rank, (beat, silence) in beats.items():
        sign = "is"
        if silence > SILENT_SECONDS:
            sign = f"has given no sign of life for {silence:.0f} s; it was"
        elif beat.waits:
            continue
        hanging[rank] = f"rank {rank} ({beat.process}), which {sign} {beat}"
    return hanging


def _place(innermost: FrameType) -> tuple[bool, str]:
    """Return whether a thread is inside a collective, and the line that waits for it, or where it is."""
    waits = _is_collective(innermost)
    frame = innermost
    while waits and frame.f_back is not None:
        name = frame.f_code.co_filename
        if _TORCH not in name and name != collectives.__file__:
            break
        frame = frame.f_back
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return waits, f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


def _is_collective(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return _TORCH_DISTRIBUTED in name or name == collectives.__file__
