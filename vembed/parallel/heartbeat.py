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
from vembed.parallel.launch import HANG_REPORTS
from vembed.parallel.network import machine_name

log = logging.getLogger("vembed")

BEAT_SECONDS = 5.0
STILL_SECONDS = 15.0
"""Time without progress from which a rank asks whom it waits for."""
SILENT_SECONDS = 20.0
"""Time without a new record, or without an answer of rank 0, from which a rank counts as silent."""
FIRST_LINE_SECONDS = 60.0
"""Time of waiting before the first line about it; each further line takes twice as long."""
MAX_NAMED_RANKS = 3
MAX_DATAGRAM_BYTES = 8192
LOOPBACK = "127.0.0.1"
KEY = "heartbeat"
_COLLECTIVE_FILES = (f"{os.sep}torch{os.sep}distributed{os.sep}", collectives.__file__)
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True, slots=True)
class Beat:
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
class LastBeat:
    """The last record of a rank, and when it came."""

    record: Beat
    at: float


@dataclass(frozen=True, slots=True)
class HangReport:
    """The ranks that hang, in one sentence."""

    ranks: tuple[int, ...]
    text: str


class HeartbeatTable:
    """Records of all ranks, on rank 0, and answers to those that ask whom they wait for."""

    def __init__(self) -> None:
        self._last_beats: dict[int, LastBeat] = {}
        self._lock = threading.Lock()

    def take(self, rank: int, record: Beat, waited: float) -> HangReport | None:
        """Keep a record; return whom its rank waits for, if it has stood still for `waited` seconds."""
        now = time.monotonic()
        with self._lock:
            self._last_beats[rank] = LastBeat(record, now)
            if waited < STILL_SECONDS:
                return None
            others = dict(self._last_beats)
            del others[rank]
        return find_hanging_ranks(rank, record, others, now, waited)

    def serve(self, server: socket.socket, token: str, ended: threading.Event) -> None:
        """Answer the other ranks. Runs in a thread of its own."""
        server.settimeout(0.5)
        while not ended.is_set():
            # A timeout, or a datagram that is not of this run.
            with suppress(OSError, ValueError, KeyError, TypeError):
                content, address = server.recvfrom(MAX_DATAGRAM_BYTES)
                message = json.loads(content)
                if message["token"] != token:
                    continue
                beat = Beat(**message["record"])
                report = self.take(int(message["rank"]), beat, float(message["waited"]))
                answer = None if report is None else asdict(report)
                server.sendto(json.dumps(answer).encode(), address)
        server.close()


