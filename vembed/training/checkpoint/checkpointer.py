"""Checkpointer: writes, verifies, prunes and reads the checkpoints of a run. All ranks must call each method.

A checkpoint is a folder `checkpoint-<step>`:

    manifest.json            every file with size and SHA-256, and a checksum of the list itself
    state.json               step, counters, best score, settings, versions
    shard-<r>-*.safetensors  trained weights, loss parameters and optimizer state, in pieces

It is written as `checkpoint-<step>.partial`, flushed to disk, and renamed after every rank has written. A run that is
killed leaves a complete checkpoint or none. Any number of ranks and any strategy can read it. Nothing is pickled, so a
checkpoint from an untrusted source cannot run code.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vembed.config.schema import ModelSection, RunSection, option_fields
from vembed.errors import RunError, UserError
from vembed.evaluation.report.record import SUMMARY_FILE, collect_versions
from vembed.files import read_json_object, sha256_of, write_durably
from vembed.models.families.backbones import unwrapped_name
from vembed.parallel import collectives
from vembed.parallel.launch_check import require_equal
from vembed.parallel.parameters import local_tensor
from vembed.parallel.session import Session
from vembed.training.checkpoint import folders
from vembed.training.checkpoint.folders import (
    ABANDONED,
    JUDGES,
    LOCK,
    MANIFEST,
    MAY_CHANGE,
    PARTIAL,
    STATE,
    FinishedRun,
    NothingToTrain,
    candidates,
    finished_run,
    list_checkpoints,
    refuse_own_model,
    trim_metrics,
)

log = logging.getLogger("vembed")

NO_BEST: dict[str, Any] = {"best": None, "best_step": None, "best_scores": {}}
"""State of the loop without a best step."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    path: Path
    state: dict[str, Any]
    """Content of state.json: "loop" (the `state` given to `save`), "config", "identity", versions."""

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return int(self.state["loop"]["step"])


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """The checkpoints of one run. A context manager: its exit waits for the last save."""

    def __init__(self, run: RunSection, session: Session) -> None:
        self.run = run
        self.session = session
        self.output = Path(run.output_dir)
        self.options: Mapping[str, Any] = {}
        """Options of the run, with the values that it has decided."""
        self.identity: dict[str, Any] = {}
        """What must match besides options: {"data": fingerprint, "global_batch_size": n}."""
        self.save_seconds = 0.0
        """Duration of the longest save, for callers that must reserve time for one."""
        self._is_alone = session.world_size == 1
        # An asynchronous save communicates from its own thread, so it needs a process group of its own.
        timeout = timedelta(minutes=session.timeout_minutes)
        self._group = collectives.new_cpu_group(timeout) if run.async_save else None
        self._pending: tuple[int, Future[Any]] | None = None
        """Step of an asynchronous save, and its result."""
        self._saved_step = -1

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        """Finish the checkpoint that is being written, also when the run has failed."""
        try:
            self.wait()
        except (RunError, RuntimeError) as problem:
            if error is None:
                raise
            log.error(str(problem))

    # ---- before training -----------------------------------------------------

    def find(self, model: ModelSection) -> ResumePoint | None:
        """Return the checkpoint to resume from, or None for a new run. Collective.

        Raise UserError if output_dir is not writable, or holds another run or the model to start from. Skip damaged
        checkpoints. Nothing is changed before `begin`.
        """
        if not self._is_alone:
            # Every rank may write there, and sees the lock of rank 0.
            problem = None
            if not os.access(self.output, os.W_OK | os.X_OK):
                problem = "cannot be written to"
            elif not (self.output / LOCK).is_file():
                problem = "is not the folder of process 0"
            for rank, reason in enumerate(collectives.gather_objects(problem)):
                if reason is not None:
                    raise UserError(
                        f"output_dir: {self.output} {reason} on process {rank}: give one on a file system that all machines "
                        "share, and that every process may write to"
                    )
        self._on_main(lambda: refuse_own_model(self.run, model))
        point = None
        # The list of rank 0: `verify` is collective, so all ranks go through the same paths.
        paths = self._on_main(lambda: candidates(self.run))
        for path in paths:
            problems = self.verify(path)
            if not problems:
                point = ResumePoint(path, read_state(path))
                break
            log.warning(f"skipped {path}: {'; '.join(problems)}")
        resume = self.run.resume
        if point is None and paths and resume != "auto":
            raise UserError(
                f"none of the {len(paths)} checkpoint(s) to resume from is intact ({paths[0].name}: {problems[0]}); "
                "restore one, or start anew with resume: auto or in another output_dir"
            )
        # A path to resume from may be a folder of each machine's own.
        seal = None if point is None else sha256_of(point.path / MANIFEST)
        advice = "give every machine the same one"
        require_equal("the checkpoint to resume from", seal, advice)
        if point is not None:
            self._saved_step = point.step
            log.info(f"resuming from {point.path} (step {point.step})")
        return point

    def check(
        self,
        point: ResumePoint | None,
        settings: Mapping[str, Any],
        identity: Mapping[str, Any],
    ) -> None:
        """Raise UserError if the checkpoint was trained with other settings. Called before the model is loaded.

        `settings`: the options, with the values that the checkpoint's run has decided. `identity`: what must match
        besides them.
        """
        self.options = settings
        self.identity = dict(identity)
        if point is None:
            return
        forbidden = []
        changed = []
        for name, before, value, is_allowed in self._differences(point):
            what = "content of the data" if name == "data" else name
            difference = f"{what} {before} -> {value}"
            is_named = name not in ("resume", "output_dir")
            if not is_allowed:
                forbidden.append(difference)
            elif is_named and value != "auto":  # that is decided again, later
                changed.append(difference)
        listed = "; ".join(forbidden)
        if forbidden and self.run.resume == "force":
            log.warning(
                f"resume: force: going on although the settings differ: {listed}"
            )
        elif forbidden:
            raise UserError(
                f"{point.path} was trained with other settings: {listed}; put them back, start anew in another "
                "output_dir, or set resume: force"
            )
        if changed:
            log.info(f"settings changed since the checkpoint: {'; '.join(changed)}")

    def require_steps_left(self, point: ResumePoint | None, total_steps: int) -> None:
        """Raise NothingToTrain if output_dir holds a finished run to which no step would be added. Collective.

        Raise UserError if steps would be added to it without a checkpoint.
        """

        def unchanged_run() -> FinishedRun | None:
            finished = finished_run(self.output)
            if finished is None or finished.step >= total_steps:
                return finished
            if point is None:
                raise UserError(
                    f"output_dir: {self.output} holds {finished} without a checkpoint, so {total_steps:,d} steps "
                    f"cannot go on from it: train further from its model in another folder "
                    f"(model_name={finished.model_dir} output_dir=...), or start anew (resume: false, "
                    "overwrite: true); save_steps keeps checkpoints"
                )
            # A checkpoint of exactly the last step means that the run was stopped before it wrote its model.
            return finished if point.step > total_steps else None

        if self.run.resume is False:
            return
        finished = self._on_main(unchanged_run)
        if finished is not None:
            raise NothingToTrain(finished, total_steps)

    def begin(self, point: ResumePoint | None) -> None:
        """Make room for the run: the first change of the folder. Collective.

        Called when all checks have passed and the model is loaded. Removes what a killed process left incomplete, sets
        aside later checkpoints, removes the earlier run with `overwrite`, and cuts metrics.jsonl to end where this run
        begins.
        """
        if not self.session.is_main:
            collectives.barrier()
            return
        output = self.output
        for path in sorted(output.glob(f"checkpoint-*{PARTIAL}")):
            if path.is_dir():
                shutil.rmtree(path)
                log.info(f"removed {path.name} (incomplete)")
        checkpoints = list_checkpoints(output)
        if self.run.overwrite and point is None:
            # `final/` stays until the new model replaces it.
            for _, path in checkpoints:
                folders.remove(path)
            log.info(f"overwrite: removed {len(checkpoints)} checkpoints of {output}")
            # Without summary and report the folder no longer counts as finished.
            for name in (SUMMARY_FILE, "report.html", "report.md"):
                (output / name).unlink(missing_ok=True)
            checkpoints = []
        # Checkpoints later than the chosen one must not be taken for the resumed run's. All steps here are later than a
        # checkpoint of another folder.
        last = -1
        first_step = -1
        is_scored = True
        num_bytes = 0
        if point is not None:
            first_step = point.step
            loop = point.state["loop"]
            is_scored = loop["scored_step"] == point.step
            if self._has(point):
                last = point.step
                num_bytes = loop["hooks"].get("metrics", {}).get("bytes", 0)
        for step, path in checkpoints:
            if step > last:
                renamed = path.with_name(path.name + ABANDONED)
                shutil.rmtree(renamed, ignore_errors=True)
                path.rename(renamed)
                log.info(f"renamed {path} to {renamed.name}")
        trim_metrics(output, first_step, is_scored=is_scored, num_bytes=num_bytes)
        collectives.barrier()

    def load(self, point: ResumePoint, trained: TrainedState) -> dict[str, Any]:
        """Restore what is trained from a checkpoint; return the `state` that was passed to `save`."""
        restore(trained, point.path, no_dist=self._is_alone)
        state: dict[str, Any] = dict(point.state["loop"])
        changed = {name for name, *_ in self._differences(point)} & JUDGES
        if changed:
            log.info(
                "the best score is reset (eval_metric or the evaluation data changed)"
            )
            state |= NO_BEST
            # Patience counts since that score.
            state["hooks"] = dict(state["hooks"])
            state["hooks"].pop("patience", None)
        if "val_data_path" in changed:
            # Scores on other data do not belong in this run's report and do not count as an evaluation of this step.
            state.update(before={}, scores={}, guarded_scores={}, scored_step=None)
        if not self._has(point):
            # The checkpoints that it names are in the other folder.
            log.info(
                f"the best score is reset (its checkpoint is not in {self.output})"
            )
            state.update(NO_BEST, guarded_step=None, guarded_scores={})
        return state

    def load_weights(self, directory: Path, trained: TrainedState) -> bool:
        """Restore all but the optimizer's state (of the best checkpoint, at the end of a run).

        Return False, with a warning and unchanged weights, if the checkpoint is missing or damaged.
        """
        self.wait()
        problems = self.verify(directory)
        if problems:
            log.warning(
                f"cannot load the weights of {directory}: {'; '.join(problems)}"
            )
            return False
        restore(replace(trained, optimizer=None), directory, no_dist=self._is_alone)
        return True

    def verify(self, directory: Path) -> list[str]:
        """Return the problems of a checkpoint. Each rank reads its part of the files. Collective."""
        problems = folders.verify(
            directory, part=self.session.rank, num_parts=self.session.world_size
        )
        # All ranks must agree whether it is damaged, and each has seen other files.
        problems_of_ranks = chain.from_iterable(collectives.gather_objects(problems))
        return list(dict.fromkeys(problems_of_ranks))

    # ---- during training -----------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        trained: TrainedState,
        write_more: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the checkpoint of `state["step"]`. A second call for the same step does nothing. Collective.

        The checkpoints of `state["best_step"]` and of `state["guarded_step"]` are never pruned. All ranks call
        `write_more`, which writes more files into the folder. With `async_save`, return once the tensors are copied to
        host memory.
        """
        self.wait()
        step = int(state["step"])
        if step == self._saved_step:
            return
        start = time.monotonic()
        final = self.path_of(step)
        unfinished = final.with_name(final.name + PARTIAL)
        # Order: rank 0 makes the folder, all agree that it is there, then all write into it.
        with self._agreed(step):
            if self.session.is_main:
                if unfinished.exists():
                    shutil.rmtree(unfinished)
                unfinished.mkdir(parents=True)
        if write_more is not None:
            with self._agreed(step):
                write_more(unfinished)
        kept_steps = {state["best_step"], state["guarded_step"]} - {None}
        content = {
            "loop": dict(state),
            "config": dict(self.options),
            "identity": self.identity,
            "strategy": self.session.strategy,
            "precision": self.session.mixed_precision,
            "world_size": self.session.world_size,
            "versions": collect_versions(),
        }

        def commit(checksums: Mapping[str, str]) -> None:
            """Write the state, complete the checkpoint, and prune the oldest ones. Runs on rank 0."""
            write_durably(unfinished / STATE, json.dumps(content, indent=1).encode())
            size = folders.commit(unfinished, final, checksums)
            seconds = time.monotonic() - start
            log.info(f"saved {final.name} ({size / 1e9:.2f} GB, {seconds:.1f} s)")
            try:
                folders.prune(self.output, self.run.save_total_limit, kept_steps)
            except OSError as error:
                log.warning(f"an old checkpoint could not be removed: {error}")

        arguments: dict[str, Any] = {
            "storage_writer": CheckpointWriter(unfinished, commit),
            "planner": CheckpointPlanner(flatten_state_dict=False),
            "no_dist": self._is_alone,
        }
        weights = tensors_of(trained)
        if self.run.async_save:
            pending = async_save(weights, process_group=self._group, **arguments)
            assert isinstance(pending, Future)
            self._pending = (step, pending)
        else:
            self._finish(step, partial(save, weights, **arguments))
        self.save_seconds = max(self.save_seconds, time.monotonic() - start)

    def wait(self) -> None:
        """Wait for an asynchronous save. Each save calls this first; the run calls it before it ends."""
        if self._pending is not None:
            step, pending = self._pending
            self._pending = None
            self._finish(step, pending.result)

    def path_of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint of this run, whether or not it exists."""
        return self.output / f"checkpoint-{step}"

    # ---- parts ---------------------------------------------------------------

    def _has(self, point: ResumePoint) -> bool:
        """Return whether a checkpoint is in the folder of this run."""
        return point.path.resolve().parent == self.output.resolve()

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """Return what rank 0 gets from an action. Its UserError is raised on every rank. Collective."""
        value = None
        problem = None
        if self.session.is_main:
            try:
                value = action()
            except UserError as error:
                problem = str(error)
        value, problem = collectives.broadcast_object((value, problem))
        if problem is not None:
            raise UserError(problem)
        return value

    def _differences(self, point: ResumePoint) -> list[tuple[str, Any, Any, bool]]:
        """Return what differs from a checkpoint: the option, its value there, its value now, and whether it may.

        An option that the checkpoint lacks (written by an older vembed) counts as its default.
        """
        state = point.state
        fields = option_fields()
        differences = []
        for name, option in self.options.items():
            value = option
            default = fields[name].get_default(call_default_factory=True)
            before = state["config"].get(name, default)
            if name == "mixed_precision":
                # It must stay also where the option is `auto`.
                before = state["precision"]
                value = self.session.mixed_precision
            if before != value:
                differences.append((name, before, value, name in MAY_CHANGE))
        for name in sorted(set(state["identity"]) & set(self.identity)):
            before = state["identity"][name]
            value = self.identity[name]
            if before != value:
                differences.append((name, before, value, False))
        return differences

    @contextmanager
    def _agreed(self, step: int) -> Iterator[None]:
        """Raise RunError on every rank if the disk is full on one of them inside the with-block. Collective."""
        problem = None
        try:
            yield
        except (OSError, SafetensorError) as error:
            problem = f"rank {self.session.rank}: {error}"
        for reason in collectives.gather_objects(problem):
            if reason is not None:
                self._fail(step, str(reason))

    def _finish(self, step: int, action: Callable[[], Any]) -> None:
        """Run a save. Turn disk errors, which torch reports to every rank, into a RunError."""
        try:
            action()
            self._saved_step = step
        except CheckpointException as error:
            problems = []
            for rank, (cause, _) in error.failures.items():
                if not isinstance(cause, OSError):
                    raise RuntimeError(f"saving step {step} failed") from error
                problems.append(f"rank {rank}: {cause}")
            self._fail(step, "; ".join(problems))

    def _fail(self, step: int, problem: str) -> NoReturn:
        name = self.path_of(step).name
        if self.session.is_main:
            folder = self.output / f"{name}{PARTIAL}"
            shutil.rmtree(folder, ignore_errors=True)
        newest = folders.newest_checkpoint(self.output)
        raise RunError(
            f"{name} could not be written ({problem}); the newest checkpoint is {newest or 'none'}. "
            f"Make room in {self.output} if its disk is full, and resume"
        )


