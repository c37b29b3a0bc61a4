"""Checkpoints of one process: what comes back, what survives being killed at any moment, what a full disk does."""

import itertools
import os
import resource
import shutil
import signal
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.harness import run_ranks
from tests.training.tiny_run import (
    TinyLoss,
    TinyModel,
    assert_same,
    backward,
    config_for,
    step,
    whole_state,
)
from vembed.errors import RunError, UserError
from vembed.parallel.session import start_session
from vembed.training.checkpoint import folders as integrity
from vembed.training.checkpoint.checkpointer import (
    Checkpointer,
    TrainedState,
    read_state,
)
from vembed.training.optimizer import build_optimizer
from vembed.training.trainer import LoopState

FILE = "shard-00001-model-00001-of-00001.safetensors"


class Run:
    """As much of a run as a checkpoint sees."""

    def __init__(self, session, output_dir, model=None, **options):
        self.config = config_for(output_dir, **options)
        if session.world_size > 1:
            if session.is_main:
                output_dir.mkdir(exist_ok=True)
                (output_dir / integrity.LOCK).touch()
            session.barrier()
        self.checkpointer = Checkpointer(self.config.run, session)
        self.model = model or TinyModel()
        self.loss = TinyLoss()
        self.rebuild()
        self.state = asdict(LoopState())
        self.point = None

    def rebuild(self):
        """Once more, when the model has been wrapped."""
        self.optimizer = build_optimizer(self.model, self.loss, self.config.optimizer)
        return self

    @property
    def trained(self):
        return TrainedState(self.model, self.loss, self.optimizer)

    def resume(self, identity=None):
        self.point = self.checkpointer.find(self.config.model)
        identity = identity or {"data": "abc", "global_batch_size": 8}
        self.checkpointer.check(self.point, self.config.to_dict(), identity)
        self.checkpointer.require_steps_left(self.point, 1_000)
        self.checkpointer.begin(self.point)
        if self.point is not None:
            self.state = self.checkpointer.load(self.point, self.trained)
        return self

    def train(self, num_steps=1):
        for _ in range(num_steps):
            step(self.model, self.loss, self.optimizer)
            self.state["step"] += 1
        return self

    def save(self, extra=None):
        self.checkpointer.save(self.state, self.trained, extra)
        return self

    def whole(self):
        return whole_state(self.model, self.loss, self.optimizer)


def found_in(output_dir):
    """The checkpoint that a run resumes from."""
    with starting(output_dir, resume="auto") as run:
        point = run.checkpointer.find(run.config.model)
        return None if point is None else point.path


@contextmanager
def starting(output_dir, model=None, **options):
    with start_session(config_for(output_dir, **options)) as session:
        yield Run(session, output_dir, model, **options)


@contextmanager
def resumed(output_dir, model=None, **options):
    """The same, begun where the options say."""
    with starting(output_dir, model, **options) as run:
        yield run.resume()


def saved(output_dir, num_steps=1):
    """Train, with a checkpoint after each step."""
    with resumed(output_dir) as run:
        for _ in range(num_steps):
            run.train().save()


def test_everything_comes_back_and_nothing_is_pickled(tmp_path):
    with resumed(tmp_path) as run:
        run.train(3)
        run.model.num_seen += 5
        run.state |= {
            "best": 0.5,
            "best_step": 3,
            "before": {"ndcg@10": 0.1},
        }
        run.state["scale"]["value"] = 2.0**16
        expected = run.save().whole()
        remaining = dict(run.state)
        run.train().save()  # goes on, so that nothing that comes back is there by chance
    folder = tmp_path / "checkpoint-3"
    names = {path.name for path in folder.iterdir()}
    assert names == {"manifest.json", "state.json", FILE}
    with safe_open(folder / FILE, "pt") as file:
        assert not any("embeddings" in name for name in file.keys())  # noqa: SIM118 - no mapping
    with resumed(tmp_path, resume=str(folder)) as run:
        assert run.state == remaining
        assert_same(run.whole(), expected)
        assert run.model.num_seen.tolist() == [5.0] * 3
        assert (tmp_path / "checkpoint-4.abandoned").is_dir()
        run.train().save()
    assert found_in(tmp_path).name == "checkpoint-4"
    state = read_state(tmp_path / "checkpoint-4")
    assert (state["world_size"], state["strategy"]) == (1, "single")


def test_changed_rates_of_this_run_hold_and_not_those_of_the_checkpoint(
    tmp_path, caplog
):
    saved(tmp_path)
    options = {
        "resume": "force",
        "learning_rate": 0.01,
        "weight_decay": 0.3,
    }
    groups = set()
    with resumed(tmp_path, **options) as run:
        for group in run.optimizer.param_groups:
            groups.add((group["lr"], group["initial_lr"], group["weight_decay"]))
    assert groups == {(0.01, 0.01, 0.3), (0.01, 0.01, 0.0)}
    assert "resume: force: going on although" in caplog.text


@pytest.mark.promise("D33")
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "adafactor", "sgd"])
def test_other_optimizers_resume_exactly(tmp_path, optim):
    options = {"optim": optim, "learning_rate": 1e-3}
    with resumed(tmp_path / "whole", TinyModel(dim=72), **options) as run:
        expected = run.train(4).whole()
    with resumed(tmp_path / "broken", TinyModel(dim=72), **options) as run:
        run.train(2).save()
    options |= {"resume": True, "async_save": True}
    with resumed(tmp_path / "broken", TinyModel(dim=72), **options) as run:
        assert_same(run.train(2).whole(), expected)


