"""AdamW with state in 8 bits: of bitsandbytes, and of torchao on shards."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vembed.errors import UserError
from vembed.training.optimizers.declaration import (
    ADAM_OPTIONS,
    OptimizerInputs,
    OptimizerKind,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("vembed")


class AdamW8Bit(OptimizerKind):
    """AdamW whose moments take a quarter of the memory."""

    name = "adamw_8bit"
    summary = "AdamW whose state takes a quarter of the memory."
    spellings = "adamw_bnb_8bit adamw8bit"
    options = ADAM_OPTIONS
    state_bytes = 2.1
    is_paged = False

    def refusal(self, inputs: OptimizerInputs) -> str | None:
        """Refuse flat pieces: its blocks are of whole parameters."""
        if inputs.is_flat:
            return (
                f"optim: {self.name} holds blocks of whole parameters, and fsdp_version: 1 leaves each process a flat "
                "piece of them: use fsdp_version: 2, or optim: adamw"
            )
        return None

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """Return torchao's AdamW8bit for shards, and bitsandbytes' for whole inputs."""
        arguments, betas = inputs.adam_arguments()
        if inputs.is_sharded:
            # It supports DTensors, which bitsandbytes' kernels do not.
            optimizer = self._of_torchao(inputs, arguments)
            return optimizer, f"AdamW8bit of torchao (sharded parameters), {betas}"
        is_paged = self.is_paged
        if is_paged and not all(tensor.is_cuda for tensor in inputs.tensors()):
            log.warning(
                f"optim: {self.name} needs a GPU to page from; without one it is adamw_8bit"
            )
            is_paged = False
        optimizer = self._of_bitsandbytes(inputs, arguments, is_paged=is_paged)
        return optimizer, f"{type(optimizer).__name__} of bitsandbytes, {betas}"

    def _of_bitsandbytes(
        self, inputs: OptimizerInputs, arguments: dict[str, Any], *, is_paged: bool
    ) -> Optimizer:
        from vembed.parallel.devices import quieten_bitsandbytes

        quieten_bitsandbytes()
        try:
            from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
        except ImportError as error:
            raise UserError(
                f"optim: {self.name} needs bitsandbytes ({error}): pip install 'vembed[gpu]'"
            ) from error
        kind = PagedAdamW8bit if is_paged else AdamW8bit
        optimizer: Optimizer = kind(inputs.groups, **arguments)
        return optimizer

    def _of_torchao(
        self, inputs: OptimizerInputs, arguments: dict[str, Any]
    ) -> Optimizer:
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise UserError(
                f"optim: {self.name} needs torchao on sharded parameters ({error}): pip install 'vembed[fsdp]', or use "
                "optim: adamw"
            ) from error
        optimizer: Optimizer = AdamW8bit(inputs.groups, **arguments)
        return optimizer


class PagedAdamW8Bit(AdamW8Bit):
    """The same, with state that moves to host memory where a GPU has no room."""

    name = "paged_adamw_8bit"
    summary = "The same, with state that moves to host memory where a GPU has no room."
    spellings = "paged_adamw8bit"
    is_paged = True