def read_state(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's state.json."""
    return read_json_object(directory / STATE)


# ---- tensors: weights and optimizer state by names that any strategy can read, and their storage --------------------
#
# torch's default storage pickles its metadata. Its storage for safetensors does not: each process writes its pieces of the
# tensors to files of its own, and their headers say where each piece begins in its tensor.

_OPTIMIZER = "optimizer."
_HOOKS = "hooks."
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_OWN = re.compile(r"\.rank\d+of\d+$")
MAX_NAMED = 3

FILE_BYTES = 256 * 2**20
"""Approximate size of a file of pieces. While writing, a process holds this much twice in memory."""


class CheckpointWriter(HuggingFaceStorageWriter):
    """Torch's writer of safetensors into a folder, which calls `commit` with the checksums of the files when all are
    written.

    Torch calls its methods, so a failure on one process is known to all, and an asynchronous save commits by itself.
    """

    def __init__(
        self, folder: Path, commit: Callable[[Mapping[str, str]], None]
    ) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder
        self.commit = commit

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Divide the pieces of each process among files of FILE_BYTES. Runs on the coordinator."""
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            file_numbers = {}
            num_bytes = 0
            for item in plan.items:
                file_numbers[item.index.fqn] = 1 + num_bytes // FILE_BYTES
                data = item.tensor_data
                assert data is not None
                num_bytes += data.chunk.sizes.numel() * data.properties.dtype.itemsize
            plan.storage_data["fqn_to_index_mapping"] = file_numbers
        return plans

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[Any]:
        """Write and flush this process's pieces, and return the checksums of their files by name. Torch only hands them
        on to `finish`."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        checksums: torch.futures.Future[dict[str, str]] = torch.futures.Future()
        checksums.set_result({name: sha256_of(self.folder / name) for name in names})
        return checksums

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Commit. Runs on the coordinator after all have written."""
        del metadata
        self.commit(dict(ChainMap(*results)))


class CheckpointPlanner(DefaultSavePlanner):
    """Torch's planner, with pieces that safetensors takes."""

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return a copy of a piece in host memory. Tensors that share memory or are not contiguous are refused."""
        piece: Any = super().resolve_data(write_item)
        return piece.detach().cpu().clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]


def stored_tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape, type and pieces of each tensor of a checkpoint."""
    metadata: Any = HuggingFaceStorageReader(str(checkpoint)).read_metadata()
    return dict(metadata.state_dict_metadata)


def _quieten_torch() -> None:
    """Suppress torch's warnings about FSDP1's sharded state and about saving in a single process, in all threads, and
    its records of every tensor that is saved."""
    for message in (
        "torch.distributed is disabled, unavailable or uninitialized",
        "Please use DTensor instead and we are deprecating ShardedTensor",
        "`_get_pg_default_device` will be deprecated",
        "Multiple backends are registered with this ProcessGroup",
    ):
        warnings.filterwarnings("ignore", message=message)
    # It writes two records for each tensor of a checkpoint, which nobody reads and which take longer than a small save.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)


@dataclass(frozen=True)
class TrainedState:
    """What is trained, and so belongs in a checkpoint."""

    model: nn.Module
    loss: nn.Module
    optimizer: Optimizer | None = None
    """None: its state is neither read nor written."""
    of_hooks: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of hooks by name. They are filled in place by a checkpoint that holds them."""

    @property
    def modules(self) -> nn.Module:
        """Model and loss in one module: their names begin with "model." and "loss.", as in the optimizer's state."""
        return nn.ModuleDict({"model": self.model, "loss": self.loss})


def tensors_of(trained: TrainedState) -> dict[str, Any]:
    """Return trained weights, buffers, optimizer state and tensors of hooks by name, as plain tensors or DTensors."""
    _quieten_torch()
    optimizer = trained.optimizer
    modules = trained.modules
    tensors = _weights(modules)
    tensors |= {_HOOKS + name: value for name, value in trained.of_hooks.items()}
    # A new optimizer has no state, and get_state_dict would create some by taking a step.
    if optimizer is not None and optimizer.state:
        state = get_optimizer_state_dict(modules, optimizer, options=_TRAINED)
        tensors |= _state_tensors(state["state"])
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} is not a tensor; a checkpoint holds only tensors and JSON"
            )
        tensors[name] = _movable(value)
    return tensors


