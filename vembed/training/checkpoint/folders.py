"""The folder of a run: its lock, what it may resume from, the settings and files that must stay, the cut of its metrics, and
the files of a checkpoint with their checksums.

Imports no torch, and reads no weights: a dry run looks at the folder too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache

from vembed.config.schema import FILE_OPTIONS, ModelSection, RunSection, TrainConfig
from vembed.config.terms import run_temperature
from vembed.data.examples import Example, Item, spread
from vembed.errors import UserError
from vembed.evaluation.report.record import SUMMARY_FILE, read_run, read_summary
from vembed.files import (
    NO_LOCKS,
    checksums_of,
    damage_of,
    existing,
    read_json_object,
    read_state_bytes,
    replaced_file,
    sync,
    sync_folder,
    write_durably,
)

if TYPE_CHECKING:
    from vembed.data.example_store import ExampleStore

log = logging.getLogger("vembed")

FINAL = "final"
METRICS_FILE = "metrics.jsonl"

_LENGTH_AND_MACHINES = """
    epochs max_steps max_train_minutes strategy accelerate_config num_processes num_machines
    dist_timeout_minutes fsdp_version fsdp_sharding_strategy fsdp_offload_params
    fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
    fsdp_forward_prefetch fsdp_state_dict_type
"""
_MEMORY_AND_SPEED = """
    num_workers micro_batch_tokens use_gradient_cache
    cache_frozen_features gradient_checkpointing torch_compile attn_implementation
    padding_free deterministic
"""
_WATCHED_AND_KEPT = """
    val_data_path patience eval_steps eval_before eval_metric guards save_steps
    save_total_limit save_merged load_best_model_at_end async_save on_nonfinite
    logging_steps report_to run_name wandb_project wandb_tags console log_file debug profile_steps output_dir
    overwrite resume trust_remote_code
