"""Fingerprints of the files that a run reads, for comparisons between ranks and with the run that is resumed.

Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from vembed.config.schema import FILE_OPTIONS
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item
from vembed.files import add_content
from vembed.names import existing

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


def of_option(
    name: str,
    value: Any,
    revision: str | None,
) -> Any:
    """Return the value of an option with files and folders replaced by their fingerprints, at any depth."""
    if isinstance(value, list):
        return [of_option(name, entry, revision) for entry in value]
    if isinstance(value, Mapping):
        return {key: of_option(name, entry, revision) for key, entry in value.items()}
    if not isinstance(value, str):
        return value
    kind = FILE_OPTIONS[name]
    if kind == "model":
        fingerprint = of_model(value, revision)
    else:
        # Code is named as path/to/file.py:Name.
        file = value if kind == "data" else value.rpartition(":")[0] or value
        path = existing(file)
        fingerprint = None if path is None else _content(path)
    return value if fingerprint is None else f"content {fingerprint}"


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
    digests: dict[str, str] = {}
    for entries in collections:
        interval = max(-(-len(entries) // MAX_SAMPLED_EXAMPLES), 1)
        for index in range(0, len(entries), interval):
            entry = entries[index]
            items = entry.items if isinstance(entry, Example) else [entry]
            for image in chain.from_iterable(item.images for item in items):
                path = image.path
                if path is None or "://" in path or path in digests:
                    continue
                try:
                    whole_bytes = IMAGE_PARTS * PIECE_BYTES
                    digests[path] = _digest(Path(path), IMAGE_PARTS, whole_bytes)
                except OSError as error:
                    digests[path] = f"cannot be read: {error.strerror}"
    return _short(list(digests.values())) if digests else None


def _content(path: Path, suffixes: frozenset[str] | None = None) -> str:
    """Return the fingerprint of a file, or of the files below a folder, without hidden ones."""
    try:
        if path.is_file():
            return _short([_digest(path)])
        parts = []
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            is_hidden = any(part.startswith(".") for part in name.parts)
            is_read = suffixes is None or file.suffix in suffixes
            if is_read and not is_hidden and file.is_file():
                parts += [name.as_posix(), _digest(file)]
        return _short(parts)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _digest(
    path: Path,
    pieces: int = PARTS,
    whole_bytes: int = WHOLE_BYTES,
) -> str:
    size = str(path.stat().st_size)
    digest = hashlib.blake2b(size.encode(), digest_size=16)
    add_content(
        digest, path, pieces=pieces, piece_bytes=PIECE_BYTES, whole_bytes=whole_bytes
    )
    return digest.hexdigest()


def _short(parts: list[str]) -> str:
    text = "\n".join(parts)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