def restore(
    trained: TrainedState,
    checkpoint: Path,
    *,
    no_dist: bool,
) -> None:
    """Restore model, loss and optimizer from a checkpoint, and those tensors of hooks that it holds.

    The optimizer's group options (learning rate, weight decay, betas) stay as the config has them. `no_dist`: this
    process reads alone.
    """
    _quieten_torch()
    stored = stored_tensors(checkpoint)
    optimizer = trained.optimizer
    modules = trained.modules
    # The same names as in `tensors_of`: a tensor of the checkpoint finds its place by name alone.
    weights = _weights(modules)
    tensors = dict(weights)
    for name, value in trained.of_hooks.items():
        if _HOOKS + name in stored:
            tensors[_HOOKS + name] = value
    state = {}
    groups = []
    # Collective under FSDP, like each get_ and set_ below. All ranks read the same files, so all take the same branch.
    if optimizer is not None and any(name.startswith(_OPTIMIZER) for name in stored):
        # torch allocates the state tensors by a step with zero gradients, and only if there are none yet.
        optimizer.zero_grad(set_to_none=True)
        allocated: Any = get_optimizer_state_dict(modules, optimizer, options=_TRAINED)
        groups = allocated["param_groups"]
        # State that the step above has made, and the checkpoint lacks, is not loaded.
        for name, values in allocated["state"].items():
            if any(key.startswith(f"{_OPTIMIZER}{name}.") for key in stored):
                state[name] = values
        tensors |= _state_tensors(state)
    if optimizer is None:
        stored = {
            name: entry
            for name, entry in stored.items()
            if not name.startswith(_OPTIMIZER)
        }
    _check(tensors, stored)
    load(
        {name: _movable(value) for name, value in tensors.items()},
        storage_reader=HuggingFaceStorageReader(str(checkpoint)),
        planner=DefaultLoadPlanner(flatten_state_dict=False),
        no_dist=no_dist,
    )
    # FSDP1 returned copies of its flat parameters' pieces, so they must be loaded back.
    set_model_state_dict(modules, weights, options=_TRAINED)
    if optimizer is None:
        return
    if not state:
        optimizer.state.clear()
        return
    # Numbers were loaded as tensors.
    for name, holder, key in _leaves(state):
        if not isinstance(holder[key], Tensor):
            holder[key] = tensors[name].item()
    # Drops state that the checkpoint lacks (created by the step above).
    set_optimizer_state_dict(
        modules,
        optimizer,
        {"state": state, "param_groups": groups},
        options=_TRAINED,
    )


