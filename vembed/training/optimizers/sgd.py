"""SGD: stochastic gradient descent without momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.training.optimizers.declaration import (
    OptimizerInputs,
    OptimizerKind,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Sgd(OptimizerKind):
    """torch's SGD."""

    name = "sgd"
    summary = "Gradient descent without momentum and without state."
    state_bytes = 0.0

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """Return torch's SGD."""
        import torch

        # Without momentum torch's coupled weight decay is decoupled: p - lr (g + d p) = (1 - lr d) p - lr g.
        return torch.optim.SGD(
            inputs.groups, lr=inputs.learning_rate
        ), "SGD without momentum"
