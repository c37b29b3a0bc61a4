"""Memory lines with a real sum over the ranks, peaks that start anew, and both without a process group."""

import logging
import platform
import re
import time

import numpy as np
import pytest
import torch

from tests.commands import CODE, command
from tests.harness import run_ranks
from tests.parallel.steps import listen
from vembed.parallel import collectives, devices
from vembed.parallel.environment import RankInfo

LINE = re.compile(r"Rank (\d+), CPU: RSS: (\d+\.\d\d)GB, Peak: (\d+\.\d\d)GB$")


def hold_and_print():
    """Rank 1 holds 300 MiB more than rank 0, so that one rank's value times the number of ranks is not the sum."""
    lines = listen()
    held = np.ones(300 * 2**17 * collectives.rank())
    returned = devices.fsdp_print_memory_usage("after loading")
    assert held.size == 300 * 2**17 * collectives.rank()
    devices.fsdp_empty_cache()
    return returned, lines


@pytest.mark.promise("A19", "B11", "B30")
def test_total_is_a_real_sum():
    (lines, logged), (others, logged_by_other) = run_ranks(
        hold_and_print, 2, process_group=True
    )
    assert logged == lines == others
    assert logged_by_other == []
    values = np.array([LINE.search(line).groups() for line in lines[:2]], float)
    ranks, used, _ = values.T
    assert ranks.tolist() == [0, 1]
    assert used[1] - used[0] > 0.25
    total = "after loading: Total across 2 processes: RSS: (.+)GB, Peak: (.+)GB"
    sums = [float(number) for number in re.fullmatch(total, lines[2]).groups()]
    assert sums == pytest.approx(values[:, 1:].sum(axis=0), abs=0.011)


@pytest.mark.promise("B10", "B29", "B31")
def test_peak_starts_anew_between_phases():
    block = np.ones(200 * 2**17)
    del block
    high = devices.memory_snapshot(torch.device("cpu"))["peak_gb"]
    devices.fsdp_empty_cache()
    low = devices.memory_snapshot(torch.device("cpu"))
    assert low["peak_gb"] < high - 0.1
    assert low["peak_gb"] >= low["rss_gb"]


def clear_together():
    """Rank 1 comes late. Return when this rank came and went, and the memory that it gave back, freed memory kept."""
    devices.choose_device(RankInfo())
    blocks = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
    del blocks
    before = devices.memory_snapshot(torch.device("cpu"))["rss_gb"]
    if collectives.rank() == 1:
        time.sleep(0.3)
    came = time.monotonic()
    devices.fsdp_empty_cache()
    went = time.monotonic()
    after = devices.memory_snapshot(torch.device("cpu"))["rss_gb"]
    return came, went, before - after


@pytest.mark.promise("B10", "B29")
def test_ranks_wait_for_each_other_and_give_back_what_they_keep():
    came, went, returned = zip(
        *run_ranks(clear_together, 2, process_group=True), strict=True
    )
    assert min(went) >= max(came)
    if platform.libc_ver()[0] == "glibc":
        assert min(returned) > 0.15


@pytest.mark.promise("B10")
def test_lines_reach_standard_output_where_nobody_logs():
    program = "import vembed; vembed.fsdp_empty_cache(); vembed.fsdp_print_memory_usage('start: ')"
    done = command(program, module=CODE)
    first, second = done.stdout.splitlines()
    assert LINE.match(first.removeprefix("start: "))
    assert second.startswith("start: Total across 1 processes: RSS: ")


@pytest.mark.promise("A21")
def test_gpu_line_has_the_words_of_the_documents(monkeypatch):
    figures = {"allocated_gb": 1.234, "reserved_gb": 2.344, "peak_gb": 3.45}
    figures["device"] = "cuda:3"
    monkeypatch.setattr(devices, "memory_snapshot", lambda _: figures)
    logging.getLogger("vembed").addHandler(logging.NullHandler())
    lines = devices.fsdp_print_memory_usage()
    assert lines == [
        "Rank 0, GPU 3: Allocated: 1.23GB, Reserved: 2.34GB, Peak: 3.45GB",
        "Total across 1 processes: Allocated: 1.23GB, Reserved: 2.34GB, Peak: 3.45GB",
    ]
