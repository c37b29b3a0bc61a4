"""Models from whole configs, as commands and the trainer make them."""

from __future__ import annotations

from typing import Any

from vembed.config.schema import TrainConfig
from vembed.models.building import build_model
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.description import ModelDescription, describe


def described(config: TrainConfig, *, for_inference: bool = False) -> ModelDescription:
    """Return the description of a config's model."""
    return describe(
        config.model,
        config.matryoshka,
        similarity=config.objective.similarity,
        use_qlora=config.adapters.use_qlora,
        for_inference=for_inference,
    )


def model_of(
    config: TrainConfig, description: ModelDescription | None = None, **options: Any
) -> EmbeddingModel:
    """Return a config's model."""
    return build_model(
        description or described(config),
        config.model,
        config.adapters,
        objective=config.objective,
        seed=config.run.seed,
        **options,
    )
