"""How processes find each other, what each decides, and that every one of them ends well."""

import contextlib
import errno
import os
import signal
import socket
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from tests.commands import command
from tests.harness import rank_outcomes, run_ranks
from tests.parallel.steps import (
    config_of,
    listen,
)
from tests.tiny import shared, tiny_bert
from vembed.config.loading import resolve_run
from vembed.errors import UserError
from vembed.parallel import collectives, launch_check, placement, session
from vembed.parallel.environment import RankInfo, interface_to, read_rank_info
from vembed.parallel.placement import choose_precision, place
from vembed.parallel.step_memory import GIB, ModelSize

CPU = torch.device("cpu")
GROUP = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SHORT = 3 / 60
"""dist_timeout_minutes of collectives that a rank never joins: three seconds."""


# ---- the launcher's variables ----------------------------------------------------------------------------------------


@pytest.mark.promise("A10", "B26", "C26")
def test_variables_have_torchs_meaning_and_none_means_one_process():
    assert read_rank_info(GROUP | {"LOCAL_WORLD_SIZE": "1"}) == RankInfo(1, 2, 1, 1)
    assert read_rank_info({}) == RankInfo(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT is not set .*WORLD_SIZE=2"),
        ({"RANK": "2"}, "RANK=2 must be between 0 and WORLD_SIZE"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
    ],
)
@pytest.mark.promise("A10", "C26")
def test_variables_that_are_wrong_or_missing_are_named(changes, message):
    variables = GROUP | changes
    environment = {name: value for name, value in variables.items() if value}
    with pytest.raises(UserError, match=message):
        read_rank_info(environment)


# ---- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("C23", "D15")
def test_precision_on_the_cpu():
    def chosen(**options):
        run = resolve_run(config_of("unused", **options), env={})
        return choose_precision(run.precision, CPU).value

    assert chosen() == "no"
    assert chosen(mixed_precision="bf16") == "bf16"
    with pytest.raises(UserError, match=r"fp16 .* needs a GPU"):
        chosen(mixed_precision="fp16")


SMALL = ModelSize(1000, 1000, 4000.0, 4000.0, 8000.0, 400, 2, 8, 16, 64)
LARGE = ModelSize(
    8 * GIB, 8 * GIB, 32.0 * GIB, 32.0 * GIB, 64.0 * GIB, GIB // 8, 32, 4096, 16384, 512
)


def placed(size, num_ranks=2, memory=80 * GIB, **options):
    run = resolve_run(config_of("unused", **options), env={})
    ranks = RankInfo(0, num_ranks, 0, num_ranks)
    with mock.patch.object(placement, "measure", lambda _: size):
        return place(run, ranks, CPU, memory)


@pytest.mark.promise("B33", "C02")
def test_auto_chooses_by_size_and_says_why():
    small = placed(SMALL, memory=GIB)
    assert (small.strategy.value, small.fsdp, small.num_shards) == ("ddp", None, 1)
    assert "1,000 parameters need 0.00GB" in small.strategy.reason
    assert "0% of the 1.0GB of a process" in small.strategy.reason
    large = placed(LARGE)
    assert (large.strategy.value, large.num_shards) == ("fsdp", 2)
    assert "8,589,934,592 parameters need 128.00GB" in large.strategy.reason
    assert "160% of the 80.0GB of a process" in large.strategy.reason


@pytest.mark.promise("B21", "D03")
def test_advice_where_fsdp_is_pointless():
    small = placed(SMALL, strategy="fsdp")
    assert small.strategy.value == "fsdp"
    (advice,) = small.notes
    assert advice.startswith("FSDP is not needed here: 1,000 parameters need")
    assert placed(LARGE, strategy="fsdp").notes == ()


def test_options_without_effect_on_these_processes_are_said():
    options = {
        "fsdp_min_num_params": 5,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    }
    notes = placed(SMALL, num_processes=4, **options).notes
    names = ["fsdp_auto_wrap_policy", "fsdp_min_num_params", "num_processes"]
    assert [note.partition(":")[0] for note in notes] == names
    assert placed(LARGE, **options).notes == ()


# ---- start and end ---------------------------------------------------------------------------------------------------


