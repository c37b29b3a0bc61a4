"""Facts about one model while its description is built: config, file contents and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.models import backbones
from vembed.models.description import DESCRIPTION_FILE, Family, ModelDescription
from vembed.models.sources import SentenceTransformersFiles, read_json, read_model


@dataclass
class Facts:
    """Facts about one model while its description is built."""

    config: TrainConfig
    files: SentenceTransformersFiles | None
    saved: ModelDescription | None
    backbone: Path
    adapter: Path | None
    model_config: PretrainedConfig
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Transformers' name for the architecture."""
        return str(self.model_config.model_type)

    def of_saved(self, name: str) -> Any:
        """Return a value of the description saved with the model; None without a saved description."""
        return None if self.saved is None else self.saved.to_dict()[name]

    def of_tokenizer(self, name: str) -> Any:
        """Return a setting of the tokenizer; None if it is not set."""
        return (read_json(self.backbone / "tokenizer_config.json") or {}).get(name)


def gather(config: TrainConfig) -> Facts:
    """Locate the model's files and read the small ones."""
    found = read_model(config.model_name, config.model_revision)
    saved = read_json(found.folder / DESCRIPTION_FILE)
    if found.adapter is not None and config.use_qlora:
        raise UserError(
            f"use_qlora: {config.model_name} is an adapter without the weights below it; "
            "merge it first with `vembed export --merge`, and train the result"
        )
    return Facts(
        config=config,
        files=found.sentence_transformers,
        saved=None if saved is None else ModelDescription.from_dict(saved, found.folder),
        backbone=found.backbone,
        adapter=found.adapter,
        model_config=backbones.read_config(found.backbone, trust_remote_code=config.trust_remote_code),
    )


def is_causal(facts: Facts, family: Family) -> bool:
    """Return True if attention is causal by default, before the option bidirectional_attention is applied."""
    return family in ("text_decoder", "vision_language") or (
        family == "composed" and backbones.is_decoder_only(facts.model_config)
    )
