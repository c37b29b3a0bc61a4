"""Heartbeats: which rank hangs, in place of the name of a rank that merely noticed it.

Every few seconds each rank writes into the store its step, the number of its collectives, and where the thread of its
run is. A rank that stands still reads those of all, and names the ranks that it waits for: one that writes nothing any
more (halted, or its machine is gone), or one that is outside of all collectives while others wait (in a loop, or slow).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]

from vembed.parallel import collectives
from vembed.parallel.environment import RankInfo, machine_name
from vembed.parallel.launch import HANG_REPORT

BEAT_SECONDS = 5.0
STILL_SECONDS = 15.0
"""Time without progress from which a rank looks whom it waits for."""
SILENT_SECONDS = 20.0
"""Time without a new record, or without an answer of the store, from which a rank counts as silent."""
FIRST_LINE_SECONDS = 60.0
"""Time of waiting before the first line about it; each further line takes twice as long."""
MAX_NAMED_RANKS = 3
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

    def __str__(self) -> str:
        step = f"in step {self.step:,d}, " if self.step else ""
        return f"{step}at {self.place}"


@dataclass(frozen=True, slots=True)
class HangReport:
    """The ranks that hang, in one sentence."""

    ranks: tuple[int, ...]
    text: str


class Heartbeats:
    """Heartbeats of this rank, and what it knows of the others."""

    def __init__(self, ranks: RankInfo, store: Store) -> None:
        """Begin. All ranks do so."""
        self.step = 0
        """Step of the run, for the records; 0 before the first."""
        self._ranks = ranks
        self._thread_id = threading.get_ident()
        self._beat = Beat()
        self._still_since = time.monotonic()
        self._answered = self._still_since
        self._report_time = self._still_since
        self._report: HangReport | None = None
        self._is_final = False
        self._ended = threading.Event()
        # A connection of its own: a thread that waits for an answer would block the others that use the store.
        own_store = store.clone()  # type: ignore[attr-defined]
        own_store.set_timeout(timedelta(seconds=SILENT_SECONDS))
        own_store.set(_key(ranks.rank), json.dumps([0, asdict(self._beat)]))
        threading.Thread(
            target=self._watch, args=[own_store], name="vembed-heartbeat", daemon=True
        ).start()

    def stop(self) -> None:
        """End the thread. Not waited for."""
        self._ended.set()
        if not self._is_final:
            self._leave_for_launcher(None)

    def hang_report(self, error: BaseException) -> str | None:
        """Return the sentence on the rank that hangs, if this error is a collective in which this rank waited for it;
        also for the launcher. None otherwise."""
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        if traceback is None or not _is_collective(traceback.tb_frame):
            return None
        now = time.monotonic()
        report = self._report
        silence = now - self._answered
        # An older report was about another wait.
        if now - self._report_time > STILL_SECONDS + BEAT_SECONDS:
            report = None
        if report is None and self._ranks.rank and silence > SILENT_SECONDS:
            # Rank 0 keeps the store, so a halted rank 0 answers nobody, and the thread waits for it.
            waiting = _waiting(self._ranks.rank, self._beat, now - self._still_since)
            text = (
                f"{waiting} rank 0, which has given no sign of life for {silence:.0f} s"
            )
            report = HangReport((0,), text)
        if report is None:
            return None
        self._ended.set()
        self._is_final = True
        self._leave_for_launcher(report)
        return report.text

    def _watch(self, store: Store) -> None:
        """Write this rank's records, and log what it waits for. Runs in a thread of its own."""
        rank = self._ranks.rank
        host = machine_name().partition(" ")[0]
        keys = [_key(other) for other in range(self._ranks.world_size)]
        last_changes: dict[int, tuple[bytes, float]] = {}
        number = 0
        next_line = FIRST_LINE_SECONDS
        while not self._ended.wait(BEAT_SECONDS):
            # From outside, without the run's cooperation: a thread blocked inside a C call is seen too.
            waits, place = _place(sys._current_frames().get(self._thread_id))
            calls = list(collectives.calls.values())  # a copy: the run counts on
            beat = Beat(self.step, sum(calls), waits, place, host, os.getpid())
            if beat != self._beat:
                self._beat = beat
                self._still_since = time.monotonic()
                next_line = FIRST_LINE_SECONDS
                last_changes.clear()
                self._leave_for_launcher(None)
            waited = time.monotonic() - self._still_since
            number += 1
            values: list[bytes] = []
            # Of the store: rank 0 has ended, or does not answer in time.
            with suppress(RuntimeError):
                store.set(_key(rank), json.dumps([number, asdict(beat)]))
                # Only those that stand still read: many ranks share one store.
                if waited >= STILL_SECONDS:
                    values = store.multi_get(keys)
                self._answered = time.monotonic()
            others = {}
            for other, value in enumerate(values):
                # By the own clock, and from the first look on: clocks of machines differ.
                if other not in last_changes or last_changes[other][0] != value:
                    last_changes[other] = (value, self._answered)
                if other != rank:
                    silence = self._answered - last_changes[other][1]
                    others[other] = (Beat(**json.loads(value)[1]), silence)
            report = find_hanging_ranks(rank, beat, others, waited)
            if report is None:
                continue
            self._report = report
            self._report_time = time.monotonic()
            if waited >= next_line:
                next_line *= 2
                self._leave_for_launcher(report)
                # One line for all: of the first rank that is not waited for.
                if rank == min(set(range(len(keys))) - set(report.ranks)):
                    collectives.log_from(rank, report.text)

    def _leave_for_launcher(self, report: HangReport | None) -> None:
        """Leave the sentence for the launcher of this machine, or take it back: NCCL ends a process without an error
        that could be caught."""
        path = os.environ.get(HANG_REPORT)
        if path is None:
            return
        text = "" if report is None else report.text
        with suppress(OSError):
            Path(path).write_text(text, encoding="utf-8", errors="replace")


