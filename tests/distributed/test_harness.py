"""The harness itself: results by rank, the failing rank's traceback, a killed rank, a time limit that ends all."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailed, rank_outcomes, run_ranks


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
    assert run_ranks(add_ranks, 3, 1) == [(0, torch.tensor([6.0])), (1, torch.tensor([6.0])), (2, torch.tensor([6.0]))]


def test_error_names_the_rank_and_keeps_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed.*fail_on_rank_one.*the shelf is empty"):
        run_ranks(fail_on_rank_one, 2)


def test_time_limit_ends_all_ranks() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0\] of 2 did not end within 3 s"):
        run_ranks(hang_on_rank_zero, 2, timeout=3)


def test_killed_rank_is_told_from_one_that_raised() -> None:
    outcomes = rank_outcomes(killed_rank, 2)
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL]
    assert outcomes[0].result == "alive"