def _weights(modules: nn.Module) -> dict[str, Any]:
    """Return trained parameters and buffers. Extra state entries of quantised frozen layers are left out."""
    # Names of extra state entries begin with that of their parameter and a dot.
    frozen = []
    for name, parameter in modules.named_parameters():
        if not parameter.requires_grad:
            frozen.append(unwrapped_name(name) + ".")
    prefixes = tuple(frozen)
    return {
        name: value
        for name, value in get_model_state_dict(modules, options=_TRAINED).items()
        if not name.startswith(prefixes)
    }


def _state_tensors(state: Any) -> dict[str, Any]:
    """Return the tensors of an optimizer's state by name. They share its memory, except for those of numbers.

    A quantised shard (torchao) is stored as its parts: its blocks do not fit shards of another size, so their names
    contain the rank and the world size. Collective where the state is sharded.
    """
    values = {}
    for name, holder, key in _leaves(state):
        value = holder[key]
        values[name] = value if isinstance(value, Tensor) else torch.tensor(value)
    quantised = set()
    for name, value in values.items():
        if is_traceable_wrapper_subclass(local_tensor(value)):
            quantised.add(name)
    # torchao quantises only shards of whole blocks, so one rank may have to and another not. The other shards of the
    # same tensor are stored by rank too.
    if any(isinstance(value, DTensor) for value in values.values()):
        quantised.update(*collectives.gather_objects(quantised))
    shard = f"rank{collectives.rank()}of{collectives.world_size()}"
    tensors = {}
    for name, value in values.items():
        local: Any = local_tensor(value)
        if name not in quantised:
            tensors[name] = value
        elif is_traceable_wrapper_subclass(local):
            for part in local.__tensor_flatten__()[0]:
                tensors[f"{name}.{part}.{shard}"] = getattr(local, part)
        elif local.numel() > 0:
            tensors[f"{name}.{shard}"] = local
    return tensors


