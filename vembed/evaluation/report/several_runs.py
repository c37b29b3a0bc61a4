"""Several runs side by side: scores with paired differences, curves, settings that differ, queries won and lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.evaluation.report.plots import Line
from vembed.evaluation.report.query_changes import (
    Changed,
    Comparison,
    compare_results,
    path_of,
    read_queries,
)
from vembed.evaluation.report.record import TABLE, RunRecord, metric_name, read_run
from vembed.evaluation.report.report import curves

NEVER_COMPARED = ("output_dir", "run_name", "resume")
"""Settings that differ between any two runs, and those that change no result."""


@dataclass(frozen=True)
class Entrant:
    """One of the compared runs."""

    name: str
    record: RunRecord
    queries: Mapping[str, Any] | None
    """Results per query of the weights that count; None if they were not recorded."""

    @property
    def is_finished(self) -> bool:
        """Return whether the run came to its end."""
        return bool(self.record.summary.finished)

    @property
    def state(self) -> str:
        """Finished, or stopped and where."""
        return (
            "finished"
            if self.is_finished
            else f"stopped after step {last_step(self.record):,d}"
        )


@dataclass(frozen=True)
class Against:
    """A run against the first one."""

    name: str
    comparison: Comparison | None
    reason: str
    """Reason why queries could not be paired; empty if they were."""
    has_other_data: bool = False
    """True if its scores are of other queries, so that they must not be compared."""


@dataclass(frozen=True)
class RunChart:
    """One quantity of all runs that recorded it."""

    title: str
    note: str
    lines: Sequence[Line]
    write: Callable[[float], str]
    has_points: bool = False


@dataclass(frozen=True)
class SeveralRuns:
    """Compared runs; the first one is the one that the others are compared with."""

    entrants: Sequence[Entrant]
    metric: str
    """The deciding metric of the first run that has one; empty without any evaluation."""
    against: Sequence[Against]
    """One for each run but the first."""

    @property
    def metrics(self) -> list[str]:
        """Metrics of the table, the deciding one first."""
        found = [
            key
            for key in TABLE
            if any(key in one.record.after for one in self.entrants)
        ]
        return list(dict.fromkeys([*([self.metric] if self.metric else []), *found]))

    @property
    def best(self) -> Entrant | None:
        """The run with the highest deciding metric, of those that were evaluated on the queries of the first."""
        scored = [
            one
            for one in self._same_data
            if self.metric and self.metric in one.record.after
        ]
        return max(scored, key=lambda one: one.record.after[self.metric], default=None)

    def is_alone(self, entrant: Entrant) -> bool:
        """Return whether no other run was evaluated on the same queries, so that there is nothing to be best of."""
        return not any(
            self.metric in one.record.after
            for one in self._same_data
            if one is not entrant
        )

    def comparable(self, number: int) -> bool:
        """Return whether the scores of a run may be compared with those of the first."""
        return number == 0 or not self.against[number - 1].has_other_data

    @property
    def _same_data(self) -> list[Entrant]:
        """Runs whose scores may be compared with those of the first, with itself."""
        return [
            one for number, one in enumerate(self.entrants) if self.comparable(number)
        ]

    def differing_settings(self) -> dict[str, list[Any]]:
        """Options that differ, with the value of each run."""
        configs = [one.record.config for one in self.entrants]
        names = list(dict.fromkeys(key for config in configs for key in config))
        # A run of an older vembed lacks newer options: they had no effect, as with their defaults.
        defaults = TrainConfig(model_name="", data_path="").to_dict()
        values = {
            name: [config.get(name, defaults.get(name)) for config in configs]
            for name in names
            if name not in NEVER_COMPARED
        }
        return {
            name: of_runs
            for name, of_runs in values.items()
            if any(one != of_runs[0] for one in of_runs)
        }

    def charts(self) -> list[RunChart]:
        """Curves of all runs: the deciding metric first, then what was logged by step."""
        found = [chart for chart in (self._evaluations(),) if chart is not None]
        by_title: dict[str, RunChart] = {}
        for number, one in enumerate(self.entrants):
            for curve in curves(one.record):
                line = Line(number, curve.steps, curve.values)
                earlier = by_title.get(curve.title)
                lines = [*(earlier.lines if earlier else ()), line]
                by_title[curve.title] = RunChart(
                    curve.title, curve.note, lines, curve.write
                )
        return found + list(by_title.values())

    def _evaluations(self) -> RunChart | None:
        lines = []
        for number, one in enumerate(self.entrants):
            points = [
                (each.step, each.scores[self.metric])
                for each in one.record.evaluations
                if self.metric in each.scores
            ]
            if points:
                steps, values = zip(*points, strict=True)
                lines.append(Line(number, steps, values))
        if not any(len(line.steps) > 1 for line in lines):
            return None
        return RunChart(
            metric_name(self.metric),
            "of each evaluation",
            lines,
            "{:.3f}".format,
            has_points=True,
        )


def last_step(record: RunRecord) -> int:
    """Return the last step that was logged or evaluated."""
    logged = [int(line["step"]) for line in record.steps[-1:]]
    return max([*logged, *(one.step for one in record.evaluations), 0])


def read_several(folders: Sequence[str | Path]) -> SeveralRuns:
    """Read the folders of at least two runs, finished or not."""
    paths = [Path(one) for one in folders]
    if len(paths) < 2:
        raise UserError(
            f"{len(paths)} run was given: a comparison needs two or more, as vembed compare runs/a runs/b"
        )
    resolved = [path.resolve() for path in paths]
    twice = next(
        (path for number, path in enumerate(resolved) if path in resolved[:number]),
        None,
    )
    if twice is not None:
        raise UserError(f"{twice} was given twice: give each run once")
    records = [read_run(path) for path in paths]
    entrants = [
        Entrant(name, record, _queries(record))
        for name, record in zip(_names(records), records, strict=True)
    ]
    metric = next(
        (record.headline for record in records if record.after and record.headline), ""
    )
    first, *others = entrants
    return SeveralRuns(
        entrants, metric, [_against(first, one, metric) for one in others]
    )


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return a different short name for each run: run_name or folder, with more of the path where these are equal."""
    names = [
        str(one.config.get("run_name") or one.folder.resolve().name) for one in records
    ]
    # run_name may be the same in all runs of one config.
    if len(set(names)) < len(names):
        names = [one.folder.resolve().name for one in records]
    # At some depth the paths differ: no folder was given twice.
    depth = 2
    while len(set(names)) < len(names):
        names = ["/".join(one.folder.resolve().parts[-depth:]) for one in records]
        depth += 1
    return names


