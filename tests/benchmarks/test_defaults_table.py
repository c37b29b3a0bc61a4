"""The table of `python -m benchmarks.defaults table`: shares of the gain of the best value, on other seeds."""

import pytest

from benchmarks.defaults_table import print_tables


def share_and_best(scores, capsys):
    """The columns of the table for these runs: a rate, or none for the defaults -> the score of each seed."""
    place = {
        "collection": "packages",
        "family": "encoder",
        "size": 300,
        "max_length": 32,
    }
    runs = [{"run": {"what": "before", **place}, "score": 0.5}]
    for rate, by_seed in scores.items():
        options = {"learning_rate": float(rate)} if rate else {}
        for seed, score in enumerate(by_seed):
            run = {"what": "search", **place, "options": options, "seed": seed}
            runs.append({"run": run, "score": score})
    print_tables(runs, num_seeds=2)
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("| encoder"):
            columns = line.strip("| ").split(" | ")
    return columns[3], columns[-1]


@pytest.mark.parametrize(
    ("scores", "best", "share"),
    [
        # The first two seeds choose the rate, and the last two compare it.
        (
            {"": (0.60, 0.61, 0.60, 0.60), "8e-5": (0.62, 0.63, 0.61, 0.63)},
            "`learning_rate: 8e-05`",
            "83%",
        ),
        ({"": (0.60, 0.61), "8e-5": (0.55, 0.60)}, "the defaults", "100%"),
        ({"": (0.40, 0.41), "8e-5": (0.40, 0.40)}, "the defaults", "no gain"),
    ],
)
def test_share_of_the_best_gain(scores, best, share, capsys):
    assert share_and_best(scores, capsys) == (best, share)


def test_a_search_that_has_not_ended_is_said(capsys):
    best, _ = share_and_best({"": (0.60, 0.61), "8e-5": (0.62, 0.63)}, capsys)
    assert best == "the search has not ended"
