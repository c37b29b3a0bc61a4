"""The learning rate of a run whose config leaves it to `auto`: the facts about the built model, and the decision."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
import yaml
from torch import nn

from vembed.config.rate import HEAD, Trained, What, peak_rate
from vembed.config.rhythm import starts_from_nothing
from vembed.config.schema import TrainConfig
from vembed.models.adapters import wants_adapters
from vembed.models.embedding_model import EmbeddingModel
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.training.optim import head_prefixes

log = logging.getLogger("vembed")


def with_rate(
    config: TrainConfig, embedder: EmbeddingModel, session: Session, total_steps: int
) -> TrainConfig:
    """Return the config with a number for `learning_rate`, and log why. Call it before the model is sharded, while rank
    0 holds all of it. Collective. `total_steps`: of the run."""
    if config.optimizer.learning_rate != "auto":
        return config
    description = embedder.description
    is_new = collectives.broadcast_json(
        has_initial_norms(embedder) if session.is_main else None
    )
    facts = Trained(
        what=_what(config, embedder),
        family=description.family,
        width=description.text_hidden_dim or description.hidden_dim,
        is_tuned=_is_tuned(Path(description.source)),
        is_new=is_new or starts_from_nothing(config),
        has_scale=description.traits.has_scale_and_bias,
        total_steps=total_steps,
    )
    decision = peak_rate(config, facts)
    log.info("learning_rate: %g (auto; %s)", decision.value, decision.reason)
    changes: dict[str, float] = {"learning_rate": decision.value}
    if (
        description.traits.has_two_models
        and config.optimizer.head_learning_rate is None
    ):
        changes["head_learning_rate"] = max(HEAD, decision.value)
        log.info(
            "head_learning_rate: %g (auto; the projections of the two towers are new)",
            changes["head_learning_rate"],
        )
    return config.changed(**changes)


def _is_tuned(folder: Path) -> bool:
    """Return whether the folder is that of an embedding model: it names a pooling, and has learned from pairs."""
    return any(
        (one / "modules.json").is_file() for one in (folder, folder.parent)
    ) and not _is_pretrained(folder)


def _is_pretrained(folder: Path) -> bool:
    """Return whether a run of vembed without a loss over pairs wrote the folder, such as one on the next token.

    It saves the layout of an embedding model as every run does."""
    config = folder.parent / "config.yaml"
    if folder.name != "final" or not config.is_file():
        return False
    written = yaml.safe_load(config.read_text("utf-8"))
    return (
        isinstance(written, dict)
        and written.get("loss") == "none"
        and not written.get("losses")
    )


def has_initial_norms(model: nn.Module) -> bool:
    """Return True if every norm has its initial weights, ones and zeros, which no trained model has."""
    weights = [
        one
        for module in model.modules()
        if "Norm" in type(module).__name__
        for one in _own(module)
    ]
    return bool(weights) and all(bool((one == value).all()) for one, value in weights)


def _own(module: nn.Module) -> Iterable[tuple[torch.Tensor, float]]:
    for name, value in module.named_parameters(recurse=False):
        if value.device.type != "meta":
            yield value.detach(), 0.0 if name == "bias" else 1.0


def _what(config: TrainConfig, embedder: EmbeddingModel) -> What:
    if wants_adapters(config.adapters):
        return "adapters"
    names = [
        name
        for name, parameter in embedder.named_parameters()
        if parameter.requires_grad
    ]
    heads = head_prefixes(embedder)
    only_heads = all(name.startswith(heads) for name in names)
    return "head" if names and only_heads else "weights"
