"""Interrupts: signals and the time limit. They end a run between two steps, on all ranks at the same step."""

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from vembed.errors import Stopped
from vembed.parallel import collectives
from vembed.parallel.launch import LAUNCHER_VARIABLE, REPEATED_SIGNAL_SECONDS

log = logging.getLogger("vembed")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that end a run. Slurm can be asked to send SIGUSR1 some time before its SIGTERM; a closed terminal sends
SIGHUP. Both count as SIGTERM (exit code 143). A signal that was ignored when the run began (nohup) stays ignored."""
HEAD_START_SECONDS = 1.0
"""Time in which the launcher signals the other ranks, before this one leaves them."""
_TIME_IS_UP = 1
_CHECK_EVERY = 8
_SLACK_SECONDS = 60.0
_SLACK_SHARE = 0.02


class StopRequested(Exception):  # noqa: N818 - not an error, as Stopped
    """Raised between two steps, or inside an evaluation or a mining, which the resumed run does again. A checkpoint is
    still to be saved."""


class Interrupts:
    """Signal handling while the with-block runs.

    Before the first call of `agree_to_stop`, a signal ends the run at once: there is nothing to save, and the launcher stops
    the other ranks. From then on it sets a flag that the ranks share in `agree_to_stop` and, during an evaluation, in `check`,
    so that the run can finish the step and save. Once `ignores_signals` is set, the flag has no effect: only final/ is
    left to write. A second signal ends the process at once, or, while it waits for other ranks, as soon as they come (the
    launcher ends all ranks at once). SIGUSR1 never does: it is a warning.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        """`max_minutes`: time limit of the run."""
        self.max_seconds = None if max_minutes is None else max_minutes * 60.0
        self.reason_to_stop = 0
        """Signal that stops the run, or _TIME_IS_UP, once all ranks know of it; 0: none."""
        self.has_agreed_end = False
        """True once all ranks know that a rank asked for the end of the run. The run then ends well: with final/."""
        self.wants_early_end = False
        """Set on a rank that asks for the end of the run. After the next `agree_to_stop` or `share_early_end`,
        `has_agreed_end` is true on every rank."""
        self._number = 0
        self._first_at = 0.0
        self._began = time.monotonic()
        self._last_step_at = self._began
        self._longest_step = 0.0
        self._is_armed = False
        """True from the first `agree_to_stop` on."""
        self.ignores_signals = False
        """Set when training is over: signals have no effect any more. A second one still ends the process at once."""
        self._num_checks = 0
        self._save_seconds = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def agree_to_stop(self, save_seconds: float = 0.0) -> bool:
        """Return whether the run must stop: any rank was signalled, or the time is up by the clock of rank 0. Also set
        `has_agreed_end` if any rank asked for it. All ranks call it after every step.

        `save_seconds` is the duration of a checkpoint. `max_train_minutes` reserves that time, and the time of a step.
        """
        current_time = time.monotonic()
        if self._is_armed:
            # From one call to the next: a step, and the evaluation and checkpoint before it.
            self._longest_step = max(
                self._longest_step, current_time - self._last_step_at
            )
        self._is_armed = True
        self._last_step_at = current_time
        self._save_seconds = save_seconds
        return self._ask_ranks(self._longest_step)

    def share_early_end(self) -> None:
        """Set `has_agreed_end` on every rank if one of them has asked, between two steps. Collective."""
        self.has_agreed_end = bool(collectives.max_ints([int(self.wants_early_end)])[0])

    def check(self) -> None:
        """Raise StopRequested if the run is to stop. All ranks call it between two micro-batches of an evaluation.

        Only every eighth call communicates; all ranks make the same number of calls.
        """
        self._num_checks += 1
        if (
            self._is_armed
            and self._num_checks % _CHECK_EVERY == 0
            and self._ask_ranks()
        ):
            raise StopRequested

    def stopped(self, step: int, checkpoint: Path, *, resumes: bool) -> Stopped:
        """Return the exception to raise after `agree_to_stop` returned True. `resumes`: the same run started again goes
        on from its newest checkpoint."""
        way_on = "run it again to go on" if resumes else "go on with --resume"
        reason = "max_train_minutes: the time is up;"
        number = 0
        if self.reason_to_stop != _TIME_IS_UP:
            number = self.reason_to_stop
            reason = f"{signal.Signals(number).name}:"
        return Stopped(
            f"{reason} stopped after step {step:,d}, saved in {checkpoint}; {way_on}",
            number,
        )

    def _ask_ranks(self, step_seconds: float = 0.0) -> bool:
        """Return whether the run must stop, and set `has_agreed_end`. `step_seconds` pass before the next chance to stop.

        A positive answer is final, even if an evaluation would still fit into a time that is too short for a
        step."""
        if self.reason_to_stop:
            return True
        number = self._number
        # One clock decides: those of the machines may differ.
        if not number and self.max_seconds is not None and collectives.rank() == 0:
            # A step and a checkpoint must fit into the remaining time.
            slack = min(_SLACK_SECONDS, _SLACK_SHARE * self.max_seconds)
            reserved = step_seconds + 1.5 * self._save_seconds + slack
            if time.monotonic() - self._began + reserved >= self.max_seconds:
                number = _TIME_IS_UP
        # One collective for both questions, as it is called after every step.
        self.reason_to_stop, ends = collectives.max_ints(
            [number, int(self.wants_early_end)]
        )
        self.has_agreed_end = bool(ends)
        return bool(self.reason_to_stop)

    # ---- signals -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            log.info(
                "signals are left alone: only the main thread of a program may catch them"
            )
            return self
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        os.register_at_fork(
            before=lambda: self._mask(signal.SIG_BLOCK),
            after_in_parent=lambda: self._mask(signal.SIG_UNBLOCK),
            after_in_child=self._forget,
        )
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _: object) -> None:
        """Handle a signal in the main thread, between two instructions."""
        current_time = time.monotonic()
        is_interrupt = number == signal.SIGINT
        counted_as = int(signal.SIGINT if is_interrupt else signal.SIGTERM)
        if self._number:
            # A launcher passes on the Ctrl-C that has reached this process too: that is one request.
            is_repeated = current_time - self._first_at > REPEATED_SIGNAL_SECONDS
            if is_repeated and number != signal.SIGUSR1:
                os._exit(128 + counted_as)
            return
        self._number = counted_as
        self._first_at = current_time
        name = signal.Signals(number).name
        if not self._is_armed:
            # It may have reached this rank alone, and no collective tells the others before the first step.
            if os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid()):
                os.kill(os.getppid(), signal.SIGUSR1)
                # A rank that waits for this one would see a closed connection before it sees its signal.
                time.sleep(HEAD_START_SECONDS)
            raise Stopped(
                f"{name} before the first step: nothing was trained, so nothing is lost",
                counted_as,
            )
        action = "finishing the step and saving"
        if self.ignores_signals:
            action = "training is over, writing final/"
        line = f"vembed: {name}: {action}; once more ends the run at once\n"
        if collectives.rank() == 0:
            # Not by the log, which this signal may have interrupted.
            with suppress(OSError):
                os.write(2, line.encode())

    def _mask(self, how: int) -> None:
        """Block signals around a fork. Until the child has reset its handlers, its signals would count for the
        parent."""
        if self._before:
            signal.pthread_sigmask(how, SIGNALS)

    def _forget(self) -> None:
        """Restore default signal handling in a forked child (a pool worker), so that a signal ends only the child."""
        if self._before:
            for number in self._before:
                signal.signal(number, signal.SIG_DFL)
            self._mask(signal.SIG_UNBLOCK)
