"""The table of `python -m benchmarks.defaults table`: shares of the best gain, beside the range of the seeds."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.defaults_table import print_tables


def lines(scores: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    """Runs of a search: a rate, or none for the defaults -> the score of each seed."""
    place = {"collection": "packages", "family": "encoder", "size": 300, "max_length": 32}
    found: list[dict[str, Any]] = [{"run": {"what": "before", **place}, "score": 0.5}]
    for rate, by_seed in scores.items():
        options = {"learning_rate": float(rate)} if rate else {}
        for seed, score in enumerate(by_seed):
            found.append({"run": {"what": "search", **place, "options": options, "seed": seed}, "score": score})
    return found


@pytest.mark.parametrize(
    ("scores", "share"),
    [
        ({"": (0.60, 0.61, 0.62), "8e-5": (0.62, 0.63, 0.64)},
         "85%, 0.0200 less; the seeds' range is 0.0200 (1 tried)"),
        ({"": (0.60, 0.61, 0.62), "8e-5": (0.90,)}, "100% (1 tried)"),
        ({"": (0.40, 0.41, 0.42), "8e-5": (0.40, 0.40, 0.40)}, "no gain at any value (1 tried)"),
    ],
)  # fmt: skip
def test_share_of_the_best_gain(
    scores: dict[str, tuple[float, ...]], share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_tables(lines(scores))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| encoder")]
    assert row.split(" | ")[-1] == f"{share} |"
    assert row.startswith("| encoder, packages, 300 rows | 0.5000 | ")
