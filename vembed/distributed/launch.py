"""Starting the processes of one machine, passing signals on to them, and ending them all when one of them fails."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that was asked to stop, and has saved a checkpoint."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL, for ranks that wait for one that has failed."""
FOLLOW_SECONDS = 30.0
"""How long the other ranks may take to stop once one has."""
SETTLE_SECONDS = 1.0
HOLD_SECONDS = 30.0
"""How long a traceback waits for its rank to end."""
JOIN_SECONDS = 2.0
DEFAULT_PORT = 29500
TRACEBACK = "Traceback (most recent call last)"
PR_SET_PDEATHSIG = 1
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def num_visible_devices(env: Mapping[str, str] = os.environ) -> int:
    """GPUs that processes started here would see; torch is only asked where the machine may have one."""
    if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles") or not any(
        Path(node).exists() for node in GPU_NODES
    ):
        return 0
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen != os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(chosen.split(","))  # torch would look at this process's own variable
    import torch

    return torch.cuda.device_count()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environments(
    num_processes: int,
    *,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> list[dict[str, str]]:
    """The environment of each process of this machine, in torch's meaning of the names."""
    port = main_process_port or (DEFAULT_PORT if num_machines > 1 else free_port())
    shared = dict(env) | {
        "WORLD_SIZE": str(num_processes * num_machines),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": main_process_ip or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # Each process would otherwise start as many threads as there are cores, and all would wait for each other.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes)))
    return [
        shared | {"RANK": str(machine_rank * num_processes + local), "LOCAL_RANK": str(local)}
        for local in range(num_processes)
    ]


def launch(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run the command once in each environment, wait for all, and return the exit code of the whole.

    0: all ended well. 130, 143: stopped by a signal. 2: a rank found a user's mistake. 1: a rank failed or was killed.
    """
    return _Ranks(command, environments).wait()


class _Ranks:
    """The running processes, and what has happened to them."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self.numbers = [int(environment["RANK"]) for environment in environments]
        self.stop_signal: signal.Signals | None = None
        self.ends_at_once = False
        self.cause: str | None = None
        self.code = 0
        self.failed_at: float | None = None
        self.deadline: float | None = None
        self.command, self.environments = command, environments
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pumps: list[_Pump] = []
        self.all_started = False
        self.passed_on = False

    def _start_all(self) -> None:
        # All processes before the first thread: what runs between fork and exec must not meet other threads' locks.
        for position, environment in enumerate(self.environments):
            self.processes.append(_start(self.command, environment, position == 0))
        self.pumps = [
            _Pump(number, pipe, target)
            for number, process in zip(self.numbers, self.processes, strict=True)
            for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            if pipe is not None
        ]
        self.all_started = True
        self._pass_on()

    def wait(self) -> int:
        """Until no rank is left."""
        try:
            with self._signals():
                self._start_all()
                while self._look():
                    time.sleep(POLL_SECONDS)
        finally:
            self._kill()
            for pump in self.pumps:
                pump.join(timeout=JOIN_SECONDS)
                # What a user's mistake on one rank does to the others says nothing more.
                pump.release(drop=self.code == 2)
        if self.cause is not None:
            return self.code
        if self.stop_signal is not None and any(process.returncode for process in self.processes):
            return 128 + (signal.SIGINT if self.stop_signal is signal.SIGINT else signal.SIGTERM)
        return max(process.returncode for process in self.processes)

    def _look(self) -> bool:
        """See who has ended, do what follows from it, and say whether any is left."""
        codes = [process.poll() for process in self.processes]
        for pump in self.pumps:
            if pump.has_held_for(HOLD_SECONDS):
                pump.release()
        ended = [(number, code) for number, code in zip(self.numbers, codes, strict=True) if code]
        failed = [(number, code) for number, code in ended if not self._is_stop(code)]
        now = time.monotonic()
        if failed and self.cause is None and not self.ends_at_once:
            self.failed_at = self.failed_at or now
            # The end of one rank fails others, which may be gone before it: the cause is known a moment later.
            if now - self.failed_at > SETTLE_SECONDS or None not in codes:
                self._report(failed)
                self.deadline = now + GRACE_SECONDS
                self._send(signal.SIGTERM)
        elif ended and self.deadline is None:
            self.deadline = now + FOLLOW_SECONDS
        if self.ends_at_once:
            self._kill()
        elif self.deadline is not None and now > self.deadline:
            if self.cause is None:
                self._fail(f"a rank stopped, and the others did not within {FOLLOW_SECONDS:g} seconds", code=1)
            self._kill()
        return None in codes

    def _is_stop(self, code: int) -> bool:
        if code in STOPPED_CODES:
            return True
        # Before a rank has set up its handlers, the signal itself ends it.
        return self.stop_signal is not None and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def _report(self, failed: Sequence[tuple[int, int]]) -> None:
        """Name the rank that made the others fail: one that was killed, or else found a mistake, or else any."""
        number, code = min(failed, key=lambda one: (one[1] >= 0, one[1] != 2, one[0]))
        for pump in self.pumps:
            if pump.number == number:
                pump.join(timeout=JOIN_SECONDS)
                pump.release()
        if code < 0:
            why = " (perhaps because memory ran out)" if -code == signal.SIGKILL else ""
            self._fail(f"rank {number} was killed by signal {-code}, {signal.Signals(-code).name}{why}", code=1)
        else:
            self._fail(f"rank {number} ended with exit code {code}", code=2 if code == 2 else 1)

    def _fail(self, cause: str, code: int) -> None:
        self.cause, self.code = cause, code
        num_left = sum(process.poll() is None for process in self.processes)
        ending = f"; ending the other {num_left}" if num_left else ""
        with suppress(OSError):  # where the terminal is closed
            sys.stderr.write(f"vembed: {cause}{ending}\n")
            sys.stderr.flush()

    def _pass_on(self) -> None:
        """Send a signal that has come to all ranks, once, and not before all are there to get it."""
        if self.stop_signal is None or self.passed_on or not self.all_started:
            return
        self.passed_on = True
        self._send(signal.SIGTERM if self.stop_signal is signal.SIGHUP else self.stop_signal)

    def _send(self, signum: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                # Its own session, so its group is itself and what it has started.
                os.killpg(process.pid, signal.SIGKILL)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass the first signal on and wait for the checkpoint; the second ends everything at once."""

        def handle(signum: int, _frame: object) -> None:
            if self.stop_signal is not None:
                self.ends_at_once = True
                return
            self.stop_signal = signal.Signals(signum)
            self._pass_on()

        before = {}
        for signum in FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and so do we then
                before[signum] = signal.signal(signum, handle)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Pump(threading.Thread):
    """Copies a rank's output line by line, each with its number, so that several tracebacks can be told apart.

    A traceback and what follows it are held until the rank has ended: then it is known whether it is the cause, or only
    what the end of another rank has led to.
    """

    lock = threading.Lock()

    def __init__(self, number: int, pipe: IO[bytes], target: IO[str]) -> None:
        super().__init__(daemon=True)
        self.number, self.pipe, self.target = number, pipe, target
        self.held: list[str] = []
        self.held_since = 0.0
        self.start()

    def run(self) -> None:
        """Until the rank closes its end; goes on reading where nobody listens any more, or the rank would block."""
        with self.pipe:
            for raw in self.pipe:
                line = f"[rank {self.number}] {raw.decode('utf-8', 'replace').rstrip()}\n"
                with self.lock:
                    if self.held or TRACEBACK in line:
                        self.held_since = self.held_since if self.held else time.monotonic()
                        self.held.append(line)
                    else:
                        self._write(line)

    def has_held_for(self, seconds: float) -> bool:
        """Whether something has been held so long: then its rank is not about to end."""
        return bool(self.held) and time.monotonic() - self.held_since > seconds

    def release(self, *, drop: bool = False) -> None:
        """Write what is held, or forget it."""
        with self.lock:
            if not drop:
                self._write("".join(self.held))
            self.held = []

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.target.write(text)
            self.target.flush()


def _start(command: Sequence[str], environment: Mapping[str, str], is_first: bool) -> subprocess.Popen[bytes]:
    """One process in a session of its own, so that Ctrl-C reaches it once: through us. The first keeps our terminal."""
    output = None if is_first else subprocess.PIPE
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_die_with_parent(os.getpid()) if sys.platform == "linux" else None,  # noqa: PLW1509 - see _Ranks
    )


def _die_with_parent(parent: int) -> Callable[[], None]:
    """What a child does before it becomes the command: ask the kernel to be killed when its parent is gone."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask
