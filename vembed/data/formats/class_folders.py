"""Folders of images by class: class/picture.jpg, as records of labelled images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from vembed.data.cache import short_hash, written_aside
from vembed.data.images.files import IMAGE_SUFFIXES
from vembed.data.messages import listed
from vembed.errors import UserError

SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test"})


def is_class_folder(folder: Path) -> bool:
    """Return whether a folder has subfolders with images, and no images itself."""
    entries = sorted(folder.iterdir())
    return not any(_is_image(entry) for entry in entries) and any(
        next(_images(entry), None) is not None for entry in entries if entry.is_dir()
    )


def class_records(folder: Path, cache: Path) -> Path:
    """Return a file with a record for each image of a class folder, in the cache folder: its path and its class."""
    classes = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and next(_images(entry), None) is not None
    )
    if splits := [name for name in classes if name.lower() in SPLITS]:
        raise UserError(
            f"{folder} holds {listed(classes)}, and {splits[0]} is the name of a split, not of a class: give "
            f"{folder / splits[0]} itself, and other splits as val_data_path"
        )
    records = [
        {"image": str(image.relative_to(folder)), "label": name}
        for name in classes
        for image in _images(folder / name)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    path = cache / "class_folders" / f"{short_hash(str(folder.absolute()), text)}.jsonl"
    if not path.exists():
        with written_aside(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return path


def _images(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if _is_image(path))


def _is_image(path: Path) -> bool:
    return (
        path.suffix.lower() in IMAGE_SUFFIXES
        and not path.name.startswith(".")
        and path.is_file()
    )
