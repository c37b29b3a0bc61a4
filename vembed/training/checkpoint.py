"""Checkpointer: writes, verifies, keeps and reads a run's checkpoints; every method is called by all ranks together.

A checkpoint is a folder `checkpoint-<step>`:

    manifest.json            every file with size and SHA-256, and a checksum of the list itself
    state.json               step, counters, best score, settings, versions
    index.json               which piece of which tensor lies in which file
    rank<r>-<n>.safetensors  trained weights, loss parameters and optimizer state, in pieces

It is written as `checkpoint-<step>.partial`, flushed to disk, and renamed when every rank has written: whatever kills
the run leaves either a whole checkpoint or none. Any number of ranks and any strategy reads what any other wrote.
Nothing in it is pickled: a checkpoint from a stranger can be wrong, but it cannot run code.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from vembed.config.schema import TrainConfig
from vembed.distributed import collectives
from vembed.distributed.session import Session
from vembed.errors import RunError, UserError
from vembed.training import integrity
from vembed.training.integrity import ABANDONED, DAMAGED, PARTIAL, STATE, checkpoint_name, list_checkpoints
from vembed.training.resume import JUDGES, Difference, candidates, compare_resume, refuse, trim_metrics
from vembed.training.state import optimizer_kind, quieten_torch, restore, tensors_of
from vembed.training.storage import CheckpointReader, CheckpointWriter

log = logging.getLogger("vembed")


class Checkpointer:
    """The checkpoints of one run; a context manager, whose end waits for the last save."""

    def __init__(self, config: TrainConfig, session: Session) -> None:
        self.config = config
        self.session = session
        self.output = Path(config.output_dir)
        self.identity: dict[str, Any] = {}
        self.save_seconds = 0.0
        """How long the longest save took, for whoever must leave time for one."""
        self._alone = session.world_size == 1
        # An asynchronous save talks from its own thread, so it needs a group of its own.
        timeout = timedelta(minutes=config.dist_timeout_minutes)
        self._group = collectives.new_cpu_group(timeout) if config.async_save else None
        self._pending: Future[Any] | None = None
        self._saved_step = -1
        quieten_torch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A checkpoint that is being written is finished, all the more when the run has failed."""
        try:
            self.wait()
        except (RunError, RuntimeError) as problem:
            if error is None:
                raise
            log.error("%s", problem)

    # ---- before training ---------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """The checkpoint to go on from, or None for a new run.

        Refuses an output_dir that cannot be written to, or that holds another run. Removes what a killed process left
        half-written, passes over damaged checkpoints, and sets aside those that the resumed run will not reach.
        """
        self._probe()
        answer: dict[str, Any] = {}
        if self.session.is_main:
            for name in integrity.remove_leftovers(self.output):
                log.info("removed %s, which an earlier process left half-written", name)
            try:
                answer = {"paths": [str(path) for path in candidates(self.config)]}
            except UserError as error:
                answer = {"error": str(error)}
        answer = collectives.broadcast_json(answer)
        if "error" in answer:
            raise UserError(answer["error"])
        damaged: dict[Path, list[str]] = {}
        chosen = None
        for path in map(Path, answer["paths"]):
            problems = self.verify(path)
            if not problems:
                chosen = path
                break
            damaged[path] = problems
            log.warning("%s is passed over: %s", path, "; ".join(problems))
        if chosen is None and damaged and self.config.resume != "auto":
            wanted = "true" if self.config.resume is True else self.config.resume
            raise UserError(
                f"resume: {wanted}, but none of the {len(damaged)} checkpoint(s) is whole ("
                + "; ".join(f"{path.name}: {problems[0]}" for path, problems in damaged.items())
                + "); bring one back, or start anew with resume: auto or in another output_dir"
            )
        if self.session.is_main:
            self._set_aside(chosen, set(damaged))
            if chosen is None:
                trim_metrics(self.output, -1)
        collectives.barrier()
        if chosen is not None:
            self._saved_step = int(read_state(chosen)["loop"]["step"])
            log.info("resuming from %s (step %d)", chosen, self._saved_step)
        return chosen

    def check(self, directory: Path | None, identity: Mapping[str, Any]) -> None:
        """Before the model is loaded: refuse to go on from a checkpoint that was trained with other settings.

        `identity` is what must stay besides options: {"data": fingerprint, "global_batch_size": n}.
        """
        self.identity = dict(identity)
        if self.config.negatives_from == "own_rank":
            self.identity["world_size"] = self.session.world_size
        if directory is None:
            return
        differences = self._differences(directory)
        if self.config.resume_anyway:
            forbidden = [str(one) for one in differences if not one.is_allowed]
            if forbidden:
                log.warning("resume_anyway: going on although the settings differ: %s", "; ".join(forbidden))
        else:
            refuse(differences, str(directory))
        changed = [str(one) for one in differences if one.is_allowed and one.name not in ("resume", "output_dir")]
        if changed:
            log.info("settings changed since the checkpoint: %s", "; ".join(changed))

    def load(
        self, directory: Path, model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Bring model, loss and optimizer to the state of a checkpoint; returns what `save` was given as `state`.

        metrics.jsonl is cut to end at the checkpoint's step.
        """
        saved = read_state(directory)
        self._read(directory, saved, model, loss, optimizer)
        state: dict[str, Any] = saved["loop"]
        if self.session.is_main:
            trim_metrics(self.output, state["step"])
        changed = {one.name for one in self._differences(directory)} & JUDGES
        if changed:
            log.info("the best score so far is forgotten: eval_metric or the evaluation data have changed")
            state |= {"best": None, "best_step": None, "best_scores": {}}
        if "val_data_path" in changed:
            # Scores on other data are no part of this run's report, and do not stand for an evaluation of this step.
            state |= {"before": {}, "scores": {}, "scored_step": None}
        return state

    def load_weights(self, directory: Path, model: nn.Module, loss: nn.Module) -> bool:
        """Bring model and loss alone to the state of a checkpoint (the best one, at the end of a run).

        False, with a warning, where it is not there or not whole: the weights stay as they are.
        """
        self.wait()
        problems = self.verify(directory)
        if problems:
            log.warning("the weights of %s cannot be taken: %s", directory, "; ".join(problems))
            return False
        self._read(directory, read_state(directory), model, loss, None)
        return True

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.output / checkpoint_name(step)

    def has_saved(self, step: int) -> bool:
        """Whether the newest save that went well was of that step; with `async_save`, to be asked after `wait`."""
        return step == self._saved_step

    def verify(self, directory: Path) -> list[str]:
        """What is wrong with a checkpoint, in words; each rank reads its part of the files."""
        world = self.session.world_size
        found = integrity.verify(directory, part=self.session.rank, num_parts=world)
        return list(dict.fromkeys(problem for part in collectives.gather_objects_as_json(found) for problem in part))

    # ---- during training ---------------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a checkpoint of `state["step"]`; never removes that of `state["best_step"]`. Twice for a step: once.

        `extra` writes more files into the folder (the whole model, with fsdp_state_dict_type: FULL_STATE_DICT); it is
        called by all ranks. With `async_save`, this returns when the tensors have been copied to host memory.
        """
        self.wait()
        step = int(state["step"])
        if step == self._saved_step:
            return
        began = time.monotonic()
        final = self.path_of(step)
        partial = final.with_name(final.name + PARTIAL)
        problem = self._attempt(lambda: _make_empty(partial) if self.session.is_main else None)
        if problem is None and extra is not None:
            problem = self._attempt(lambda: extra(partial))
        if problem is not None:
            self._failed(final, problem)
            return
        writer = CheckpointWriter(
            partial,
            final,
            self._description(state, optimizer),
            rank=self.session.rank,
            committed=lambda: self._committed(final, state.get("best_step"), began),
        )
        tensors = tensors_of(model, loss, optimizer)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        if self.config.async_save:
            pending = async_save(
                tensors, storage_writer=writer, planner=planner, process_group=self._group, no_dist=self._alone
            )
            assert isinstance(pending, Future)
            self._pending, self._saving = pending, (step, final)
        else:
            self._guard(lambda: save(tensors, storage_writer=writer, planner=planner, no_dist=self._alone), step, final)
        self.save_seconds = max(self.save_seconds, time.monotonic() - began)

    def wait(self) -> None:
        """Wait for an asynchronous save; every save does, and the run does before it ends."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._guard(pending.result, *self._saving)

    # ---- parts -------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Every rank must be able to write to output_dir, and to see there what rank 0 writes."""
        name = f".probe-{self.session.rank}"
        problem = integrity.probe(self.output, name)
        problems = collectives.gather_objects_as_json(problem)
        # Not asked where writing failed already: there, even asking may be forbidden.
        shared = collectives.gather_objects_as_json(problem is not None or (self.output / ".probe-0").exists())
        if problem is None:
            (self.output / name).unlink()
        failed = [f"process {rank}: {one}" for rank, one in enumerate(problems) if one is not None]
        if failed:
            raise UserError(
                f"output_dir: {self.output} cannot be written to ({'; '.join(failed[:3])}); give a folder that every "
                "process may write to, on a disk with room"
            )
        if not all(shared):
            raise UserError(
                f"output_dir: {self.output} is not the same folder for all processes (process {shared.index(False)} "
                "does not see what process 0 writes there); give one on a file system that all machines share"
            )

    def _set_aside(self, chosen: Path | None, damaged: set[Path]) -> None:
        """Checkpoints of this folder later than the chosen one would be mistaken for the resumed run's."""
        after = -1 if chosen is None else _step_in(chosen, self.output)
        for step, path in list_checkpoints(self.output):
            if step > after:
                ending = DAMAGED if path in damaged else ABANDONED
                log.info("%s is now called %s", path, integrity.set_aside(path, ending).name)

    def _read(
        self,
        directory: Path,
        saved: Mapping[str, Any],
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        reader = CheckpointReader(directory)
        entries = reader.read_metadata().state_dict_metadata
        shapes = {name: list(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

        def fill(tensors: dict[str, Any]) -> None:
            load(
                tensors,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=self._alone,
            )

        restore(model, loss, optimizer, shapes, fill, saved_optimizer=saved["optimizer"])

    def _differences(self, directory: Path) -> list[Difference]:
        saved = read_state(directory)
        return compare_resume(saved["config"], self.config, saved["identity"], self.identity)

    def _description(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            "loop": dict(state),
            "config": self.config.to_dict(),
            "identity": self.identity,
            "optimizer": optimizer_kind(optimizer),
            "strategy": self.session.strategy,
            "world_size": self.session.world_size,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }

    def _attempt(self, action: Callable[[], None]) -> str | None:
        """Do something that may meet a full disk on any rank; what all ranks then know of it."""
        problem = None
        try:
            action()
        except (OSError, SafetensorError) as error:
            problem = f"rank {self.session.rank}: {_said(error)}"
        return next((one for one in collectives.gather_objects_as_json(problem) if one is not None), None)

    def _guard(self, action: Callable[[], Any], step: int, final: Path) -> None:
        """torch tells every rank what any rank met. A disk that cannot be written to is no bug; all else is."""
        try:
            action()
            self._saved_step = step
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            if not all(isinstance(cause, OSError) for cause in causes.values()):
                raise RuntimeError(f"saving {final.name} failed") from error
            self._failed(final, "; ".join(f"rank {rank}: {_said(cause)}" for rank, cause in causes.items()))

    def _failed(self, final: Path, problem: str) -> None:
        if self.session.is_main:
            shutil.rmtree(final.with_name(final.name + PARTIAL), ignore_errors=True)
        kept = [path.name for _, path in list_checkpoints(self.output)]
        what = f"{final.name} could not be written ({problem}); the newest checkpoint is {kept[-1] if kept else 'none'}"
        if self.config.on_save_error == "stop":
            raise RunError(f"{what}. Make room in {self.output} and resume, or set on_save_error: continue")
        log.error("%s; going on (on_save_error: continue)", what)

    def _committed(self, final: Path, best_step: int | None, began: float) -> None:
        """On rank 0, when a checkpoint is in place: say so, and remove the oldest."""
        size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
        log.info("saved %s (%.2f GB, %.1f s)", final.name, size / 1e9, time.monotonic() - began)
        try:
            keep = set() if best_step is None else {best_step}
            for path in integrity.prune(self.output, self.config.save_total_limit, keep):
                log.info("removed %s (save_total_limit: %d)", path.name, self.config.save_total_limit)
        except OSError as error:
            log.warning("an old checkpoint could not be removed: %s", _said(error))


def read_state(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: "loop" (what `save` was given), "config", "identity", versions."""
    state: dict[str, Any] = json.loads((directory / STATE).read_bytes())
    return state


def latest_good(output_dir: Path) -> Path | None:
    """The newest checkpoint of a run that is whole; says which were passed over and why. For one process alone."""
    for _, path in reversed(list_checkpoints(output_dir)):
        problems = integrity.verify(path)
        if not problems:
            return path
        log.warning("%s is passed over: %s", path, "; ".join(problems))
    return None


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _step_in(chosen: Path, output: Path) -> int:
    """The step of a checkpoint if it is one of this folder; of another folder's, none is later."""
    steps = {path.resolve(): step for step, path in list_checkpoints(output)}
    return steps.get(chosen.resolve(), -1)


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