class Heartbeats:
    """Heartbeats of this rank, and what it knows of the others. Does nothing before `start`."""

    def __init__(self, ranks: RankInfo) -> None:
        self.step = 0
        """Step of the run, for the records; 0 before the first."""
        self._ranks = ranks
        self._host = machine_name().partition(" ")[0]
        self._thread_id = threading.get_ident()
        self._beat = Beat()
        self._still_since = self._next_line = 0.0
        self._table: HeartbeatTable | None = None
        self._client: socket.socket | None = None
        self._token = ""
        self._answered: float | None = None
        """Time of rank 0's last answer; None before its first answer."""
        self._report: HangReport | None = None
        self._report_time = 0.0
        self._has_written = self._is_final = False
        self._ended = threading.Event()

    def start(self, store: Store) -> None:
        """Begin. Rank 0 says through the store where it listens. All ranks call it."""
        is_one_machine = self._ranks.local_world_size == self._ranks.world_size
        if self._ranks.rank == 0:
            self._table = HeartbeatTable()
            server = _listening(LOOPBACK if is_one_machine else "")
            token = uuid.uuid4().hex
            store.set(KEY, json.dumps([server.getsockname()[1], token]))
            listener = threading.Thread(
                target=self._table.serve, args=(server, token, self._ended), daemon=True
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
            self._write_report(None)

    def hang_report(self, error: BaseException) -> str | None:
        """Return the sentence on the rank that hangs, if this error is a collective in which this rank waited for it;
        also for the launcher. None otherwise."""
        report = self._report
        # An older report was about another wait.
        is_recent = time.monotonic() - self._report_time < STILL_SECONDS + BEAT_SECONDS
        if (
            report is None
            or not is_recent
            or not _is_in_collective(error.__traceback__)
        ):
            return None
        self._ended.set()
        self._is_final = True
        self._write_report(report)
        return report.text

    def _watch(self) -> None:
        """Follow this rank's progress, and log what it waits for. Runs in a thread of its own."""
        while not self._ended.wait(BEAT_SECONDS):
            now = time.monotonic()
            has_moved = self._update(now)
            waited = now - self._still_since
            report = self._exchange(waited)
            if report is not None:
                self._report = report
                self._report_time = now
            if has_moved:
                self._write_report(None)
            elif report is not None and waited >= self._next_line:
                self._next_line *= 2
                self._write_report(report)
                self._log_report(report)
        if self._client is not None:
            self._client.close()

    def _update(self, now: float) -> bool:
        """Look where this rank is; return whether it has moved since the last look."""
        before = self._beat
        # From outside, without the run's cooperation: a thread blocked inside a C call is seen too.
        waits, place = _place(sys._current_frames().get(self._thread_id))
        self._beat = Beat(
            self.step, collectives.num_calls(), waits, place, self._host, os.getpid()
        )
        if before == self._beat:
            return False
        self._still_since = now
        self._next_line = FIRST_LINE_SECONDS
        return True

    def _exchange(self, waited: float) -> HangReport | None:
        """Send the record, and return whom this rank waits for, if it waits."""
        if self._table is not None:
            return self._table.take(0, self._beat, waited)
        now = time.monotonic()
        message = {
            "token": self._token,
            "rank": self._ranks.rank,
            "record": asdict(self._beat),
            "waited": waited,
        }
        with suppress(OSError, ValueError):
            assert self._client is not None
            self._client.send(json.dumps(message).encode())
            # An answer later than the timeout is read at the next beat, and is then one beat old.
            answer = json.loads(self._client.recv(MAX_DATAGRAM_BYTES))
            self._answered = time.monotonic()
            if answer is None:
                return None
            return HangReport(tuple(answer["ranks"]), answer["text"])
        silence = 0.0 if self._answered is None else now - self._answered
        if silence < SILENT_SECONDS or waited < STILL_SECONDS or not self._beat.waits:
            return None
        text = f"{_waiting(self._ranks.rank, self._beat, waited)} rank 0, which has given no sign of life for"
        return HangReport((0,), f"{text} {silence:.0f} s")

    def _log_report(self, report: HangReport) -> None:
        """Write a line, on the first rank that is not waited for."""
        first = next(
            rank for rank in range(self._ranks.world_size) if rank not in report.ranks
        )
        if first != self._ranks.rank:
            return
        if first == 0:
            log.warning("%s", report.text)
            return
        with suppress(
            OSError, AttributeError, ValueError
        ):  # the other ranks have no log on the console
            sys.stderr.write(f"vembed: {report.text}\n")
            sys.stderr.flush()

    def _write_report(self, report: HangReport | None) -> None:
        """Leave the sentence for the launcher of this machine, or take it back."""
        folder = os.environ.get(HANG_REPORTS)
        if folder is None or (report is None and not self._has_written):
            return
        path = Path(folder, str(self._ranks.rank))
        with suppress(OSError):
            if report is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(report.text, encoding="utf-8", errors="replace")
            self._has_written = report is not None


def find_hanging_ranks(
    rank: int, beat: Beat, others: Mapping[int, LastBeat], now: float, waited: float
) -> HangReport | None:
    """Return which of the other ranks hang while `rank` stands still. None if nothing is known."""
    silent = set()
    outside = set()
    behind = set()
    for other, last in others.items():
        if now - last.at > SILENT_SECONDS:
            silent.add(other)
        # Without GPUs a rank that waits is inside a collective.
        if beat.waits and not last.record.waits:
            outside.add(other)
        # Kernels run on beside Python: on GPUs only the number of collectives tells.
        if last.record.calls < beat.calls:
            behind.add(other)
    hanging = sorted(silent | outside or behind)
    if not hanging or not (beat.waits or behind):
        return None
    sentences = []
    for other in hanging[:MAX_NAMED_RANKS]:
        record = others[other].record
        sign = "is"
        if other in silent:
            seconds = now - others[other].at
            sign = f"has given no sign of life for {seconds:.0f} s; it was"
        sentences.append(
            f"rank {other} ({record.host}, process {record.pid}), which {sign} "
            f"{_in_step(record)}"
        )
    num_more = len(hanging) - len(sentences)
    more = f"; and {num_more} more ranks" if num_more else ""
    text = f"{_waiting(rank, beat, waited)} {'; and for '.join(sentences)}{more}"
    return HangReport(tuple(hanging), text)


def _waiting(rank: int, beat: Beat, waited: float) -> str:
    return f"rank {rank} has waited {waited:.0f} s, {_in_step(beat)}, for"


def _in_step(record: Beat) -> str:
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
    """Return whether a thread is inside a collective, and its line with the nearest line of vembed."""
    if innermost is None:
        return False, "its end"
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    vembed_frame = None
    calling_frame = None
    for frame in frames:
        name = frame.f_code.co_filename
        if vembed_frame is None and _is_in_vembed(name):
            vembed_frame = frame
        if calling_frame is None and not _is_collective(name):
            calling_frame = frame
    if _is_collective(innermost.f_code.co_filename):
        return True, _line(vembed_frame or calling_frame or innermost)
    if vembed_frame is None or vembed_frame is innermost:
        return False, _line(innermost)
    return False, f"{_line(innermost)}, called from {_line(vembed_frame)}"


def _is_collective(name: str) -> bool:
    return _COLLECTIVE_FILES[0] in name or name == _COLLECTIVE_FILES[1]


def _is_in_vembed(name: str) -> bool:
    return name.startswith(_PACKAGE) and name != _COLLECTIVE_FILES[1]


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
