"""Exceptions that end a run: user errors, run errors and requested stops. Names, values and secrets as messages, reports and
cards write them.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import Any


class UserError(Exception):
    """An error in the config, the data or the environment. The message gives the values and what to do. Exit code 2."""


class RunError(Exception):
    """A run that cannot continue (out of memory, non-finite values, full disk), with advice. Exit code 1."""


class Stopped(BaseException):
    """A stop by a signal or the time limit, after a checkpoint was saved. Exit code 128 + signal, or 0.

    Like KeyboardInterrupt it is raised between any two instructions, where a library may catch every Exception, as logging
    does.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """Exit code of the process."""
        return 128 + self.signum if self.signum else 0


LONGEST_LIST = 12


def printable(name: str, longest: int = 40) -> str:
    """Return a name shortened and with only printable characters; two quotes for an empty one."""
    if not name:
        return "''"
    cut = name if len(name) <= longest else f"{name[:longest]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def joined(problems: Sequence[str]) -> list[str]:
    """Return problems of the form "place: reason", with consecutive equal reasons merged."""
    lines = []
    for _, group in groupby(problems, lambda problem: problem.partition(": ")[2]):
        first, *repeats = group
        lines.append(first)
        if repeats:
            places = [problem.partition(": ")[0] for problem in repeats]
            lines.append(f"{', '.join(places)}: the same")
    return lines


def listed(names: Iterable[str]) -> str:
    """Return names as a comma-separated list, shortened after LONGEST_LIST."""
    all_names = [printable(name) for name in names]
    text = ", ".join(all_names[:LONGEST_LIST])
    num_more = len(all_names) - LONGEST_LIST
    return f"{text} and {num_more:,d} more" if num_more > 0 else text


def nearest(
    word: str,
    names: Iterable[str],
    cutoff: float = 0.6,
) -> str | None:
    """Return the most similar name, or None if no name is similar."""
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of a sentence with the most similar name; empty if no name is similar."""
    near = nearest(word, names)
    return f", did you mean {near!r}?" if near else ""


def require_package(name: str, extra: str) -> None:
    """Raise UserError if a package is missing that an extra of vembed installs."""
    if find_spec(name) is None:
        raise UserError(f"{name} is not installed: pip install 'vembed[{extra}]'")


# ---- secrets -------------------------------------------------------------------

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