def _leaves(
    state: Any, prefix: str = _OPTIMIZER
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each tensor and number of nested state: its name, the dictionary that holds it, and its key there."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, state, key


def _movable(value: Any) -> Any:
    """Return FSDP1's ShardedTensor as an equivalent DTensor on the same memory. Asynchronous saving supports only
    DTensors."""
    if not isinstance(value, ShardedTensor):
        return value
    shape = value.size()
    shards = value.local_shards()
    local = torch.empty(0, *shape[1:], dtype=value.dtype)
    if shards:
        local = shards[0].tensor
    # Without communication: the mesh is made of a group that exists, and `run_check` would compare the ranks.
    mesh = DeviceMesh.from_group(value._process_group, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def _check(
    tensors: Mapping[str, Any], stored: Mapping[str, TensorStorageMetadata]
) -> None:
    """Raise UserError unless the checkpoint holds exactly the tensors that this run trains."""
    missing = sorted(tensors.keys() - stored.keys())
    if missing and any(_OWN.search(name) for name in stored):
        raise UserError(
            f"the checkpoint's optimizer state cannot be divided among {collectives.world_size()} process(es), since its "
            "8-bit blocks follow the shards: resume on as many processes as wrote it (only optim: adamw moves freely), "
            "or start anew in another output_dir"
        )
    differences = [f"only this run trains {name}" for name in missing]
    for name in sorted(stored):
        size = stored[name].size
        if name not in tensors:
            if not name.startswith(_HOOKS) and not _OWN.search(name):
                differences.append(f"only the checkpoint has {name}")
        elif tensors[name].size() != size:
            differences.append(
                f"{name} has the shape {list(size)} there and {list(tensors[name].size())} in this run"
            )
    if differences:
        raise UserError(
            f"the checkpoint is of another model or optimizer: "
            f"{'; '.join(differences[:MAX_NAMED])}; resume with the model, LoRA, freeze, optim, strategy, torch_dtype and "
            "mixed_precision that it was trained with, or start anew in another output_dir"
        )