"""
BATCH = frozenset({"batch_size", "global_batch_size"})
"""Options whose product with the number of processes must stay."""
BY_CONTENT = frozenset({"data_path", "image_root"})
"""Options that name data. The data are compared by the fingerprint of their content."""

MAY_CHANGE = (
    frozenset(f"{_LENGTH_AND_MACHINES} {_MEMORY_AND_SPEED} {_WATCHED_AND_KEPT}".split())
    | BATCH
    | BY_CONTENT
)
"""Options that a resumed run may change; all others must stay. A test checks the list against the schema."""

JUDGES = frozenset({"val_data_path", "eval_metric"})
"""Options that make earlier and later scores incomparable: the best score is reset."""


# ---- the lock: one run at a time writes into a folder ---------------------------

LOCK = ".lock"
"""File that names host and process of the run, and on which it holds a lock of the operating system."""
MAX_OWNER_BYTES = 200


@dataclass
class OutputLock(AbstractContextManager["OutputLock"]):
    """The lock of one run on its output folder. A context manager: the exit releases it, if it was taken.

    The system releases it too, as soon as the process has ended in any way, on this machine or another.
    """

    folder: Path
    _file: IO[bytes] | None = None

    def take(self) -> None:
        """Take the lock. Raise UserError if another run has it, or if the folder cannot be written to.

        Rank 0 does so before anything is read.
        """
        path = self.folder / LOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
            is_free = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The run before may have removed the file after it was opened here.
                lock_status = os.fstat(file.fileno())
                is_free = os.path.samestat(lock_status, path.stat())
            except BlockingIOError:
                is_free = False
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    file.close()
                    raise
                log.warning(
                    f"output_dir: the file system of {self.folder} has no locks: no other run may write there meanwhile"
                )
            if not is_free:
                file.seek(0)
                owner = file.read(MAX_OWNER_BYTES).decode("utf-8", "replace")
                file.close()
                raise UserError(
                    f"output_dir: {self.folder} is in use by another run ({owner}): wait for its end, stop it, or choose "
                    "another output_dir"
                )
            self._file = file
            file.truncate(0)
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            owner = (
                f"host {socket.gethostname()}, process {os.getpid()}, started {started}"
            )
            file.write(owner.encode())
            file.flush()
        except OSError as error:
            raise UserError(
                f"output_dir: {self.folder} cannot be written to ({error.strerror}); give a folder that every process "
                "may write to, on a disk with room"
            ) from error

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            (self.folder / LOCK).unlink(missing_ok=True)
            self._file.close()
        with suppress(OSError):  # a run that has begun has filled it
            self.folder.rmdir()


# ---- finished runs -----------------------------------------------------------


@dataclass(frozen=True)
class FinishedRun:
    """A run that has written its model and its summary."""

    folder: Path
    step: int
    """Number of optimizer steps of the run."""
    when: str
    """Date and time of its end; empty if not known."""

    @property
    def model_dir(self) -> Path:
        """Folder of the model."""
        return self.folder / FINAL

    def __str__(self) -> str:
        when = f", {self.when[:16].replace('T', ' ')}" if self.when else ""
        return f"a finished run ({self.step:,d} steps{when})"

    def scores(self) -> dict[str, float]:
        """Return the scores of the saved model, and those before training with the prefix "before/"."""
        record = read_run(self.folder)
        before = {f"before/{name}": score for name, score in record.before.items()}
        return {**before, **record.after}


class NothingToTrain(Exception):  # noqa: N818 - not an error: the run is done
    """The end of a resumed run whose folder holds a finished one that it would not change."""

    def __init__(self, run: FinishedRun, total_steps: int) -> None:
        super().__init__(
            f"nothing is left to train: {run} is in {run.model_dir}, and epochs or max_steps ask for "
            f"{total_steps:,d} steps; nothing was changed"
        )
        self.run = run


def finished_run(output_dir: Path) -> FinishedRun | None:
    """Return the finished run of a folder, or None: both the model and run.json must be there."""
    if not (output_dir / SUMMARY_FILE).exists() or not (output_dir / FINAL).is_dir():
        return None
    summary = read_summary(output_dir)
    return FinishedRun(output_dir, summary.num_steps or 0, summary.finished)


# ---- the checkpoint to resume from -------------------------------------------


def candidates(run: RunSection) -> list[Path]:
    """Return the checkpoints that `resume` allows, best first. Their integrity is not checked.

    Two runs never share a folder by accident. Without `resume` or `overwrite`, an output_dir with checkpoints or with a
    finished run is refused: only the user knows whether to resume or to keep the old run.
    """
    output = Path(run.output_dir)
    # Newest first: a damaged one is passed over for the one before.
    checkpoints = [path for _, path in reversed(list_checkpoints(output))]
    finished = finished_run(output)
    if run.resume is False:
        # Nothing of an earlier run is replaced unasked.
        ways = (
            "choose another output_dir (output_dir: runs/{model}-{time} names a new one each time), or replace it "
            "(overwrite: true, --overwrite)"
        )
        if checkpoints and not run.overwrite:
            raise UserError(
                f"output_dir: {output} holds {len(checkpoints)} checkpoint(s) of an earlier run, the newest "
                f"{checkpoints[0].name}: go on with it (resume: true, --resume), {ways}"
            )
        if finished is not None and not run.overwrite:
            raise UserError(f"output_dir: {output} holds {finished}: {ways}")
        return []
    if run.resume in (True, "force") and not checkpoints and finished is None:
        raise UserError(
            f"resume: true, but output_dir: {output} holds no checkpoint; use resume: auto to start anew where "
            "there is none"
        )
    if run.resume in (True, "auto", "force"):
        return checkpoints
    requested = Path(str(run.resume))
    if (requested / MANIFEST).is_file():
        paths = [requested]
    else:
        paths = [path for _, path in reversed(list_checkpoints(requested))]
    if not paths:
        raise UserError(
            f"resume: {requested} is neither a checkpoint nor a folder with checkpoints; give a checkpoint-<step> folder, a "
            "run's output_dir, or true"
        )
    is_of_output = paths[0].resolve().parent == output.resolve()
    if (checkpoints or finished) and not is_of_output:
        raise UserError(
            f"resume: {requested} is of another run than the one in output_dir: {output}: choose another output_dir"
        )
    return paths


def require_output_folder(name: str) -> None:
    """Raise UserError if output_dir is no folder for files of a run."""
    try:
        output = Path(name).resolve()
        output.exists()  # a name may be too long
        systems = ("/proc", "/sys", "/dev")
        is_system = any(map(output.is_relative_to, systems))
        is_refused = is_system and not output.is_relative_to("/dev/shm")
        is_refused |= output == Path(output.anchor) or output.is_file()
    except (OSError, ValueError):  # a NUL character
        is_refused = True
    if is_refused:
        raise UserError(
            f"output_dir: {name!r} is no folder that may hold files of a run: choose another folder"
        )
    # Found now, and not when the model is written after the last step.
    for part in (FINAL, f".{FINAL}.new", f".{FINAL}.old"):
        path = output / part
        if path.exists() and not path.is_dir():
            raise UserError(
                f"output_dir: {path} is in the way of the model's folder: remove it"
            )


def refuse_own_model(run: RunSection, model: ModelSection) -> None:
    """Raise UserError if the run would overwrite the model that it starts from."""
    output = Path(run.output_dir).resolve()
    for name in (model.model_name, model.image_model_name):
        path = None if name is None else existing(name)
        if path is None:
            continue
        folder = path.resolve()
        # A run's folder stands for its final/, unless it is a model folder itself.
        if folder == output and not (folder / "config.json").is_file():
            folder = folder / FINAL
        is_inside = folder == output
        if folder.is_dir() and output in folder.parents:
            top = folder.relative_to(output).parts[0]
            is_inside = top == FINAL or step_of(top) is not None
        if is_inside:
            raise UserError(
                f"model_name: {name} is in output_dir: {run.output_dir}, where this run would write: give "
                "another output_dir"
            )


# ---- settings ----------------------------------------------------------------


def kept_decisions(
    config: TrainConfig,
    state: Mapping[str, Any],
    world_size: int,
) -> dict[str, Any]:
    """Return the values that the checkpoint's run had for options that the config leaves open, by option.

    So a resumed run is the same run whatever vembed would choose today. `state`: the content of state.json.
    """
    saved = state["config"]
    options = config.option_values()
    names = ["learning_rate", "epochs", "logging_steps"]
    # Their `auto` follows from the cost of an evaluation: other data, other intervals.
    evaluation = ("val_data_path", "val_split")
    if all(options[name] == saved.get(name) for name in evaluation):
        names += ["eval_steps", "save_steps"]
    kept_values = {}
    for name in names:
        if options[name] == "auto" and name in saved:
            kept_values[name] = saved[name]
    if "learning_rate" in kept_values and options["head_learning_rate"] is None:
        kept_values["head_learning_rate"] = saved["head_learning_rate"]
    is_same_loss = config.objective.loss == saved.get("loss")
    temperature = run_temperature(config.objective, config.data, config.model)
    if temperature is not None and is_same_loss and "temperature" in saved:
        kept_values["temperature"] = saved["temperature"]
    # `batch_size` counts per process. A resumed run on another number of processes keeps the examples per step, unless
    # the user has changed one of the batch options.
    examples = state["identity"].get("global_batch_size")
    batch_options = ("batch_size", "gradient_accumulation_steps")
    is_open = options["global_batch_size"] is None and examples is not None
    if is_open and all(options[name] == saved[name] for name in batch_options):
        # The identity counts the examples of a step, and the option those of one batch.
        size = int(examples) // int(options["gradient_accumulation_steps"])
        size_of_run = int(options["batch_size"]) * world_size
        if size != size_of_run:
            kept_values["global_batch_size"] = size
            log.info(
                f"global batch: {size:,d} examples, as in the checkpoint (batch_size: {options['batch_size']} x "
                f"{world_size} process(es) would be {size_of_run:,d})"
            )
    return kept_values


# ---- files that must stay ------------------------------------------------------

WHOLE_BYTES = 64 * 2**20
"""Files up to this size are read whole; of larger ones their size and PARTS pieces are."""
PARTS = 128
PIECE_BYTES = 2**16
IMAGE_PARTS = 3
"""Image files up to so many pieces are read whole; of larger ones their first, middle and last piece is."""
MAX_SAMPLED_EXAMPLES = 256
"""Examples whose image files are looked at; of more, a sample spread over all."""
MODEL_FILES = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja", ".py"})
_AT_TOP = ("config.json", "modules.json", "adapter_config.json")


def fingerprint_of_option(
    name: str,
    value: Any,
    revision: str | None,
) -> Any:
    """Return the value of an option with files and folders replaced by their fingerprints, at any depth."""
    if isinstance(value, list):
        return [fingerprint_of_option(name, entry, revision) for entry in value]
    if isinstance(value, Mapping):
        return {
            key: fingerprint_of_option(name, entry, revision)
            for key, entry in value.items()
        }
    if not isinstance(value, str):
        return value
    if FILE_OPTIONS[name] == "model":
        fingerprint = of_model(value, revision)
    else:
        fingerprint = of_local(value)
    return value if fingerprint in (None, value) else f"content {fingerprint}"


def of_model(name: str, revision: str | None = None) -> str | None:
    """Return the fingerprint of a model's files; of a Hub model the commit in the cache; None if neither is here."""
    path = existing(name)
    if path is None:
        for file in _AT_TOP:
            try:
                cached = try_to_load_from_cache(name, file, revision=revision)
            except ValueError:  # no name that the Hub could have
                return None
            if isinstance(cached, str):
                return Path(cached).parent.name  # a folder there is named by its commit
        return None
    if not path.is_dir():
        return None
    has_model = any((path / name).is_file() for name in _AT_TOP)
    if not has_model and (path / "final").is_dir():
        path = path / "final"  # the folder of a run
    return _content(path, MODEL_FILES)


