"""Auxiliary losses of a model: sums and counts per micro-batch, whose quotient is exact over the whole global batch.

Each loss is (sum of the sums) / (sum of the counts) over all micro-batches and ranks, never a mean of means. The counts
of the global batch must therefore be known before the first backward pass: the forward passes of `encode` count, one
collective adds up, and `backward` divides.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vembed.config.schema import ObjectiveSection
from vembed.data.batching.rank_batch import MicroBatch, RankBatch, index_tensor
from vembed.errors import UserError
from vembed.losses.table import LOSSES
from vembed.parallel import collectives

SliceLosses = Sequence[Mapping[str, Tensor]]
"""Auxiliary losses of each slice of a micro-batch: name -> [2, n] or [2], sums and counts."""


class AuxiliaryBatch:
    """Sums and counts of one global batch."""

    def __init__(
        self,
        objective: ObjectiveSection,
        rank_batch: RankBatch,
        device: torch.device,
    ) -> None:
        self.objective = objective
        self.weights = objective.auxiliary_losses or {}
        inputs = (rank_batch.query, rank_batch.positive, rank_batch.negative)
        counts = np.bincount(np.concatenate(inputs), minlength=len(rank_batch.features))
        # [n] how often each distinct input of this rank occurs in its rows.
        self.occurrences = torch.from_numpy(counts).to(device)
        # Name -> [2] float64, the sum and the count of this rank.
        self.of_rank: dict[str, Tensor] = {}
        # The same over all ranks, on the host.
        self.of_batch: dict[str, tuple[float, float]] = {}

    def add(self, micro_batch: MicroBatch, losses: SliceLosses) -> None:
        """Add the sums and counts of one micro-batch."""
        for (_, inputs), slice_losses in zip(micro_batch, losses, strict=True):
            for name, values in slice_losses.items():
                zero = torch.zeros(2, dtype=torch.float64, device=values.device)
                # A dummy adds the name alone: every rank then has the same names.
                total = self.of_rank.setdefault(name, zero)
                if inputs:
                    weights = self._occurrences(values, inputs)
                    total += (values.detach() * weights).reshape(2, -1).sum(dim=1)

    def sum_over_ranks(self) -> None:
        """Set the sums and counts of the global batch. Collective if the model has auxiliary losses."""
        # Sorted: the ranks may have met the losses in another order, and the sums below have no names.
        names = sorted(self.of_rank)
        unknown = sorted(self.weights.keys() - self.of_rank.keys())
        if unknown:
            raise UserError(
                f"auxiliary_losses: the model returns no {unknown[0]} in training mode; it returns "
                f"{', '.join(names) or 'none'}"
            )
        if not names:
            objective = self.objective
            if objective.losses is None and LOSSES[objective.loss].is_of_model:
                raise UserError(
                    "loss: none trains by the losses that the model returns, and it returns none"
                )
            return
        # [names, 2] as one list of numbers: the sum and the count of each loss.
        of_rank = torch.stack([self.of_rank[name] for name in names])
        totals = collectives.sum_scalars(of_rank.flatten().tolist())
        for index, name in enumerate(names):
            count = totals[2 * index + 1]
            self.of_batch[name] = (totals[2 * index], count)

    def means(self) -> dict[str, float]:
        """Return each loss of the global batch, without its weight."""
        means = {}
        for name, (total, count) in self.of_batch.items():
            means[name] = total / count if count else 0.0
        return means

    def loss_share(self) -> Tensor:
        """Return this rank's part of the weighted sum. The parts of all ranks add up to it."""
        share = self.occurrences.new_zeros((), dtype=torch.float64)
        for name in self.of_batch:
            share = share + self._factor(name) * self.of_rank[name][0]
        return share

    def micro_batch_share(
        self, micro_batch: MicroBatch, losses: SliceLosses
    ) -> Tensor | None:
        """Return what one micro-batch adds to the weighted sum, with its graph; None if nothing has a graph."""
        terms = []
        for (_, inputs), slice_losses in zip(micro_batch, losses, strict=True):
            for name, values in slice_losses.items():
                if not values.requires_grad:
                    continue
                if inputs:
                    sums = values[0] * self._occurrences(values, inputs)
                    terms.append(self._factor(name) * sums.sum())
                else:
                    # A dummy counts nothing, but its backward takes part in the ranks' collectives.
                    terms.append(0.0 * values[0].sum())
        return torch.stack(terms).sum() if terms else None

    def _factor(self, name: str) -> float:
        """Return weight / count. A loss that counted nothing in the whole batch is left out, not divided by zero."""
        count = self.of_batch[name][1]
        return self.weights.get(name, 1.0) / count if count else 0.0

    def _occurrences(self, values: Tensor, inputs: Sequence[int]) -> Tensor:
        """Return the occurrences of each input; 1 for sums over a slice, whose inputs cannot be told apart."""
        if values.shape[1:] != (len(inputs),):
            return values.new_ones(())
        index = index_tensor(inputs, self.occurrences.device)
        return self.occurrences[index].to(values.dtype)
