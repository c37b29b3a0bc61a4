"""Launcher of the processes of one machine: forwards signals, and ends all processes when one of them fails."""

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from vembed.config.values import Environment
from vembed.errors import UserError
from vembed.parallel.environment import num_cores

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that was stopped by a signal after saving a checkpoint."""
MOST_PROCESSES_PER_CORE = 8
POLL_SECONDS = 0.05
KILL_TIMEOUT_SECONDS = 5.0
"""Time from SIGTERM to SIGKILL for ranks that wait for a failed one."""
STOP_TIMEOUT_SECONDS = 30.0
"""Time limit for the other ranks to stop after the first one."""
CAUSE_SECONDS = 1.0
REPEATED_SIGNAL_SECONDS = 2.0
"""Time within which a repeated signal counts as the same one."""
JOIN_SECONDS = 2.0
DEFAULT_PORT = 29500
RUN_ID = "VEMBED_RUN_ID"
"""Environment variable with the id of a run, given on every machine (`--run-id`) and compared."""
LAUNCHER_VARIABLE = "VEMBED_LAUNCHER"
"""Environment variable with the process number of the launcher that started the processes of this machine."""
TRACEBACK = "Traceback (most recent call last)"
PR_SET_PDEATHSIG = 1
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def num_visible_devices(env: Environment = os.environ) -> int:
    """Return the number of GPUs that child processes see. Imports torch only if the machine may have a GPU."""
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    has_gpu = any(Path(node).exists() for node in GPU_NODES)
    if chosen in ("", "-1", "NoDevFiles") or not has_gpu:
        return 0
    if chosen is not None and chosen != os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(chosen.split(","))  # torch would look at this process's own variable
    import torch

    return torch.cuda.device_count()


def free_port() -> int:
    """Return a free port of this machine, below those that Linux gives to outgoing connections."""
    draws = random.SystemRandom()  # runs with equal seeds must not choose the same port
    for port in draws.sample(range(12_768, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
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
    env: Environment = os.environ,
) -> list[dict[str, str]]:
    """Return the environment of each process of this machine, with the variables of torchrun. Raise UserError if there
    are so many that they would fill its memory before any of them could say so."""
    most = MOST_PROCESSES_PER_CORE * num_cores()
    if num_processes > most and num_processes > num_visible_devices(env):
        raise UserError(
            f"num_processes: {num_processes:,d} on a machine of {num_cores()} cores: it takes at most {most}, and one for "
            "each GPU is usual"
        )
    port = main_process_port or (DEFAULT_PORT if num_machines > 1 else free_port())
    shared = dict(env) | {
        "WORLD_SIZE": str(num_processes * num_machines),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": main_process_ip or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # Each process would otherwise start one thread per core, and the processes would compete for the cores.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes)))
    shared[LAUNCHER_VARIABLE] = str(os.getpid())
    return [
        shared
        | {"RANK": str(machine_rank * num_processes + local), "LOCAL_RANK": str(local)}
        for local in range(num_processes)
    ]


def run_ranks(command: Sequence[str], environments: Sequence[Environment]) -> int:
    """Run the command once in each environment, wait for all processes, and return one exit code.

    0: success. 130, 143: stopped by a signal. 2: a rank raised a UserError. 1: a rank failed or was killed.

    torch's elastic launcher would import torch first (1.6 s), sends SIGTERM to all ranks as soon as one exits with a
    code above 0, also with 143 after a checkpoint, and names the first that ended in place of the cause.
    """
    ranks = _Ranks(command, environments)
    before = {}
    for signum in FORWARDED:
        # Keep ignored signals ignored, as SIGHUP under nohup.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, ranks.handle_signal)
    try:
        return ranks.run()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclass
class _Ranks:
    """The running processes and their state."""

    command: Sequence[str]
    environments: Sequence[Environment]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By rank."""
    pumps: list["_Pump"] = field(default_factory=list)
    stop_signal: signal.Signals | None = None
    stopped_at: float = 0.0
    ends_at_once: bool = False
    code: int | None = None
    """Exit code, once the cause of a failure is known."""
    failed_at: float | None = None
    deadline: float | None = None

    def run(self) -> int:
        """Start all ranks, wait until they have ended, and return the exit code."""
        try:
            # All processes before the first thread: between fork and exec, other threads' locks could deadlock.
            for environment in self.environments:
                on_linux = sys.platform == "linux"
                # The first process writes to the terminal directly.
                output = subprocess.PIPE if self.processes else None
                self.processes[int(environment["RANK"])] = subprocess.Popen(
                    self.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Ctrl-C reaches it only through the launcher.
                    start_new_session=True,
                    preexec_fn=_die_with_parent(os.getpid()) if on_linux else None,  # noqa: PLW1509 - see above
                )
            for number, process in self.processes.items():
                if process.stdout is not None and process.stderr is not None:
                    self.pumps.append(_Pump(number, process.stdout, sys.stdout))
                    self.pumps.append(_Pump(number, process.stderr, sys.stderr))
            if self.stop_signal is not None:  # it came while they were started
                self._send(self.stop_signal)
            while self._update():
                time.sleep(POLL_SECONDS)
        finally:
            self._kill()
            for pump in self.pumps:
                pump.join(timeout=JOIN_SECONDS)
                # After a UserError on one rank, the tracebacks of the others are only consequences.
                pump.release(drop=self.code == 2)
        if self.code is not None:
            return self.code
        codes = [process.returncode for process in self.processes.values()]
        if self.stop_signal is not None and any(codes):
            is_interrupt = self.stop_signal == signal.SIGINT
            return 128 + (signal.SIGINT if is_interrupt else signal.SIGTERM)
        return max(codes)

    def handle_signal(self, signum: int, _frame: object) -> None:
        """Forward the first signal and wait for the checkpoint. Another one, two seconds later or more, ends all."""
        current_time = time.monotonic()
        if self.stop_signal is not None:
            # Wrappers pass Ctrl-C on although it reaches the launcher too: that is the same request. Ranks send SIGUSR1
            # when they stop before the first step.
            is_repeated = current_time - self.stopped_at > REPEATED_SIGNAL_SECONDS
            if is_repeated and signum != signal.SIGUSR1:
                self.ends_at_once = True
            return
        self.stopped_at = current_time
        self.stop_signal = signal.Signals(
            signal.SIGTERM if signum == signal.SIGHUP else signum
        )
        if len(self.processes) == len(self.environments):
            self._send(self.stop_signal)

    def _update(self) -> bool:
        """Poll the ranks and handle those that ended; return True while any rank is running."""
        current_time = time.monotonic()
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        stop_codes = set(STOPPED_CODES)
        if self.stop_signal is not None:
            # A rank that has not installed its handlers yet is killed by the signal itself.
            stop_codes |= {-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1}
        failed = {
            rank: code
            for rank, code in codes.items()
            if code and code not in stop_codes
        }
        is_any_running = None in codes.values()
        if failed and self.code is None and not self.ends_at_once:
            self.failed_at = self.failed_at or current_time
            # The failure of one rank makes others fail, and they may end before it: wait a moment for the cause.
            if current_time - self.failed_at > CAUSE_SECONDS or not is_any_running:
                self._report(failed)
                self.deadline = current_time + KILL_TIMEOUT_SECONDS
                self._send(signal.SIGTERM)
        elif any(codes.values()) and self.deadline is None:
            self.deadline = current_time + STOP_TIMEOUT_SECONDS
        if self.deadline is not None and current_time > self.deadline:
            if self.code is None:
                seconds = f"{STOP_TIMEOUT_SECONDS:g} seconds"
                self._fail(
                    f"a rank stopped, and the others did not within {seconds}", 1
                )
            self._kill()
        elif self.ends_at_once:
            self._kill()
        return is_any_running

    def _report(self, failed: Mapping[int, int]) -> None:
        """Report the likely cause: a rank that was killed, else one with exit code 2, else the first."""
        rank = min(
            failed, key=lambda rank: (failed[rank] >= 0, failed[rank] != 2, rank)
        )
        code = failed[rank]
        for pump in self.pumps:
            if pump.number == rank:
                pump.join(timeout=JOIN_SECONDS)
                pump.release()
        if code < 0:
            why = " (perhaps because memory ran out)" if code == -signal.SIGKILL else ""
            name = signal.Signals(-code).name
            self._fail(f"rank {rank} was killed by signal {-code}, {name}{why}", 1)
        else:
            self._fail(
                f"rank {rank} ended with exit code {code}", 2 if code == 2 else 1
            )

    def _fail(self, cause: str, code: int) -> None:
        self.code = code
        num_left = sum(process.poll() is None for process in self.processes.values())
        ending = f"; ending the other {num_left}" if num_left else ""
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.write(f"vembed: {cause}{ending}\n")
            sys.stderr.flush()

    def _send(self, signum: signal.Signals) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signum)

    def _kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                # Each rank has its own session, so its process group is the rank and its children.
                os.killpg(process.pid, signal.SIGKILL)


class _Pump(threading.Thread):
    """Thread that copies a rank's output line by line, with the rank as prefix.

    A traceback or an error, and the lines after it, are held until the rank has ended, when it is known whether this
    rank is the cause, failed because of another one, or repeats what all ranks say.
    """

    lock = threading.Lock()

    def __init__(
        self,
        number: int,
        pipe: IO[bytes],
        target: IO[str],
    ) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.pipe = pipe
        self.target = target
        self.held: list[str] = []
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
                        self.held.append(line)
                    else:
                        self._write(line)

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


def _die_with_parent(parent: int) -> Callable[[], None]:
    """Return a function for the child, before exec: ask the kernel to kill it when its parent ends."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

    return ask