def of_local(name: str) -> str:
    """Return the fingerprint of a file or folder that is here, or of the file of `file.py:Name`; another name as it
    is."""
    path = existing(name)
    if path is None and ".py:" in name:
        path = existing(name.rpartition(":")[0])
    return name if path is None else _content(path)


def of_images(*collections: ExampleStore | Sequence[Example | Item]) -> str | None:
    """Return the fingerprint of the image files that samples of these collections name; None if they name none."""
    # Without their names: machines may keep the images in other folders.
    digests = {}
    for entries in collections:
        for index in spread(len(entries), MAX_SAMPLED_EXAMPLES):
            entry = entries[index]
            items = entry.items if isinstance(entry, Example) else [entry]
            for image in chain.from_iterable(item.images for item in items):
                path = image.path
                if path is None or "://" in path or path in digests:
                    continue
                try:
                    whole_bytes = IMAGE_PARTS * PIECE_BYTES
                    digests[path] = content_digest(
                        Path(path), pieces=IMAGE_PARTS, whole_bytes=whole_bytes
                    )
                except OSError as error:
                    digests[path] = f"cannot be read: {error.strerror}"
    return _short(list(digests.values())) if digests else None


def _content(path: Path, suffixes: frozenset[str] | None = None) -> str:
    """Return the fingerprint of a file, or of the files below a folder, without hidden ones."""
    try:
        if path.is_file():
            return _short([content_digest(path)])
        parts = []
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            is_hidden = any(part.startswith(".") for part in name.parts)
            is_read = suffixes is None or file.suffix in suffixes
            if is_read and not is_hidden and file.is_file():
                parts += [name.as_posix(), content_digest(file)]
        return _short(parts)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def content_digest(
    path: Path,
    *,
    pieces: int = PARTS,
    piece_bytes: int = PIECE_BYTES,
    whole_bytes: int = WHOLE_BYTES,
) -> str:
    """Return a hash of a file's size and content: whole up to `whole_bytes`, otherwise of the first piece, the last
    one, and those at equal distances between them."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= whole_bytes:
            return hashlib.file_digest(file, lambda: digest).hexdigest()
        for piece in range(pieces):
            file.seek(piece * (size - piece_bytes) // (pieces - 1))
            digest.update(file.read(piece_bytes))
    return digest.hexdigest()


def _short(parts: list[str]) -> str:
    text = "\n".join(parts)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- metrics.jsonl -----------------------------------------------------------


def trim_metrics(
    output_dir: Path,
    step: int,
    *,
    is_scored: bool = True,
    num_bytes: int = 0,
) -> None:
    """Drop lines of metrics.jsonl after `step`, and an incomplete last line, so that no step appears twice.

    `is_scored`: false drops the evaluation of `step` too, which the run will make again.
    `num_bytes`: length of the file when the checkpoint was written. A shorter file is reported.
    """
    path = output_dir / METRICS_FILE
    content = read_state_bytes(path) if path.exists() else b""
    if len(content) < num_bytes:
        log.warning(
            f"{path} is damaged: it has {len(content):,d} bytes, and had {num_bytes:,d} when the checkpoint was written; "
            "the report will lack the missing lines"
        )
    lines = content.splitlines(keepends=True)
    kept_lines = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            values = json.loads(line)
            # An evaluation comes after the step's own line.
            position = (float(values["step"] + 0), "eval" in values)
            if line.endswith(b"\n") and position <= (step, is_scored):
                kept_lines.append(line)
    if len(kept_lines) != len(lines):
        with replaced_file(path) as partial:
            write_durably(partial, b"".join(kept_lines))


# ---- checkpoint folders: names, checksums, removal --------------------------

MANIFEST = "manifest.json"
STATE = "state.json"
PARTIAL = ".partial"
"""Suffix of a folder that is being written or removed. It never counts; the next start removes it."""
ABANDONED = ".abandoned"
"""Suffix of a checkpoint later than the one resumed from, or damaged. It is kept until the user removes it."""
# No run takes more steps, and longer names leave no room for the suffix of a folder that is removed.
_NAME = re.compile(r"checkpoint-(\d{1,18})")
_FORMAT = 3


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's folder name; None for another name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return every folder that is named like a checkpoint, valid or not, sorted by step."""
    if not output_dir.is_dir():
        return []
    checkpoints = []
    for path in output_dir.iterdir():
        step = step_of(path.name)
        if step is not None and path.is_dir():
            checkpoints.append((step, path))
    return sorted(checkpoints)


