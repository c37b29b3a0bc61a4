"""AdamW: of torch, and with stochastic rounding for weights that are held in bfloat16 alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.training.optimizers.declaration import (
    ADAM_OPTIONS,
    OptimizerInputs,
    OptimizerKind,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


class AdamW(OptimizerKind):
    """torch's AdamW, fused where all weights allow it."""

    name = "adamw"
    summary = "Adam with decoupled weight decay, the default."
    spellings = "adamw_torch adamw_torch_fused adamw_hf"
    options = ADAM_OPTIONS
    state_bytes = 8.0
    trains_half = True

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """Return torch's AdamW, or one that rounds stochastically."""
        import torch

        from vembed.training.optimizers.rounded_adamw import RoundedAdamW

        arguments, betas = inputs.adam_arguments()
        if inputs.is_half:
            rounded = RoundedAdamW(inputs.groups, **arguments, seed=inputs.seed)
            return (
                rounded,
                f"AdamW with stochastic rounding (the weights are bfloat16 alone), {betas}",
            )
        # On two CPU cores the fused step takes a third of the plain one's time. It supports DTensors.
        fused = all(
            tensor.is_floating_point() and tensor.device.type in FUSED_DEVICES
            for tensor in inputs.tensors()
        )
        optimizer = torch.optim.AdamW(inputs.groups, **arguments, fused=fused)
        return optimizer, f"AdamW{' (fused)' if fused else ''}, {betas}"
