"""FeatureStore: features of frozen towers on disk, for the later epochs of a run and for later runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from vembed.data.cache import stamp
from vembed.data.examples import ImageRef
from vembed.data.features import Features
from vembed.data.row_store import KEY_BYTES, RowStore, StoreKind

SUFFIX = ".features"
KIND = StoreKind(
    "cache_frozen_features", "features of this tower", SUFFIX, b"vembed features 1"
)


class FeatureStore(RowStore):
    """Store of the feature rows of one tower by input."""

    def __init__(self, folder: Path, identity: str) -> None:
        """`identity`: hash of all that the rows depend on besides their inputs; also the name of the subfolder."""
        super().__init__(folder, identity, KIND)
        self._keys: dict[int, bytes] = {}

    def find(self, features: Sequence[Features]) -> dict[int, np.ndarray]:
        """Return a map from position in `features` to the stored row, without the missing ones."""
        return self.find_rows([self._key(feature) for feature in features])

    def add(self, features: Sequence[Features], rows_ND: np.ndarray) -> None:
        """Store one row for each input. If the disk is full, log a warning and store nothing from then on."""
        self.add_rows([self._key(feature) for feature in features], rows_ND)

    def _key(self, features: Features) -> bytes:
        if features.key not in self._keys:
            self._keys[features.key] = lasting_key(features)
        return self._keys[features.key]


def size_of_all(folder: Path) -> tuple[int, int]:
    """Return the number of towers with features in a folder, and their bytes."""
    sizes: dict[Path, int] = {}
    for path in folder.glob(f"*/*{SUFFIX}"):
        with suppress(OSError):  # deleted by another process
            sizes[path.parent] = sizes.get(path.parent, 0) + path.stat().st_size
    return len(sizes), sum(sizes.values())


def lasting_key(features: Features) -> bytes:
    """Return the key of an input that is valid across runs. For image files it includes size and modification time."""
    digest = hashlib.blake2b(features.modality.encode(), digest_size=KEY_BYTES)
    if features.token_ids is not None:
        digest.update(features.token_ids.tobytes())
    for image in features.images:
        identity = lasting_identity(image)
        digest.update(len(identity).to_bytes(8, "little") + identity)
    return digest.digest()


def lasting_identity(image: ImageRef) -> bytes:
    """Return the identity of an image that is valid across runs."""
    if image.data is not None:
        return b"data:" + hashlib.blake2b(image.data).digest()
    path = Path(str(image.path))
    try:
        return repr((str(path.absolute()), stamp(path))).encode()
    except (OSError, ValueError):  # an address
        return repr(image.path).encode()
