"""The table of `python -m benchmarks.defaults table`: shares of the gain of the best value, on other seeds."""

import pytest

from benchmarks.defaults_table import print_tables


def lines(scores):
    """Runs of a search: a rate, or none for the defaults -> the score of each seed."""
    place = {
        "collection": "packages",
        "family": "encoder",
        "size": 300,
        "max_length": 32,
    }
    actual = [{"run": {"what": "before", **place}, "score": 0.5}]
    for rate, by_seed in scores.items():
        options = {"learning_rate": float(rate)} if rate else {}
        for seed, score in enumerate(by_seed):
            actual.append(
                {
                    "run": {
                        "what": "search",
                        **place,
                        "options": options,
                        "seed": seed,
                    },
                    "score": score,
                }
            )
    return actual


@pytest.mark.parametrize(
    ("scores", "best", "share"),
    [
        # The first two seeds choose the rate, and the last two compare it.
        (
            {"": (0.60, 0.61, 0.60, 0.60), "8e-5": (0.62, 0.63, 0.61, 0.63)},
            "`learning_rate: 8e-05`",
            "83%",
        ),
        (
            {"": (0.60, 0.61, 0.62, 0.64), "8e-5": (0.62, 0.63, 0.60, 0.60)},
            "`learning_rate: 8e-05`",
            "130%",
        ),
        ({"": (0.60, 0.61), "8e-5": (0.90,)}, "the defaults", "100%"),
        ({"": (0.60, 0.61), "8e-5": (0.55, 0.60)}, "the defaults", "100%"),
        ({"": (0.40, 0.41), "8e-5": (0.40, 0.40)}, "the defaults", "no gain"),
    ],
)
def test_share_of_the_best_gain(scores, best, share, capsys):
    print_tables(lines(scores), num_seeds=2)
    (row,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| encoder")
    ]
    assert row.startswith("| encoder, packages, 300 rows | 0.5000 | 1 | ")
    assert row.split(" | ")[3] == best and row.split(" | ")[-1] == f"{share} |"


def test_a_search_that_has_not_ended_is_said(capsys):
    for scores in ({"": (0.6,)}, {"": (0.60, 0.61), "8e-5": (0.62, 0.63)}):
        print_tables(lines(scores), num_seeds=2)
        (row,) = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("| encoder")
        ]
        assert row.split(" | ")[3] == "the search has not ended"
