"""Formatting of names and values from files for messages: short, printable, on one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST_LIST = 12

ROOM = "free some space, or set XDG_CACHE_HOME to a folder with more"
"""End of a message about a disk without room for the cache folder."""


def printable(name: str, longest: int = 40) -> str:
    """Return a name shortened and with only printable characters; two quotes for an empty one."""
    if not name:
        return "''"
    cut = name if len(name) <= longest else f"{name[:longest]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def joined(problems: Sequence[str]) -> list[str]:
    """Return problems of the form "place: reason", with consecutive equal reasons merged."""
    lines: list[str] = []
    last = None
    for problem in problems:
        place, _, reason = problem.partition(": ")
        if reason != last:
            lines.append(problem)
            repeats: list[str] = []
        else:
            if repeats:
                lines.pop()
            repeats.append(place)
            lines.append(f"{', '.join(repeats)}: the same")
        last = reason
    return lines


def listed(names: Iterable[str]) -> str:
    """Return names as a comma-separated list, shortened after LONGEST_LIST."""
    all_names = [printable(name) for name in names]
    more = (
        f" and {len(all_names) - LONGEST_LIST:,d} more"
        if len(all_names) > LONGEST_LIST
        else ""
    )
    return ", ".join(all_names[:LONGEST_LIST]) + more
