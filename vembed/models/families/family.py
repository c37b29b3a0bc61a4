"""Family: the record of a model family, with everything that differs between families.

Other modules read the record (`description.family_traits`) and compare no names.
This module imports no torch, because the config reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Modality = Literal["text", "image", "multimodal"]
Tower = Literal["text", "vision"]
Forward = Literal["text", "image", "vision_language", "pooled_towers"]
"""Forward pass of one modality: token vectors of texts, of an image or of a conversation, to be pooled; or the pooled
output of a tower."""

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
    model_types: frozenset[str] | None
    """Values of `model_type` in config.json that belong to the family. None: `describe` tells it by a model's inputs."""

    # ---- forward pass -------------------------------------------------------------------------------------------
    forward_kinds: Mapping[Modality, Forward]
    """Modality of the inputs -> its forward pass. All models but image encoders have `text`."""
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
    is_composed: bool = False
    """True: a text model and an image model of their own, with new projections (ComposedModel)."""

    # ---- text ---------------------------------------------------------------------------------------------------
    longest_by_default: int = TEXT_LENGTH
    has_fixed_length: bool = False
    """True: trained without an attention mask, on texts that are padded to the number of positions."""

    # ---- sizes, training and files --------------------------------------------------------------------------------
    embedding_size: tuple[str, ...] | None = None
    """Path of the embedding's size in config.json; None: the size of the hidden states."""
    has_logit_scale_and_bias: bool = False
    """True: the weights contain the loss's learned scale (and bias), with which training starts and ends."""
    adapter_targets: Mapping[Tower, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers behind the towers that get an adapter together with their tower."""
    sentence_transformers: str | None = "Transformer"
    """Class that loads a saved model in Sentence Transformers; None: it has none for this family.

    Versions before 5.4 have a class for CLIP; later ones read it as a Transformer.
    """
    starter: Starter
    reranker_starter: Starter | None = None
    """The same for `task: rerank`; None: the family has no rerankers."""

    @property
    def reads_only_text(self) -> bool:
        """True for models without images."""
        return tuple(self.forward_kinds) == ("text",)

    @property
    def is_vision_language(self) -> bool:
        """True for language models with images inside their token sequence, which need a chat template."""
        return "multimodal" in self.forward_kinds
