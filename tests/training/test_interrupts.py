"""Signals end a run between two steps, on all ranks at the same one; a second one ends it at once."""

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import run_ranks
from vembed.errors import Stopped
from vembed.training import interrupts as module
from vembed.training.interrupts import Interrupts, StopRequested


@pytest.mark.parametrize(
    ("number", "exit_code", "resumes", "way_on"),
    [
        (signal.SIGINT, 130, True, "run it again to go on"),
        (signal.SIGHUP, 143, False, "--resume"),
    ],
)
def test_a_signal_is_obeyed_after_the_step(number, exit_code, resumes, way_on, capfd):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert not interrupts.agree_to_stop()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the terminal and the launcher both send it
        assert interrupts.agree_to_stop()
        stopped = interrupts.stopped(7, Path("run/checkpoint-7"), resumes=resumes)
    assert stopped.exit_code == exit_code
    assert "after step 7, saved in run/checkpoint-7" in str(stopped)
    assert str(stopped).endswith(way_on)
    assert f"{number.name}: finishing the step and saving" in capfd.readouterr().err
    assert signal.getsignal(number) is before


def test_a_signal_while_a_line_is_logged_is_not_lost():
    class Interrupted(logging.Handler):
        def emit(self, record):
            # As the handlers of Python do it.
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            except Exception:
                self.handleError(record)

    logger = logging.Logger("interrupted")
    logger.addHandler(Interrupted())
    with Interrupts(), pytest.raises(Stopped) as stopped:
        logger.info("before the first step")
    assert stopped.value.exit_code == 143


def test_what_was_to_be_ignored_stays_ignored():
    """nohup vembed train ..."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert not interrupts.agree_to_stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def assert_stops(interrupts):
    """Only every eighth check asks the ranks."""
    with pytest.raises(StopRequested):
        for _ in range(8):
            interrupts.check()


def test_an_evaluation_does_not_use_up_the_time_for_its_checkpoint(monkeypatch):
    clock = Clock(monkeypatch)
    interrupts = Interrupts(100 / 60)
    interrupts.agree_to_stop(save_seconds=20.0)
    # 100 - 2 (slack) - 30 (half as much again as a save) = 68
    clock.now = 67.0
    for _ in range(16):
        interrupts.check()
    clock.now = 68.0
    assert_stops(interrupts)
    assert interrupts.stopped(13, Path("c"), resumes=False).exit_code == 0


def test_an_evaluation_does_not_take_back_that_the_run_stops(monkeypatch):
    """No step fits into what is left, and an evaluation would."""
    clock = Clock(monkeypatch)
    interrupts = Interrupts(100 / 60)
    interrupts.agree_to_stop()
    clock.now = 60.0
    assert interrupts.agree_to_stop()  # a step took 60
    assert_stops(interrupts)


def test_only_the_main_thread_may_catch_signals():
    before = signal.getsignal(signal.SIGTERM)

    def run():
        with Interrupts() as interrupts:
            assert signal.getsignal(signal.SIGTERM) is before
            return interrupts.agree_to_stop()

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(run).result()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_childs_signals_are_its_own():
    """A pool ends its forked workers by SIGTERM: that must not stop the run."""
    with Interrupts() as interrupts:
        interrupts.agree_to_stop()
        child = os.fork()
        if not child:
            time.sleep(10)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        time.sleep(0.05)
        assert not interrupts.agree_to_stop()


# ---- the time limit --------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_the_time_limit_leaves_room_for_a_step_and_a_checkpoint(monkeypatch):
    clock = Clock(monkeypatch)
    interrupts = Interrupts(100 / 60)
    # 100 - 2 (slack) - 5 (the longest step) - 30 (half as much again as a save) = 63
    for clock.now in range(5, 65, 5):
        assert not interrupts.agree_to_stop(save_seconds=20.0)
    clock.now = 65
    assert interrupts.agree_to_stop(save_seconds=20.0)
    stopped = interrupts.stopped(13, Path("c"), resumes=False)
    assert stopped.exit_code == 0
    assert "max_train_minutes" in str(stopped)


def test_set_up_counts_for_the_limit_and_not_for_the_step(monkeypatch):
    clock = Clock(monkeypatch)
    interrupts = Interrupts(1)
    clock.now = 50.0
    assert not interrupts.agree_to_stop()
    clock.now = 59.0
    assert interrupts.agree_to_stop()


# ---- several ranks ---------------------------------------------------------------------------------------------


def time_is_up_on_one():
    interrupts = Interrupts(0.001 if os.environ["RANK"] == "0" else 1000)
    time.sleep(0.1)
    is_stopped = interrupts.agree_to_stop()
    return is_stopped, interrupts.stopped(3, Path("c"), resumes=False).exit_code


def test_all_ranks_stop_where_the_time_of_one_is_up():
    assert run_ranks(time_is_up_on_one, 2, process_group=True) == [(True, 0)] * 2
