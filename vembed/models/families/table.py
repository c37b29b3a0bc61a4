"""Table of model families: one record per family, with everything that differs between them.

All other modules read traits from the record (`description.traits`) and compare no names.
A family is added by its record here. This module imports no torch, because the config
reads the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

Modality = Literal["text", "image", "multimodal"]
Tower = Literal["text", "vision"]
Forward = Literal["text", "image", "chat", "pooled_towers"]
"""Forward pass of one modality: token vectors of texts, of an image or of a conversation, to be pooled; or the pooled
output of a tower."""
Evidence = Literal[
    "model_type",
    "pixel_input",
    "decoder_only",
    "text_input",
    "image_model_name",
    "both_inputs",
]
"""Predicate that recognises a family."""

TEXT_LENGTH = 512
CHAT_LENGTH = 8192
"""Default for conversations. Image tokens count too and must not be truncated."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """Settings of the starter config that `vembed init` writes."""

    model_name: str
    about: str
    multilingual: str | None = None
    """Model for texts that are not English."""
    max_length: int | None = 512
    batch_size: int = 64
    learning_rate: float | None = None
    """None: auto."""
    use_lora: bool = False
    image_model_name: str | None = None
    temperature: float = 0.05
    """The learned one of the model that is named, where it has learned one."""
    retrieval_mode: str | None = None
    """Mode in which plain strings of the data are paths of images."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Traits of one model family."""

    name: str
    evidence: Evidence
    model_types: frozenset[str] = frozenset()
    """Values of `model_type` in config.json, for a family that is recognised by them."""

    # ---- forward pass -------------------------------------------------------------------------------------------
    forwards: Mapping[Modality, Forward]
    """Modality of the inputs -> its forward pass."""
    towers: Mapping[Tower, str]
    """Tower -> prefix of its parameter names in the backbone. The prefix is empty if the backbone is the tower."""
    projections: Mapping[Modality, str] = field(default_factory=dict)
    """Modality -> name of the linear layer behind its tower, applied after pooling."""
    pools_itself: bool = False
    """True: the embedding is the model's own pooled and projected output, so pooling cannot be chosen."""
    pooling: str = "mean"
    """Default pooling of texts for a model that defines none; a causal decoder gets `last`."""
    pooling_reason: str = "default of the family (the model defines no pooling)"
    is_causal: bool | None = False
    """Attention of the text tower; None: its config tells."""
    has_two_models: bool = False
    """True: a text model and an image model of their own, with new projections (TwoTowers)."""

    # ---- text ---------------------------------------------------------------------------------------------------
    longest_by_default: int = TEXT_LENGTH
    has_fixed_length: bool = False
    """True: trained without an attention mask, on texts that are padded to the number of positions."""

    # ---- sizes, training and files --------------------------------------------------------------------------------
    embedding_size: tuple[str, ...] | None = None
    """Path of the embedding's size in config.json; None: the size of the hidden states."""
    has_scale_and_bias: bool = False
    """True: the weights contain the loss's learned scale (and bias), with which training starts and ends."""
    adapter_targets: Mapping[Tower, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers behind the towers that get an adapter together with their tower."""
    sentence_transformers: str | None = "Transformer"
    """Class that loads a saved model in Sentence Transformers; None: it has none for this family.

    Versions before 5.4 have a class for CLIP; later ones read it as a Transformer.
    """
    starter: Starter

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities of the inputs."""
        return tuple(self.forwards)

    @property
    def reads_text(self) -> bool:
        """True for all models but image encoders."""
        return "text" in self.forwards

    @property
    def reads_only_text(self) -> bool:
        """True for models without images."""
        return self.modalities == ("text",)

    @property
    def reads_chats(self) -> bool:
        """True for language models with images inside their token sequence, which need a chat template."""
        return "multimodal" in self.forwards

    @property
    def has_image_encoder(self) -> bool:
        """True if a tower is a plain image encoder, whose output is pooled here."""
        return self.forwards.get("image") == "image"

    @property
    def has_untouched_adapters(self) -> bool:
        """True if a run with adapters trains nothing else, so that the adapter alone is the whole result."""
        return not (self.has_scale_and_bias or self.has_two_models)


_RECORDS = (
    Family(
        name="text_encoder",
        evidence="text_input",
        forwards={"text": "text"},
        towers={"text": ""},
        starter=Starter(
            model_name="BAAI/bge-base-en-v1.5",
            multilingual="intfloat/multilingual-e5-base",
            about="BERT-like text model",
        ),
    ),
    Family(
        name="text_decoder",
        evidence="decoder_only",
        forwards={"text": "text"},
        towers={"text": ""},
        pooling_reason="a decoder with bidirectional attention (the model defines no pooling)",
        is_causal=True,
        starter=Starter(
            model_name="Qwen/Qwen3-Embedding-0.6B",
            about="LLM-based text model",
            use_lora=True,
        ),
    ),
    Family(
        name="clip",
        evidence="model_type",
        model_types=frozenset({"clip", "metaclip_2"}),
        forwards={"text": "pooled_towers", "image": "pooled_towers"},
        towers={"text": "text_model.", "vision": "vision_model."},
        projections={"text": "text_projection", "image": "visual_projection"},
        pools_itself=True,
        pooling="own",
        embedding_size=("projection_dim",),
        has_scale_and_bias=True,
        adapter_targets={
            "text": ("text_projection",),
            "vision": ("visual_projection",),
        },
        sentence_transformers="CLIPModel",
        starter=Starter(
            model_name="openai/clip-vit-base-patch32",
            about="text and images, two towers",
            max_length=77,
            batch_size=128,
            temperature=0.01,
        ),
    ),
    Family(
        name="siglip",
        evidence="model_type",
        model_types=frozenset({"siglip", "siglip2"}),
        forwards={"text": "pooled_towers", "image": "pooled_towers"},
        towers={"text": "text_model.", "vision": "vision_model."},
        pools_itself=True,
        pooling="own",
        has_fixed_length=True,
        embedding_size=("vision_config", "hidden_size"),
        has_scale_and_bias=True,
        adapter_targets={"text": ("text_model.head",)},
        starter=Starter(
            model_name="google/siglip2-base-patch16-224",
            about="text and images, two towers",
            max_length=64,
            batch_size=128,
            temperature=0.01,
        ),
    ),
    Family(
        name="image_encoder",
        evidence="pixel_input",
        forwards={"image": "image"},
        towers={"vision": ""},
        starter=Starter(
            model_name="facebook/dinov2-base",
            about="images only",
            max_length=None,
            retrieval_mode="i2i",
        ),
    ),
    Family(
        name="vision_language",
        evidence="model_type",
        model_types=frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}),
        forwards={"text": "text", "multimodal": "chat"},
        towers={"text": "language_model.", "vision": "visual."},
        pooling="last",
        pooling_reason="the end-of-text token, default of the family (the model defines no pooling)",
        is_causal=True,
        longest_by_default=CHAT_LENGTH,
        starter=Starter(
            model_name="Qwen/Qwen3-VL-Embedding-2B",
            about="text and images in one LLM-based model",
            max_length=1024,
            batch_size=32,
            use_lora=True,
        ),
    ),
    Family(
        name="composed",
        evidence="image_model_name",
        forwards={"text": "text", "image": "image"},
        towers={"text": "text_model.", "vision": "vision_model."},
        projections={"text": "text_projection", "image": "visual_projection"},
        is_causal=None,
        has_two_models=True,
        sentence_transformers=None,
        starter=Starter(
            model_name="BAAI/bge-base-en-v1.5",
            about="a text tower and an image tower",
            max_length=128,
            batch_size=128,
            image_model_name="facebook/dinov2-base",
        ),
    ),
    Family(
        name="own_text_image",
        evidence="both_inputs",
        forwards={"text": "text", "image": "image"},
        towers={"text": "", "vision": ""},
        is_causal=None,
        sentence_transformers=None,
        starter=Starter(
            model_name="my_model.py:MyModel",
            about="a module of your own that takes texts and images",
            max_length=128,
            learning_rate=1e-3,
        ),
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _RECORDS}
"""Family name, as in the option `model_family` -> its record."""
if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


def recognised_by(evidence: Evidence, model_type: str = "") -> Family | None:
    """Return the family that is recognised by this evidence; for `model_type`, by its value. None: no family is."""
    for family in FAMILIES.values():
        if family.evidence == evidence and (
            evidence != "model_type" or model_type in family.model_types
        ):
            return family
    return None
