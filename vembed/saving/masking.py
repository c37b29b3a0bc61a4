"""Secrets are masked: in the log, in reports and in model cards."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"token|secret|password|passwd|credential|api_?key|auth", re.IGNORECASE
)
_SECRET_VARIABLE = re.compile(
    r"token|secret|password|passwd|credential|api_?key", re.IGNORECASE
)
_SECRET_VALUE = re.compile(
    # The second alternative is `user:password@` behind the `//` of an address.
    r"\b(hf_\w{8,}|sk-\w{8,}|ghp_\w{8,}|github_pat_\w{8,}|AKIA\w{12,})|(?<=//)[^/\s@]+:[^/\s@]+@"
)
_TOKEN_COUNTS = re.compile(r"_tokens$|^tokenizer")
"""Names of options that are about the tokens of texts."""
MIN_SECRET_LENGTH = 8


def is_secret(name: str) -> bool:
    """Return whether an option of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _TOKEN_COUNTS.search(name)


def masked(text: str) -> str:
    """Return a text without the values of secret environment variables and what looks like a key."""
    for name, secret in os.environ.items():
        if _SECRET_VARIABLE.search(name) and len(secret) >= MIN_SECRET_LENGTH:
            text = text.replace(secret, MASK)
    return _SECRET_VALUE.sub(MASK, text)


def masked_option(name: str, value: Any) -> Any:
    """Return the value of an option with its secrets masked, also those inside lists and mappings."""
    if is_secret(name) and isinstance(value, str):
        return MASK
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list):
        return [masked_option(name, entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: masked_option(str(key), inner) for key, inner in value.items()}
    return value
