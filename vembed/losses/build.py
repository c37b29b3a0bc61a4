"""Construction of the loss from the config."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vembed.config.schema import TrainConfig
from vembed.config.terms import (
    READS,
    followed_teacher,
    has_tasks,
    loss_terms,
    source_configs,
    task_numbers,
)
from vembed.losses.batch import EmbeddingLoss, NoLoss
from vembed.losses.by_source import LossBySource
from vembed.losses.circle import Circle
from vembed.losses.compressed_vectors import CompressedVectors
from vembed.losses.distillation import BatchDivergence, Relational, SpreadOut
from vembed.losses.infonce import InfoNCE
from vembed.losses.listed import (
    ListedDivergence,
    Listwise,
    MarginError,
    RankNet,
    ScoreError,
)
from vembed.losses.projection import Anchor, EmbeddingDistillation
from vembed.losses.scored import Angle, CoSENT, CosineRegression
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.triplet import Triplet
from vembed.losses.weighted import WeightedLosses

log = logging.getLogger("vembed")


def build_loss(
    config: TrainConfig,
    *,
    mrl_dims: Sequence[int] = (),
    start_scale: float | None = None,
    start_bias: float | None = None,
    embedding_dim: int | None = None,
    teacher_dims: Mapping[str, int] | None = None,
) -> EmbeddingLoss:
    """Return the loss that the config selects.

    `mrl_dims`: the model's Matryoshka sizes, used with `use_mrl` when the config names none. `start_scale`,
    `start_bias`: the model's learned values (CLIP, SigLIP). A learned temperature or scale starts from them,
    unless the config gives a `temperature`. `embedding_dim`, `teacher_dims`: sizes of the embeddings and of each
    teacher's vectors, for `loss: embedding`.
    """
    dims = (
        tuple(config.matryoshka.mrl_dims or mrl_dims)
        if config.matryoshka.use_mrl
        else ()
    )
    if config.matryoshka.use_mrl and not dims:
        raise ValueError("use_mrl without mrl_dims: pass the model's sizes")
    sizes = _Sizes(dims, embedding_dim, teacher_dims or {})
    loss: EmbeddingLoss
    if has_tasks(config):
        configs, numbers = source_configs(config), task_numbers(config)
        tasks = {
            number: _sum(configs[number], sizes, start_scale, start_bias)
            for number in dict.fromkeys(numbers)
        }
        loss = LossBySource([tasks[number] for number in numbers])
    else:
        loss = _sum(config, sizes, start_scale, start_bias)
    if config.objective.quantize_embeddings is None:
        return loss
    return CompressedVectors(
        loss,
        config.objective.quantize_embeddings,
        cosine=config.objective.similarity == "cosine",
    )


def _sum(
    config: TrainConfig,
    sizes: _Sizes,
    start_scale: float | None,
    start_bias: float | None,
) -> EmbeddingLoss:
    """Return the loss of one source: one term, or the weighted sum of several."""
    terms = [
        (weight, term, _build(term, sizes, start_scale, start_bias))
        for weight, term in loss_terms(config)
    ]
    if config.objective.losses is None and len(terms) == 1:
        return terms[0][2]
    names = [term.objective.loss for _, term, _ in terms]
    numbered = [
        f"{name}_{names[:n].count(name) + 1}" if names.count(name) > 1 else name
        for n, name in enumerate(names)
    ]
    return WeightedLosses(
        numbered, [weight for weight, _, _ in terms], [loss for _, _, loss in terms]
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    dims: tuple[int, ...]
    embedding: int | None
    teachers: Mapping[str, int]


def _start(config: TrainConfig, own: float | None) -> float | None:
    """Return the model's own scale where a learned one starts from it; None where it starts at `temperature`. Log which
    of the two it is."""
    is_learned = config.objective.loss == "sigmoid" or (
        config.objective.learn_temperature
        and "learn_temperature" in READS[config.objective.loss]
    )
    if not is_learned:
        return own
    if "temperature" in config.given:
        instead = (
            ""
            if own is None
            else f", not at {1 / own:.3g}, with which this model was trained"
        )
        log.info(
            "temperature: learned, starting at %g as given%s",
            config.objective.temperature,
            instead,
        )
        return None
    if own is None:
        log.info(
            "temperature: learned, starting at %g (default)",
            config.objective.temperature,
        )
    else:
        log.info(
            "temperature: learned, starting at %.3g, with which this model was trained",
            1 / own,
        )
    return own


def _build(
    config: TrainConfig,
    sizes: _Sizes,
    start_scale: float | None,
    start_bias: float | None,
) -> EmbeddingLoss:
    """One term."""
    dims = sizes.dims
    start_scale = _start(config, start_scale)
    match config.objective.loss:
        case "infonce":
            return InfoNCE(config, dims, start_scale)
        case "cosent":
            return CoSENT(config, dims, start_scale)
        case "circle":
            return Circle(config, dims)
        case "angle":
            return Angle(config, dims, start_scale)
        case "cosine":
            return CosineRegression(config, dims)
        case "triplet":
            return Triplet(config, dims)
        case "sigmoid":
            return SigmoidLoss(config, dims, start_scale, start_bias)
        case "kl":
            which = (
                BatchDivergence
                if config.objective.distill_candidates == "batch"
                else ListedDivergence
            )
            return which(config, dims, start_scale)
        case "margin_mse":
            return MarginError(config, dims, start_scale)
        case "score_mse":
            return ScoreError(config, dims, start_scale)
        case "listwise":
            return Listwise(config, dims, start_scale)
        case "ranknet":
            return RankNet(config, dims, start_scale)
        case "relational":
            return Relational(config, dims)
        case "spread_out":
            return SpreadOut(config, dims)
        case "anchor":
            return Anchor(config)
        case "none":
            return NoLoss()
        case "embedding":
            teacher = str(followed_teacher(config))
            if sizes.embedding is None or teacher not in sizes.teachers:
                raise ValueError(
                    "loss: embedding without embedding_dim and teacher_dims: pass both sizes"
                )
            return EmbeddingDistillation(
                config, dims, sizes.embedding, sizes.teachers[teacher]
            )
