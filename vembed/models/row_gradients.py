"""Gradients of token embeddings on CPUs: each micro-batch adds the rows of its tokens to one dense gradient.

torch makes a dense gradient of the whole table in every micro-batch and adds it to the last one. With a table of
30,000 rows and a micro-batch of 4,096 tokens that writes 47 MB twice for 6 MB of values; multilingual tables have eight
times as many rows.
"""

from __future__ import annotations

import torch
from torch import nn

FEWEST_ROWS = 8192
"""Smaller tables are about as large as the rows of a micro-batch."""


def use_row_gradients(backbone: nn.Module) -> int:
    """Let large trained nn.Embedding modules give gradients by rows, and return their number. `.grad` stays dense.

    For models that are not sharded, on CPUs.
    """
    found = [
        module
        for module in backbone.modules()
        # Exactly this class: a subclass may compute something else.
        if type(module) is nn.Embedding
        and module.weight.requires_grad
        and module.num_embeddings >= FEWEST_ROWS
        and not module.scale_grad_by_freq
    ]
    for module in found:
        module.sparse = True
        module.weight.register_post_accumulate_grad_hook(_make_dense)  # type: ignore[no-untyped-call]
    return len(found)


def _make_dense(weight: torch.Tensor) -> None:
    """Convert the first gradient of a step. torch adds later ones to it in place, row by row."""
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
