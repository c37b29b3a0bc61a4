"""Digests of files: small ones count whole, of large ones their beginning, their end, and pieces between."""

import hashlib

import pytest

from vembed.training.checkpoint.folders import content_digest


@pytest.mark.parametrize(
    ("size", "read"),
    [
        (0, []),
        (31, [(0, 10), (10, 20), (21, 31)]),
        (100, [(0, 10), (45, 55), (90, 100)]),
    ],
)
def test_pieces_of_a_file(tmp_path, size, read):
    content = bytes(range(size))
    path = tmp_path / "file"
    path.write_bytes(content)
    digest = content_digest(path, pieces=3, piece_bytes=10, whole_bytes=30)
    expected = str(size).encode() + b"".join(content[start:end] for start, end in read)
    assert digest == hashlib.blake2b(expected, digest_size=16).hexdigest()
