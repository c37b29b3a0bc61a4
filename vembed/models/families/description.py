"""ModelDescription: the facts about one model, decided once, logged with reasons and saved with the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from vembed.errors import UserError
from vembed.models.families.family import Family, Modality
from vembed.models.families.model_settings import check_inside, first_problem
from vembed.models.families.table import FAMILIES

DESCRIPTION_FILE = "vembed.json"
"""File with a saved model's description, in the model's folder."""
IMAGE_TOWER_FOLDER = "image_tower"
"""Folder of a composed model's image tower, inside the model's folder."""
NOT_SAVED = ("reasons", "dense", "token_dim", "pooling_folder", "adds_projection")
Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class ModelDescription:
    """Properties of one model, used by training, evaluation, inference and the saved files."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    family: str
    source: str
    """Local folder of weights, tokenizer and processor. For a Hub model: its snapshot in the Hub's cache."""
    embedding_dim: Size
    """Size of the output of `EmbeddingModel`, after any projection."""
    hidden_dim: Size
    """Size of the output of pooling."""
    pooling: str
    """Pooling of token vectors to one vector. `own`: the model's projected feature (CLIP, SigLIP)."""
    modalities: tuple[Modality, ...]
    """Modalities of the inputs. text: token ids; image: pixels only; multimodal: token ids with images in them."""
    layer_classes: tuple[str, ...]
    """Classes of the transformer layers: the units of FSDP, recomputation and compilation."""
    max_length: Size
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
    truncate_dim: Size | None = None
    mrl_dims: tuple[Size, ...] = ()
    dense: tuple[Path, ...] = ()
    """Folders of the model's own Dense modules, in order. Not saved: the layout has them."""
    token_dim: int = 0
    """Size of a token's vector, before the pooling. Not saved: config.json has it."""
    pooling_folder: Path | None = None
    """Folder with the weights of a trained pooling. Not saved: the layout has it."""
    adds_projection: bool = False
    """True: this run adds a linear layer to `embedding_dim` for its Matryoshka sizes. Not saved."""
    scores: Literal["label", "answer"] | None = None
    """How a reranker gives the score of a pair: the logit of its one label, or of the answer `yes` less that of `no`.
    None: an embedding model."""
    bidirectional_attention: bool = False
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    image_source: str | None = None
    """Composed models: the folder of the image tower."""
    text_hidden_dim: Size | None = None
    """Composed models: output size of the text tower; `hidden_dim` is the size of the shared space."""
    image_hidden_dim: Size | None = None
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
        # The saved folder is self-contained: paths of this machine mean nothing elsewhere, and are not published.
        image_source = None if self.image_source is None else IMAGE_TOWER_FOLDER
        saved = replace(self, source=".", adapter=None, image_source=image_source)
        values = asdict(saved)
        for name in NOT_SAVED:
            del values[name]
        return values

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], folder: str | Path = "."
    ) -> ModelDescription:
        """Return the description that `to_dict` saved in `folder`."""
        path = Path(folder, DESCRIPTION_FILE)
        if "lanes" in values:  # 0.1 wrote `lanes`, and `vision` for multimodal
            values = dict(values)
            lanes = values.pop("lanes")
            values["modalities"] = [
                "multimodal" if lane == "vision" else lane for lane in lanes
            ]
        try:
            saved = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise UserError(f"{path}: {first_problem(error)}") from error
        if saved.family not in FAMILIES:
            raise UserError(
                f"{path}: family {saved.family!r} is none of {', '.join(FAMILIES)}"
            )
        check_inside(path, "source", saved.source)
        check_inside(path, "image_source", saved.image_source or "")
        if saved.image_source is not None:
            saved = replace(saved, image_source=str(Path(folder, saved.image_source)))
        return replace(saved, source=str(Path(folder, saved.source)))

    @property
    def output(self) -> str:
        """What the model gives, in words."""
        if self.scores is not None:
            return "reranker"
        return f"embedding of {self.embedding_dim:,d} dimensions"

    def summary(self) -> str:
        """Return the model's facts and their reasons, one line each, for the log."""
        lines = [
            f"{self.name or self.source}: {self.family}, {self.output}, "
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
