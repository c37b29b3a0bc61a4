"""Outcome of a search: the best config as YAML, all trials as JSON, and a picture of what mattered."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vembed.config.loading import load_config, render
from vembed.evaluation.report.pictures import write_picture
from vembed.evaluation.report.plots import bars_svg

BEST = "best.yaml"
TRIALS = "trials.json"
FEWEST = 4
"""Finished trials from which the importance of options is estimated."""


@dataclass(frozen=True)
class SearchOutcome:
    """Result of a search."""

    best_config: Path
    best_trial: int
    score: float
    score_without_search: float
    values: dict[str, Any]
    """Options that the best trial sets."""
    importance: dict[str, float]
    """Each option's share of the differences between trials; empty with few trials."""
    trials: list[dict[str, Any]]
    lines: list[str]
    """Text for the console."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, without the text."""
        return {name: value for name, value in asdict(self).items() if name != "lines"}


def write_outcome(
    folder: Path, config: str, overrides: Sequence[str], study: Any
) -> SearchOutcome:
    """Write the files; return the result."""
    trials = [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name in ("COMPLETE", "PRUNED")
    ]
    complete = [entry for entry in trials if entry.state.name == "COMPLETE"]
    best = max(complete, key=lambda entry: entry.value)
    first = min(trials, key=lambda entry: entry.number)
    plain = [
        {
            "trial": entry.number,
            "state": entry.state.name.lower(),
            "score": entry.value,
            "options": entry.params,
            "scores": list(entry.intermediate_values.values()),
        }
        for entry in trials
    ]
    (folder / TRIALS).write_text(json.dumps(plain, indent=1) + "\n", "utf-8")
    values = (
        {name: rounded(value) for name, value in best.params.items()}
        if best.number != first.number
        else {}
    )
    args = [f"{name}={value}" for name, value in values.items()]
    # The search's trials have their own folders; the best config trains in that of the user's config.
    text = render(load_config(config, [*overrides, *args]))
    head = f"# The best of {len(trials)} trials of {config}: {best.value:.4f}, and {first.value:.4f} without a search.\n"
    (folder / BEST).write_text(head + text, "utf-8")
    lines = [
        f"best: trial {best.number}, {best.value:.4f} ({best.value - first.value:+.4f} to the config as it is)"
    ]
    lines += [f"  {name}: {value:g}" for name, value in values.items()]
    matters = importance(study) if len(complete) >= FEWEST else {}
    if matters:
        svg = bars_svg(matters, "share of the difference between trials")
        for kind in ("svg", "png"):
            write_picture(folder / f"importance.{kind}", svg)
        lines.append(
            "what mattered: "
            + ", ".join(f"{name} {share:.0%}" for name, share in matters.items())
        )
    else:
        lines.append(
            f"what mattered: not estimated from {len(complete)} trials that came to their end"
        )
    lines.append(f"train with it: vembed train {folder / BEST}")
    return SearchOutcome(
        folder / BEST,
        best.number,
        best.value,
        first.value,
        values,
        dict(matters),
        plain,
        lines,
    )


def importance(study: Any) -> Mapping[str, float]:
    """Return each option's share of the differences between trials, the largest first."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    with warnings.catch_warnings():
        # Of few trials, or equal ones: the shares are then equal, which the caller's line shows.
        warnings.filterwarnings("ignore", "Target and region quantiles", UserWarning)
        # PED-ANOVA by name: the default of earlier versions of optuna needs scikit-learn.
        shares: dict[str, float] = get_param_importances(
            study, evaluator=PedAnovaImportanceEvaluator()
        )
    return shares


def rounded(value: float) -> float:
    """Return the value as the trial used it."""
    return float(f"{value:.3g}") if isinstance(value, float) else value
