"""Heartbeats: signs of life of all ranks. They name the rank that hangs, and not the one that noticed.

Every few seconds each rank sends rank 0 a record: its step, the number of its collectives, and where the thread of its
run is. A rank that stands still asks rank 0 whom it waits for: one that sends no records any more (halted, or its
machine is gone), or one that is outside of all collectives while others wait (in a loop, or slow). The records are
datagrams: they block nobody, and where a network does not let them through nobody is named.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

from torch.distributed import Store  # type: ignore[attr-defined]

from vembed.parallel import collectives
from vembed.parallel.environment import RankInfo
from vembed.parallel.launch import BLAME
from vembed.parallel.network import machine_name

log = logging.getLogger("vembed")

BEAT_SECONDS = 5.0
STILL_SECONDS = 15.0
"""Time without progress from which a rank asks whom it waits for."""
SILENT_SECONDS = 20.0
"""Time without a new record, or without an answer of rank 0, from which a rank counts as silent."""
FIRST_LINE_SECONDS = 60.0
"""Time of waiting before the first line about it; each further line takes twice as long."""
MOST_NAMED = 3
MOST_BYTES = 8192
LOOPBACK = "127.0.0.1"
KEY = "heartbeat"
_COLLECTIVE_FILES = (f"{os.sep}torch{os.sep}distributed{os.sep}", collectives.__file__)
_OWN = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True, slots=True)
class Record:
    """State of a rank, as the others see it."""

    step: int = 0
    calls: int = 0
    """Collectives begun so far."""
    waits: bool = False
    """True inside a collective."""
    place: str = "its start"
    """Function and line of the thread that runs the run."""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The last record of a rank, and when it came."""

    record: Record
    at: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks that hang, in one sentence."""

    ranks: tuple[int, ...]
    text: str


class Board:
    """Records of all ranks, on rank 0, and answers to those that ask whom they wait for."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}
        self._lock = threading.Lock()

    def take(self, rank: int, record: Record, waited: float) -> Verdict | None:
        """Keep a record; return whom its rank waits for, if it has stood still for `waited` seconds."""
        now = time.monotonic()
        with self._lock:
            self._seen[rank] = Seen(record, now)
            if waited < STILL_SECONDS:
                return None
            others = {other: one for other, one in self._seen.items() if other != rank}
        return judge(rank, record, others, now, waited)

    def serve(self, server: socket.socket, token: str, ended: threading.Event) -> None:
        """Answer the other ranks. Runs in a thread of its own."""
        server.settimeout(0.5)
        while not ended.is_set():
            with suppress(
                OSError, ValueError, KeyError, TypeError
            ):  # no time, or no datagram of this run
                content, address = server.recvfrom(MOST_BYTES)
                said = json.loads(content)
                if said["token"] == token:
                    found = self.take(
                        int(said["rank"]),
                        Record(**said["record"]),
                        float(said["waited"]),
                    )
                    server.sendto(
                        json.dumps(None if found is None else asdict(found)).encode(),
                        address,
                    )
        server.close()


