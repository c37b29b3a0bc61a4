"""Violation: a rule that a config breaks, with the sentence and the options that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: the options involved and the message."""

    options: tuple[str, ...]
    sentence: str

    def text(self, places: Mapping[str, str]) -> str:
        """Return the message, followed by the places where its options were set."""
        said = "; ".join(
            f"{name}: {places[name]}" for name in self.options if name in places
        )
        return f"{self.sentence} ({said})" if said else self.sentence


def word(value: object) -> str:
    """Return a value as a config file would write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
