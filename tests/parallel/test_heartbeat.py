"""Ranks that hang: the others name them, and what they do."""

import os
import re
import signal
import time

import pytest

from tests.harness import rank_outcomes
from tests.parallel.steps import config_of, listen
from tests.parallel.test_session import patient_start
from tests.tiny import shared, tiny_bert
from vembed.parallel import collectives, launch_check, session


def loop_for_ever():
    while True:
        time.sleep(0.01)


def in_a_run(folder, stops, loops):
    """One rank is halted, another loops in Python, and the others go into a collective."""
    rank = int(os.environ["RANK"])
    # A report counts for STILL_SECONDS and a beat: long enough for threads that a busy machine lets wait.
    launch_check.BEAT_SECONDS = 0.1
    launch_check.STILL_SECONDS = 1.5
    launch_check.SILENT_SECONDS = 1.5
    launch_check.LOGGED_SECONDS = 1.6
    patient_start()
    lines = listen()
    try:
        config = config_of(folder, dist_timeout_minutes=3.5 / 60)
        with session.start_session(config) as first:
            assert first.heartbeats is not None
            first.heartbeats.step = 7
            first.barrier()
            if rank == stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            if rank == loops:
                loop_for_ever()
            collectives.sum_ints([rank])
    except Exception as error:
        waits = [line for line in lines if "has waited" in line]
        return [f"{type(error).__name__}: {error}", *waits]
    return []


@pytest.mark.parametrize(
    ("ranks", "stops", "loops", "waits"), [(3, 2, 1, 0), (2, 0, -1, 1)]
)
def test_the_rank_that_hangs_is_named_and_not_the_one_that_noticed(
    ranks, stops, loops, waits
):
    # Rank 0 keeps the store: once among those that wait, once halted itself.
    folder = shared(tiny_bert)
    outcomes = rank_outcomes(in_a_run, ranks, folder, stops, loops, wait_for=[waits])
    error, *lines = outcomes[waits].result
    assert re.match(
        rf"RunError: rank {waits} has waited \d+ s, in step 7, at in_a_run \(.*\), for rank ",
        error,
    )
    if stops:
        assert re.search(
            r"for rank 1 \(.*, process \d+\), which is in step 7, at loop_for_ever \(",
            error,
        )
        assert re.search(
            r"and for rank 2 \(.*\), which has given no sign of life for \d+ s; it was ",
            error,
        )
        assert lines and "for rank 1 (" in lines[0], "a line while it waits"
    else:
        assert "for rank 0" in error