class Heartbeats:
    """Heartbeats of this rank, and what it knows of the others. Does nothing before `start`."""

    def __init__(self, ranks: RankInfo) -> None:
        self.step = 0
        """Step of the run, for the records; 0 before the first."""
        self._ranks = ranks
        self._host = machine_name().partition(" ")[0]
        self._thread_id = threading.get_ident()
        self._own = Record()
        self._still_since = self._next_line = 0.0
        self._board: Board | None = None
        self._client: socket.socket | None = None
        self._token = ""
        self._answered: float | None = None
        """Time of rank 0's last answer; None before its first answer."""
        self._verdict: Verdict | None = None
        self._verdict_at = 0.0
        self._has_blamed = self._is_final = False
        self._ended = threading.Event()

    def start(self, store: Store) -> None:
        """Begin. Rank 0 says through the store where it listens. All ranks call it."""
        is_one_machine = self._ranks.local_world_size == self._ranks.world_size
        if self._ranks.rank == 0:
            self._board, server, token = (
                Board(),
                _listening(LOOPBACK if is_one_machine else ""),
                uuid.uuid4().hex,
            )
            store.set(KEY, json.dumps([server.getsockname()[1], token]))
            listener = threading.Thread(
                target=self._board.serve, args=(server, token, self._ended), daemon=True
            )
            listener.start()
        else:
            # The store carries the port alone, and waits for rank 0. The records go as datagrams, which never wait.
            port, self._token = json.loads(store.get(KEY))
            self._client = _connected(
                LOOPBACK if is_one_machine else os.environ["MASTER_ADDR"], port
            )
        threading.Thread(
            target=self._watch, name="vembed-heartbeat", daemon=True
        ).start()

    def stop(self) -> None:
        """End the threads. Not waited for."""
        self._ended.set()
        if not self._is_final:
            self._blame(None)

    def blamed(self, error: BaseException) -> str | None:
        """Return the sentence on the rank that hangs, if this error is a collective in which this rank waited for it;
        also for the launcher. None otherwise."""
        verdict = self._verdict
        # An older verdict was about another wait.
        is_recent = time.monotonic() - self._verdict_at < STILL_SECONDS + BEAT_SECONDS
        if (
            verdict is None
            or not is_recent
            or not _is_in_collective(error.__traceback__)
        ):
            return None
        self._ended.set()
        self._is_final = True
        self._blame(verdict)
        return verdict.text

    def _watch(self) -> None:
        """Follow this rank's progress, and say what it waits for. Runs in a thread of its own."""
        while not self._ended.wait(BEAT_SECONDS):
            now = time.monotonic()
            has_moved = self._look(now)
            waited = now - self._still_since
            found = self._exchange(waited)
            if found is not None:
                self._verdict, self._verdict_at = found, now
            if has_moved:
                self._blame(None)
            elif found is not None and waited >= self._next_line:
                self._next_line *= 2
                self._blame(found)
                self._say(found)
        if self._client is not None:
            self._client.close()

    def _look(self, now: float) -> bool:
        """Look where this rank is; return whether it has moved since the last look."""
        before = self._own
        # From outside, without the run's cooperation: a thread blocked inside a C call is seen too.
        waits, place = _place(sys._current_frames().get(self._thread_id))
        self._own = Record(
            self.step, collectives.num_calls(), waits, place, self._host, os.getpid()
        )
        if before == self._own:
            return False
        self._still_since, self._next_line = now, FIRST_LINE_SECONDS
        return True

    def _exchange(self, waited: float) -> Verdict | None:
        """Send the record, and return whom this rank waits for, if it waits."""
        if self._board is not None:
            return self._board.take(0, self._own, waited)
        now = time.monotonic()
        said = {
            "token": self._token,
            "rank": self._ranks.rank,
            "record": asdict(self._own),
            "waited": waited,
        }
        with suppress(OSError, ValueError):
            assert self._client is not None
            self._client.send(json.dumps(said).encode())
            # An answer later than the timeout is read at the next beat, and is then one beat old.
            answer = json.loads(self._client.recv(MOST_BYTES))
            self._answered = time.monotonic()
            return (
                None
                if answer is None
                else Verdict(tuple(answer["ranks"]), answer["text"])
            )
        silence = 0.0 if self._answered is None else now - self._answered
        if silence < SILENT_SECONDS or waited < STILL_SECONDS or not self._own.waits:
            return None
        text = f"{_waiting(self._ranks.rank, self._own, waited)} rank 0, which has given no sign of life for"
        return Verdict((0,), f"{text} {silence:.0f} s")

    def _say(self, verdict: Verdict) -> None:
        """Write a line, on the first rank that is not waited for."""
        first = next(
            rank for rank in range(self._ranks.world_size) if rank not in verdict.ranks
        )
        if first != self._ranks.rank:
            return
        if first == 0:
            log.warning("%s", verdict.text)
            return
        with suppress(
            OSError, AttributeError, ValueError
        ):  # the other ranks have no log on the console
            sys.stderr.write(f"vembed: {verdict.text}\n")
            sys.stderr.flush()

    def _blame(self, verdict: Verdict | None) -> None:
        """Leave the sentence for the launcher of this machine, or take it back."""
        folder = os.environ.get(BLAME)
        if folder is None or (verdict is None and not self._has_blamed):
            return
        path = Path(folder, str(self._ranks.rank))
        with suppress(OSError):
            if verdict is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(verdict.text, encoding="utf-8", errors="replace")
            self._has_blamed = verdict is not None


