"""Weights that write to the residual stream: the embeddings, and in each layer the last linear layers of attention and
feed-forward."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from vembed.errors import UserError
from vembed.models.families.backbones import layers_of
from vembed.models.families.description import ModelDescription
from vembed.models.names import plain_name
from vembed.models.towers import tower_module

# Llama, Qwen, Mistral: o_proj, down_proj; CLIP, SigLIP: out_proj, fc2; BERT (attention.output.dense and output.dense);
# DistilBERT: out_lin, lin2; GPT-2: c_proj, twice; GPT-NeoX, BLOOM, Falcon: (self_)attention.dense, dense_4h_to_h;
# ModernBERT: Wo; T5: o, wo; MPNet: attn.o.
_LAST = re.compile(
    r"(^|\.)(o_proj|out_proj|out_lin|down_proj|output\.dense|(self_)?attention\.dense|fc2|lin2|c_proj|dense_4h_to_h"
    r"|[Ww]o|o)$"
)
"""Names of the linear layers, within a transformer layer, whose output is added to what the layer was given."""
FEWEST_WRITERS = 2
"""In each layer: one of attention, one of the feed-forward part."""


class Writer:
    """One weight that writes to the residual stream behind a layer (0: the embeddings)."""

    def __init__(self, name: str, layer: int, *, by_rows: bool, has_bias: bool) -> None:
        self.name = name
        """Of the module in the model."""
        self.layer = layer
        self.by_rows = by_rows
        """True if each row of the weight is a vector of the residual stream; otherwise each column is."""
        self.has_bias = has_bias


def writers_of(
    model: nn.Module, backbone: nn.Module, description: ModelDescription
) -> list[Writer]:
    """Return the weights that write to the residual stream of the text tower, in the order of the forward pass."""
    if "text" not in description.traits.towers:
        raise UserError(
            f"{description.name} has no text tower, and directions are taken out of text towers"
        )
    tower: Any = tower_module(backbone, description.traits, "text")
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    embeddings = tower.get_input_embeddings()
    found = [Writer(names[id(embeddings)], 0, by_rows=True, has_bias=False)]
    for number, layer in enumerate(layers_of(tower), start=1):
        # Conv1D of GPT-2 stores its weight as [in, out], transposed to nn.Linear: there each row is a vector of the
        # stream.
        written = [
            Writer(
                names[id(module)],
                number,
                by_rows=isinstance(module, Conv1D),
                has_bias=module.bias is not None,
            )
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and _LAST.search(plain_name(name))
        ]
        if (
            len(written) < FEWEST_WRITERS
        ):  # a part would keep what is taken out of the others
            raise UserError(
                f"{description.name}: the linear layers of a {type(layer).__name__} have names that vembed does not "
                "know, so it cannot tell which of them write to the residual stream; use --where embedding"
            )
        found += written
    return found
