"""run_ranks: an ordinary function on N processes with a gloo group, a free port, a time limit and a clean end.

The processes are forked from a server that has imported torch, Transformers, Accelerate and vembed once: a rank starts
in a tenth of a second instead of ten. The server has run nothing but imports, so a rank is as good as a fresh process.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import socket
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp"},
    "fsdp1": {"strategy": "fsdp", "fsdp_version": 1},
}
"""Options of each way to train on several ranks."""

LIMIT = 300.0
"""Seconds that ranks may take, for a machine that is slow or busy: it is there for those that hang."""
GRACE = 1.0
"""Seconds that the other ranks have to report after one has failed."""


class RankFailed(AssertionError):  # noqa: N818
    """A rank raised, died or did not end in time; the message has its number and its traceback."""


@dataclass
class Outcome:
    """How one rank ended: with a result, with an error (its traceback), or killed (neither, but an exit code)."""

    rank: int
    result: Any = None
    error: str | None = None
    exitcode: int | None = None
    seconds: float = 0.0


def run_ranks(fn, world_size, *args, timeout=LIMIT, process_group=False):
    """Call `fn(*args)` on every rank and return the results by rank; the first rank that fails ends all.

    `fn`, its arguments and its result must be picklable: a function at the top of a module. Each rank has torch's
    variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and one thread. A session of vembed starts the
    process group itself. `process_group`: start one with gloo, for code without a session.
    """
    outcomes = rank_outcomes(
        fn,
        world_size,
        *args,
        timeout=timeout,
        process_group=process_group,
        stop_at_failure=True,
    )
    failures = []
    for outcome in sorted(outcomes, key=lambda entry: entry.seconds):
        if outcome.error is not None:
            failures.append(
                f"rank {outcome.rank} of {world_size} failed:\n{outcome.error}"
            )
        elif outcome.exitcode not in (0, None):
            failures.append(
                f"rank {outcome.rank} of {world_size} died with exit code {outcome.exitcode}"
            )
    if failures:
        raise RankFailed("\n".join(failures))
    return [outcome.result for outcome in outcomes]


def run_cases(fn, world_size, cases):
    """Call `fn(*args)` for the arguments of each case, one after the other on the same ranks: starting ranks, and what
    a process does when it shards its first model, take longer than a small case.

    Return each case's results by rank. If a case fails, each has ranks of its own, and the exception of those that fail
    is their result; `result_of` raises it.
    """
    try:
        by_rank = run_ranks(_all_cases, world_size, fn, cases)
    except RankFailed:
        return {name: _alone(fn, world_size, args) for name, args in cases.items()}
    return {name: [entry[name] for entry in by_rank] for name in cases}


def result_of(results, name):
    """Return a case's results by rank, or raise why it has none."""
    if isinstance(results[name], RankFailed):
        raise results[name]
    return results[name]


def _all_cases(fn, cases):
    actual = {}
    for name, args in cases.items():
        # Each case starts a group of its own.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        actual[name] = fn(*args)
    return actual


def _alone(fn, world_size, args):
    try:
        return run_ranks(fn, world_size, *args)
    except RankFailed as failure:
        return failure


def rank_outcomes(
    fn,
    world_size,
    *args,
    timeout=LIMIT,
    process_group=False,
    stop_at_failure=False,
    wait_for=None,
):
    """As `run_ranks`, but tell how each rank ended instead of raising; only running past the time limit raises.

    `wait_for`: the ranks to wait for, if not all; the others are ended soon after.
    """
    context = forkserver()
    port = free_ports()
    ranks = {}
    processes = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, fn, args, rank, world_size, port, process_group),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            ranks[receiver] = Outcome(rank)
        began = (
            time.monotonic()
        )  # not before: the first start waits for the server's imports
        pending = set(ranks)
        ending = False
        while pending:
            left = timeout - (time.monotonic() - began)
            ready = wait(pending, timeout=max(left, 0.0))
            if not ready and ending:
                break
            if not ready:
                late = sorted(ranks[entry].rank for entry in pending)
                raise RankFailed(
                    f"ranks {late} of {world_size} did not end within {timeout} s"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                pending.discard(connection)
                outcome = ranks[connection]
                outcome.seconds = time.monotonic() - began
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    processes[outcome.rank].join(10)
                    outcome.exitcode = processes[outcome.rank].exitcode
                    ok = True
                    value = None
                else:
                    outcome.exitcode = 0 if ok else 1
                if ok:
                    outcome.result = value
                else:
                    outcome.error = value
                done = wait_for is not None and not {
                    ranks[entry].rank for entry in pending
                } & set(wait_for)
                if done or (stop_at_failure and outcome.exitcode != 0):
                    # Others fail because of it, and sometimes before it: leave them a moment to say how.
                    timeout = min(timeout, outcome.seconds + GRACE)
                    ending = True
        for process in processes:
            process.join(10 if not pending else 0)
        return list(ranks.values())
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in ranks:
            connection.close()


@cache
def forkserver():
    """The server from which processes are forked: it has imported `tests.preloaded`, and nothing has run in it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    options = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    before = {name: os.environ.get(name) for name in options}
    os.environ.update(options)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def free_ports(count=40):
    """The first of so many TCP ports in a row that nobody uses now: a test may start one session after the other.

    They are none of those that the system gives to outgoing connections, nor of those that vembed's launcher chooses
    from, nor those of another worker.
    """
    first = 5_000
    end = 12_000
    if "PYTEST_XDIST_WORKER" in os.environ:
        size = (end - first) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first += size * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        end = first + size
    while True:
        start = random.SystemRandom().randrange(first, end - count)
        with suppress(OSError), ExitStack() as stack:
            for port in range(start, start + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return start


def _rank_main(sender, fn, args, rank, world_size, port, process_group):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if process_group:
            dist.init_process_group("gloo")
        answer = (True, fn(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    try:
        payload = pickle.dumps(answer)
    except Exception:
        payload = pickle.dumps(
            (False, f"the result cannot be pickled:\n{traceback.format_exc()}")
        )
    sender.send_bytes(payload)
    sender.close()
    if process_group and answer[0] and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
