"""Cache folder: the index of large data, stored for other processes and later runs."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.batching.schedule import ContentKeys
from vembed.data.first_pass import Index
from vembed.data.index_parts import Counts

FORMAT = 8
"""Format version. Increase it when the meaning of records or the layout of an entry changes."""


def stamp(path: Path) -> list[int]:
    """Return size, modification time and inode of a file, to detect changes."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def short_hash(*values: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


class IndexCache:
    """Cache entry for the index of one source with one set of options."""

    def __init__(
        self, folder: Path, files: Sequence[Path], options: Sequence[Any]
    ) -> None:
        self._folder = folder / "index"
        self._entry = self._folder / short_hash(
            FORMAT, [str(path.absolute()) for path in files], *options
        )
        self._stamps = [stamp(path) for path in files]

    def load(self) -> Index | None:
        """Return the stored index; None if there is none, or if the data or images have changed."""
        try:
            facts = json.loads((self._entry / "facts.json").read_text(encoding="utf-8"))
            if facts["stamps"] != self._stamps or not self._same_images(
                facts["images"]
            ):
                return None
            arrays = {
                name: np.load(self._entry / f"{name}.npy", mmap_mode="r")
                for name in facts["arrays"]
            }
        except (
            OSError,
            ValueError,
            KeyError,
        ):  # missing or damaged: the index is built again
            return None
        if any(
            len(array) != size
            for array, size in zip(
                arrays.values(), facts["arrays"].values(), strict=True
            )
        ):
            return None
        return Index(
            starts=arrays["starts"],
            sizes=arrays["sizes"],
            lines=arrays["lines"],
            keys=ContentKeys(arrays["key_values"], arrays["key_starts"])
            if "key_values" in arrays
            else None,
            counts=Counts(**facts["counts"]),
            labels=arrays.get("labels"),
            **facts["others"],
        )

    def save(self, index: Index) -> None:
        """Store an index. Errors of the disk are ignored: the index is built again the next time."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=self._folder, prefix="partial-"))
        except OSError:
            return
        try:
            self._write(partial, index)
            # An entry is replaced and not changed: another process may have mapped its arrays.
            shutil.rmtree(self._entry, ignore_errors=True)
            partial.rename(self._entry)
        except OSError:  # the disk is full, or another process was faster
            shutil.rmtree(partial, ignore_errors=True)

    def _write(self, folder: Path, index: Index) -> None:
        arrays = {"starts": index.starts, "sizes": index.sizes, "lines": index.lines}
        if index.keys is not None:
            arrays |= {"key_values": index.keys.values, "key_starts": index.keys.starts}
        if index.labels is not None:
            arrays["labels"] = index.labels
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        facts = {
            "stamps": self._stamps,
            "arrays": {name: len(array) for name, array in arrays.items()},
            "counts": asdict(index.counts),
            "images": {path: _image_stamp(path) for path in index.images},
            "others": {
                "fingerprint": index.fingerprint,
                "num_bad": index.num_bad,
                "problems": index.problems,
                "unused": index.unused,
                "missing": index.missing,
            },
        }
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    def _same_images(self, images: dict[str, list[int] | None]) -> bool:
        return all(_image_stamp(path) == known for path, known in images.items())


def _image_stamp(path: str) -> list[int] | None:
    try:
        return stamp(Path(path))
    except (OSError, ValueError):  # missing file or an address
        return None