def test_a_checkpoint_before_the_first_update_leaves_the_optimizer_fresh(tmp_path):
    """on_nonfinite: skip may leave out the first steps: the state must not be made up by saving it."""
    with resumed(tmp_path) as run:
        run.state["step"] = 1
        run.save()
    with resumed(tmp_path, resume=True) as run:
        assert not run.optimizer.state
        backward(run.model, run.loss)
        run.loss.scale.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.state["step"] = 2
        run.save()
    with resumed(tmp_path, resume=True) as run:
        assert run.loss.scale not in run.optimizer.state
        assert run.optimizer.state[run.model.head.weight]["step"] == 1


def test_four_bit_layers_under_adapters(tmp_path):
    from bitsandbytes.nn import Linear4bit

    def quantised():
        model = TinyModel(dim=64)
        model.frozen = Linear4bit(64, 64, quant_type="nf4").to("cpu")
        model.frozen.requires_grad_(False)
        return model

    def trained(run):
        values = run.whole()
        return {name: values[name] for name in values if "frozen" not in name}

    with resumed(tmp_path, quantised()) as run:
        expected = trained(run.train().save())
    with resumed(tmp_path, quantised(), resume=True) as run:
        assert_same(trained(run), expected)


def test_best_weights_that_are_not_there_leave_the_last_ones(tmp_path, caplog):
    with resumed(tmp_path) as run:
        run.train().save().train()
        expected = run.whole()
        (tmp_path / "checkpoint-1" / "state.json").write_text("{}")
        for step in (1, 7):
            path = run.checkpointer.path_of(step)
            assert not run.checkpointer.load_weights(path, run.trained)
        assert_same(run.whole(), expected)
    assert "checkpoint-7: manifest.json is missing" in caplog.text
    assert "checkpoint-1: state.json has 2 bytes instead of" in caplog.text


# ---- another model, another optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ({"num_layers": 1}, {}, "only the checkpoint has .*layer.1.linear.bias"),
        ({"dim": 8}, {}, r"has the shape \[7, 7\] there and \[8, 8\] in this run"),
        ({"frozen_embeddings": False}, {}, "only this run trains .*embeddings.weight"),
        ({}, {"optim": "sgd"}, r"another model or optimizer: only .* optimizer\."),
        ({}, {"optim": "adamw_8bit"}, r"optimizer: only .* optimizer\."),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    tmp_path, model, options, says
):
    saved(tmp_path)
    with (
        starting(tmp_path, TinyModel(**model), resume="force", **options) as run,
        pytest.raises(UserError, match=says),
    ):
        run.resume()


# ---- crashes and full disks ------------------------------------------------------------------------------------


DISK_CALLS = [
    (os, "fsync"),
    (Path, "rename"),
    (Path, "open"),
    (Path, "mkdir"),
    (shutil, "rmtree"),
]


def kill_at_disk_call(number):
    """End this process by SIGKILL before its n-th call that changes the disk."""
    calls = itertools.count(1)

    def wrapped(real):
        def call(*args, **options):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for owner, name in DISK_CALLS:
        setattr(owner, name, wrapped(getattr(owner, name)))


def killed_everywhere(output_dir):
    """In a process of its own: a child for every moment at which a save can be killed. Return the steps that the runs
    after them go on from."""
    start = output_dir / "start"
    steps = []
    with start_session(config_for(output_dir)) as session:
        Run(session, start).resume().train().save()
        for at in range(1, 100):
            folder = output_dir / f"run-{at}"
            shutil.copytree(start, folder)
            child = os.fork()
            if not child:
                run = Run(session, folder, resume=True, save_total_limit=1)
                kill_at_disk_call(at)
                run.resume().train().save()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            listed = [path for _, path in integrity.list_checkpoints(folder)]
            problems = [integrity.verify(path) for path in listed]
            run = Run(session, folder, resume=True).resume()
            assert listed and not any(problems), at
            assert not list(folder.glob("*.partial")), at
            steps.append(run.state["step"])
            if not os.WIFSIGNALED(status):
                assert status == 0
                return steps
    raise AssertionError("a save was killed whatever its number of calls")


def test_kill_9_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    (steps,) = run_ranks(killed_everywhere, 1, tmp_path)
    assert len(steps) > 15
    # Up to the rename the old one counts, from then on the new one.
    assert set(steps) == {1, 2}
    assert steps == sorted(steps)


@contextmanager
def small_files(num_bytes):
    """Files cannot grow beyond a few bytes: what a full disk does, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_many_tensors_go_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("vembed.training.checkpoint.checkpointer.FILE_BYTES", 300)
    with resumed(tmp_path) as run:
        expected = run.train().save().whole()
    assert len(list((tmp_path / "checkpoint-1").glob("*.safetensors"))) > 3
    with resumed(tmp_path, resume=True) as run:
        assert_same(run.whole(), expected)


def test_tensors_alone_go_into_a_checkpoint(tmp_path):
    class Odd(TinyModel):
        def get_extra_state(self):
            return {"x": 1}

    with resumed(tmp_path, Odd()) as run:
        run.train()
        with pytest.raises(TypeError, match="holds only tensors and JSON"):
            run.save()


def crash(run):
    with run.checkpointer:
        run.resume().train().save()
        raise ZeroDivisionError


def test_the_last_asynchronous_save_is_finished_whatever_ends_the_run(tmp_path):
    with starting(tmp_path, async_save=True) as run, pytest.raises(ZeroDivisionError):
        crash(run)
    assert found_in(tmp_path) == tmp_path / "checkpoint-1"


def test_an_asynchronous_save_that_fails_hides_no_other_error(tmp_path, caplog):
    with starting(tmp_path, async_save=True) as run:
        with small_files(300), pytest.raises(ZeroDivisionError):
            crash(run)
        assert "checkpoint-1 could not be written" in caplog.text
        with small_files(300), pytest.raises(RunError), run.checkpointer:
            run.save()
    assert found_in(tmp_path) is None
