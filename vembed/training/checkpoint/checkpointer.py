"""Checkpointer: writes, verifies, prunes and reads the checkpoints of a run. All ranks must call each method.

A checkpoint is a folder `checkpoint-<step>`:

    manifest.json            every file with size and SHA-256, and a checksum of the list itself
    state.json               step, counters, best score, settings, versions
    index.json               the file of each piece of each tensor
    rank<r>-<n>.safetensors  trained weights, loss parameters and optimizer state, in pieces

It is written as `checkpoint-<step>.partial`, flushed to disk, and renamed after every rank has written. A run that is
killed leaves a complete checkpoint or none. Any number of ranks and any strategy can read it. Nothing is pickled, so a
checkpoint from an untrusted source cannot run code.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from vembed.config.schema import TrainConfig
from vembed.errors import RunError, UserError
from vembed.losses.batch import EmbeddingLoss
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.precision import saved_dtype
from vembed.parallel import collectives
from vembed.parallel.launch_check import require_equal
from vembed.parallel.parameters import full_state_dict
from vembed.parallel.placement import CHECKPOINT
from vembed.parallel.session import Session
from vembed.saving.durability import way_out
from vembed.saving.files import save_model
from vembed.training.checkpoint import folder as integrity
from vembed.training.checkpoint import schema as checkpoint_schema
from vembed.training.checkpoint.folder import (
    ABANDONED,
    DAMAGED,
    MANIFEST,
    PARTIAL,
    STATE,
    checkpoint_name,
    list_checkpoints,
)
from vembed.training.checkpoint.resume import (
    JUDGES,
    Difference,
    NothingLeft,
    candidates,
    compare_resume,
    finished_run,
    forget_finished,
    keep_decisions,
    keep_global_batch,
    nothing_left,
    refuse,
    refuse_own_model,
    trim_metrics,
)
from vembed.training.checkpoint.storage import CheckpointReader, CheckpointWriter
from vembed.training.checkpoint.tensors import (
    optimizer_kind,
    quieten_torch,
    restore,
    tensors_of,
)
from vembed.training.hooks.evaluations import Patience

log = logging.getLogger("vembed")


class Checkpointer:
    """The checkpoints of one run. A context manager: its exit waits for the last save."""

    def __init__(self, config: TrainConfig, session: Session) -> None:
        self.config = config
        self.session = session
        self.output = Path(config.run.output_dir)
        self.earlier = EarlierCheckpoints(self.output)
        self.identity: dict[str, Any] = {}
        self.save_seconds = 0.0
        """Duration of the longest save, for callers that must reserve time for one."""
        self._alone = session.world_size == 1
        # An asynchronous save communicates from its own thread, so it needs a process group of its own.
        timeout = timedelta(minutes=session.placement.run.timeout_minutes.value)
        self._group = (
            collectives.new_cpu_group(timeout) if config.run.async_save else None
        )
        self._pending: Future[Any] | None = None
        self._saved_step = -1
        self._damaged: frozenset[Path] = frozenset()
        quieten_torch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the checkpoint that is being written, also when the run has failed."""
        try:
            self.wait()
        except (RunError, RuntimeError) as problem:
            if error is None:
                raise
            log.error("%s", problem)

    # ---- before training ---------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """Return the checkpoint to resume from, or None for a new run.

        Raise UserError if output_dir is not writable or holds another run. Skip damaged checkpoints. Nothing is
        changed before `begin`.
        """
        self._probe()
        answer: dict[str, Any] = {}
        if self.session.is_main:
            try:
                refuse_own_model(self.config)
                answer = {"paths": [str(path) for path in candidates(self.config)]}
            except UserError as error:
                answer = {"error": str(error)}
        answer = collectives.broadcast_json(answer)
        if "error" in answer:
            raise UserError(answer["error"])
        damaged: dict[Path, list[str]] = {}
        chosen = None
        # The list of rank 0: `verify` is collective, so all ranks go through the same paths.
        for path in map(Path, answer["paths"]):
            problems = self.verify(path)
            if not problems:
                chosen = path
                break
            damaged[path] = problems
            log.warning("skipped %s: %s", path, "; ".join(problems))
        if chosen is None and damaged and self.config.run.resume != "auto":
            wanted = (
                "true" if self.config.run.resume is True else self.config.run.resume
            )
            raise UserError(
                f"resume: {wanted}, but none of the {len(damaged)} checkpoint(s) is intact ("
                + "; ".join(
                    f"{path.name}: {problems[0]}" for path, problems in damaged.items()
                )
                + "); restore one, or start anew with resume: auto or in another output_dir"
            )
        self._damaged = frozenset(damaged)
        # A path to resume from may be a folder of each machine's own.
        seal = (
            None if chosen is None else integrity.sha256_of(chosen / integrity.MANIFEST)
        )
        require_equal(
            "the checkpoint to resume from", seal, "give every machine the same one"
        )
        if chosen is not None:
            self._saved_step = int(read_state(chosen)["loop"]["step"])
            log.info("resuming from %s (step %d)", chosen, self._saved_step)
        return chosen

    def continued(self, directory: Path | None) -> TrainConfig:
        """Return the config with what the checkpoint has decided: the global batch, where only the number of processes
        changed it, and options that are left to `auto`."""
        if directory is not None:
            saved = read_state(directory)
            self.config = keep_global_batch(self.config, saved, self.session.world_size)
            self.config = keep_decisions(self.config, saved["config"])
            precision = self.session.placement.precision
            if precision.source == CHECKPOINT:
                log.info("mixed precision: %s", precision)
        return self.config

    def require_steps_left(self, directory: Path | None, total_steps: int) -> None:
        """Raise NothingLeft if output_dir holds a finished run to which no step would be added. Collective."""
        answer: dict[str, Any] = {}
        if self.session.is_main:
            chosen = None if directory is None else (self._saved_step, directory)
            try:
                answer = {
                    "is_finished": nothing_left(self.config, chosen, total_steps)
                    is not None
                }
            except UserError as error:
                answer = {"error": str(error)}
        answer = collectives.broadcast_json(answer)
        if "error" in answer:
            raise UserError(answer["error"])
        if answer["is_finished"]:
            finished = finished_run(self.output)
            assert finished is not None
            raise NothingLeft(finished, total_steps)

    def begin(self, directory: Path | None) -> None:
        """Make room for the run: remove what a killed process left incomplete, set aside later checkpoints, with
        `overwrite` remove the earlier run, and cut metrics.jsonl to end where this run begins. Collective.

        Called when all checks have passed and the model is loaded: it is the first change of the folder.
        """
        if self.session.is_main:
            for name in integrity.remove_leftovers(self.output):
                log.info("removed %s (incomplete, left by an earlier process)", name)
            if self.config.run.overwrite and directory is None:
                self._remove_earlier_run()
            self._set_aside(directory, self._damaged)
            if directory is None:
                trim_metrics(self.output, -1)
            else:
                loop = read_state(directory)["loop"]
                trim_metrics(
                    self.output,
                    loop["step"],
                    is_scored=loop.get("scored_step") == loop["step"],
                )
        collectives.barrier()

    def check(self, directory: Path | None, identity: Mapping[str, Any]) -> None:
        """Raise UserError if a checkpoint was trained with other settings. Called before the model is loaded.

        `identity` holds what must match besides options: {"data": fingerprint, "global_batch_size": n}.
        """
        self.identity = dict(identity)
        if self.config.objective.negatives_from == "own_rank":
            self.identity["world_size"] = self.session.world_size
        if directory is None:
            return
        differences = self._differences(directory)
        if self.config.run.resume_anyway:
            forbidden = [str(one) for one in differences if not one.is_allowed]
            if forbidden:
                log.warning(
                    "resume_anyway: going on although the settings differ: %s",
                    "; ".join(forbidden),
                )
        else:
            refuse(differences, str(directory))
        # What is auto now is decided again, later.
        shown = [
            one
            for one in differences
            if one.name not in ("resume", "output_dir") and one.now != "auto"
        ]
        changed = [str(one) for one in shown if one.is_allowed]
        if changed:
            log.info("settings changed since the checkpoint: %s", "; ".join(changed))

    def load(
        self,
        directory: Path,
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Restore model, loss and optimizer from a checkpoint; return the `state` that was passed to `save`.

        `tensors` (see `save`) are filled in place, those that the checkpoint holds.
        """
        saved = read_state(directory)
        self._read(directory, saved, model, loss, optimizer, tensors or {})
        state: dict[str, Any] = saved["loop"]
        changed = {one.name for one in self._differences(directory)} & JUDGES
        if changed:
            log.info(
                "the best score is reset (eval_metric or the evaluation data changed)"
            )
            state |= {"best": None, "best_step": None, "best_scores": {}}
            state["hooks"].pop(Patience.name, None)  # it counts since that score
        if "val_data_path" in changed:
            # Scores on other data do not belong in this run's report and do not count as an evaluation of this step.
            state |= {
                "before": {},
                "scores": {},
                "scored_step": None,
                "held_scores": {},
            }
        return (
            state | self.earlier.look_for(directory, state) if self._chooses else state
        )

    def load_weights(
        self,
        directory: Path,
        model: nn.Module,
        loss: nn.Module,
        tensors: Mapping[str, Any] | None = None,
    ) -> bool:
        """Restore only the weights of model and loss, and `tensors` (of the best checkpoint, at the end of a run).

        Return False, with a warning and unchanged weights, if the checkpoint is missing or damaged.
        """
        self.wait()
        problems = self.verify(directory)
        if problems:
            log.warning(
                "cannot load the weights of %s: %s", directory, "; ".join(problems)
            )
            return False
        self._read(directory, read_state(directory), model, loss, None, tensors or {})
        return True

    def path_of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self.output / checkpoint_name(step)

    def has_saved(self, step: int) -> bool:
        """Return whether the newest successful save was of that step. With `async_save`, call `wait` first."""
        return step == self._saved_step

    def verify(self, directory: Path) -> list[str]:
        """Return the problems of a checkpoint. Each rank reads its part of the files. Collective."""
        world = self.session.world_size
        found = checkpoint_schema.verify(
            directory, part=self.session.rank, num_parts=world
        )
        return list(
            dict.fromkeys(
                problem
                for part in collectives.gather_objects_as_json(found)
                for problem in part
            )
        )

    @property
    def _chooses(self) -> bool:
        """True if `final/` may get another checkpoint than the last one."""
        return bool(
            self.config.run.load_best_model_at_end or self.config.evaluation.guards
        )

    # ---- during training ---------------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Callable[[Path], None] | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the checkpoint of `state["step"]`. A second call for the same step does nothing.

        The checkpoints of `state["best_step"]` and of
        `state["held_step"]` are never pruned. All ranks call `extra`, which writes more files into the
        folder (the whole model, with fsdp_state_dict_type: FULL_STATE_DICT). `tensors`: those of hooks, by name. With
        `async_save`, return once the tensors are copied to host memory.
        """
        self.wait()
        step = int(state["step"])
        if step == self._saved_step:
            return
        began = time.monotonic()
        final = self.path_of(step)
        partial = final.with_name(final.name + PARTIAL)
        problem = self._attempt(
            lambda: _make_empty(partial) if self.session.is_main else None
        )
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
            committed=lambda: self._committed(
                final, [state.get("best_step"), state.get("held_step")], began
            ),
        )
        weights = tensors_of(model, loss, optimizer, tensors or {})
        planner = DefaultSavePlanner(flatten_state_dict=False)
        if self.config.run.async_save:
            pending = async_save(
                weights,
                storage_writer=writer,
                planner=planner,
                process_group=self._group,
                no_dist=self._alone,
            )
            assert isinstance(pending, Future)
            self._pending, self._saving = pending, (step, final)
        else:
            self._guard(
                lambda: save(
                    weights, storage_writer=writer, planner=planner, no_dist=self._alone
                ),
                step,
                final,
            )
        self.save_seconds = max(self.save_seconds, time.monotonic() - began)

    def wait(self) -> None:
        """Wait for an asynchronous save. Each save calls this first; the run calls it before it ends."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._guard(pending.result, *self._saving)

    # ---- parts -------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Raise UserError unless every rank can write to output_dir and sees there the files of rank 0."""
        name = f".probe-{self.session.rank}"
        problem = integrity.probe(self.output, name)
        problems = collectives.gather_objects_as_json(problem)
        # Skipped where writing failed already: even a lookup may be forbidden there.
        shared = collectives.gather_objects_as_json(
            problem is not None or (self.output / ".probe-0").exists()
        )
        if problem is None:
            (self.output / name).unlink()
        failed = [
            f"process {rank}: {one}"
            for rank, one in enumerate(problems)
            if one is not None
        ]
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

    def _remove_earlier_run(self) -> None:
        """Remove checkpoints, summary and report; `final/` stays until the new model replaces it."""
        found = list_checkpoints(self.output)
        for _, path in found:
            integrity.remove(path)
        if found or finished_run(self.output) is not None:
            log.info(
                "overwrite: the earlier run in %s is replaced (%d checkpoints removed)",
                self.output,
                len(found),
            )
        forget_finished(self.output)

    def _set_aside(self, chosen: Path | None, damaged: Collection[Path]) -> None:
        """Rename checkpoints later than the chosen one, so that they are not taken for the resumed run's."""
        after = -1 if chosen is None else _step_in(chosen, self.output)
        for step, path in list_checkpoints(self.output):
            if step > after:
                ending = DAMAGED if path in damaged else ABANDONED
                log.info(
                    "renamed %s to %s", path, integrity.set_aside(path, ending).name
                )

    def _read(
        self,
        directory: Path,
        saved: Mapping[str, Any],
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
    ) -> None:
        reader = CheckpointReader(directory)
        entries = reader.read_metadata().state_dict_metadata
        shapes = {
            name: list(entry.size)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

        # Another strategy may hold the same weights in another type.
        same = saved["strategy"] == self.session.strategy
        dtypes = {
            name: entry.properties.dtype
            for name, entry in entries.items()
            if same and isinstance(entry, TensorStorageMetadata)
        }

        def fill(tensors: dict[str, Any]) -> None:
            load(
                tensors,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=self._alone,
            )

        restore(
            model,
            loss,
            optimizer,
            shapes,
            fill,
            dtypes=dtypes,
            saved_optimizer=saved["optimizer"],
            extra=extra,
        )

    def _differences(self, directory: Path) -> list[Difference]:
        saved = read_state(directory)
        found = compare_resume(
            saved["config"], self.config, saved["identity"], self.identity
        )
        if saved.get("precision") != self.session.mixed_precision:
            return found
        # `auto` and what it came to are the same.
        return [
            replace(one, is_allowed=True) if one.name == "mixed_precision" else one
            for one in found
        ]

    def _description(
        self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        return {
            "loop": dict(state),
            "config": self.config.to_dict(),
            "identity": self.identity,
            "optimizer": optimizer_kind(optimizer),
            "strategy": self.session.strategy,
            "precision": self.session.mixed_precision,
            "world_size": self.session.world_size,
            "versions": {
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def _attempt(self, action: Callable[[], None]) -> str | None:
        """Run an action that may meet a full disk on any rank; return the errors known to all ranks."""
        problem = None
        try:
            action()
        except (OSError, SafetensorError) as error:
            problem = f"rank {self.session.rank}: {_said(error)}"
        return next(
            (
                one
                for one in collectives.gather_objects_as_json(problem)
                if one is not None
            ),
            None,
        )

    def _guard(self, action: Callable[[], Any], step: int, final: Path) -> None:
        """Turn disk errors, which torch reports to every rank, into the `on_save_error` policy. Other errors
        propagate."""
        try:
            action()
            self._saved_step = step
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            if not all(isinstance(cause, OSError) for cause in causes.values()):
                raise RuntimeError(f"saving {final.name} failed") from error
            self._failed(
                final,
                "; ".join(
                    f"rank {rank}: {_said(cause)}" for rank, cause in causes.items()
                ),
            )

    def _failed(self, final: Path, problem: str) -> None:
        if self.session.is_main:
            shutil.rmtree(final.with_name(final.name + PARTIAL), ignore_errors=True)
        kept = [path.name for _, path in list_checkpoints(self.output)]
        what = f"{final.name} could not be written ({problem}); the newest checkpoint is {kept[-1] if kept else 'none'}"
        if self.config.run.on_save_error == "stop":
            way = way_out(problem, self.output)
            raise RunError(
                f"{what}. {way[0].upper()}{way[1:]} and resume, or set on_save_error: continue"
            )
        log.error("%s; going on (on_save_error: continue)", what)

    def _committed(
        self, final: Path, kept_steps: Sequence[int | None], began: float
    ) -> None:
        """Log the finished checkpoint and prune the oldest ones. Runs on rank 0."""
        size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
        log.info(
            "saved %s (%.2f GB, %.1f s)",
            final.name,
            size / 1e9,
            time.monotonic() - began,
        )
        try:
            keep = {step for step in kept_steps if step is not None}
            if self._chooses:
                self.earlier.take_along(keep)
            for path in integrity.prune(
                self.output, self.config.run.save_total_limit, keep
            ):
                log.info(
                    "removed %s (save_total_limit: %d)",
                    path.name,
                    self.config.run.save_total_limit,
                )
        except OSError as error:
            log.warning("an old checkpoint could not be removed: %s", _said(error))


def read_state(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's state.json: "loop" (the `state` given to `save`), "config", "identity", versions."""
    state: dict[str, Any] = json.loads((directory / STATE).read_bytes())
    return state


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _step_in(chosen: Path, output: Path) -> int:
    """Return the step of a checkpoint of this folder, or -1 for one of another folder: all steps here are later."""
    steps = {path.resolve(): step for step, path in list_checkpoints(output)}
    return steps.get(chosen.resolve(), -1)


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        )
    return str(error)


CHOICES: dict[str, dict[str, Any]] = {
    "best_step": {"best": None, "best_step": None, "best_scores": {}},
    "held_step": {"held_step": None, "held_scores": {}},
}
"""Keys of the loop's state that name a checkpoint for `final/`, and what the state is without it."""


class EarlierCheckpoints:
    """Places of the checkpoints that the state of a resumed run names."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._elsewhere: dict[int, Path] = {}

    def look_for(self, chosen: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes of a state that names checkpoints which are gone. `chosen`: the one that is resumed from,
        which may be in another folder, beside those of its run. Collective."""
        # The one that is resumed from too: its own scores may be the best.
        steps = {state["step"], *(state[key] for key in CHOICES)} - {None}
        found = {
            step: self._look(
                step, chosen if step == state["step"] else None, chosen.parent
            )
            for step in steps
        }
        gone = collectives.broadcast_json(
            [step for step in steps if found[step] is None]
        )
        self._elsewhere = {
            step: place
            for step, place in found.items()
            if place is not None and step not in gone
        }
        changes: dict[str, Any] = {}
        for key, without in CHOICES.items():
            if state[key] in gone:
                log.warning(
                    "%s is not there any more: final/ gets a later one",
                    checkpoint_name(state[key]),
                )
                changes |= without
        return changes

    def place(self, step: int) -> Path:
        """Return the folder of a step's checkpoint: of this run, or of the one that was resumed."""
        own = self.output / checkpoint_name(step)
        return own if own.is_dir() else self._elsewhere.get(step, own)

    def take_along(self, steps: Iterable[int]) -> None:
        """Copy those of these checkpoints that are in another folder, which may be removed before this run ends. Called
        by rank 0 after a checkpoint was written: none that is older may be the newest here."""
        for step in steps:
            own = self.output / checkpoint_name(step)
            place = self.place(step)
            if place == own or not place.is_dir():
                continue
            partial = own.with_name(own.name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            # Files of a checkpoint are never changed, so that both folders may share them.
            shutil.copytree(place, partial, copy_function=_linked)
            partial.rename(own)
            log.info("copied %s (final/ may get it)", place)

    def _look(self, step: int, chosen: Path | None, folder: Path) -> Path | None:
        places = [
            self.output / checkpoint_name(step),
            chosen,
            folder / checkpoint_name(step),
        ]
        return next(
            (one for one in places if one is not None and (one / MANIFEST).is_file()),
            None,
        )


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
    return target


MODEL_FOLDER = "model"


def whole_model_writer(
    config: TrainConfig,
    session: Session,
    embedder: EmbeddingModel,
    model: nn.Module,
    loss: EmbeddingLoss,
) -> Callable[[Path], None] | None:
    """Return the function that writes the model in the layout of final/ into a checkpoint, or None if the config does
    not ask.

    The pieces are written too: the run resumes from those, on any number of processes. The function is collective.
    """
    kind = None if session.fsdp is None else session.fsdp.state_dict_type
    if kind == "LOCAL_STATE_DICT":
        log.info(
            "fsdp_state_dict_type: LOCAL_STATE_DICT: each process writes its own pieces, as with SHARDED_STATE_DICT; "
            "here any number of processes can read them"
        )
    if kind != "FULL_STATE_DICT":
        return None
    log.info(
        "fsdp_state_dict_type: FULL_STATE_DICT: each checkpoint holds the whole model too, in %s/",
        MODEL_FOLDER,
    )

    def write(checkpoint: Path) -> None:
        # Collective, so it comes before the branch on rank 0.
        weights = full_state_dict(model)
        if session.is_main:
            learned = loss.scale_and_bias()
            if learned is not None:
                embedder.write_scale_and_bias(*learned, weights)
            merge = config.adapters.save_merged
            save_model(
                checkpoint / MODEL_FOLDER,
                embedder,
                weights,
                dtype=saved_dtype(config.run.save_dtype, embedder.description),
                merge_adapters=merge,
            )

    return write
