"""ModelDescription: the facts about one model, decided once, logged with reasons and saved with the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from vembed.errors import UserError
from vembed.models.families.family import Family, Modality
from vembed.models.families.model_settings import check_inside, first_problem
from vembed.models.families.table import FAMILIES

DESCRIPTION_FILE = "vembed.json"
"""File with a saved model's description, in the model's folder."""
IMAGE_TOWER_FOLDER = "image_tower"
"""Folder of a composed model's image tower, inside the model's folder."""


@dataclass(frozen=True)
class ModelDescription:
    """Properties of one model, used by training, evaluation, inference and the saved files."""

    family: str
    source: str
    """Local folder of weights, tokenizer and processor. For a Hub model: its snapshot in the Hub's cache."""
    embedding_dim: int
    """Size of the output of `EmbeddingModel`, after any projection."""
    hidden_dim: int
    """Size of the output of pooling."""
    pooling: str
    """Pooling of token vectors to one vector. `own`: the model's projected feature (CLIP, SigLIP)."""
    modalities: tuple[Modality, ...]
    """Modalities of the inputs. text: token ids; image: pixels only; multimodal: token ids with images in them."""
    layer_classes: tuple[str, ...]
    """Classes of the transformer layers: the units of FSDP, recomputation and compilation."""
    max_length: int
    """Longest text in tokens."""
    padding_side: Literal["left", "right"] = "right"
    query_prompt: str = ""
    document_prompt: str = ""
    other_prompts: dict[str, str] = field(default_factory=dict)
    """Prompts of the model's files for other uses, by name: they are saved along."""
    default_prompt_name: str | None = None
    """Prompt that Sentence Transformers takes where none is asked for: query, document or one of the others. Saved
    along."""
    similarity: Literal["cosine", "dot"] = "cosine"
    normalize: bool = True
    """True: encode returns unit vectors."""
    truncate_dim: int | None = None
    mrl_dims: tuple[int, ...] = ()
    dense: tuple[Path, ...] = ()
    """Folders of the model's own Dense modules, in order. Not saved: the layout has them."""
    token_dim: int = 0
    """Size of a token's vector, before the pooling. Not saved: config.json has it."""
    pooling_folder: Path | None = None
    """Folder with the weights of a trained pooling. Not saved: the layout has it."""
    adds_projection: bool = False
    """True: this run adds a linear layer to `embedding_dim` for its Matryoshka sizes. Not saved."""
    bidirectional_attention: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    image_source: str | None = None
    """Composed models: the folder of the image tower."""
    text_hidden_dim: int | None = None
    """Composed models: output size of the text tower; `hidden_dim` is the size of the shared space."""
    image_hidden_dim: int | None = None
    """Composed models: output size of the image tower."""
    image_pooling: str | None = None
    """Composed models: pooling of the image tower."""
    adapter: str | None = None
    """Folder of a saved adapter for the weights in `source`."""
    quantized: bool = False
    """True: the adapter was trained on 4-bit weights, so the weights below it must be rounded to 4 bits."""
    name: str = ""
    """The model name that the user gave."""
    revision: str | None = None
    trust_remote_code: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    """Field -> reason for its value, for the log."""

    @property
    def traits(self) -> Family:
        """The record of the model's family."""
        return FAMILIES[self.family]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the saved description, without reasons and with paths relative to its folder."""
        values = asdict(self)
        for name in (
            "reasons",
            "dense",
            "token_dim",
            "pooling_folder",
            "adds_projection",
        ):
            del values[name]
        # The saved folder is self-contained: paths of this machine mean nothing elsewhere, and are not published.
        values["source"] = "."
        values["adapter"] = None
        values["image_source"] = (
            None if self.image_source is None else IMAGE_TOWER_FOLDER
        )
        return values

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], folder: str | Path = "."
    ) -> ModelDescription:
        """Return the description that `to_dict` saved in `folder`."""
        path = Path(folder, DESCRIPTION_FILE)
        values = _with_modalities(values)
        _check_saved(path, values)
        changed: dict[str, Any] = {
            key: tuple(values[key])
            for key in ("modalities", "layer_classes", "mrl_dims")
            if key in values
        }
        for key in ("source", "image_source"):
            if values.get(key) is not None:
                changed[key] = str(Path(folder, values[key]))
        return cls(**{**values, **changed})

    def summary(self) -> str:
        """Return the model's facts and their reasons, one line each, for the log."""
        lines = [
            f"{self.name or self.source}: {self.family}, embedding of {self.embedding_dim:,d} dimensions, "
            f"modalities {', '.join(self.modalities)}, layers {', '.join(self.layer_classes)}"
        ]
        values = asdict(self)
        lines += [
            f"{key}: {values[key]!r} ({reason})" for key, reason in self.reasons.items()
        ]
        return "\n  ".join(lines)

    def with_(self, **changes: Any) -> ModelDescription:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def _check_saved(path: Path, values: dict[str, Any]) -> None:
    """Raise UserError unless saved values are those of a description, with places inside of its folder."""
    unknown = sorted(values.keys() - {field.name for field in fields(ModelDescription)})
    if unknown:
        raise UserError(
            f"{path}: {unknown[0]!r} is no field of a description; it is of another version of vembed"
        )
    if values.get("family") not in FAMILIES:
        raise UserError(
            f"{path}: family {values.get('family')!r} is none of {', '.join(FAMILIES)}"
        )
    try:
        TypeAdapter(ModelDescription).validate_python(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}") from error
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        if any(
            isinstance(number, int) and not isinstance(number, bool) and number < 1
            for number in numbers
        ):
            raise UserError(
                f"{path}: {name} is {value}, and a positive number is needed"
            )
    for name in ("source", "image_source"):
        if values.get(name) is not None:
            check_inside(path, name, values[name])


def _with_modalities(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a saved description under today's names. 0.1 wrote `lanes`, and `vision` for multimodal."""
    if "lanes" not in values:
        return values
    values = dict(values)
    lanes = values.pop("lanes")
    return values | {
        "modalities": ["multimodal" if lane == "vision" else lane for lane in lanes]
    }
