"""Auxiliary losses of a model: sums and counts per micro-batch, whose quotient is exact over the whole global batch.

Each loss is (sum of the sums) / (sum of the counts) over all micro-batches and ranks, never a mean of means. The counts
of the global batch must therefore be known before the first backward pass: the forward passes of `encode` count, one
collective adds up, and `backward` divides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vembed.config.schema import ObjectiveSection
from vembed.data.batching.feeding import row_index
from vembed.data.batching.rank_batch import RankBatch
from vembed.errors import UserError
from vembed.losses.table import LOSSES
from vembed.parallel import collectives

Parts = Sequence[Mapping[str, Tensor]]
"""Auxiliary losses of each slice of a micro-batch: name -> [2, n] or [2, 1], sums and counts."""


@dataclass(slots=True)
class AuxiliaryBatch:
    """Sums and counts of one global batch."""

    occurrences: Tensor
    """[n] how often each distinct input of this rank occurs in its rows."""
    of_rank: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [2] float64, this rank's sum and count."""
    total: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The same over all ranks."""

    def means(self) -> dict[str, float]:
        """Return each loss of the global batch."""
        return {
            name: value / count if count else 0.0
            for name, (value, count) in self.total.items()
        }


class AuxiliaryLosses:
    """The auxiliary losses of a run's model, with their weights."""

    def __init__(self, objective: ObjectiveSection) -> None:
        self.weights = dict(objective.auxiliary_losses or {})
        self.is_alone = objective.losses is None and LOSSES[objective.loss].is_of_model

    def begin(self, rank_batch: RankBatch, device: torch.device) -> AuxiliaryBatch:
        """Return the empty sums of a batch."""
        roles = (rank_batch.query, rank_batch.positive, rank_batch.negative)
        counted = np.bincount(np.concatenate(roles), minlength=len(rank_batch.features))
        return AuxiliaryBatch(torch.from_numpy(counted).to(device))

    def count(
        self, batch: AuxiliaryBatch, parts: Parts, rows: Sequence[Sequence[int]]
    ) -> None:
        """Add the sums and counts of one micro-batch. A dummy adds its names alone, which every rank then has."""
        for losses, places in zip(parts, rows, strict=True):
            for name, values in losses.items():
                zero = torch.zeros(2, dtype=torch.float64, device=values.device)
                total = batch.of_rank.setdefault(name, zero)
                if places:
                    weights = _weights(batch, values, places)
                    total += (values.detach() * weights).sum(dim=1)

    def agree(self, batch: AuxiliaryBatch) -> None:
        """Set the sums and counts of the global batch. Collective if the model has auxiliary losses."""
        # Sorted: the ranks may have met the losses in another order, and the sums below have no names.
        names = sorted(batch.of_rank)
        unknown = sorted(self.weights.keys() - batch.of_rank.keys())
        if unknown:
            raise UserError(
                f"auxiliary_losses: the model returns no {unknown[0]} in training mode; it returns "
                f"{', '.join(names) or 'none'}"
            )
        if not names:
            if self.is_alone:
                raise UserError(
                    "loss: none trains by the losses that the model returns, and it returns none"
                )
            return
        flat = torch.stack([batch.of_rank[name] for name in names]).flatten().tolist()
        summed = collectives.sum_scalars(flat)
        for number, name in enumerate(names):
            batch.total[name] = (summed[2 * number], summed[2 * number + 1])

    def share(self, batch: AuxiliaryBatch) -> Tensor:
        """Return this rank's part of the weighted sum. The parts of all ranks add up to it."""
        total = batch.occurrences.new_zeros((), dtype=torch.float64)
        for name, (_, count) in batch.total.items():
            # A loss that counted nothing in the whole batch is left out, and not divided by zero.
            if count:
                weight = self.weights.get(name, 1.0)
                total = total + weight * batch.of_rank[name][0] / count
        return total

    def surrogate(
        self, batch: AuxiliaryBatch, parts: Parts, rows: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """Return what one micro-batch adds to the weighted sum, with its graph; None if nothing has a graph."""
        terms: list[Tensor] = []
        for losses, places in zip(parts, rows, strict=True):
            for name, values in losses.items():
                if not values.requires_grad:
                    continue
                sums = values[0]
                # A dummy counts nothing, but its backward takes part in the ranks' collectives.
                factor = 0.0
                count = batch.total[name][1]
                if places:
                    sums = sums * _weights(batch, values, places)
                    factor = self.weights.get(name, 1.0) / count if count else 0.0
                terms.append(factor * sums.sum())
        return torch.stack(terms).sum() if terms else None


def _weights(batch: AuxiliaryBatch, values: Tensor, places: Sequence[int]) -> Tensor:
    """Return the occurrences of each input; 1 for sums over a whole micro-batch, whose inputs cannot be told apart."""
    if values.shape[1] != len(places):
        return values.new_ones(values.shape[1])
    index = row_index(places, batch.occurrences.device)
    return batch.occurrences[index].to(values.dtype)
