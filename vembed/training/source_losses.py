"""Losses by task and by term: means over the batches between two log lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vembed.config.terms import task_names
from vembed.parallel import collectives
from vembed.training.hooks import Hook, Run, StepReport


class LossesBySource(Hook):
    """Mean loss of each task since the last log line; of runs with several sources and homogeneous batches. A source is
    a task of its own, unless `homogeneous_batches: task` joins it with others."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def on_start(self, run: Run) -> None:
        """Take the names of the sources."""
        if run.config.data.homogeneous_batches and len(run.data.examples.names) > 1:
            self._names = tuple(task_names(run.config, run.data.examples.names))

    def on_step(self, report: StepReport) -> None:
        """Count the batches of a step."""
        for rank_batch, result in report.batches if self._names else ():
            task = self._names[rank_batch.source]
            before = self._sums.get(task)
            share = result.loss_share.detach().to(torch.float64)
            self._sums[task] = share if before is None else before + share
            self._counts[task] = self._counts.get(task, 0) + 1

    def figures(self, report: StepReport) -> Mapping[str, Any]:
        """Return the mean losses since the last call. Collective; the same on every rank."""
        del report
        # All ranks have had the same tasks, in the same steps.
        tasks = sorted(self._sums)
        if not tasks:
            return {}
        totals = collectives.sum_scalars([float(self._sums[task]) for task in tasks])
        means = {
            f"loss/{task}": total / self._counts[task]
            for task, total in zip(tasks, totals, strict=True)
        }
        self._sums, self._counts = {}, {}
        return means


class LossesByTerm(Hook):
    """Mean of each term of `losses` since the last log line, without its weight; by task where each batch is of one
    task."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def on_start(self, run: Run) -> None:
        """Take the names of the sources."""
        if run.config.data.homogeneous_batches and len(run.data.examples.names) > 1:
            self._names = tuple(task_names(run.config, run.data.examples.names))

    def on_step(self, report: StepReport) -> None:
        """Add the terms of a step."""
        for rank_batch, result in report.batches:
            for name, value in result.terms.items():
                key = (self._names[rank_batch.source] if self._names else "", name)
                share = value.detach().to(torch.float64)
                before = self._sums.get(key)
                self._sums[key] = share if before is None else before + share
                self._counts[key] = self._counts.get(key, 0) + 1

    def figures(self, report: StepReport) -> Mapping[str, Any]:
        """Return the means since the last call. Collective; the same on every rank."""
        del report
        # All ranks have had the same tasks, and so the same terms, in the same order.
        keys = list(self._sums)
        if not keys:
            return {}
        totals = collectives.sum_scalars([float(self._sums[key]) for key in keys])
        means = {
            f"loss/{task}/{name}" if task else f"loss/{name}": total
            / self._counts[task, name]
            for (task, name), total in zip(keys, totals, strict=True)
        }
        self._sums, self._counts = {}, {}
        return means
