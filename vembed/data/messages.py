"""Names and values from files as a message can show them: short, printable, on one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST_LIST = 12


def shown(name: str, longest: int = 40) -> str:
    """A name as it can be printed anywhere."""
    cut = name if len(name) <= longest else f"{name[:longest]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def joined(problems: Sequence[str]) -> list[str]:
    """Problems, each "place: reason", in which a reason that comes again right away is not said again."""
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
    """Several names, not too many."""
    all_names = [shown(name) for name in names]
    more = f" and {len(all_names) - LONGEST_LIST:,d} more" if len(all_names) > LONGEST_LIST else ""
    return ", ".join(all_names[:LONGEST_LIST]) + more
