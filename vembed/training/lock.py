"""Lock on output_dir: one run at a time writes there. Rank 0 takes it before anything is read.

The file `.lock` names the run, host and process of its owner. Its modification time, set anew every few seconds, is the
owner's sign of life.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from vembed.errors import UserError
from vembed.files import read_state_bytes
from vembed.parallel.environment import machine_name

log = logging.getLogger("vembed")

LOCK = ".lock"
LOCK_BEAT_SECONDS = 10.0
DEAD_SECONDS = 90.0
"""Age of the last sign of life from which an owner on another host counts as dead."""
LOOK_SECONDS = 1.0
SETTLE_SECONDS = 0.3
"""Time after which one of several starts that replace a dead owner's lock at once knows that it has won."""
UNKNOWN_OWNER = {"host": "unknown", "machine": "", "pid": 0, "process_started": 0.0}
"""Owner of a lock that cannot be read."""


class OutputLock:
    """The lock of one run on its output folder. A context manager: the exit releases it, if it was taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK
        # Of no other process: process 1 of several containers may look at the same folder.
        self._probe = folder / f"{LOCK}.{secrets.token_hex(8)}"
        self._content = b""
        self._made: list[Path] = []
        """Folders that did not exist before; removed at the exit if they are empty."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take the lock. Raise UserError if a living run has it, or if the folder cannot be written to."""
        owner = {
            "host": machine_name().partition(" ")[0],
            "machine": _machine(),
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "started": time.time(),
        }
        self._content = json.dumps(owner).encode()
        action = "created"
        try:
            for folder in reversed((self.folder, *self.folder.parents)):
                if not folder.exists():
                    folder.mkdir(exist_ok=True)
                    self._made.append(folder)
            self.folder.mkdir(exist_ok=True)  # says so where a file is in the way
            action = "written to"
            while not self._create():
                with suppress(FileNotFoundError):  # released meanwhile: try again
                    self._replace(self._dead_owner())
                    break
        except OSError as error:
            raise UserError(
                f"output_dir: {self.folder} cannot be {action} ({error.strerror}); give a folder that every process "
                "may write to, on a disk with room"
            ) from error
        self._thread = threading.Thread(
            target=self._beat, name="vembed-lock", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            with suppress(OSError):
                # Only if it is this run's still: another may have taken it over from a run that it held for dead.
                if self.path.read_bytes() == self._content:
                    self.path.unlink()
        for folder in reversed(self._made):
            with suppress(OSError):  # a run that has begun has filled it
                folder.rmdir()

    def _create(self) -> bool:
        try:
            with self.path.open("xb") as file:
                file.write(self._content)
        except FileExistsError:
            return False
        return True

    def _dead_owner(self) -> str:
        """Return who the dead owner of the lock is. Raise UserError if it lives."""
        # The clock of the file system sets the times of files.
        self._probe.touch()
        current_time = self._probe.stat().st_mtime
        self._probe.unlink()
        age = current_time - self.path.stat().st_mtime
        owner: dict[str, Any] = {**UNKNOWN_OWNER, "started": 0.0}
        with suppress(ValueError, TypeError):
            owner.update(json.loads(read_state_bytes(self.path)))
        if owner["machine"] == _machine():
            is_dead = _has_ended(owner)
            sign = "which has ended" if is_dead else "which is running"
        else:
            is_dead = self._is_silent(age)
            sign = "which gives signs of life"
            if is_dead:
                sign = f"without a sign of life for {DEAD_SECONDS:g} s"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["started"]))
        description = (
            f"host {owner['host']}, process {owner['pid']}, started {started}, {sign}"
        )
        if is_dead:
            return description
        raise UserError(
            f"output_dir: {self.folder} is in use by another run ({description}): wait for its "
            "end, stop it, or choose another output_dir; the lock of a run that is dead is taken over by itself, at "
            f"once on its own host and after {DEAD_SECONDS:g} s on another (or remove {self.path})"
        )

    def _replace(self, owner: str) -> None:
        """Put this run's lock in the place of a dead owner's."""
        self._probe.write_bytes(self._content)
        self._probe.replace(self.path)
        # Several starts may replace the same dead lock: the last one to write wins, and each of them looks again.
        time.sleep(SETTLE_SECONDS)
        if self.path.read_bytes() != self._content:
            raise UserError(
                f"output_dir: {self.folder} was taken by another run that started at the same time"
            )
        log.warning(
            f"took over the lock on {self.folder} from a run that is dead ({owner})"
        )

    def _is_silent(self, age: float) -> bool:
        """Return whether the owner, on another host, gives no sign of life until it is too old. A job that is put on
        another machine after a crash begins by itself that way."""
        last = self.path.stat().st_mtime
        if age < DEAD_SECONDS:
            log.info(
                f"output_dir: {self.folder} has a lock of another host: looking for signs of life"
            )
        end = time.monotonic() + DEAD_SECONDS - age
        while time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            # Opened anew: network file systems remember the times of files.
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_mtime != last:
                    return False
        return True

    def _beat(self) -> None:
        """Renew the sign of life until the end. Runs in a thread of its own."""
        while not self._ended.wait(LOCK_BEAT_SECONDS):
            with suppress(OSError):  # the disk may come back
                if self.path.read_bytes() != self._content:
                    log.error(
                        f"{self.path} belongs to another run now: two runs write to {self.folder}"
                    )
                    return
                os.utime(self.path)


def _machine() -> str:
    """Return the name of this machine and, in a container, of its processes' namespace."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{machine_name()} {namespace}"


def _has_ended(owner: dict[str, Any]) -> bool:
    """Return whether the owner, a process of this machine, has ended. Its number may be another process's now."""
    try:
        process = psutil.Process(owner["pid"])
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return is_zombie or abs(process.create_time() - owner["process_started"]) > 1.0
    except psutil.Error:
        return not psutil.pid_exists(owner["pid"])
