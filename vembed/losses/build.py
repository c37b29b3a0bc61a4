"""Construction of the loss from the config."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vembed.config.schema import TrainConfig
from vembed.losses.batch import EmbeddingLoss
from vembed.losses.infonce import InfoNCE
from vembed.losses.scored import CoSENT, CosineRegression
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.triplet import Triplet

log = logging.getLogger("vembed")


def build_loss(
    config: TrainConfig,
    *,
    mrl_dims: Sequence[int] = (),
    start_scale: float | None = None,
    start_bias: float | None = None,
) -> EmbeddingLoss:
    """Return the loss that the config selects.

    `mrl_dims`: the model's Matryoshka sizes, used with `use_mrl` when the config names none. `start_scale`,
    `start_bias`: the model's learned values (CLIP, SigLIP). A learned temperature or scale starts from them
    instead of from `temperature`.
    """
    dims = tuple(config.mrl_dims or mrl_dims) if config.use_mrl else ()
    if config.use_mrl and not dims:
        raise ValueError("use_mrl without mrl_dims: pass the model's sizes")
    is_fixed = config.loss == "infonce" and not config.learn_temperature
    if start_scale is not None and is_fixed and "temperature" not in config.model_fields_set:
        log.info(
            "temperature: %g (default), but this model was trained with %.3g; set temperature=%.3g to keep that, or "
            "learn_temperature: true to continue learning it",
            config.temperature, 1 / start_scale, 1 / start_scale,
        )  # fmt: skip
    match config.loss:
        case "infonce":
            return InfoNCE(config, dims, start_scale)
        case "cosent":
            return CoSENT(config, dims, start_scale)
        case "cosine":
            return CosineRegression(config, dims)
        case "triplet":
            return Triplet(config, dims)
        case "sigmoid":
            return SigmoidLoss(config, dims, start_scale, start_bias)
