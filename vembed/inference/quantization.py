"""Embeddings in fewer bits, with the formulas of Sentence Transformers."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from vembed.errors import UserError

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]


def ranges_of(vectors_ND: np.ndarray) -> np.ndarray:
    """Return [2, d] float32, the lowest and highest value of each coordinate."""
    return np.stack([vectors_ND.min(axis=0), vectors_ND.max(axis=0)]).astype(np.float32)


def read_ranges(path: str, dim: int) -> np.ndarray:
    """Read ranges from a .npy file. Raise UserError unless they are those of `dim` coordinates."""
    try:
        ranges = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"ranges: {path} cannot be read as a .npy file: {error}"
        ) from error
    return checked_ranges(ranges, dim, path)


def checked_ranges(
    ranges_2D: np.ndarray,
    dim: int,
    name: str = "ranges",
) -> np.ndarray:
    """Return ranges as [2, dim] float32. Raise UserError for other shapes and for values that are no ranges."""
    ranges = np.asarray(ranges_2D)
    if ranges.shape != (2, dim) or not np.issubdtype(ranges.dtype, np.floating):
        raise UserError(
            f"{name} has the shape {list(ranges.shape)}, and [2, {dim}] is needed: the lowest and the highest value of "
            "each coordinate, as `vembed encode --precision int8` writes them beside the vectors"
        )
    if not np.isfinite(ranges).all() or (ranges[0] > ranges[1]).any():
        raise UserError(
            f"{name} has a lowest value above the highest one, or a value that is not finite"
        )
    return ranges.astype(np.float32)


def quantized(
    vectors_ND: np.ndarray,
    precision: Precision,
    ranges_2D: np.ndarray | None = None,
) -> np.ndarray:
    """Return the vectors in a precision. int8 and uint8 take the range of each coordinate from `ranges_2D`, and values
    beyond it are cut off; without, from these vectors. binary and ubinary keep one bit per coordinate, eight in a
    byte."""
    if precision not in get_args(Precision):
        raise UserError(
            f"precision is {precision!r}; give one of {', '.join(get_args(Precision))}"
        )
    if precision == "float32":
        return vectors_ND
    if precision in ("binary", "ubinary"):
        levels = np.packbits(vectors_ND > 0, axis=1)
    else:
        levels = _levels(vectors_ND, precision, ranges_2D)
    if precision in ("ubinary", "uint8"):
        return levels
    # Signed bytes are shifted by 128, as in Sentence Transformers; by way of int16, since uint8 has no negative
    # numbers.
    return (levels.astype(np.int16) - 128).astype(np.int8)


def _levels(
    vectors_ND: np.ndarray,
    precision: Precision,
    ranges_2D: np.ndarray | None,
) -> np.ndarray:
    """Return the level of each coordinate in its range, 0 to 255."""
    if ranges_2D is None and len(vectors_ND) < 2:
        raise UserError(
            f"precision is {precision!r} for {len(vectors_ND)} vector(s): the range of each coordinate comes from the "
            "vectors that are encoded together; give at least two, better a thousand"
        )
    low, high = ranges_of(vectors_ND) if ranges_2D is None else ranges_2D
    # 256 levels. A constant coordinate becomes 0 instead of 0 / 0; astype cuts off as Sentence Transformers does.
    steps = np.where(high > low, (high - low) / 255, 1)
    levels: np.ndarray = np.clip((vectors_ND - low) / steps, 0, 255).astype(np.uint8)
    return levels
