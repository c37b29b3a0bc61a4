"""HiddenStates: a model that gives what its layers hand on, pooled to one vector per text, in place of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vembed.errors import UserError
from vembed.models.attention import packs
from vembed.models.embedding_model import padded_states, padding_mask, pool
from vembed.models.families.backbones import layers_of
from vembed.models.families.description import ModelDescription
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS
from vembed.models.towers import tower_module


class HiddenStates(nn.Module):
    """Runs the model and takes what passes by. Layer 0 is what goes into the first transformer layer, layer k what the
    k-th one gives. All ranks run it together where the model is sharded."""

    def __init__(
        self,
        model: nn.Module,
        backbone: nn.Module,
        description: ModelDescription,
        layers: Literal["all"] | Sequence[int],
        pooling: str | None = None,
    ) -> None:
        """`model`: what is called, sharded or not; `backbone`: the part of it that holds the layers."""
        super().__init__()
        if "text" not in description.traits.towers:
            raise UserError(
                f"{description.name} has no text tower, and hidden states are those of a text tower"
            )
        self.model = model
        tower = tower_module(backbone, description.traits, "text")
        self._stack = layers_of(tower)
        self._packs = packs(tower)
        deepest = len(self._stack)
        numbers = range(deepest + 1) if layers == "all" else layers
        wrong = [
            number for number in numbers if not -deepest - 1 <= int(number) <= deepest
        ]
        if wrong:
            raise UserError(
                f"layers: this model has layers 0 (its embeddings) to {deepest}, and {wrong[0]} is asked for"
            )
        # Negative numbers count from the last layer, as in a Python list.
        self.layers = [int(number) % (deepest + 1) for number in numbers]
        of_model = description.pooling
        self.pooling = pooling or (of_model if of_model != MODEL_POOLING else "mean")
        if POOLINGS[self.pooling].is_trained:
            raise UserError(
                f"pooling: {self.pooling} is trained for the last layer; give another one for hidden states"
            )
        config: Any = tower.config
        hidden_dim = description.text_hidden_dim or config.get_text_config().hidden_size
        self.width = POOLINGS[self.pooling].width(int(hidden_dim))

    def forward(self, parts: list[tuple[str, dict[str, Tensor]]]) -> list[Tensor]:
        """For each part, one at a time: [n, layers * width], layer by layer."""
        states = []
        for part in parts:
            inputs = part[1]
            taken: dict[int, Tensor] = {}

            def enter(
                _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
            ) -> None:
                hidden = arguments[0] if arguments else named["hidden_states"]
                taken[0] = self.pooled(hidden, inputs)  # noqa: B023 - removed below

            def leave(number: int, _: nn.Module, __: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                taken[number] = self.pooled(hidden, inputs)  # noqa: B023

            # Hooks, and not output_hidden_states: they are the same for padded, packed and sharded models.
            hooks = []
            if 0 in self.layers:
                first = self._stack[0]
                hooks.append(first.register_forward_pre_hook(enter, with_kwargs=True))
            for number, layer in enumerate(self._stack, start=1):
                if number in self.layers:
                    hooks.append(layer.register_forward_hook(partial(leave, number)))
            try:
                self.model([part])
            finally:
                for hook in hooks:
                    hook.remove()
            states.append(torch.cat([taken[layer] for layer in self.layers], dim=1))
        return states

    def none(self) -> np.ndarray:
        """Return the hidden states of no text."""
        return np.empty((0, len(self.layers), self.width), np.float32)

    def pooled(self, hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """[n, width] from what a layer gives, padded or packed."""
        mask = padding_mask(inputs)
        if self._packs:
            hidden = padded_states(hidden[0], inputs, mask)
        return pool(self.pooling, hidden, mask).float()
