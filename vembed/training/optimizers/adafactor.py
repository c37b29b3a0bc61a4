"""Adafactor: row and column means in place of second moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.training.optimizers.declaration import (
    OptimizedWeights,
    OptimizerKind,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from vembed.config.schema import OptimizerSection


class Adafactor(OptimizerKind):
    """torch's Adafactor."""

    name = "adafactor"
    summary = "Keeps row and column means in place of a second moment of each weight."
    state_bytes = 0.1

    def refusal(self, weights: OptimizedWeights) -> str | None:
        """Refuse shards: its means run over whole rows and columns."""
        if weights.is_sharded or weights.is_flat:
            return (
                "optim: adafactor takes means over whole rows and columns, and torch's does not run on sharded "
                "parameters: use optim: adamw_8bit with fsdp_version: 2, or strategy: ddp"
            )
        return None

    def build(
        self,
        weights: OptimizedWeights,
        learning_rate: float,
        options: OptimizerSection,
        seed: int,
    ) -> tuple[Optimizer, str]:
        """Return torch's Adafactor."""
        import torch

        del options, seed
        return torch.optim.Adafactor(weights.groups, lr=learning_rate), "Adafactor"
