"""Identities for the cache of teachers: of a model's files with its settings, and of inputs and pairs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from vembed.config.entries import Teacher
from vembed.data.cache import add_content
from vembed.data.examples import Item, Kind
from vembed.data.pair_features import ANSWER_END, ANSWER_PROMPT
from vembed.data.row_store import KEY_BYTES, lasting_identity

FORMAT = 2
"""Version of the identities. Increase it when a teacher gives other answers for the same files and settings."""
SAMPLE = 2**20
"""Bytes that are read at the beginning, middle and end of a large file."""


def teacher_identity(folder: Path, teacher: Teacher, kind: str, arithmetic: str) -> str:
    """Return a hash of a teacher's files and settings; of files above 3 MiB, of the size and three samples of 1 MiB."""
    digest = hashlib.blake2b(digest_size=16)
    settings = [
        FORMAT,
        kind,
        arithmetic,
        teacher.query_prompt,
        teacher.document_prompt,
        teacher.max_length,
    ]
    if kind == "yes_no":
        settings += [teacher.instruction, ANSWER_PROMPT, ANSWER_END]
    digest.update(json.dumps(settings).encode())
    for path in sorted(folder.rglob("*")):
        if (
            path.suffix in (".json", ".safetensors", ".txt", ".model", ".jinja", ".bin")
            and path.is_file()
        ):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}".encode())
            add_content(
                digest, path, pieces=3, piece_bytes=SAMPLE, whole_bytes=3 * SAMPLE
            )
    return digest.hexdigest()


def item_key(item: Item, kind: Kind | None) -> bytes:
    """Return the key of an input in a role; `None` if the role makes no difference to the teacher."""
    digest = _content(item, kind)
    if (
        item.prompt is not None or item.max_length is not None
    ):  # its own, in place of the teacher's
        digest.update(b"\0p" + json.dumps([item.prompt, item.max_length]).encode())
    return digest.digest()


def pair_key(query: Item, document: Item) -> bytes:
    """Return the key of a (query, document) pair. Rerankers know no prompts."""
    contents = (
        _content(query, "query").digest() + _content(document, "document").digest()
    )
    return hashlib.blake2b(contents, digest_size=KEY_BYTES).digest()


def _content(item: Item, kind: Kind | None) -> hashlib.blake2b:
    digest = hashlib.blake2b((kind or "").encode(), digest_size=KEY_BYTES)
    if item.text is not None:
        # The letters tell a text from an image; lengths keep (a, bc) and (ab, c) apart.
        digest.update(b"t" + item.text.encode("utf-8", "surrogatepass"))
    for image in item.images:
        identity = lasting_identity(image)
        digest.update(b"\0i" + len(identity).to_bytes(8, "little") + identity)
    return digest
