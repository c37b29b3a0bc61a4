"""OptimizerKind: what an optimizer is and what others need to know of it. Imports no torch.

An optimizer is one class in one file of this folder, listed in `table.py`. The accepted
values of `optim`, the notes on options without effect, the estimate of memory, the
documentation and the contract tests follow from its class variables. The config reads
these classes, and a dry run imports no torch: import it inside methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from vembed.config.schema import OptimizerSection


@dataclass(frozen=True, slots=True)
class OptimizerInputs:
    """The weights that an optimizer gets on this rank, and the options of the run."""

    groups: list[dict[str, Any]]
    """Parameter groups as torch takes them."""
    learning_rate: float
    options: OptimizerSection
    seed: int
    is_sharded: bool
    """The weights are DTensors, as FSDP2 leaves them."""
    is_flat: bool
    """They are flat pieces of several parameters, as FSDP1 leaves them."""
    is_half: bool
    """Some of them are held in 16 bits alone (`torch_dtype: pure_bfloat16`)."""

    def tensors(self) -> list[Tensor]:
        """Return the weights of all groups."""
        return [tensor for group in self.groups for tensor in group["params"]]

    def adam_arguments(self) -> tuple[dict[str, Any], str]:
        """Return the arguments that all kinds of AdamW share, and the betas for the log."""
        first, second = self.options.adam_betas
        arguments = {
            "lr": self.learning_rate,
            "betas": (first, second),
            "eps": self.options.adam_epsilon,
        }
        return arguments, f"betas ({first:g}, {second:g})"


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
    trains_half: ClassVar[bool] = False
    """It trains weights that are held in bfloat16 alone."""

    def refusal(self, inputs: OptimizerInputs) -> str | None:
        """Return why it cannot train these weights, as a sentence that names the option; or None."""
        del inputs
        return None

    @abstractmethod
    def build(self, inputs: OptimizerInputs) -> tuple[Optimizer, str]:
        """Return the optimizer, and a short description of it for the log."""


ADAM_OPTIONS = frozenset({"adam_betas", "adam_epsilon"})
