"""The harness and its commands: results by rank, tracebacks, a killed rank, and a time limit for all."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailed, rank_outcomes, result_of, run_cases, run_ranks


def add_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the shelf is empty")
    dist.barrier()


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def killed_rank() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_results_come_by_rank() -> None:
    assert run_ranks(add_ranks, 3, 1) == [
        (0, torch.tensor([6.0])),
        (1, torch.tensor([6.0])),
        (2, torch.tensor([6.0])),
    ]


def test_error_names_the_rank_and_keeps_its_traceback() -> None:
    with pytest.raises(
        RankFailed,
        match=r"(?s)rank 1 of 2 failed.*fail_on_rank_one.*the shelf is empty",
    ):
        run_ranks(fail_on_rank_one, 2)


def test_time_limit_ends_all_ranks() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0\] of 2 did not end within 1.5 s"):
        run_ranks(hang_on_rank_zero, 2, timeout=1.5)


def test_killed_rank_is_told_from_one_that_raised() -> None:
    outcomes = rank_outcomes(killed_rank, 2)
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL]
    assert outcomes[0].result == "alive"


def halved(number: int) -> tuple[int, float]:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return int(os.environ["MASTER_PORT"]), number / 2


def test_a_case_that_fails_takes_no_other_with_it() -> None:
    found = run_cases(halved, 2, {"wrong": (-1,), "four": (4,)}, process_group=False)
    assert [half for _, half in result_of(found, "four")] == [2, 2]
    with pytest.raises(RankFailed, match="-1 is negative"):
        result_of(found, "wrong")
