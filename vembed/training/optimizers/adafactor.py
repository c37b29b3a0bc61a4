"""Adafactor: row and column means in place of second moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.training.optimizers.declaration import (
    OptimizerInputs,
    OptimizerKind,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Adafactor(OptimizerKind):
    """torch's Adafactor."""

    name = "adafactor"
    summary = "Keeps row and column means in place of a second moment of each weight."
    state_bytes = 0.1

    def refusal(self, inputs: OptimizerInputs) -> str | None:
        """Refuse shards: its means run over whole rows and columns."""
        if inputs.is_sharded or inputs.is_flat:
            return (
                "optim: adafactor takes means over whole rows and columns, and torch's does not run on sharded "
                "parameters: use optim: adamw_8bit with fsdp_version: 2, or strategy: ddp"
            )
        return None

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """Return torch's Adafactor."""
        import torch

        return torch.optim.Adafactor(
            inputs.groups, lr=inputs.learning_rate
        ), "Adafactor"
