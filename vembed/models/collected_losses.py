"""Outputs of a model beside its pooled vectors: losses, as sums and counts of one forward pass, and hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vembed.models.custom.modeling import OwnOutput


class Collected:
    """Auxiliary losses of one forward pass, and the hidden states of its texts."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.states: Tensor | None = None
        """[n, tokens, dim] before the pooling, for a language-model head."""

    def take(self, output: Any) -> None:
        """Take the losses of a model's output, if it has any."""
        if isinstance(output, OwnOutput):
            self.values.update(output.auxiliary or {})
        elif isinstance(
            output, Mapping
        ):  # a copy of the wrapper that was saved with a model
            self.values.update(output.get("auxiliary") or {})

    def in_normal_form(self, count: int) -> dict[str, Tensor]:
        """Return each loss as [2, n] or [2, 1], sums and counts, in at least float32. `count`: inputs of the pass.

        A pair (sums, counts) is one number each, or one for each input. A scalar is the mean over the inputs.
        """
        return {
            name: _normal_form(name, value, count)
            for name, value in self.values.items()
        }


def _normal_form(name: str, value: Any, count: int) -> Tensor:
    if isinstance(value, tuple | list) and len(value) == 2:
        sums = torch.as_tensor(value[0])
        counts = torch.as_tensor(value[1], device=sums.device)
    elif isinstance(value, Tensor) and value.ndim == 0:
        sums = value * count
        counts = torch.tensor(count, device=value.device)
    else:
        raise TypeError(
            f"the auxiliary loss {name} must be a scalar, or a pair (sums, counts) of numbers or of one number for "
            f"each input, and is {type(value).__name__}"
        )
    sums = sums if sums.dtype == torch.float64 else sums.float()
    if sums.ndim > 1 or (sums.ndim == 1 and len(sums) not in (1, count)):
        raise TypeError(
            f"the auxiliary loss {name} has the shape {list(sums.shape)} for {count} inputs"
        )
    pair = [sums, counts.detach().to(sums.dtype).expand_as(sums)]
    return torch.stack(
        [tensor.reshape(-1) for tensor in pair]
    )  # FSDP wants no view as a result
