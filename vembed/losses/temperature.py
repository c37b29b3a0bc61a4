"""Base classes of losses with a similarity, and with a temperature that is fixed or learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vembed.config.entries import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from vembed.config.schema import TrainConfig
from vembed.losses.batch import EmbeddingLoss
from vembed.losses.matryoshka import Similarity, arithmetic_dtype


class ScoredLoss(EmbeddingLoss):
    """Base class with the similarity and the Matryoshka sizes."""

    def __init__(self, config: TrainConfig, mrl_dims: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.mrl_dims = mrl_dims
        """Matryoshka sizes in the order of the config; empty without Matryoshka."""

    def similarity_for(self, embeddings: Tensor) -> Similarity:
        """Return the similarity and sizes for these embeddings; without Matryoshka the full size alone."""
        embedding_dim = embeddings.shape[1]
        if self.mrl_dims and max(self.mrl_dims) > embedding_dim:
            raise ValueError(
                f"Matryoshka sizes {self.mrl_dims} for embeddings of size {embedding_dim}"
            )
        dims = self.mrl_dims or (embedding_dim,)
        weights = (
            self.config.matryoshka.mrl_weights
            if self.mrl_dims and self.config.matryoshka.mrl_weights
            else [1.0] * len(dims)
        )
        return Similarity.at(
            dims, weights, cosine=self.config.objective.similarity == "cosine"
        )


class TemperedLoss(ScoredLoss):
    """Base class of losses on similarities divided by a temperature."""

    def __init__(
        self, config: TrainConfig, mrl_dims: Sequence[int], start_scale: float | None
    ) -> None:
        super().__init__(config, mrl_dims)
        self.temperature: nn.Parameter | None = None
        if config.objective.learn_temperature:
            start = (
                config.objective.temperature
                if start_scale is None
                else 1.0 / start_scale
            )
            self.temperature = nn.Parameter(
                torch.tensor(min(max(start, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE))
            )

    def scale_for(self, embeddings: Tensor) -> Tensor:
        """Return 1 / temperature, in the dtype of the scores."""
        dtype = arithmetic_dtype(embeddings)
        if self.temperature is None:
            return torch.tensor(
                1.0 / self.config.objective.temperature,
                dtype=dtype,
                device=embeddings.device,
            )
        return 1.0 / self.temperature.to(embeddings.device, dtype)

    def project_parameters(self) -> None:
        """Clamp a learned temperature to [0.005, 1]."""
        if self.temperature is not None:
            with torch.no_grad():
                self.temperature.clamp_(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)

    def scale_and_bias(self) -> tuple[float, float] | None:
        """Return the learned scale and a bias of 0 (a softmax has no bias), or None if the temperature is fixed."""
        return (
            None
            if self.temperature is None
            else (1.0 / float(self.temperature.detach()), 0.0)
        )
