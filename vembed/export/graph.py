"""TextGraph: a model's texts as one graph of tensors, from token ids to the final embedding, for tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vembed.families.backbones import is_decoder_only
from vembed.inference.embedder import Embedder
from vembed.models.modalities import project
from vembed.models.pooling import pool
from vembed.models.towers import tower_module

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_embedding"


class TextGraph(nn.Module):
    """Backbone, pooling, projection, Dense modules, normalisation and truncation in one forward.

    It has no step that depends on values, which tracing would freeze: the mask is always applied, and texts are padded.
    """

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.description = embedder.description
        self.backbone: Any = embedder.backbone
        self.head = embedder.head
        self.truncate_dim = embedder.truncate_dim
        # Eager attention is plain matrix products: every runtime has them, and int8 kernels replace them.
        backbone: Any = embedder.backbone
        backbone.set_attn_implementation("eager")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map [n, tokens] ids and mask to [n, d] embeddings, as `Embedder.encode` returns them."""
        vectors = project(self.description, self.backbone, "text", self._features(input_ids, attention_mask))
        if self.head is not None:
            vectors = self.head(vectors)
        vectors = vectors.float()
        # First the length, then the cut: the values of Embedder and Sentence Transformers.
        if self.description.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors if self.truncate_dim is None else vectors[:, : self.truncate_dim]

    def _features(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        family = self.description.traits
        arguments: dict[str, Any] = {"input_ids": input_ids}
        if family.forwards["text"] == "pooled_towers":
            if not family.has_fixed_length:  # otherwise the model was trained without a mask
                arguments["attention_mask"] = mask
            pooled: Tensor = tower_module(self.backbone, family, "text")(**arguments).pooler_output
            return pooled
        text: Any = tower_module(self.backbone, family, "text") if family.has_two_models else self.backbone
        arguments["attention_mask"] = mask
        if is_decoder_only(text.config):
            arguments["use_cache"] = False
            if self.description.padding_side == "left":
                arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return pool(self.description.pooling, text(**arguments).last_hidden_state, mask)


def example_inputs(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return [2, 8] ids and mask for tracing. Both sizes exceed 1, which tracing would take for a constant."""
    ids = torch.arange(16).remainder(max(vocab_size, 1)).view(2, 8)
    return ids, torch.ones_like(ids)
