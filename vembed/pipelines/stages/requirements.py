"""Requirements of an evaluation: conditions on scores, and the sentence where one is not met."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from vembed.errors import UserError

_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
# An optional comparison and a decimal number, also `.5` and `1e-3`.
_CONDITION = re.compile(r"\s*(>=|<=|>|<)?\s*([+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)\s*")
_OF_RETRIEVAL = ("ndcg", "mrr", "recall", "map")
_OF_PAIRS = ("spearman", "pearson")


def check_conditions(required: Any, ks: str) -> None:
    """Raise UserError where conditions cannot be read, or ask for what is not measured at the cut-offs `ks`."""
    if not isinstance(required, Mapping):
        raise UserError(
            f'require: {required!r} is no condition by name; write it as {{nDCG@10: ">= 0.60"}}'
        )
    cuts = [word.strip() for word in ks.split(",")]
    measured = [f"{metric}@{k}" for metric in _OF_RETRIEVAL for k in cuts] + list(
        _OF_PAIRS
    )
    for name, condition in required.items():
        _parsed(name, condition)
        plain = str(name).lower().rpartition("/")[2]  # also `dim256/ndcg@10`
        if plain not in measured:
            raise UserError(
                f"require: {name} is not among what is measured: {', '.join(measured)}"
            )


def check_requirements(
    scores: Mapping[str, float], required: Mapping[str, Any]
) -> str | None:
    """Return what is not met, in words; None where all is. A plain number is the least that is required."""
    by_name = {name.lower(): value for name, value in scores.items()}
    for name, condition in required.items():
        sign, limit = _parsed(name, condition)
        if name.lower() not in by_name:
            raise UserError(
                f"require: {name} is not among what is measured: {', '.join(scores)}"
            )
        if not _COMPARE[sign](by_name[name.lower()], limit):
            return f"{name} is {by_name[name.lower()]:.4f}, and {sign} {limit:g} is required"
    return None


def _parsed(name: str, condition: Any) -> tuple[str, float]:
    match = _CONDITION.fullmatch(str(condition))
    if match is None:
        raise UserError(
            f'require: {name}: {condition!r} is no condition; write it as ">= 0.60"'
        )
    return match[1] or ">=", float(match[2])
