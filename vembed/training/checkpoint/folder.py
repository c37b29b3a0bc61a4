"""Checkpoint folders on disk: names, manifest with checksums, verification, removal.

Does not import torch, and reads no weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vembed.errors import UserError
from vembed.files import read_json_object
from vembed.saving.checksums import checksums_of, damage_of
from vembed.saving.durability import sync, write_durably

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


def verify(directory: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return the problems of a checkpoint as messages; empty if it is intact. With `num_parts`, check one part of
    the files."""
    if not (directory / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    try:
        content = read_json_object(directory / MANIFEST)
        seal = content.pop("sha256")
        checkpoint_format = content["format"]
    except (UserError, KeyError):
        return [f"{MANIFEST} is damaged"]
    if checkpoint_format != _FORMAT:
        return [
            f"{MANIFEST} has format {checkpoint_format}, and this vembed reads {_FORMAT}"
        ]
    if seal != _seal(content):
        return [f"{MANIFEST} does not match its own checksum"]
    problems = []
    for name in sorted(content["files"])[part::num_parts]:
        problem = damage_of(directory, name, content["files"][name])
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