def find_hanging_ranks(
    rank: int,
    beat: Beat,
    others: Mapping[int, tuple[Beat, float]],
    waited: float,
) -> HangReport | None:
    """Return which of the other ranks hang while `rank` stands still. None if nothing is known.

    `others`: the last record of each, and the seconds since it came.
    """
    silent = {
        other for other, (_, silence) in others.items() if silence > SILENT_SECONDS
    }
    # Without GPUs a rank that waits is inside a collective.
    outside = {
        other for other, (last, _) in others.items() if beat.waits and not last.waits
    }
    # Kernels run on beside Python: on GPUs only the number of collectives tells.
    behind = {other for other, (last, _) in others.items() if last.calls < beat.calls}
    hanging = sorted(silent | outside or behind)
    if not hanging or not (beat.waits or behind):
        return None
    sentences = []
    for other in hanging[:MAX_NAMED_RANKS]:
        last, silence = others[other]
        sign = "is"
        if other in silent:
            sign = f"has given no sign of life for {silence:.0f} s; it was"
        sentences.append(
            f"rank {other} ({last.host}, process {last.pid}), which {sign} {last}"
        )
    num_more = len(hanging) - len(sentences)
    more = f"; and {num_more} more ranks" if num_more else ""
    text = f"{_waiting(rank, beat, waited)} {'; and for '.join(sentences)}{more}"
    return HangReport(tuple(hanging), text)


def _key(rank: int) -> str:
    return f"heartbeat-{rank}"


def _waiting(
    rank: int,
    beat: Beat,
    waited: float,
) -> str:
    return f"rank {rank} has waited {waited:.0f} s, {beat}, for"


def _place(innermost: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread is inside a collective, and its line with the nearest line of vembed."""
    if innermost is None:
        return False, "its end"
    waits = _is_collective(innermost)
    vembed_frame = None
    calling_frame = None
    frame: FrameType | None = innermost
    while frame is not None:
        if not _is_collective(frame):
            calling_frame = calling_frame or frame
            if frame.f_code.co_filename.startswith(_PACKAGE):
                vembed_frame = vembed_frame or frame
        frame = frame.f_back
    if waits:
        return True, _line(vembed_frame or calling_frame or innermost)
    if vembed_frame is None or vembed_frame is innermost:
        return False, _line(innermost)
    return False, f"{_line(innermost)}, called from {_line(vembed_frame)}"


def _is_collective(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    torchs = f"{os.sep}torch{os.sep}distributed{os.sep}"
    return torchs in name or name == collectives.__file__


def _line(frame: FrameType) -> str:
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"