def judge(
    rank: int, own: Record, seen: Mapping[int, Seen], now: float, waited: float
) -> Verdict | None:
    """Return which of the other ranks hang, from their records, while `rank` stands still; None if nothing is known."""
    silent = {other for other, one in seen.items() if now - one.at > SILENT_SECONDS}
    # Without GPUs a rank that waits is inside a collective. Kernels run on beside Python: there only the count tells.
    absent = {
        other for other, one in seen.items() if own.waits and not one.record.waits
    }
    behind = {other for other, one in seen.items() if one.record.calls < own.calls}
    # The counts of calls decide only where the above tells nothing, as on GPUs.
    hanging = sorted(silent | absent or behind)
    if not hanging or not (own.waits or behind):
        return None
    told = []
    for other in hanging:
        record, seconds = seen[other].record, now - seen[other].at
        sign = (
            f"has given no sign of life for {seconds:.0f} s; it was"
            if other in silent
            else "is"
        )
        told.append(
            f"rank {other} ({record.host}, process {record.pid}), which {sign} {_in_step(record)}"
        )
    more = (
        f"; and {len(told) - MOST_NAMED} more ranks" if len(told) > MOST_NAMED else ""
    )
    return Verdict(
        tuple(hanging),
        f"{_waiting(rank, own, waited)} {'; and for '.join(told[:MOST_NAMED])}{more}",
    )


def _waiting(rank: int, own: Record, waited: float) -> str:
    return f"rank {rank} has waited {waited:.0f} s, {_in_step(own)}, for"


def _in_step(record: Record) -> str:
    return (f"in step {record.step:,d}, " if record.step else "") + f"at {record.place}"


def _listening(host: str) -> socket.socket:
    """Return a socket that takes datagrams at an address, or without one on all interfaces, IPv4 and IPv6."""
    if host:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind((host, 0))
        return server
    try:
        server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
    except OSError:  # no IPv6 here
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("", 0))
    return server


def _connected(host: str, port: int) -> socket.socket:
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
        0
    ]
    client = socket.socket(family, kind)
    client.connect(address)
    client.settimeout(min(1.0, BEAT_SECONDS))
    return client


def _place(innermost: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread is inside a collective, and where: its line, or the one from which the collective was
    called; with the nearest line of vembed."""
    if innermost is None:
        return False, "its end"
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    waits = _is_collective(innermost.f_code.co_filename)
    own = next((one for one in frames if _is_vembeds(one.f_code.co_filename)), None)
    if waits:
        outer = next(
            (one for one in frames if not _is_collective(one.f_code.co_filename)),
            innermost,
        )
        return True, _line(own or outer)
    called = "" if own is None or own is innermost else f", called from {_line(own)}"
    return False, _line(innermost) + called


def _is_collective(name: str) -> bool:
    return _COLLECTIVE_FILES[0] in name or name == _COLLECTIVE_FILES[1]


def _is_vembeds(name: str) -> bool:
    return name.startswith(_OWN) and name != _COLLECTIVE_FILES[1]


def _is_in_collective(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised inside a collective."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and _is_collective(
        traceback.tb_frame.f_code.co_filename
    )


def _line(frame: FrameType) -> str:
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"
