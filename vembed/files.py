"""Files: the cache folder, versions of files, copies that appear as a whole, and state files.

A state file is a small one that vembed writes and reads again. It is regular and of bounded size. A pipe would be waited for, a device has
no end, and a file of many gigabytes does not fit into memory: each is a UserError, as
are contents that cannot be parsed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from vembed.errors import UserError

MAX_STATE_BYTES = 2**30
"""Larger state files are refused."""


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return vembed's cache folder: $XDG_CACHE_HOME/vembed, by default ~/.cache/vembed."""
    # Empty counts as unset, as the XDG specification says.
    base = env.get("XDG_CACHE_HOME")
    return Path(base) / "vembed" if base else Path("~/.cache/vembed").expanduser()


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def open_regular(path: str | Path) -> int:
    """Return a descriptor for reading. Raise UserError if the path names a pipe, a device or a folder."""
    # Not blocking: opening a pipe would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise UserError(f"{path} is {_kind(mode)}, and a file is needed: remove it")


def read_state_bytes(path: str | Path, *, max_bytes: int = MAX_STATE_BYTES) -> bytes:
    """Return the content of a state file. Raise UserError if it is not a regular file of at most `max_bytes`."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_size > max_bytes:
                raise UserError(
                    f"{path} has {facts.st_size:,d} bytes, more than the {max_bytes:,d} that such a file may have: "
                    "restore or remove it"
                )
            return file.read(max_bytes)
    except ValueError as error:  # NUL in the path
        raise UserError(f"{str(path)!r} is not a path: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def read_state_text(path: str | Path, *, errors: str = "strict") -> str:
    """Return the text of a state file in UTF-8."""
    try:
        return read_state_bytes(path).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is damaged: byte {error.start:,d} is not UTF-8; restore or remove it"
        ) from error


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file."""
    try:
        return json.loads(read_state_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: it is not JSON ({error}); restore or remove it"
        ) from error


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    return _object(path, read_json(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the options of a YAML file that vembed has written."""
    text = read_state_text(path)
    try:
        value = _parse_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged: it is not YAML ({reason:.200}); restore or remove it"
        ) from error
    return _object(path, {} if value is None else value)


def require_regular(path: str | Path, option: str) -> None:
    """Raise UserError if a file that is to be written is a pipe, a device or a folder. `option` names it."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be used: {error.strerror or error}"
        ) from error
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{option}: {path} is {_kind(mode)}, and a file is written there: remove it"
        )


def _parse_yaml(text: str) -> Any:
    if yaml.__with_libyaml__:
        try:
            return yaml.load(text, Loader=yaml.CSafeLoader)  # ten times as fast
        except yaml.YAMLError:  # it refuses lone surrogates, which a path may hold
            pass
    return yaml.safe_load(text)


def _object(path: str | Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(
            f"{path} is damaged: it holds a {type(value).__name__}, and keys with values are needed; restore or "
            "remove it"
        )
    return dict(value)


def _kind(mode: int) -> str:
    """Return what a file is that is not a regular one."""
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def stamp(path: Path) -> list[int]:
    """Return size, modification time and inode of a file, to detect changes."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def short_hash(*values: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def add_content(
    digest: Any, path: Path, *, pieces: int, piece_bytes: int, whole_bytes: int
) -> None:
    """Add a file to a digest of hashlib: whole up to `whole_bytes`, otherwise the first piece, the last one, and those
    at equal distances between them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= whole_bytes:
            while block := file.read(2**20):
                digest.update(block)
            return
        for piece in range(pieces):
            file.seek(piece * (size - piece_bytes) // (pieces - 1))
            digest.update(file.read(piece_bytes))


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a path beside the target. What is written there becomes the target when the with-block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def change_since(path: Path, before: os.stat_result) -> str | None:
    """Return what happened to a data file since it was opened, as a sentence; None if nothing did."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return f"{path} has been deleted or moved since the run began; the run goes on with what it has open"
    except OSError as error:
        return f"{path} can no longer be read ({error.strerror or error})"
    if not os.path.samestat(now, before):
        return f"{path} has been replaced since the run began; the run goes on with the file that it has open"
    if now.st_size == before.st_size and now.st_mtime_ns == before.st_mtime_ns:
        return None
    return (
        f"{path} has been written to since the run began ({before.st_size:,d} bytes then, {now.st_size:,d} now). What "
        "was added is not read before the next start. If other records changed, start again"
    )


def refuse_truncated(files: Mapping[Path, os.stat_result]) -> None:
    """Raise UserError if a file is shorter than it was when it was mapped into memory: reading a page behind its end
    would end the process. A file that was deleted or replaced stays mapped as it was."""
    for path, before in files.items():
        try:
            now = path.stat()
        except OSError:
            continue
        if os.path.samestat(now, before) and now.st_size < before.st_size:
            raise UserError(
                f"{path} has been truncated from {before.st_size:,d} to {now.st_size:,d} bytes since it was opened: "
                "restore it, and start again"
            )


ROOM = "free some space, or set XDG_CACHE_HOME to a folder with more"
"""End of a message about a disk without room for the cache folder."""


@contextmanager
def new_copy(target: Path, name: str) -> Iterator[Path]:
    """Yield a path where a copy is written, and remove those of earlier versions. Raise UserError for a full disk."""
    try:
        with written_aside(target) as partial:
            yield partial
    except OSError as error:
        if error.errno is None:  # of the source, not of this disk
            raise
        raise UserError(
            f"{name} could not be copied into {target.parent} ({error.strerror or error}): {ROOM}"
        ) from error
    for older in target.parent.parent.glob(f"{target.parent.name.partition('-')[0]}-*"):
        if older != target.parent:
            shutil.rmtree(older, ignore_errors=True)
