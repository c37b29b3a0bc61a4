"""TextGraph and ImageGraph: one modality of a model as one graph of tensors, from inputs to the final embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vembed.inference.embedder import Embedder
from vembed.models.families.backbones import is_decoder_only
from vembed.models.families.table import Modality
from vembed.models.modalities import pool, project, tower_features
from vembed.models.towers import tower_module

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_embedding"


class Graph(nn.Module):
    """Tower, pooling, projection, Dense modules, normalisation and truncation of one modality in one forward.

    It has no step that depends on values, which tracing would freeze.
    """

    modality: Modality

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.description = embedder.description
        self.backbone: Any = embedder.backbone
        self.head = embedder.head
        self.pooling = embedder.pooling
        self.truncate_dim = embedder.truncate_dim
        family = self.description.traits
        # Eager attention is plain matrix products: every runtime has them, and int8 kernels replace them.
        towers = [tower_module(self.backbone, family, tower) for tower in family.towers]
        models: list[Any] = towers if family.has_two_models else [embedder.backbone]
        for model in models:
            model.set_attn_implementation("eager")

    def finish(self, features: Tensor) -> Tensor:
        """Map tower features [n, width] to [n, d] embeddings, as `Embedder.encode` returns them."""
        vectors = project(self.description, self.backbone, self.modality, features)
        if self.head is not None:
            vectors = self.head(vectors)
        vectors = vectors.float()
        # First the length, then the cut: the values of Embedder and Sentence Transformers.
        if self.description.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors if self.truncate_dim is None else vectors[:, : self.truncate_dim]


class TextGraph(Graph):
    """Texts. The mask is always applied, and texts are padded."""

    modality: Modality = "text"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map [n, tokens] ids and mask to [n, d] embeddings."""
        return self.finish(self._features(input_ids, attention_mask))

    def _features(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        family = self.description.traits
        arguments: dict[str, Any] = {"input_ids": input_ids}
        if family.forwards["text"] == "pooled_towers":
            if (
                not family.has_fixed_length
            ):  # otherwise the model was trained without a mask
                arguments["attention_mask"] = mask
            pooled: Tensor = tower_module(self.backbone, family, "text")(
                **arguments
            ).pooler_output
            return pooled
        text: Any = (
            tower_module(self.backbone, family, "text")
            if family.has_two_models
            else self.backbone
        )
        arguments["attention_mask"] = mask
        if is_decoder_only(text.config):
            arguments["use_cache"] = False
            if self.description.padding_side == "left":
                # Padded on the left, a text's first token must still have position 0; without this its position depends
                # on the batch.
                arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return pool(
            self.description.pooling,
            text(**arguments).last_hidden_state,
            mask,
            module=self.pooling,
        )


class ImageGraph(Graph):
    """Images of one size."""

    modality: Modality = "image"

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map [n, channels, height, width] pixels, as the image processor gives them, to [n, d] embeddings."""
        return self.finish(
            tower_features(
                self.description,
                self.backbone,
                "image",
                {"pixel_values": pixel_values},
                pooling=self.pooling,
            )
        )


def example_inputs(vocab_size: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return [2, 8] ids and mask for tracing, or of a fixed length. Sizes exceed 1, which tracing would take for a
    constant."""
    tokens = length or 8
    ids = torch.arange(2 * tokens).remainder(max(vocab_size, 1)).view(2, tokens)
    return ids, torch.ones_like(ids)
