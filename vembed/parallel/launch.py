"""Launcher of the processes of one machine: forwards signals, and ends all processes when one of them fails."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vembed.cores import num_cores
from vembed.errors import UserError

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that was stopped by a signal after saving a checkpoint."""
POLL_SECONDS = 0.05
KILL_TIMEOUT_SECONDS = 5.0
"""Time from SIGTERM to SIGKILL for ranks that wait for a failed one."""
STOP_TIMEOUT_SECONDS = 30.0
"""Time limit for the other ranks to stop after the first one."""
CAUSE_SECONDS = 1.0
REPEATED_SIGNAL_SECONDS = 2.0
"""Time within which a repeated signal counts as the same one."""
TRACEBACK_HOLD_SECONDS = 30.0
"""Time limit for holding a traceback until its rank ends."""
JOIN_SECONDS = 2.0
DEFAULT_PORT = 29500
RUN_ID = "VEMBED_RUN_ID"
"""Environment variable with the id of a run, given on every machine (`--run-id`) and compared."""
LAUNCH_ID = "VEMBED_LAUNCH_ID"
"""Environment variable with the id that machine 0's launcher makes for its own processes."""
LAUNCHER = "VEMBED_LAUNCHER"
"""Environment variable with the process number of the launcher that started the processes of this machine."""
HANG_REPORTS = "VEMBED_HANG_REPORTS"
"""Environment variable with the folder in which each rank leaves the name of the rank that it waits for in vain."""
TRACEBACK = "Traceback (most recent call last)"
PR_SET_PDEATHSIG = 1
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def num_visible_devices(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that child processes see. Imports torch only if the machine may have a GPU."""
    if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles") or not any(
        Path(node).exists() for node in GPU_NODES
    ):
        return 0
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen != os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(chosen.split(","))  # torch would look at this process's own variable
    import torch

    return torch.cuda.device_count()


def free_port() -> int:
    """Return a free port of this machine.

    It lies below those that the kernel gives to outgoing connections, which may take one before rank 0 listens.
    """
    try:
        first = int(
            Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
        )
    except (OSError, ValueError, IndexError):
        first = 32768
    below = range(max(1024, first - 20_000), first)
    draws = random.SystemRandom()  # runs with equal seeds must not choose the same port
    for port in (*(draws.choice(below) for _ in range(20 if below else 0)), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            port_number: int = probe.getsockname()[1]
            return port_number
    raise UserError(
        "this machine has no free port: end processes that hold connections open"
    )


def rank_environments(
    num_processes: int,
    *,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> list[dict[str, str]]:
    """Return the environment of each process of this machine, with the variables of torchrun."""
    port = main_process_port or (DEFAULT_PORT if num_machines > 1 else free_port())
    shared = dict(env) | {
        "WORLD_SIZE": str(num_processes * num_machines),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": main_process_ip or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # Each process would otherwise start one thread per core, and the processes would compete for the cores.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes)))
    shared[LAUNCHER] = str(os.getpid())
    shared.pop(LAUNCH_ID, None)
    if (
        machine_rank == 0
    ):  # the processes of the other machines take it over from rank 0
        shared[LAUNCH_ID] = uuid.uuid4().hex[:12]
    return [
        shared
        | {"RANK": str(machine_rank * num_processes + local), "LOCAL_RANK": str(local)}
        for local in range(num_processes)
    ]


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run the command once in each environment, wait for all processes, and return one exit code.

    0: success. 130, 143: stopped by a signal. 2: a rank raised a UserError. 1: a rank failed or was killed.
    """
    return _Ranks(command, environments).wait()


class _Ranks:
    """The running processes and their state."""

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> None:
        self.numbers = [int(environment["RANK"]) for environment in environments]
        self.stop_signal: signal.Signals | None = None
        self.stopped_at = 0.0
        self.ends_at_once = False
        self.cause: str | None = None
        self.code = 0
        self.failed_at: float | None = None
        self.deadline: float | None = None
        self.command = command
        self.hang_reports = tempfile.TemporaryDirectory(
            prefix="vembed-", ignore_cleanup_errors=True
        )
        self.environments = [
            {**environment, HANG_REPORTS: self.hang_reports.name}
            for environment in environments
        ]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pumps: list[_Pump] = []
        self.all_started = False
        self.passed_on = False

    def _start_all(self) -> None:
        # Start all processes before the first thread: between fork and exec, other threads' locks could deadlock.
        for position, environment in enumerate(self.environments):
            self.processes.append(_start(self.command, environment, position == 0))
        self.pumps = [
            _Pump(number, pipe, target)
            for number, process in zip(self.numbers, self.processes, strict=True)
            for pipe, target in (
                (process.stdout, sys.stdout),
                (process.stderr, sys.stderr),
            )
            if pipe is not None
        ]
        self.all_started = True
        self._pass_on()

    def wait(self) -> int:
        """Wait until all ranks have ended and return the exit code."""
        try:
            with self._signals():
                self._start_all()
                while self._update():
                    time.sleep(POLL_SECONDS)
        finally:
            self._kill()
            for pump in self.pumps:
                pump.join(timeout=JOIN_SECONDS)
                # After a UserError on one rank, the tracebacks of the others are only consequences.
                pump.release(drop=self.code == 2)
            self.hang_reports.cleanup()
        if self.cause is not None:
            return self.code
        if self.stop_signal is not None and any(
            process.returncode for process in self.processes
        ):
            return 128 + (
                signal.SIGINT if self.stop_signal is signal.SIGINT else signal.SIGTERM
            )
        return max(process.returncode for process in self.processes)

    def _update(self) -> bool:
        """Poll the ranks and handle those that ended; return True while any rank is running."""
        codes = [process.poll() for process in self.processes]
        for pump in self.pumps:
            if pump.has_held_for(TRACEBACK_HOLD_SECONDS):
                pump.release()
        ended = [
            (number, code)
            for number, code in zip(self.numbers, codes, strict=True)
            if code
        ]
        failed = [(number, code) for number, code in ended if not self._is_stop(code)]
        now = time.monotonic()
        if failed and self.cause is None and not self.ends_at_once:
            self.failed_at = self.failed_at or now
            # The failure of one rank makes others fail, and they may end before it: wait a moment for the cause.
            if now - self.failed_at > CAUSE_SECONDS or None not in codes:
                self._report(failed)
                self.deadline = now + KILL_TIMEOUT_SECONDS
                self._send(signal.SIGTERM)
        elif ended and self.deadline is None:
            self.deadline = now + STOP_TIMEOUT_SECONDS
        if self.ends_at_once:
            self._kill()
        elif self.deadline is not None and now > self.deadline:
            if self.cause is None:
                self._fail(
                    f"a rank stopped, and the others did not within {STOP_TIMEOUT_SECONDS:g} seconds",
                    code=1,
                )
            self._kill()
        return None in codes

    def _is_stop(self, code: int) -> bool:
        if code in STOPPED_CODES:
            return True
        # A rank that has not installed its handlers yet is killed by the signal itself.
        return self.stop_signal is not None and -code in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGUSR1,
        )

    def _report(self, failed: Sequence[tuple[int, int]]) -> None:
        """Report the likely cause: a rank that was killed, else one with exit code 2, else the first that does not name
        another."""
        number, code = min(
            failed,
            key=lambda ending: (
                ending[1] >= 0,
                ending[1] != 2,
                bool(self._hang_report_of(ending[0])),
                ending[0],
            ),
        )
        for pump in self.pumps:
            if pump.number == number:
                pump.join(timeout=JOIN_SECONDS)
                pump.release()
        halted = self._halted()
        hang_report = self._hang_report_of(number)
        if halted and code not in (2, -signal.SIGKILL):
            self._fail(
                f"rank {halted[0]} is halted (SIGSTOP?), and rank {number} gave up waiting for it",
                code=1,
            )
        elif hang_report is not None and code not in (2, -signal.SIGKILL):
            self._fail(f"{hang_report}; rank {number} gave up waiting", code=1)
        elif code < 0:
            why = " (perhaps because memory ran out)" if -code == signal.SIGKILL else ""
            self._fail(
                f"rank {number} was killed by signal {-code}, {signal.Signals(-code).name}{why}",
                code=1,
            )
        else:
            self._fail(
                f"rank {number} ended with exit code {code}", code=2 if code == 2 else 1
            )

    def _hang_report_of(self, number: int) -> str | None:
        """Return the sentence in which a rank names the one that it waited for in vain."""
        with suppress(OSError):
            return (
                Path(self.hang_reports.name, str(number)).read_text(
                    encoding="utf-8", errors="replace"
                )
                or None
            )
        return None

    def _halted(self) -> list[int]:
        """Return the ranks that are stopped as by SIGSTOP: those that others wait for in vain."""
        import psutil

        halted = []
        for number, process in zip(self.numbers, self.processes, strict=True):
            with suppress(psutil.Error):
                if (
                    process.poll() is None
                    and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
                ):
                    halted.append(number)
        return halted

    def _fail(self, cause: str, code: int) -> None:
        self.cause = cause
        self.code = code
        num_left = sum(process.poll() is None for process in self.processes)
        ending = f"; ending the other {num_left}" if num_left else ""
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.write(f"vembed: {cause}{ending}\n")
            sys.stderr.flush()

    def _pass_on(self) -> None:
        """Forward a received signal to all ranks, once, after all have been started."""
        if self.stop_signal is None or self.passed_on or not self.all_started:
            return
        self.passed_on = True
        self._send(
            signal.SIGTERM if self.stop_signal is signal.SIGHUP else self.stop_signal
        )

    def _send(self, signum: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                # Each rank has its own session, so its process group is the rank and its children.
                os.killpg(process.pid, signal.SIGKILL)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward the first signal and wait for the checkpoint; kill all ranks on another one, two seconds later or
        more."""

        def handle(signum: int, _frame: object) -> None:
            now = time.monotonic()
            if self.stop_signal is not None:
                # Wrappers pass Ctrl-C on although it reaches the launcher too: that is the same request.
                self.ends_at_once = (
                    self.ends_at_once or now - self.stopped_at > REPEATED_SIGNAL_SECONDS
                )
                return
            self.stopped_at = now
            self.stop_signal = signal.Signals(signum)
            self._pass_on()

        before = {}
        for signum in FORWARDED:
            if (
                signal.getsignal(signum) is not signal.SIG_IGN
            ):  # keep ignored signals ignored, as SIGHUP under nohup
                before[signum] = signal.signal(signum, handle)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Pump(threading.Thread):
    """Thread that copies a rank's output line by line, with the rank as prefix.

    A traceback or an error, and the lines after it, are held until the rank has ended, when it is known whether this
    rank is the cause, failed because of another one, or repeats what all ranks say.
    """

    lock = threading.Lock()

    def __init__(self, number: int, pipe: IO[bytes], target: IO[str]) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.pipe = pipe
        self.target = target
        self.held: list[str] = []
        self.held_since = 0.0
        self.start()

    def run(self) -> None:
        """Copy until the rank closes its output. Keep reading if the target is closed, or the rank would block."""
        with self.pipe:
            for raw in self.pipe:
                line = (
                    f"[rank {self.number}] {raw.decode('utf-8', 'replace').rstrip()}\n"
                )
                with self.lock:
                    if self.held or TRACEBACK in line or raw.startswith(b"error: "):
                        self.held_since = (
                            self.held_since if self.held else time.monotonic()
                        )
                        self.held.append(line)
                    else:
                        self._write(line)

    def has_held_for(self, seconds: float) -> bool:
        """Return True if lines have been held for longer than `seconds`."""
        return bool(self.held) and time.monotonic() - self.held_since > seconds

    def release(self, *, drop: bool = False) -> None:
        """Write the held lines, or drop them."""
        with self.lock:
            if not drop:
                self._write("".join(self.held))
            self.held = []

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.target.write(text)
            self.target.flush()


def _start(
    command: Sequence[str], environment: Mapping[str, str], is_first: bool
) -> subprocess.Popen[bytes]:
    """Start one process in its own session, so that Ctrl-C reaches it only through the launcher. The first process
    writes to the terminal directly."""
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
    """Return a function for the child, before exec: ask the kernel to kill it when its parent ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

    return ask
