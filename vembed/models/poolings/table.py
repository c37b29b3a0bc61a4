"""The poolings that vembed has: how the vectors of a text's tokens become one embedding.

A new pooling needs its class in a file of this folder and its entry in the list below.
The values of the option `pooling`, the files of Sentence Transformers, exports, servers,
docs and tests are derived from the classes. This module imports no torch, because the
config reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from vembed.declarations import check_parts, text_of_values
from vembed.models.poolings.base import Cls, Last, Max, Mean, Pooling, WeightedMean

MODEL_POOLING = "own"
"""Pooling of models that give one vector per input themselves (CLIP, SigLIP)."""
MODE_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""Mode of Sentence Transformers' Pooling module -> its flag in the config.json that
versions 3 to 6 read."""

_CLASSES: tuple[type[Pooling], ...] = (
    Cls,
    Mean,
    Last,
    WeightedMean,
    Max,
)


def check_poolings(classes: Sequence[type[Pooling]]) -> dict[str, Pooling]:
    """Return the poolings by name. Raise TypeError for a class that lacks something."""
    check_parts(
        "pooling",
        Pooling,
        classes,
        lambda pooling: (pooling.name, *pooling.spellings.split()),
        needed=("name", "__doc__"),
        allowed={"modes": MODE_FLAGS},
        taken_names=("auto", MODEL_POOLING),
    )
    poolings = {}
    for pooling in classes:
        method = "build" if pooling.is_trained else "pool"
        if getattr(pooling, method) is getattr(Pooling, method):
            raise TypeError(
                f"pooling {pooling.__name__} of {pooling.__module__} declares no `{method}`"
            )
        poolings[pooling.name] = pooling()
    return poolings


POOLINGS = check_poolings(_CLASSES)
"""Name, as in the option `pooling` -> its pooling, in the order of this file."""


def poolings_of(server: str) -> list[str]:
    """Return the names of the poolings that a server has."""
    return [pooling.name for pooling in POOLINGS.values() if server in pooling.servers]


if TYPE_CHECKING:
    PoolingName = str
else:
    PoolingName = Literal[tuple(POOLINGS)]

POOLING_TEXT = text_of_values(
    "Pooling of token vectors into one embedding. `auto`: from the model's own files, otherwise by family.",
    {
        name: str(type(pooling).__doc__).split(". ")[0]
        for name, pooling in POOLINGS.items()
    },
)
"""Text of the option `pooling`."""
