"""Folders of images by class: class/picture.jpg, as records of labelled images."""

from __future__ import annotations

import json
from pathlib import Path

from vembed.data.cache import short_hash, written_aside
from vembed.data.images.files import IMAGE_SUFFIXES
from vembed.data.messages import listed
from vembed.errors import UserError

SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test"})


def class_records(folder: Path, cache: Path) -> Path | None:
    """Return a file with a record for each image of a folder whose subfolders are classes, in the cache folder: the
    image's path and class. None for a folder without subfolders of images, or with images itself."""
    entries = sorted(folder.iterdir())
    if any(map(_is_image, entries)):
        return None
    lines: list[str] = []
    classes: dict[str, None] = {}
    for entry in entries:
        for image in filter(_is_image, sorted(entry.rglob("*"))):
            classes[entry.name] = None
            record = {"image": str(image.relative_to(folder)), "label": entry.name}
            lines.append(json.dumps(record) + "\n")
    if not classes:
        return None
    if splits := [name for name in classes if name.lower() in SPLITS]:
        raise UserError(
            f"{folder} holds {listed(classes)}, and {splits[0]} is the name of a split, not of a class: give "
            f"{folder / splits[0]} itself, and other splits as val_data_path"
        )
    text = "".join(lines)
    path = cache / "class_folders" / f"{short_hash(str(folder.absolute()), text)}.jsonl"
    if not path.exists():
        with written_aside(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return path


def _is_image(path: Path) -> bool:
    return (
        path.suffix.lower() in IMAGE_SUFFIXES
        and not path.name.startswith(".")
        and path.is_file()
    )
