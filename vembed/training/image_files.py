"""Fingerprints of the image files that data name, from a sample: their sizes and pieces of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item
from vembed.data.file_content import add_content
from vembed.evaluation.dataset import EvalData, RetrievalData

MOST_SAMPLED = 256
"""Examples whose image files are looked at; of more, a sample spread over all."""
PIECE_BYTES = 2**16
"""Files up to three pieces are read whole; of larger ones their first, middle and last piece is."""


def of_examples(examples: ExampleStore | Sequence[Example]) -> str | None:
    """Return the fingerprint of the image files of examples; None if they name none."""
    sampled = (examples[index] for index in _spread(len(examples)))
    return _of(
        item for one in sampled for item in (one.query, *one.positives, *one.negatives)
    )


def of_evaluation(data: EvalData | None) -> str | None:
    """Return the fingerprint of the image files of evaluation data; None if they name none."""
    if data is None:
        return None
    sides = (
        (data.queries, data.documents)
        if isinstance(data, RetrievalData)
        else (data.first, data.second)
    )
    return _of(side[index] for side in sides for index in _spread(len(side)))


def _of(items: Iterable[Item]) -> str | None:
    # Without their names: machines may keep the images in other folders.
    digests: dict[str, str] = {}
    for item in items:
        for image in item.images:
            if (
                image.path is not None
                and "://" not in image.path
                and image.path not in digests
            ):
                digests[image.path] = _content(Path(image.path))
    return (
        hashlib.blake2b("\n".join(digests.values()).encode(), digest_size=8).hexdigest()
        if digests
        else None
    )


def _content(path: Path) -> str:
    try:
        digest = hashlib.blake2b(str(path.stat().st_size).encode(), digest_size=16)
        add_content(
            digest, path, pieces=3, piece_bytes=PIECE_BYTES, whole_bytes=3 * PIECE_BYTES
        )
        return digest.hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _spread(count: int) -> range:
    return range(0, count, max(-(-count // MOST_SAMPLED), 1))
