"""Fingerprints of the files that a run reads, for comparisons between ranks and with the run that is resumed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from vembed.data.cache import add_content

WHOLE_BYTES = 64 * 2**20
"""Files up to this size are read whole; of larger ones their size and PARTS pieces are."""
PARTS = 128
PART_BYTES = 2**16
MODEL_FILES = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja", ".py"})
_AT_TOP = ("config.json", "modules.json", "adapter_config.json")


def of_data(name: str) -> str | None:
    """Return the fingerprint of a data file or folder; None for what is no path here (a Hub name)."""
    path = _path(name)
    if path is None:
        return None
    try:
        if path.is_dir():
            return _folder(path, _files(path))
        return _short([_file(path)])
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def of_model(name: str, revision: str | None = None) -> str | None:
    """Return the fingerprint of a model's files; of a Hub model the commit in the cache; None if neither is here."""
    path = _path(name)
    if path is None:
        return _commit(name, revision)
    if not path.is_dir():
        return None
    if (path / "final").is_dir() and not any(
        (path / file).is_file() for file in _AT_TOP
    ):
        path = path / "final"  # the folder of a run
    try:
        return _folder(
            path, [file for file in _files(path) if file.suffix in MODEL_FILES]
        )
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def of_code(name: str) -> str | None:
    """Return the fingerprint of a file with code, named as path/to/file.py:Name; None if it is not one."""
    path = _path(name.rpartition(":")[0] or name)
    if path is None or not path.is_file():
        return None
    return of_data(str(path))


def _path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError):  # not a valid name of a file
        return None


def _commit(name: str, revision: str | None) -> str | None:
    """Return the commit of a Hub model in the cache, which is the name of its folder there."""
    for file in _AT_TOP:
        try:
            cached = try_to_load_from_cache(name, file, revision=revision)
        except ValueError:  # no name that the Hub could have
            return None
        if isinstance(cached, str):
            return Path(cached).parent.name
    return None


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder, without hidden ones."""
    cached = [file for file in folder.rglob("*") if file.is_file()]
    return sorted(
        file
        for file in cached
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _folder(folder: Path, files: list[Path]) -> str:
    return _short(
        [
            part
            for file in files
            for part in (file.relative_to(folder).as_posix(), _file(file))
        ]
    )


def _file(path: Path) -> str:
    digest = hashlib.blake2b(str(path.stat().st_size).encode(), digest_size=16)
    add_content(
        digest, path, pieces=PARTS, piece_bytes=PART_BYTES, whole_bytes=WHOLE_BYTES
    )
    return digest.hexdigest()


def _short(parts: list[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