def _queries(record: RunRecord) -> Mapping[str, Any] | None:
    return (
        None
        if record.final is None
        else read_queries(path_of(record.folder, record.final.step))
    )


def _against(first: Entrant, other: Entrant, metric: str) -> Against:
    """Compare the queries of two runs, if these are the same ones."""
    lacking = [one.name for one in (first, other) if one.queries is None]
    if first.queries is None or other.queries is None:
        return Against(
            other.name,
            None,
            f"no results per query were recorded by {' and '.join(lacking)}",
        )
    if _texts(first.queries) != _texts(other.queries) or len(
        first.queries["values"]
    ) != len(other.queries["values"]):
        return Against(
            other.name,
            None,
            f"{first.name} and {other.name} were evaluated on other queries",
            has_other_data=True,
        )
    return Against(
        other.name, compare_results(first.queries, other.queries, metric), ""
    )


def _texts(results: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(one["query"], one["relevant"]) for one in results["queries"]]


def as_json(runs: SeveralRuns) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    first = runs.entrants[0]
    best = runs.best
    return {
        "metric": runs.metric or None,
        "compared_with": first.name,
        "best": None if best is None else best.name,
        "runs": [run_json(one.name, one.record) for one in runs.entrants],
        "differences": [_against_json(one) for one in runs.against],
        "settings": {
            name: {
                one.name: value
                for one, value in zip(runs.entrants, values, strict=True)
            }
            for name, values in runs.differing_settings().items()
        },
    }


def run_json(name: str, record: RunRecord) -> dict[str, Any]:
    """Return the result of one run as JSON values."""
    return {
        "name": name,
        "folder": str(record.folder),
        "is_finished": bool(record.summary.finished),
        "last_step": last_step(record),
        "seconds": record.summary.seconds,
        "metric": record.headline or None,
        "scored_step": None if record.final is None else record.final.step,
        "before": record.before,
        "after": record.after,
        "evaluations": [
            {"step": each.step, "scores": each.scores} for each in record.evaluations
        ],
        "last_loss": record.steps[-1].get("loss") if record.steps else None,
    }


def _against_json(one: Against) -> dict[str, Any]:
    found = one.comparison
    if found is None:
        return {"run": one.name, "not_paired": one.reason}
    return {
        "run": one.name,
        "num_queries": found.num_queries,
        "num_better": found.num_better,
        "num_worse": found.num_worse,
        "metrics": {
            name: {
                "difference": each.difference,
                "low": each.low,
                "high": each.high,
                "is_clear": each.is_clear,
            }
            for name, each in found.intervals.items()
        },
        "wins": [_changed_json(each) for each in found.better],
        "losses": [_changed_json(each) for each in found.worse],
    }


def _changed_json(one: Changed) -> dict[str, Any]:
    return {
        "query": one.query["text"],
        "relevant": [item["text"] for item in one.relevant],
        "first": {
            "score": one.before,
            "found": [item["text"] for item, _ in one.found_before],
        },
        "this": {
            "score": one.after,
            "found": [item["text"] for item, _ in one.found_after],
        },
    }
