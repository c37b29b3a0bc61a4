"""Losses by source and by term: means over the batches between two log lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vembed.distributed import collectives
from vembed.training.hooks import Hook, Run, StepReport


class LossesBySource(Hook):
    """Mean loss of each source since the last log line; of runs with several sources and homogeneous batches."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def on_start(self, run: Run) -> None:
        """Take the names of the sources."""
        if run.config.homogeneous_batches and len(run.data.examples.names) > 1:
            self._names = run.data.examples.names

    def on_step(self, report: StepReport) -> None:
        """Count the batches of a step."""
        for rank_batch, result in report.batches if self._names else ():
            source = rank_batch.source
            before = self._sums.get(source)
            share = result.loss_share.detach().to(torch.float64)
            self._sums[source] = share if before is None else before + share
            self._counts[source] = self._counts.get(source, 0) + 1

    def figures(self, report: StepReport) -> Mapping[str, Any]:
        """Return the mean losses since the last call. Collective; the same on every rank."""
        del report
        # All ranks have had the same sources, in the same steps.
        sources = sorted(self._sums)
        if not sources:
            return {}
        totals = collectives.sum_scalars([float(self._sums[source]) for source in sources])
        means = {
            f"loss/{self._names[source]}": total / self._counts[source]
            for source, total in zip(sources, totals, strict=True)
        }
        self._sums, self._counts = {}, {}
        return means


class LossesByTerm(Hook):
    """Mean of each term of `losses` since the last log line, without its weight; by source where each batch is of one
    source."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: dict[tuple[int, str], Tensor] = {}
        self._counts: dict[tuple[int, str], int] = {}

    def on_start(self, run: Run) -> None:
        """Take the names of the sources."""
        if run.config.homogeneous_batches and len(run.data.examples.names) > 1:
            self._names = run.data.examples.names

    def on_step(self, report: StepReport) -> None:
        """Add the terms of a step."""
        for rank_batch, result in report.batches:
            for name, value in result.terms.items():
                key = (rank_batch.source if self._names else 0, name)
                share = value.detach().to(torch.float64)
                before = self._sums.get(key)
                self._sums[key] = share if before is None else before + share
                self._counts[key] = self._counts.get(key, 0) + 1

    def figures(self, report: StepReport) -> Mapping[str, Any]:
        """Return the means since the last call. Collective; the same on every rank."""
        del report
        # All ranks have had the same sources, and so the same terms, in the same order.
        keys = list(self._sums)
        if not keys:
            return {}
        totals = collectives.sum_scalars([float(self._sums[key]) for key in keys])
        means = {
            f"loss/{self._names[source]}/{name}" if self._names else f"loss/{name}": total / self._counts[source, name]
            for (source, name), total in zip(keys, totals, strict=True)
        }
        self._sums, self._counts = {}, {}
        return means
