"""OptimizerKind: what an optimizer is and what others need to know of it, and all of them. Imports no torch.

The accepted values of `optim`, the notes on options without effect, the estimate of memory, the documentation and the
contract tests follow from the class variables. The config reads these classes, and a dry run imports no torch: import
it inside methods.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vembed.declarations import check_parts, text_of_values
from vembed.errors import UserError

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("vembed")

ADAM_OPTIONS = frozenset({"adam_betas", "adam_epsilon"})
FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})


@dataclass(frozen=True)
class OptimizerInputs:
    """The weights that an optimizer gets on this rank, and what it reads of the run's options."""

    groups: list[dict[str, Any]]
    """Parameter groups as torch takes them, each with its learning rate and weight decay."""
    adam_arguments: Mapping[str, Any]
    """Betas and epsilon, which all kinds of AdamW share."""
    seed: int
    is_sharded: bool
    """The weights are DTensors, as FSDP2 leaves them."""
    is_flat: bool
    """They are flat pieces of several parameters, as FSDP1 leaves them."""
    is_half: bool
    """Some of them are held in 16 bits alone (`torch_dtype: pure_bfloat16`)."""
    device_types: frozenset[str]
    """Types of the devices that they are on."""


class OptimizerKind(ABC):
    """Base class of all optimizers."""

    name: ClassVar[str]
    """Its name: `optim: NAME`."""
    summary: ClassVar[str]
    """What it is, in one sentence, for the documentation."""
    spellings: ClassVar[str] = ""
    """Other names of it, separated by spaces."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Options that it reads, beside those that all optimizers share."""
    state_bytes: ClassVar[float]
    """Bytes of state per trained parameter."""
    takes_adam_rates: ClassVar[bool] = True
    """The rates of `learning_rate: auto`, which were measured with AdamW, are of the right size for it."""
    trains_half: ClassVar[bool] = False
    """It trains weights that are held in bfloat16 alone."""

    @abstractmethod
    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """Return the optimizer, and a short description of it for the log. Raise UserError with a sentence that names
        the option if it cannot train these weights."""


class AdamW(OptimizerKind):
    """torch's AdamW, fused where all weights allow it; one with stochastic rounding for weights in bfloat16 alone."""

    name = "adamw"
    summary = "Adam with decoupled weight decay, the default."
    spellings = "adamw_torch adamw_torch_fused adamw_hf"
    options = ADAM_OPTIONS
    state_bytes = 8.0
    trains_half = True

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """See OptimizerKind."""
        import torch

        from vembed.training.rounded_adamw import RoundedAdamW

        arguments = inputs.adam_arguments
        if inputs.is_half:
            rounded = RoundedAdamW(inputs.groups, **arguments, seed=inputs.seed)
            return (
                rounded,
                "AdamW with stochastic rounding (the weights are bfloat16 alone)",
            )
        # On two CPU cores the fused step takes a third of the plain one's time. It supports DTensors.
        fused = inputs.device_types <= FUSED_DEVICES
        optimizer = torch.optim.AdamW(inputs.groups, **arguments, fused=fused)
        return optimizer, "AdamW (fused)" if fused else "AdamW"


class AdamW8Bit(OptimizerKind):
    """AdamW whose moments take a quarter of the memory: of bitsandbytes, and of torchao on shards."""

    name = "adamw_8bit"
    summary = "AdamW whose state takes a quarter of the memory."
    spellings = "adamw_bnb_8bit adamw8bit"
    options = ADAM_OPTIONS
    state_bytes = 2.1
    is_paged: ClassVar[bool] = False

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """See OptimizerKind."""
        if inputs.is_flat:
            raise UserError(
                f"optim: {self.name} holds blocks of whole parameters, and fsdp_version: 1 leaves each process a flat "
                "piece of them: use fsdp_version: 2, or optim: adamw"
            )
        arguments = inputs.adam_arguments
        optimizer: Optimizer
        if inputs.is_sharded:
            # bitsandbytes' kernels do not support DTensors.
            try:
                from torchao.optim import AdamW8bit as ShardedAdamW8bit
            except ImportError as error:
                raise UserError(
                    f"optim: {self.name} needs torchao on sharded parameters ({error}): pip install 'vembed[fsdp]', or "
                    "use optim: adamw"
                ) from error
            optimizer = ShardedAdamW8bit(inputs.groups, **arguments)
            return optimizer, "AdamW8bit of torchao (sharded parameters)"
        from vembed.parallel.devices import quieten_bitsandbytes

        quieten_bitsandbytes()
        try:
            from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
        except ImportError as error:
            raise UserError(
                f"optim: {self.name} needs bitsandbytes ({error}): pip install 'vembed[gpu]'"
            ) from error
        kind = AdamW8bit
        if self.is_paged and inputs.device_types == {"cuda"}:
            kind = PagedAdamW8bit
        elif self.is_paged:
            log.warning(
                f"optim: {self.name} needs a GPU to page from; without one it is adamw_8bit"
            )
        optimizer = kind(inputs.groups, **arguments)
        return optimizer, f"{kind.__name__} of bitsandbytes"


class PagedAdamW8Bit(AdamW8Bit):
    """The same, with state that moves to host memory where a GPU has no room."""

    name = "paged_adamw_8bit"
    summary = "The same, with state that moves to host memory where a GPU has no room."
    spellings = "paged_adamw8bit"
    is_paged = True


class Adafactor(OptimizerKind):
    """torch's Adafactor: row and column means in place of second moments."""

    name = "adafactor"
    summary = "Keeps row and column means in place of a second moment of each weight."
    state_bytes = 0.1

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """See OptimizerKind."""
        import torch

        if inputs.is_sharded or inputs.is_flat:
            raise UserError(
                "optim: adafactor takes means over whole rows and columns, and torch's does not run on sharded "
                "parameters: use optim: adamw_8bit with fsdp_version: 2, or strategy: ddp"
            )
        optimizer = torch.optim.Adafactor(inputs.groups)
        return optimizer, "Adafactor"


class Sgd(OptimizerKind):
    """torch's SGD, without momentum."""

    name = "sgd"
    summary = "Gradient descent without momentum and without state."
    state_bytes = 0.0
    takes_adam_rates = False

    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """See OptimizerKind."""
        import torch

        # Without momentum torch's coupled weight decay is decoupled: p - lr (g + d p) = (1 - lr d) p - lr g.
        optimizer = torch.optim.SGD(inputs.groups)
        return optimizer, "SGD without momentum"


_CLASSES: tuple[type[OptimizerKind], ...] = (
    AdamW,
    AdamW8Bit,
    PagedAdamW8Bit,
    Adafactor,
    Sgd,
)
check_parts(
    "optimizer",
    OptimizerKind,
    _CLASSES,
    lambda kind: (kind.name, *kind.spellings.split()),
    needed=("name", "summary", "state_bytes"),
)
OPTIMIZERS: dict[str, OptimizerKind] = {kind.name: kind() for kind in _CLASSES}
"""Name, as in the option `optim` -> its optimizer."""
OPTIMIZER_TEXT = text_of_values(
    "Optimizer.", {name: kind.summary for name, kind in OPTIMIZERS.items()}
)
"""Text of the option `optim`."""
