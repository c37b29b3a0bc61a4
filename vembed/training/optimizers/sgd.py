"""SGD: stochastic gradient descent without momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.training.optimizers.declaration import (
    OptimizedWeights,
    OptimizerKind,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from vembed.config.schema import OptimizerSection


class Sgd(OptimizerKind):
    """torch's SGD."""

    name = "sgd"
    summary = "Gradient descent without momentum and without state."
    state_bytes = 0.0

    def build(
        self,
        weights: OptimizedWeights,
        learning_rate: float,
        options: OptimizerSection,
        seed: int,
    ) -> tuple[Optimizer, str]:
        """Return torch's SGD."""
        import torch

        del options, seed
        # Without momentum torch's coupled weight decay is decoupled: p - lr (g + d p) = (1 - lr d) p - lr g.
        return torch.optim.SGD(weights.groups, lr=learning_rate), "SGD without momentum"
