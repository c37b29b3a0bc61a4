"""Rules between the options of a merge, which are known before a model is opened; no torch."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

from vembed.errors import UserError

Method = Literal["mean", "weighted", "slerp", "task_arithmetic", "ties", "dare"]
OF_DIFFERENCES: tuple[Method, ...] = ("task_arithmetic", "ties", "dare")
"""Methods that are defined on differences from a base model."""
MergeMethod = Literal[Method, "soup"]
SlerpOf = Literal["auto", "weights", "differences"]


def check_merge(
    names: Sequence[str] | None,
    method: str,
    *,
    weights: Sequence[float] | None,
    base: object,
    of: str | None,
    density: float | None,
    scale: float | None,
    interpolate: float | None,
    sweep_points: Sequence[float] | None,
    data: object,
    seed: int | None,
) -> None:
    """Raise UserError where the options of a merge do not go together, or the arithmetic would divide by zero or give
    weights that are no numbers. `names`: the models; None: not known yet. Other
    options that nobody gave are None too."""
    if method not in get_args(MergeMethod):
        raise UserError(
            f"method: {method} is not one of {', '.join(get_args(MergeMethod))}"
        )
    with_weights = ("weighted", "slerp", *OF_DIFFERENCES)
    # Option -> its value, and the methods that read it. All methods read the other options.
    read_by: dict[str, tuple[object, tuple[str, ...]]] = {
        "weights": (weights, with_weights),
        "base": (base, ("mean", *with_weights)),
        "of": (of, ("slerp",)),
        "density": (density, ("ties", "dare")),
        "scale": (scale, OF_DIFFERENCES),
        "interpolate": (interpolate, ("mean", *with_weights)),
        "sweep": (sweep_points, ("mean", "weighted", "slerp")),
        "seed": (seed, ("dare",)),
    }
    for name, (value, methods) in read_by.items():
        if value is not None and method not in methods:
            raise UserError(
                f"{name}: {value} has no effect with method: {method}. Leave it out, or use method: {' or '.join(methods)}"
            )
    if density is not None and not 0 < density <= 1:
        raise UserError(
            f"density: {density:g} is the share of each difference that {method} keeps: give 0.2, or 1"
        )
    numbers = {
        "scale": [scale],
        "interpolate": [interpolate],
        "weights": weights or (),
        "sweep": sweep_points or (),
    }
    for name, values in numbers.items():
        for value in values:
            if value is not None and not math.isfinite(value):
                raise UserError(f"{name}: {value} is not a number to compute with")
    if method == "weighted" and weights is None:
        raise UserError(
            "method: weighted needs weights, one for each model; without them it is the mean"
        )
    # ties elects the sign of each value by the weighted differences.
    are_shares = method in ("weighted", "slerp", "ties")
    if weights and are_shares and (sum(weights) <= 0 or min(weights) < 0):
        raise UserError(
            f"weights of {method} are shares: give numbers of at least 0, and not only zeros"
        )
    if (method == "soup" or sweep_points is not None) and data is None:
        what = "a soup" if method == "soup" else "a sweep"
        raise UserError(f"{what} chooses by evaluation data: give data (--data)")
    changes_alone = (
        interpolate not in (None, 1.0)
        or sweep_points is not None
        or method in OF_DIFFERENCES
    )
    if sweep_points is not None and weights is not None:
        raise UserError(
            "sweep: its points are the weights that are tried, so weights has no effect. Leave one of the two out"
        )
    if base is not None and method != "slerp" and not changes_alone:
        raise UserError(
            f"base: {base} has no effect with method: {method} and interpolate: 1. Leave it out, or lower interpolate"
        )
    if names is None:
        return
    if weights is not None and len(weights) != len(names):
        raise UserError(
            f"weights: {len(weights)} given for {len(names)} models; give one for each"
        )
    if method == "slerp" and len(names) != 2:
        raise UserError(
            f"method: slerp is between two models, and {len(names)} are given; merge two of them first"
        )
    if sweep_points is not None and len(names) > 2:
        raise UserError(
            f"a sweep is a line between two models, or between a base and one; {len(names)} are given"
        )
    if len(names) == 1 and not changes_alone:
        raise UserError(
            f"{names[0]} alone is nothing to merge: give more models, or a base and interpolate"
        )
