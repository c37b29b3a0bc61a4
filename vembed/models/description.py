"""ModelDescription: what a model is, decided once, logged with reasons, saved with the model, used by all parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Family = Literal["text_encoder", "text_decoder", "clip", "siglip", "image_encoder", "vision_language", "composed"]
Pooling = Literal["cls", "mean", "last", "weighted_mean", "max", "own"]
Lane = Literal["text", "image", "vision"]

DESCRIPTION_FILE = "vembed.json"
"""Name of the file with a saved model's description, in the model's folder."""
IMAGE_TOWER_FOLDER = "image_tower"
"""Folder of a saved composed model's image tower, inside the model's folder."""


@dataclass(frozen=True)
class ModelDescription:
    """One model, in the terms that training, evaluation, use and the saved files share."""

    family: Family
    source: str
    """Local folder of weights, tokenizer and processor; for a Hub model, its folder in the Hub's cache."""
    embedding_dim: int
    """Size of what `EmbeddingModel` returns, after any projection."""
    hidden_dim: int
    """Size of what pooling returns."""
    pooling: Pooling
    """How token vectors become one; `own`: the model's projected feature (CLIP, SigLIP)."""
    lanes: tuple[Lane, ...]
    """Separate ways through the model. text: token ids; image: pixels alone; vision: token ids with images in them."""
    layer_classes: tuple[str, ...]
    """Classes of the transformer layers: FSDP's units and what is checkpointed and compiled."""
    max_length: int
    """Longest text in tokens."""
    padding_side: Literal["left", "right"] = "right"
    query_prompt: str = ""
    document_prompt: str = ""
    similarity: Literal["cosine", "dot"] = "cosine"
    normalize: bool = True
    """Whether encode returns unit vectors."""
    truncate_dim: int | None = None
    mrl_dims: tuple[int, ...] = ()
    bidirectional_attention: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    image_source: str | None = None
    """Composed models: the folder of the image tower."""
    text_hidden_dim: int | None = None
    """Composed models: size of what the text tower gives; `hidden_dim` is that of the shared space."""
    image_hidden_dim: int | None = None
    """Composed models: size of what the image tower gives."""
    image_pooling: Pooling | None = None
    """Composed models: how the image tower's vectors become one."""
    adapter: str | None = None
    """Folder of a saved adapter that belongs on top of the weights in `source`."""
    quantized: bool = False
    """Whether the weights below the adapter are held in 4 bits in training, so that they count as what 4 bits say."""
    name: str = ""
    """The model as the user named it."""
    revision: str | None = None
    trust_remote_code: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    """Field -> why it has this value; for the log."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the file that is saved with the model: without the reasons, and with folders relative to
        the folder of that file."""
        values = asdict(self)
        del values["reasons"]
        values["source"] = "."
        values["adapter"] = None
        values["image_source"] = None if self.image_source is None else IMAGE_TOWER_FOLDER
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], folder: str | Path = ".") -> ModelDescription:
        """The reverse of `to_dict` for a model saved in `folder`."""
        changed: dict[str, Any] = {
            key: tuple(values[key]) for key in ("lanes", "layer_classes", "mrl_dims") if key in values
        }
        for key in ("source", "image_source"):
            if values.get(key) is not None:
                changed[key] = str(Path(folder, values[key]))
        return cls(**{**values, **changed})

    def summary(self) -> str:
        """What the model is and why, one line each, for the log."""
        lines = [
            f"{self.name or self.source}: {self.family}, embedding of {self.embedding_dim:,d} dimensions, "
            f"lanes {', '.join(self.lanes)}, layers {', '.join(self.layer_classes)}"
        ]
        values = asdict(self)
        lines += [f"{key}: {values[key]!r} ({reason})" for key, reason in self.reasons.items()]
        return "\n  ".join(lines)

    def with_(self, **changes: Any) -> ModelDescription:
        """A copy with some fields changed."""
        return replace(self, **changes)
