"""Questions on a terminal about columns that were guessed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from vembed.data_tools.init.guess import Guess

MOST_SHOWN = 12


def is_terminal() -> bool:
    """Return whether somebody can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirm(
    guess: Guess, missing: Sequence[str], read: Callable[[str], str] = input
) -> dict[str, str]:
    """Ask which column each missing part is; an empty answer takes the guess. Return the column mapping."""
    columns = guess.candidates[:MOST_SHOWN]
    mapping: dict[str, str] = {}
    for role in missing:
        likely = next(
            (name for name, target in guess.mapping.items() if target.startswith(role)),
            None,
        )
        what = "the query" if role == "query" else "what the query should find"
        lines = [f"  {number}  {one.shown}" for number, one in enumerate(columns, 1)]
        default = next(
            (
                str(number)
                for number, one in enumerate(columns, 1)
                if one.name == likely
            ),
            "",
        )
        prompt = "\n".join(
            [
                f"Which column is {what}?",
                *lines,
                f"Number{f' [{default}]' if default else ''}: ",
            ]
        )
        answer = read(prompt).strip() or default
        while not (answer.isdecimal() and 1 <= int(answer) <= len(columns)):
            answer = read(f"A number from 1 to {len(columns)}: ").strip() or default
        chosen = columns[int(answer) - 1]
        # A column of paths holds images.
        mapping[chosen.name] = f"{role}_image" if chosen.paths > 0.5 else role
    return mapping
