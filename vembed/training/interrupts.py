"""Interrupts: signals and the time limit end a run between two steps, on all ranks at the same one."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from vembed.config.schema import TrainConfig
from vembed.distributed import collectives
from vembed.errors import Stopped

log = logging.getLogger("vembed")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""SIGUSR1 is what Slurm can be asked to send some time before its SIGTERM, SIGHUP what a closed terminal sends: both
count as SIGTERM (exit code 143). One that was to be ignored when the run began (nohup) stays ignored."""
SAME_REQUEST_SECONDS = 2.0
"""Ctrl-C in a terminal reaches every process, and launchers pass it on: what comes this soon is no second signal."""
_TIME_IS_UP = 1
_CHECK_EVERY = 8
_SLACK_SECONDS = 60.0
_SLACK_SHARE = 0.02


class EvaluationStopped(Exception):  # noqa: N818 - not an error, as Stopped
    """An evaluation that ends because the run is to stop: there is still a checkpoint to be saved."""


class Interrupts:
    """Catches signals while its with-block runs.

    Before the first call of `agree` a signal ends the run where it stands: there is nothing to save. From then on it
    sets a mark that `agree` and, in an evaluation, `check` share among the ranks, so that the run can finish the step
    and save. After `training_is_over` it changes nothing more: what is left is to write final/. A second signal ends
    the process at once, even while it waits for other ranks: a thread of its own reads the signals.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.limit = None if config.max_train_minutes is None else config.max_train_minutes * 60.0
        self.agreed = 0
        self._number = 0
        self._first_at = 0.0
        self._began = self._agreed_at = time.monotonic()
        self._longest_step = 0.0
        self._is_armed = self._is_over = False
        self._num_checks = 0
        self._save_seconds = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._read_end = self._write_end = self._wakeup_before = -1
        self._reader: threading.Thread | None = None

    def agree(self, save_seconds: float = 0.0) -> bool:
        """After every step, on all ranks: whether any was signalled, or the time is up by the clock of rank 0.

        `save_seconds` is what a checkpoint takes: with `max_train_minutes`, so much is left for it, and for a step.
        """
        now = time.monotonic()
        if self._is_armed:
            self._longest_step = max(self._longest_step, now - self._agreed_at)
        self._is_armed, self._agreed_at, self._save_seconds = True, now, save_seconds
        return self._ask(self._longest_step)

    def check(self) -> None:
        """Between two micro-batches of an evaluation, on all ranks: raise EvaluationStopped where the run is to stop.

        Asks the other ranks at every eighth call only, which they all make as often.
        """
        self._num_checks += 1
        if self._is_armed and self._num_checks % _CHECK_EVERY == 0 and self._ask():
            raise EvaluationStopped

    def training_is_over(self) -> None:
        """From here on a signal has nothing to stop; a second one still ends the process at once."""
        self._is_over = True

    def stopped(self, step: int, checkpoint: Path | None) -> Stopped:
        """What to raise when `agree` was true and the checkpoint has been written, or could not be (None)."""
        saved = f"saved in {checkpoint}; go on with --resume"
        if checkpoint is None:
            saved = "which could not be saved; --resume goes on with the newest checkpoint, if there is one"
        if self.agreed == _TIME_IS_UP:
            return Stopped(f"max_train_minutes: the time is up; stopped after step {step:,d}, {saved}", 0)
        name = signal.Signals(self.agreed).name
        return Stopped(f"{name}: stopped after step {step:,d}, {saved}", self.agreed)

    def _ask(self, step_seconds: float = 0.0) -> bool:
        """Whether any rank was signalled, or the time is up, with `step_seconds` before the next chance to stop. What
        has been agreed once stays, although an evaluation, say, would fit into the time where a step does not."""
        if self.agreed:
            return True
        mine = self._number
        if not mine and collectives.rank() == 0 and self._time_is_up(step_seconds):
            mine = _TIME_IS_UP
        self.agreed = collectives.max_ints([mine])[0]
        return bool(self.agreed)

    def _time_is_up(self, step_seconds: float) -> bool:
        """Whether a step and a checkpoint might not fit into what is left."""
        if self.limit is None:
            return False
        slack = min(_SLACK_SECONDS, _SLACK_SHARE * self.limit)
        return time.monotonic() - self._began + step_seconds + 1.5 * self._save_seconds + slack >= self.limit

    # ---- signals -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            log.info("signals are left alone: only the main thread of a program may catch them")
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # The system writes the number of each caught signal there, whatever the main thread is waiting for.
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        obeyed = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in obeyed}
        os.register_at_fork(before=self._hold_back, after_in_parent=self._let_through, after_in_child=self._forget)
        self._reader = threading.Thread(target=self._read, name="vembed-signals", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._reader is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._write_end, b"\0")
        self._reader.join()
        self._reader = None
        os.close(self._read_end)
        os.close(self._write_end)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's signature
        """In the main thread, between two of its instructions."""
        if not self._is_armed:
            name = signal.Signals(number).name
            raise Stopped(f"{name} before the first step: nothing was trained, so nothing is lost", _counted_as(number))

    def _read(self) -> None:
        """In a thread of its own: note the first signal, obey the second."""
        while number := os.read(self._read_end, 1)[0]:
            if number not in SIGNALS:
                continue
            now = time.monotonic()
            if not self._number:
                self._number, self._first_at = _counted_as(number), now
                if self._is_armed:
                    what = "training is over, writing final/" if self._is_over else "finishing the step and saving"
                    log.info("%s: %s; once more ends the run at once", signal.Signals(number).name, what)
            elif now - self._first_at > SAME_REQUEST_SECONDS:
                os._exit(128 + _counted_as(number))

    def _hold_back(self) -> None:
        """Around a fork: until the child has forgotten this run, its signals would count for the parent."""
        if self._before:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _let_through(self) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _forget(self) -> None:
        """In a forked child (a pool's worker): a signal ends it, and does not concern the run."""
        if self._before:
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _counted_as(number: int) -> int:
    return int(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
