"""Checkpoint folders on disk: names, manifest with checksums, the schema of the state, verification, removal.

Does not import torch, and reads no weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.files import read_json_object, read_state_bytes
from vembed.models.families.model_files import first_problem
from vembed.saving.checksums import checksums_of, damage_of
from vembed.saving.durability import sync, write_durably
from vembed.training.state import LoopState

MANIFEST = "manifest.json"
STATE = "state.json"
PARTIAL = ".partial"
"""Suffix of a folder that is being written or removed. It never counts; the next start removes it."""
DAMAGED = ".damaged"
"""Suffix of a folder that failed its checksums. It is kept until the next checkpoint is written."""
ABANDONED = ".abandoned"
"""Suffix of a checkpoint later than the one resumed from. It is kept until the user removes it."""
_NAME = re.compile(r"checkpoint-(\d+)")
_FORMAT = 2


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's folder name; None for another name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return every folder that is named like a checkpoint, valid or not, sorted by step."""
    if not output_dir.is_dir():
        return []
    named = [
        (step_of(path.name), path) for path in output_dir.iterdir() if path.is_dir()
    ]
    return sorted((step, path) for step, path in named if step is not None)


def newest_checkpoint(output_dir: Path) -> str:
    """Return the name of the newest checkpoint; empty if there is none."""
    checkpoints = list_checkpoints(output_dir)
    return checkpoints[-1][1].name if checkpoints else ""


def irregular(directory: Path, name: str) -> str | None:
    """Return why a file of a checkpoint must not be opened; None for a regular file inside the folder.

    A pipe would be waited for, and a link or `..` could lead to any file of the machine.
    """
    place = PurePosixPath(name)
    path = directory
    if place.is_absolute() or ".." in place.parts or not place.parts or "\0" in name:
        return f"{name} leads out of the folder"
    try:
        for piece in place.parts:
            path = path / piece
            if path.is_symlink():
                return f"{name} is a link, and only files of the folder itself are read"
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    return None if stat.S_ISREG(mode) else f"{name} is not a regular file"


def write_manifest(directory: Path, checksums: Mapping[str, str]) -> None:
    """List every file below a folder with size and checksum. Files named in `checksums` are not read again."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = checksums_of(directory, paths, checksums)
    missing = sorted(set(checksums) - set(files))
    if missing:
        raise OSError(
            f"{missing[0]} was written by another process but is not in {directory} as this one sees it: output_dir "
            "must be on a file system that all machines share"
        )
    content = {"format": _FORMAT, "files": files}
    write_durably(
        directory / MANIFEST,
        json.dumps({**content, "sha256": _seal(content)}, indent=1).encode(),
    )


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def commit(partial: Path, final: Path, checksums: Mapping[str, str]) -> None:
    """Turn a written folder into a checkpoint: manifest, flush, rename. It does not count before the rename."""
    write_manifest(partial, checksums)
    # Content first, rename second: after a power cut, a name without `.partial` implies complete files. Files in
    # `checksums` were flushed by the rank that wrote them.
    for path in (partial, *partial.rglob("*")):
        if path.relative_to(partial).as_posix() not in checksums:
            sync(path)
    partial.rename(final)
    # The rename itself is durable only when the parent's directory entries are on disk.
    sync(final.parent)


def verify_files(directory: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return the problems of a checkpoint as messages; empty if it is intact. With `num_parts`, check one part of
    the files."""
    problem = irregular(directory, MANIFEST)
    if problem is not None:
        return [problem]
    try:
        content = read_json_object(directory / MANIFEST)
        seal = content.pop("sha256")
        if content["format"] != _FORMAT:
            return [
                f"{MANIFEST} has format {content['format']}, and this vembed reads {_FORMAT}"
            ]
        if seal != _seal(content):
            return [f"{MANIFEST} does not match its own checksum"]
        files: dict[str, Any] = content["files"]
        # Of each file the size and the checksum, both of which must be there.
        expected = {
            name: {"bytes": int(files[name]["bytes"]), "sha256": files[name]["sha256"]}
            for name in sorted(files)[part::num_parts]
        }
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} is damaged"]
    problems = []
    for name, checksum in expected.items():
        problem = irregular(directory, name) or damage_of(directory, name, checksum)
        if problem is not None:
            problems.append(problem)
    return problems


def remove(directory: Path) -> None:
    """Remove a checkpoint. It stops counting at once, even if the removal is interrupted."""
    leaving = directory.with_name(directory.name + ".removed" + PARTIAL)
    if leaving.exists():
        shutil.rmtree(leaving)
    # Rename first: a removal that is cut short must not leave a damaged checkpoint under a valid name.
    directory.rename(leaving)
    shutil.rmtree(leaving)


def prune(output_dir: Path, limit: int | None, keep: set[int]) -> list[Path]:
    """Remove the oldest checkpoints until `limit` are left. The newest and the steps in `keep` are never removed."""
    # Called after a new checkpoint is complete: from now on the damaged ones are of no use.
    for path in output_dir.glob(f"checkpoint-*{DAMAGED}"):
        shutil.rmtree(path)
    checkpoints = list_checkpoints(output_dir)
    if limit is None or len(checkpoints) <= limit:
        return []
    # The list is sorted by step: the last one, the newest, is no candidate.
    removable = [path for step, path in checkpoints[:-1] if step not in keep]
    removed = removable[: len(checkpoints) - limit]
    for path in removed:
        remove(path)
    return removed


# ---- contents ----------------------------------------------------------------


class IdentitySchema(BaseModel):
    """Facts that must match besides options; further keys are allowed."""

    model_config = ConfigDict(extra="allow", strict=True)

    global_batch_size: Annotated[int, Field(ge=1)] | None = None


class StateSchema(BaseModel):
    """The file state.json. More may be in it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    loop: LoopState
    config: dict[str, Any]
    identity: IdentitySchema
    optimizer: str
    strategy: str
    precision: str | None = None
    world_size: Annotated[int, Field(ge=1)]


def verify(directory: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return the problems of a checkpoint as messages; empty if it is whole and its state makes sense.

    With `num_parts`, each part compares some of the files with their checksums; the first looks at the state too.
    """
    problems = verify_files(directory, part=part, num_parts=num_parts)
    if problems or part > 0:
        return problems
    problem = irregular(directory, STATE)
    if problem is not None:
        return [problem]
    try:
        state = StateSchema.model_validate_json(read_state_bytes(directory / STATE))
        TrainConfig(**state.config)
    except ValidationError as error:
        return [f"{STATE}: {first_problem(error)}"]
    except (ValueError, UserError) as error:
        return [f"{STATE}: {error}"]
    loop = state.loop
    named = step_of(directory.name)
    if named is not None and loop.step != named:
        problems.append(
            f"{STATE}: loop.step is {loop.step}, and the folder is that of step {named}"
        )
    for name, step in (("best_step", loop.best_step), ("held_step", loop.held_step)):
        if step is not None and step > loop.step:
            problems.append(
                f"{STATE}: loop.{name} is {step}, later than its step {loop.step}"
            )
    return problems
