"""The temperature of a loss: a number from the config, or a learned parameter kept within its range."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vembed.config.schema import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, TrainConfig
from vembed.losses.batch import EmbeddingLoss
from vembed.losses.matryoshka import Similarity, arithmetic_dtype


class ScoredLoss(EmbeddingLoss):
    """What all losses share: the similarity and the sizes at which they count."""

    def __init__(self, config: TrainConfig, mrl_dims: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.mrl_dims = mrl_dims
        """Matryoshka sizes in the order of the config; none without Matryoshka."""

    def similarity_for(self, embeddings: Tensor) -> Similarity:
        """How embeddings are compared, and at which sizes; without Matryoshka as a whole."""
        embedding_dim = embeddings.shape[1]
        if self.mrl_dims and max(self.mrl_dims) > embedding_dim:
            raise ValueError(f"Matryoshka sizes {self.mrl_dims} for embeddings of size {embedding_dim}")
        dims = self.mrl_dims or (embedding_dim,)
        weights = self.config.mrl_weights if self.mrl_dims and self.config.mrl_weights else [1.0] * len(dims)
        return Similarity.at(dims, weights, cosine=self.config.similarity == "cosine")


class TemperedLoss(ScoredLoss):
    """A loss on similarities divided by a temperature."""

    def __init__(self, config: TrainConfig, mrl_dims: Sequence[int], start_scale: float | None) -> None:
        super().__init__(config, mrl_dims)
        self.temperature: nn.Parameter | None = None
        if config.learn_temperature:
            start = config.temperature if start_scale is None else 1.0 / start_scale
            self.temperature = nn.Parameter(torch.tensor(min(max(start, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE)))

    def scale_for(self, embeddings: Tensor) -> Tensor:
        """One over the temperature, in the dtype that scores have."""
        dtype = arithmetic_dtype(embeddings)
        if self.temperature is None:
            return torch.tensor(1.0 / self.config.temperature, dtype=dtype, device=embeddings.device)
        return 1.0 / self.temperature.to(embeddings.device, dtype)

    def project_parameters(self) -> None:
        """Keep a learned temperature within [0.005, 1]."""
        if self.temperature is not None:
            with torch.no_grad():
                self.temperature.clamp_(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)

    def scale_and_bias(self) -> tuple[float, float] | None:
        """The learned scale; a softmax has no bias."""
        return None if self.temperature is None else (1.0 / float(self.temperature.detach()), 0.0)
