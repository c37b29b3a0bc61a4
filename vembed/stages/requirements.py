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


def check_requirements(scores: Mapping[str, float], required: Mapping[str, Any]) -> str | None:
    """Return what is not met, in words; None where all is. A plain number is the least that is required."""
    by_name = {name.lower(): value for name, value in scores.items()}
    for name, condition in required.items():
        match = _CONDITION.fullmatch(str(condition))
        if match is None:
            raise UserError(f'require: {name}: {condition!r} is no condition; write it as ">= 0.60"')
        if name.lower() not in by_name:
            raise UserError(f"require: {name} is not among what is measured: {', '.join(scores)}")
        sign, limit = match[1] or ">=", float(match[2])
        if not _COMPARE[sign](by_name[name.lower()], limit):
            return f"{name} is {by_name[name.lower()]:.4f}, and {sign} {limit:g} is required"
    return None
