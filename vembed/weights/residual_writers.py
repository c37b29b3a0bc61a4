"""Weights that write to the residual stream: the embeddings, and in each layer the last linear layers of attention and
feed-forward."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from vembed.errors import UserError
from vembed.families.backbones import layers_of
from vembed.families.description import ModelDescription
from vembed.models.names import plain_name
from vembed.models.towers import tower_module

_LAST = re.compile(r"(^|\.)(o_proj|out_proj|out_lin|down_proj|output\.dense|fc2|lin2|c_proj|dense_4h_to_h|[Ww]o|o)$")
"""Names of the linear layers, within a transformer layer, whose output is added to what the layer was given."""


class Writer:
    """One weight that writes to the residual stream behind a layer (0: the embeddings)."""

    def __init__(self, name: str, layer: int, *, by_rows: bool, has_bias: bool) -> None:
        self.name = name
        """Of the module in the model."""
        self.layer = layer
        self.by_rows = by_rows
        """True if each row of the weight is a vector of the residual stream; otherwise each column is."""
        self.has_bias = has_bias


def writers_of(model: nn.Module, backbone: nn.Module, description: ModelDescription) -> list[Writer]:
    """Return the weights that write to the residual stream of the text tower, in the order of the forward pass."""
    if "text" not in description.traits.towers:
        raise UserError(f"{description.name} has no text tower, and directions are taken out of text towers")
    tower: Any = tower_module(backbone, description.traits, "text")
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    embeddings = tower.get_input_embeddings()
    found = [Writer(names[id(embeddings)], 0, by_rows=True, has_bias=False)]
    for number, layer in enumerate(layers_of(tower), start=1):
        written = [
            Writer(names[id(module)], number, by_rows=isinstance(module, Conv1D), has_bias=module.bias is not None)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and _LAST.search(plain_name(name))
        ]
        if not written:
            raise UserError(
                f"{description.name}: the linear layers of a {type(layer).__name__} have names that vembed does not "
                "know, so it cannot tell which of them write to the residual stream; use --where embedding"
            )
        found += written
    return found
