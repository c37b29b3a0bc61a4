"""Tables of `python -m benchmarks.defaults table`: what the runs of a JSONL come to, as Markdown."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Run = dict[str, Any]
Scores = dict[str, dict[int, float]]
"""Options as JSON -> seed -> score."""


def print_tables(lines: Sequence[Run], num_seeds: int) -> None:
    """Print the shares of the defaults in the best gain, and those of adapters in the gain of all weights.
    `num_seeds`: those of a search, which chose the best value; it is compared with the defaults on the others."""
    before = {
        _place(entry["run"]): float(entry["score"])
        for entry in lines
        if entry["run"]["what"] == "before"
    }
    groups: defaultdict[tuple[str, ...], Scores] = defaultdict(
        lambda: defaultdict(dict)
    )
    for entry in lines:
        run = entry["run"]
        if "options" in run:
            place = (run["what"], *_place(run))
            groups[place][json.dumps(run["options"], sort_keys=True)][run["seed"]] = (
                float(entry["score"])
            )
    print(
        "| model, collection, rows | before | tried | best of the search | defaults, by seed | the best, by seed "
        "| share of the best gain |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for (what, *place), scores in groups.items():
        if what == "search":
            print(search_row(place, before[tuple(place)], scores, num_seeds))
    print(
        "\n| model, collection, rows | steps | trained, rate | gain by seed | share |\n| --- | --- | --- | --- | --- |"
    )
    for (what, *place), scores in groups.items():
        if what == "adapters":
            print("\n".join(adapter_rows(place, before[tuple(place)], scores)))


def search_row(
    place: Sequence[str], before: float, scores: Scores, num_seeds: int
) -> str:
    """Return the row of one model on one collection."""
    means = {
        options: statistics.mean(by_seed[seed] for seed in range(num_seeds))
        for options, by_seed in scores.items()
        if by_seed.keys() >= set(range(num_seeds))
    }
    start = f"| {', '.join(place[:3])} | {before:.4f} | {len(scores) - 1:,d} |"
    best = max(means, key=lambda options: means[options], default="{}")
    others = {
        seed: score
        for seed, score in scores[best].items()
        if seed >= num_seeds or best == "{}"
    }
    ours = {seed: scores["{}"][seed] for seed in others if seed in scores["{}"]}
    if best not in means or not ours:
        return f"{start} the search has not ended | | | |"
    gain, most = (
        statistics.mean(by_seed[seed] for seed in ours) - before
        for by_seed in (ours, others)
    )
    return (
        f"{start} {_named(best)} | {_by_seed(ours)} | "
        f"{_by_seed(others)} | {f'{gain / most:.0%}' if most > 0 else 'no gain'} |"
    )


def _by_seed(scores: Mapping[int, float]) -> str:
    return ", ".join(f"{score:.4f}" for _, score in sorted(scores.items()))


def adapter_rows(
    place: Sequence[str], before: float, scores: Mapping[str, Mapping[int, float]]
) -> list[str]:
    """Return a row for each rate, as a share of what all weights gain at their default in the same steps."""
    rows = []
    for key, by_seed in scores.items():
        options = json.loads(key)
        steps = options["max_steps"]
        whole = scores[
            json.dumps(
                {"eval_before": False, "eval_steps": None, "max_steps": steps},
                sort_keys=True,
            )
        ]
        gains = [value - before for _, value in sorted(by_seed.items())]
        most = statistics.mean(whole.values()) - before
        trained = "adapters" if options.get("use_lora") else "all weights"
        rows.append(
            f"| {', '.join(place[:3])} | {steps} | {trained}, {options.get('learning_rate', 'auto')} "
            f"| {', '.join(f'{gain:.4f}' for gain in gains)} | {statistics.mean(gains) / most:.0%} |"
        )
    return sorted(rows)


def _place(run: Run) -> tuple[str, ...]:
    return (
        run["family"],
        run["collection"],
        f"{run['size']:,d} rows",
        str(run["max_length"]),
    )


def _named(options: str) -> str:
    values = json.loads(options)
    named = {
        name: f"{value:g}" if isinstance(value, float) else json.dumps(value)
        for name, value in values.items()
    }
    return (
        ", ".join(f"`{name}: {value}`" for name, value in named.items())
        or "the defaults"
    )