def whole_life(folder):
    before = dict(os.environ)
    lines = listen()
    recorded = {}
    config = config_of(folder, dist_timeout_minutes=7, debug=True)
    with session.start_session(config) as first:
        group = dist.group.WORLD
        assert group is not None
        recorded["timeout"] = group._get_backend(CPU).options._timeout.total_seconds()
        recorded["debug"] = str(dist.get_debug_level())
        recorded["facts"] = (
            first.rank,
            first.world_size,
            first.strategy,
            str(first.device),
            first.is_main,
            first.mixed_precision,
        )
        model = nn.Linear(3, 3)
        model.weight.data.fill_(first.rank + 1)
        recorded["weight"] = float(first.prepare(model).state_dict()["weight"].mean())
        first.barrier()
    recorded["ended"] = not dist.is_initialized()
    recorded["same_environment"] = dict(os.environ) == before
    recorded["lines"] = list(lines)
    for failure in (ZeroDivisionError, KeyboardInterrupt):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        config = config_of(folder, strategy="ddp")
        with pytest.raises(failure) as error, session.start_session(config):
            recorded["again"] = collectives.sum_ints([1])
            raise failure
        notes = getattr(error.value, "__notes__", None)
        recorded[failure] = (notes, dist.is_initialized())
    return recorded


@pytest.mark.promise("A17", "B27", "B28")
def test_a_session_starts_says_so_and_ends_the_group_whatever_happens():
    results = run_ranks(whole_life, 2, shared(tiny_bert))
    for rank, result in enumerate(results):
        assert result["timeout"] == 7 * 60
        assert result["debug"].endswith("DETAIL")
        assert result["facts"] == (rank, 2, "ddp", "cpu", rank == 0, "no")
        assert result["weight"] == 1.0
        assert result["again"] == [2]
        assert result["ended"] and result["same_environment"]
        assert result[ZeroDivisionError] == ([f"rank {rank} of 2"], False)
        assert result[KeyboardInterrupt] == (None, False)
        assert (
            "processes: 2, 2 of them on this machine; backend: gloo (no GPU); a collective waits 7 minutes at most"
            in result["lines"]
        )