def newest_checkpoint(output_dir: Path) -> str:
    """Return the name of the newest checkpoint; empty if there is none."""
    checkpoints = list_checkpoints(output_dir)
    return checkpoints[-1][1].name if checkpoints else ""


def commit(
    partial: Path,
    final: Path,
    checksums: Mapping[str, str],
) -> int:
    """Turn a written folder into a checkpoint: manifest, flush, rename. It does not count before the rename. Return the
    bytes of its files.

    The manifest lists every file with size and checksum. Files named in `checksums` are not read again.
    """
    paths = [path for path in partial.rglob("*") if path.is_file()]
    files = checksums_of(partial, paths, checksums)
    missing = sorted(set(checksums) - set(files))
    if missing:
        raise OSError(
            f"{missing[0]} was written by another process but is not in {partial} as this one sees it: output_dir "
            "must be on a file system that all machines share"
        )
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    write_durably(partial / MANIFEST, text.encode())
    # Content first, rename second: after a power cut, a name without `.partial` implies complete files.
    sync_folder(partial)
    partial.rename(final)
    # The rename itself is durable only when the parent's directory entries are on disk.
    sync(final.parent)
    return sum(entry["bytes"] for entry in files.values())


def verify(
    directory: Path,
    *,
    part: int = 0,
    num_parts: int = 1,
) -> list[str]:
    """Return the problems of a checkpoint as messages; empty if it is intact. With `num_parts`, check one part of
    the files."""
    if not (directory / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    try:
        content = read_json_object(directory / MANIFEST)
        if content["format"] != _FORMAT:
            return [f"{MANIFEST} is of another version of vembed"]
        problems = []
        for name in sorted(content["files"])[part::num_parts]:
            problem = damage_of(directory, name, content["files"][name])
            if problem is not None:
                problems.append(problem)
    except (UserError, KeyError, TypeError):
        return [f"{MANIFEST} is damaged"]
    return problems


def remove(directory: Path) -> None:
    """Remove a checkpoint. It stops counting at once, even if the removal is interrupted."""
    leaving = directory.with_name(directory.name + ".removed" + PARTIAL)
    if leaving.exists():
        shutil.rmtree(leaving)
    # Rename first: a removal that is cut short must not leave a damaged checkpoint under a valid name.
    directory.rename(leaving)
    shutil.rmtree(leaving)


def prune(
    output_dir: Path,
    limit: int | None,
    keep: set[int],
) -> None:
    """Remove the oldest checkpoints until `limit` are left. The newest and the steps in `keep` are never removed."""
    checkpoints = list_checkpoints(output_dir)
    if limit is None or len(checkpoints) <= limit:
        return
    # The list is sorted by step: the last one, the newest, is no candidate.
    removable = [path for step, path in checkpoints[:-1] if step not in keep]
    for path in removable[: len(checkpoints) - limit]:
        remove(path)
        log.info(f"removed {path.name} (save_total_limit: {limit})")
