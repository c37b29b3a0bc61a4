"""Checkpoints of several ranks: any number of them and any strategy goes on from what any other wrote."""

import resource

import pytest
import torch

from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert
from tests.training.test_checkpoint import Run, found_in, resumed
from tests.training.tiny_run import assert_same, config_for
from vembed.errors import RunError, UserError
from vembed.parallel.session import start_session
from vembed.training.checkpoint import folders as integrity
from vembed.training.checkpoint.checkpointer import Checkpointer


def one_part(output_dir, model_name, options):
    """Resume, train a step, save; the state as it was found, and as it was left."""
    options = {"model_name": model_name, "resume": "auto", **options}
    with start_session(config_for(output_dir, **options)) as session:
        run = Run(session, output_dir, **options)
        run.model = session.prepare(run.model, ("Layer",))
        run.rebuild().resume()
        actual = run.whole()
        run.train().save()
        left = run.whole()
        run.model.num_seen += 1  # an asynchronous save must not see this
        run.checkpointer.wait()
        return run.state["step"], session.strategy, actual, left


GATHERED_AND_OFFLOADED = {
    "strategy": "fsdp",
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_offload_params": True,
}
CHAIN = [
    (1, {}, "single"),
    (2, {"strategy": "ddp"}, "ddp"),
    (2, {"strategy": "fsdp"}, "fsdp"),
    (3, {"strategy": "fsdp", "async_save": True}, "fsdp"),
    (1, {"async_save": True}, "single"),
    (3, {"strategy": "ddp", "async_save": True}, "ddp"),
    (2, {"strategy": "fsdp", "fsdp_version": 1, "async_save": True}, "fsdp"),
    (2, GATHERED_AND_OFFLOADED, "fsdp"),
    (1, {}, "single"),
]


@pytest.mark.promise("E25")
def test_every_strategy_goes_on_from_every_other_without_a_bit_of_difference(tmp_path):
    model_name = str(shared(tiny_bert))
    before = None
    for number, (world_size, options, strategy) in enumerate(CHAIN):
        parts = run_ranks(one_part, world_size, tmp_path, model_name, options)
        for last_step, used, part, _ in parts:
            assert (last_step, used) == (number + 1, strategy)
            if before is not None:
                assert_same(part, before)
        before = parts[0][3]
        for *_, left in parts[1:]:
            assert_same(left, before)
    last = len(CHAIN)
    numbers = [number for number, _ in integrity.list_checkpoints(tmp_path)]
    assert numbers == [last - 2, last - 1, last]


def full_disk_on_one(output_dir, async_save):
    """Rank 1 alone cannot write."""
    options = {"strategy": "ddp", "async_save": async_save}
    with start_session(config_for(output_dir, **options)) as session:
        run = Run(session, output_dir, **options).resume().train().save()
        run.checkpointer.wait()
        if session.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        with pytest.raises(RunError) as caught:
            run.train().save().checkpointer.wait()
        run.checkpointer.verify(run.checkpointer.path_of(1))
    return str(caught.value)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_is_full_on_one_rank_is_known_on_all(tmp_path, async_save):
    for raised in run_ranks(full_disk_on_one, 2, tmp_path, async_save):
        assert "checkpoint-2 could not be written (rank 1: " in raised
        assert "File too large); the newest checkpoint is checkpoint-1" in raised
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    with resumed(tmp_path, resume=True, async_save=async_save) as run:
        run.train().save().checkpointer.wait()  # there is room again
    assert found_in(tmp_path).name == "checkpoint-2"


def timeout_of_the_second_group(output_dir):
    config = config_for(
        output_dir, strategy="ddp", async_save=True, dist_timeout_minutes=7
    )
    with (
        start_session(config) as session,
        Checkpointer(config.run, session) as checkpointer,
    ):
        backend = checkpointer._group._get_backend(torch.device("cpu"))
        return backend.options._timeout.total_seconds()


def test_asynchronous_saving_waits_as_long_as_other_collectives(tmp_path):
    for seconds in run_ranks(timeout_of_the_second_group, 2, tmp_path):
        assert seconds == 7 * 60


def two_folders(output_dir):
    with start_session(config_for(output_dir, strategy="ddp")) as session:
        rank_folder = output_dir / f"rank-{session.rank}"
        with pytest.raises(UserError) as not_shared:
            Run(session, rank_folder).resume()
        blocked = output_dir / "file" if session.rank else output_dir
        with pytest.raises(UserError) as not_writable:
            Run(session, blocked / "run").resume()
        with pytest.raises(UserError) as nothing_there:
            Run(session, output_dir / "run", resume=True).resume()
    return str(not_shared.value), str(not_writable.value), str(nothing_there.value)


def test_what_is_wrong_with_output_dir_is_said_on_every_rank(tmp_path):
    (tmp_path / "file").touch()
    for not_shared, not_writable, nothing_there in run_ranks(two_folders, 2, tmp_path):
        assert "on process 1: give one on a file system that all" in not_shared
        assert "on process 1: give one on a file system that all" in not_writable
        assert "holds no checkpoint" in nothing_there