def one_process(folder, is_launched):
    if not is_launched:
        for name in (*GROUP, "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    lines = listen()
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # as `accelerate launch` leaves it
    os.environ["FSDP_VERSION"] = "2"
    with session.start_session(config_of(folder, strategy="fsdp")) as first:
        model = first.prepare(nn.Linear(3, 3))
    facts = (first.strategy, first.fsdp, type(model).__name__)
    return facts, dist.is_initialized(), "\n".join(lines)


@pytest.mark.parametrize("is_launched", [False, True], ids=["plain", "torchrun"])
@pytest.mark.promise("A01", "A11", "B12", "C34")
def test_one_process_with_fsdp_runs_whole_with_one_line(is_launched):
    arguments = (shared(tiny_bert), is_launched)
    (result,) = run_ranks(one_process, 1, *arguments)
    facts, is_initialized, log = result
    assert facts == ("single", None, "Linear")
    assert not is_initialized
    assert log.count("FSDP needs at least two") == 1


SEVERAL_SESSIONS = """
import os, sys, time
from vembed.config.schema import TrainConfig
from vembed.parallel import collectives
from vembed.parallel.session import start_session

for number in range(3):
    if number and os.environ["RANK"] == "0":
        time.sleep(0.5)  # the other one is first at the next meeting, where the store still has the last addresses
    config = TrainConfig(model_name="none", data_path="none", strategy="ddp", dist_timeout_minutes=1)
    with start_session(config):
        sys.stdout.write(f"SUM {collectives.sum_scalars([1.0])[0]}\\n")
"""


def test_one_launch_holds_several_sessions(tmp_path):
    (tmp_path / "sessions.py").write_text(SEVERAL_SESSIONS)
    words = ["--standalone", "--nproc-per-node=2", str(tmp_path / "sessions.py")]
    done = command(*words, module="torch.distributed.run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("SUM 2.0") == 6


def test_a_state_that_another_trainer_left_is_replaced():
    """Trainers of Transformers leave theirs, and Accelerate refuses to change its precision."""
    Accelerator(cpu=True, mixed_precision="no")
    with session.start_session(
        config_of(shared(tiny_bert), mixed_precision="bf16")
    ) as first:
        assert first.accelerator.mixed_precision == "bf16"


# ---- others that fail ------------------------------------------------------------------------------------------------


def patient_start():
    """Let the short limit be for collectives only: a busy machine may start ranks slowly."""
    session.LaunchCheck = lambda ranks, _: launch_check.LaunchCheck(ranks, 1.0)


def wait_for_others(folder, misfortune):
    began = time.monotonic()
    patient_start()
    config = config_of(folder, strategy="ddp", dist_timeout_minutes=SHORT)
    with session.start_session(config) as first:
        first.barrier()
        if first.rank == 1:
            if misfortune == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if misfortune == "raises":
                raise ValueError("no more paper")
            time.sleep(60)
        try:
            collectives.all_gather_parts(torch.ones(2, 2))
        except RuntimeError as error:
            assert time.monotonic() - began < 20
            return "\n".join(error.__notes__)
    return "nothing happened"


@pytest.mark.parametrize("misfortune", ["killed", "raises", "hangs"])
@pytest.mark.promise("C30", "E33")
def test_the_others_end_in_time_and_name_rank_and_collective(misfortune):
    folder = shared(tiny_bert)
    first, second = rank_outcomes(wait_for_others, 2, folder, misfortune, wait_for=[0])
    assert first.result == "rank 0 of 2, in the collective all_gather_ints (call 1)"
    if misfortune == "killed":
        assert second.exitcode == -signal.SIGKILL
    if misfortune == "raises":
        assert "no more paper" in second.error


def started_by_hand(folder, per_machine):
    """The five variables that docs/multi-node.md names, on machines that have `per_machine` processes each."""
    machine, local = divmod(int(os.environ["RANK"]), per_machine)
    del os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_RANK"] = str(local)
    launch_check.machine_name = lambda: f"machine {machine}"
    lines = listen()
    config = config_of(
        folder,
        strategy="fsdp",
        fsdp_sharding_strategy="HYBRID_SHARD",
        dist_timeout_minutes=7,
    )
    with session.start_session(config) as first:
        timeouts = {}
        for name in first.mesh.mesh_dim_names if first.mesh else ():
            group = first.mesh.get_group(name)
            assert group is not dist.group.WORLD
            timeout = group._get_backend(CPU).options._timeout
            timeouts[group.size()] = timeout.total_seconds()
        return "\n".join(lines), timeouts


def test_processes_started_by_hand_count_those_of_their_machine():
    folder = shared(tiny_bert)
    loopback = interface_to("127.0.0.1")
    for log, timeouts in run_ranks(started_by_hand, 4, folder, 2):
        assert f"network: interface {loopback} (" in log
        assert "processes: 4, 2 of them on this machine" in log
        # The groups of the mesh wait as long as all others.
        assert timeouts == {2: 7 * 60}
    for log, timeouts in run_ranks(started_by_hand, 2, folder, 2):
        assert "processes: 2, 2 of them on this machine" in log
        assert "HYBRID_SHARD: with 1 machine(s)" in log
        assert timeouts == {}
    outcomes = rank_outcomes(started_by_hand, 3, folder, 2)
    for outcome in outcomes[:2]:
        assert "2 of 3 are on this one" in str(outcome.error)


def set_variables(monkeypatch, **changes):
    for name, value in (GROUP | changes).items():
        monkeypatch.setenv(name, value)


def test_machines_that_cannot_reach_each_other_are_told_what_to_set(monkeypatch):
    set_variables(monkeypatch, LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="eth7")

    def refused(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed: remote=[127.0.0.1]")

    check = SimpleNamespace(
        connect=dist.HashStore, check=lambda *_: ("run", read_rank_info())
    )
    monkeypatch.setattr(session, "LaunchCheck", lambda *_: check)
    monkeypatch.setattr(dist, "init_process_group", refused)
    message = r"set GLOO_SOCKET_IFNAME \(now eth7\).*remote=\[127\.0\.0\.1\]"
    with pytest.raises(UserError, match=message):
        session.start_session(config_of(shared(tiny_bert)))


def test_a_machine_without_loopback_is_told_at_once(monkeypatch):
    set_variables(monkeypatch, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")

    def unreachable(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(UserError, match=r"127\.0\.0\.1 .*ip link set lo up"):
        session.start_session(config_of(shared(tiny_bert)))


@pytest.mark.parametrize(
    ("error", "ending"),
    [(RuntimeError, "abort"), (UserError, "destroy"), (None, "destroy")],
)
def test_a_failed_rank_waited_for_kernels_that_never_end(error, ending, monkeypatch):
    """With NCCL the group is aborted after a failure: destroying it waits for collectives that others never join."""
    ended = []
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("destroy"))
    c10d = dist.distributed_c10d
    monkeypatch.setattr(c10d, "_abort_process_group", lambda: ended.append("abort"))
    first = session.start_session(config_of(shared(tiny_bert)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with contextlib.suppress(RuntimeError, UserError), first:
        if error is not None:
            raise error("failed")
    assert ended == [ending]
