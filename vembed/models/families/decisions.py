"""Decisions about one model, by its family and its files: family, pooling, attention, sizes and similarity."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from vembed.config.schema import MatryoshkaSection, ModelSection
from vembed.errors import UserError
from vembed.models.families import backbones
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription
from vembed.models.families.facts import (
    Facts,
    default_prompt_name,
    gather,
    is_causal,
    max_length,
    other_prompts,
    padding_side,
    prompts,
)
from vembed.models.families.model_files import model_folder
from vembed.models.families.model_settings import read_dense
from vembed.models.families.table import (
    FAMILIES,
    Evidence,
    Family,
    recognised_by,
)
from vembed.models.poolings import MODEL_POOLING, POOLINGS

log = logging.getLogger(__name__)

Similarity = Literal["cosine", "dot"]
SMALLEST_MRL_DIM = 64


def describe(
    model: ModelSection,
    matryoshka: MatryoshkaSection | None = None,
    *,
    similarity: Similarity = "cosine",
    use_qlora: bool = False,
    for_use: bool = False,
) -> ModelDescription:
    """Return the description of a model for this run, with the reason for each decision.

    `similarity`: that of the loss. `use_qlora`: the weights are held in 4 bits.
    `for_use`: of a finished model that is used, not trained: its files say the similarity and the maximum length.
    """
    facts = gather(model, use_qlora=use_qlora)
    family = _family(facts)
    shape = backbones.shape_of(
        facts.backbone,
        facts.model_config,
        family,
        trust_remote_code=model.trust_remote_code,
    )
    bidirectional = _bidirectional(facts, family)
    pooling = _pooling(
        facts, family, shape, causal=is_causal(facts, family) and not bidirectional
    )
    query_prompt, document_prompt = prompts(facts)
    image = _image_tower(facts) if family.has_two_models else None
    text_dim = shape.hidden_dim
    if pooling != MODEL_POOLING:
        text_dim = POOLINGS[pooling].width(text_dim)
    hidden_dim = (
        text_dim if image is None else _shared_dim(facts, text_dim, image.hidden_dim)
    )
    base_dim = _embedding_dim_before_mrl(facts, hidden_dim)
    mrl_dims = _matryoshka_sizes(facts, matryoshka, base_dim)
    projects = matryoshka is not None and _has_projection(
        facts, matryoshka, mrl_dims, base_dim
    )
    embedding_dim = max(mrl_dims) if projects else base_dim
    return ModelDescription(
        family=family.name,
        source=str(facts.backbone),
        embedding_dim=embedding_dim,
        hidden_dim=hidden_dim,
        pooling=pooling,
        modalities=family.modalities,
        layer_classes=shape.layer_classes
        if image is None
        else (*shape.layer_classes, *image.layer_classes),
        max_length=max_length(facts, family, for_use=for_use),
        padding_side=padding_side(facts, family),
        query_prompt=query_prompt,
        document_prompt=document_prompt,
        other_prompts=other_prompts(facts),
        default_prompt_name=default_prompt_name(facts),
        similarity=_similarity(facts, similarity, for_use=for_use),
        normalize=_normalize(facts, similarity),
        truncate_dim=_truncate_dim(facts, embedding_dim),
        mrl_dims=mrl_dims,
        dense=facts.files.dense if facts.files is not None else (),
        token_dim=shape.hidden_dim,
        pooling_folder=_trained_pooling(facts, pooling),
        adds_projection=projects,
        bidirectional_attention=bidirectional,
        min_pixels=model.min_pixels
        if model.min_pixels is not None
        else facts.of_saved("min_pixels"),
        max_pixels=model.max_pixels
        if model.max_pixels is not None
        else facts.of_saved("max_pixels"),
        text_hidden_dim=None if image is None else text_dim,
        image_source=None if image is None else image.source,
        image_hidden_dim=None if image is None else image.hidden_dim,
        image_pooling=None if image is None else image.pooling,
        adapter=None if facts.adapter is None else str(facts.adapter),
        quantized=use_qlora
        or (facts.adapter is not None and bool(facts.of_saved("quantized"))),
        name=model.model_name,
        revision=model.model_revision,
        trust_remote_code=model.trust_remote_code,
        reasons=facts.reasons,
    )


def without_effect(
    description: ModelDescription, user_options: Mapping[str, Any]
) -> list[str]:
    """Return a line for each option that a model of this kind does not look at.

    `user_options`: the options that the user has set, with their values.
    """
    unused: list[str] = []
    if "multimodal" not in description.modalities:
        unused += ["min_pixels", "max_pixels"]
    if description.modalities == ("image",):
        unused += ["max_length", "query_prompt", "document_prompt", "padding_free"]
    return [
        f"{name}: {user_options[name]} has no effect on a model of the family {description.family}"
        for name in unused
        if user_options.get(name) is not None
    ]


# ---- family ----------------------------------------------------------------------------------------------------


def _family(facts: Facts) -> Family:
    detected, reason = _detect(facts)
    asked = facts.options.model_family
    wanted = None if asked == "auto" else FAMILIES[asked]
    if facts.options.image_model_name is not None:
        if not (detected.reads_only_text or detected.has_two_models) or not (
            wanted is None or wanted.has_two_models
        ):
            raise UserError(
                f"image_model_name adds an image tower to a text model, but {facts.options.model_name} is of the family "
                f"{(wanted or detected).name}; leave image_model_name out"
            )
        facts.reasons["family"] = (
            f"image_model_name: {facts.options.image_model_name} is its second tower"
        )
        return _recognised("image_model_name")
    if wanted is None:
        facts.reasons["family"] = reason
        return detected
    if wanted.has_two_models and not detected.has_two_models:
        raise UserError(
            f"model_family: {asked} needs image_model_name, the tower for images"
        )
    # Between encoder and decoder of texts the user may decide: a decoder may have been trained to see both sides.
    if wanted != detected and not (wanted.reads_only_text and detected.reads_only_text):
        raise UserError(
            f"model_family: {asked} does not fit {facts.options.model_name}, whose config.json makes it "
            f"{detected.name} ({reason}); leave model_family out"
        )
    facts.reasons["family"] = (
        f"model_family in the config (detected: {detected.name}, {reason})"
    )
    return wanted


def _detect(facts: Facts) -> tuple[Family, str]:
    kind = facts.model_type
    reason = f"model_type {kind} in config.json"
    if facts.saved is not None:
        return facts.saved.traits, f"from {DESCRIPTION_FILE}"
    if facts.options.model_class is not None:
        reason = f"the forward of {facts.options.model_class}"
    by_type = recognised_by("model_type", kind)
    if by_type is not None:
        return by_type, reason
    if backbones.takes_pixels(
        facts.model_config, trust_remote_code=facts.options.trust_remote_code
    ):
        return _recognised("pixel_input"), f"{reason}: its input is pixels"
    if backbones.takes_both(facts.model_config):
        return _recognised(
            "both_inputs"
        ), f"{reason}: its forward takes input_ids and pixel_values"
    if "vision_config" in facts.model_config.to_dict():
        raise UserError(
            f"{facts.options.model_name} is of the type {kind}, a vision-language model that vembed does not support; "
            f"supported: {', '.join(sorted(kind for family in FAMILIES.values() for kind in family.model_types))}"
        )
    if backbones.is_decoder_only(facts.model_config):
        return _recognised("decoder_only"), f"{reason}: a decoder-only language model"
    return _recognised("text_input"), reason


def _recognised(evidence: Evidence) -> Family:
    family = recognised_by(evidence)
    assert family is not None
    return family


@dataclass(frozen=True)
class _ImageTower:
    source: str
    hidden_dim: int
    pooling: str
    layer_classes: tuple[str, ...]


def _image_tower(facts: Facts) -> _ImageTower:
    """Return the image tower of a composed model."""
    if facts.options.image_model_name is not None:
        folder = model_folder(facts.options.image_model_name, option="image_model_name")
    else:
        assert facts.saved is not None and facts.saved.image_source is not None
        folder = Path(facts.saved.image_source)
    config = backbones.read_config(
        folder, trust_remote_code=facts.options.trust_remote_code
    )
    if not backbones.takes_pixels(
        config, trust_remote_code=facts.options.trust_remote_code
    ):
        raise UserError(
            f"image_model_name: {folder} is of the type {config.model_type}, which is not an image encoder; "
            "give one such as a ViT, DINOv2 or ConvNeXt"
        )
    shape = backbones.shape_of(
        folder,
        config,
        _recognised("pixel_input"),
        trust_remote_code=facts.options.trust_remote_code,
    )
    pooling, reason = backbones.image_pooling(config, shape)
    facts.reasons["image_pooling"] = reason
    return _ImageTower(str(folder), shape.hidden_dim, pooling, shape.layer_classes)


def _shared_dim(facts: Facts, text_dim: int, image_dim: int) -> int:
    """Return the size of the space that both towers of a composed model are projected into."""
    if facts.saved is not None and facts.saved.traits.has_two_models:
        return facts.saved.hidden_dim
    if facts.options.composed_dim is not None:
        facts.reasons["hidden_dim"] = "composed_dim in the config"
        return facts.options.composed_dim
    facts.reasons["hidden_dim"] = (
        f"the smaller of the towers' sizes, {text_dim} for text and {image_dim} for images"
    )
    return min(text_dim, image_dim)


# ---- pooling and attention -------------------------------------------------------------------------------------


def _bidirectional(facts: Facts, family: Family) -> bool:
    asked = facts.options.bidirectional_attention
    causal = is_causal(facts, family)
    own = causal and (
        backbones.is_bidirectional(facts.model_config)
        or bool(facts.of_saved("bidirectional_attention"))
    )
    if asked and not causal:
        raise UserError(
            f"bidirectional_attention: true is for decoder-only models, and {facts.options.model_name} is of the family "
            f"{family.name}, whose attention is already bidirectional; leave it out"
        )
    if causal:
        facts.reasons["bidirectional_attention"] = (
            "bidirectional_attention: true"
            if asked
            else "the model's own files"
            if own
            else "a causal decoder"
        )
    return asked or own


def _pooling(
    facts: Facts, family: Family, shape: backbones.Shape, *, causal: bool
) -> str:
    own, own_reason = _own_pooling(facts, family, shape, causal=causal)
    asked = facts.options.pooling
    if asked == "auto":
        if own is None:
            raise UserError(own_reason)
        facts.reasons["pooling"] = own_reason
        return own
    if backbones.gives_vectors(facts.model_config):
        raise UserError(
            f"pooling: {asked} is not available for {facts.options.model_name}, whose module gives one vector for each "
            "input; leave pooling out"
        )
    if family.pools_itself:
        raise UserError(
            f"pooling: {asked} is not available for {facts.options.model_name}, whose embedding is the output of its "
            f"{family.name} projection; leave pooling out"
        )
    refusal = POOLINGS[asked].refusal(
        is_causal=causal,
        is_image=not family.reads_text,
        has_class_token=shape.has_class_token,
    )
    if refusal is not None:
        raise UserError(f"pooling: {asked} on {facts.options.model_name}: {refusal}")
    if own is None or own == asked:
        facts.reasons["pooling"] = f"pooling: {asked}"
    else:
        facts.reasons["pooling"] = (
            f"pooling: {asked}, although {own} is the model's own: {own_reason}"
        )
    return asked


def _own_pooling(
    facts: Facts, family: Family, shape: backbones.Shape, *, causal: bool
) -> tuple[str | None, str]:
    """Return the model's own pooling and the reason, or None and an error message if vembed does not support it."""
    if family.pools_itself:
        return MODEL_POOLING, f"{family.name} projects its features itself"
    if facts.saved is not None:
        return facts.saved.pooling, f"from {DESCRIPTION_FILE}"
    if backbones.gives_vectors(facts.model_config):
        return "cls", "the module gives one vector for each input"
    if facts.files is not None and facts.files.pooling_modes:
        where = "1_Pooling/config.json"
        if not facts.files.include_prompt:
            return None, (
                f"{where} of {facts.options.model_name} leaves the prompt out of the pooling, which is not supported; "
                "set pooling to train with the prompt pooled too"
            )
        pooling = facts.files.pooling
        if pooling is None:
            return None, (
                f"{where} of {facts.options.model_name} pools by {' and '.join(facts.files.pooling_modes)}, which vembed "
                f"cannot; set pooling to {' or '.join(POOLINGS)}"
            )
        refusal = pooling.refusal(
            is_causal=causal,
            is_image=not family.reads_text,
            has_class_token=shape.has_class_token,
        )
        if refusal is not None:
            return None, (
                f"{where} of {facts.options.model_name} pools by {pooling.name}: {refusal}"
            )
        return pooling.name, f"from {where}"
    if not family.reads_text:
        return backbones.image_pooling(facts.model_config, shape)
    if causal and family.pooling != "last":
        return (
            "last",
            "a causal decoder's last token is the only one that has seen the whole text",
        )
    return family.pooling, family.pooling_reason


def _trained_pooling(facts: Facts, pooling: str) -> Path | None:
    """Return the folder with the weights of the model's trained pooling; None: it has none, or the run uses another
    pooling."""
    if facts.files is None or facts.files.pooling is None:
        return None
    stored = facts.files.pooling
    return (
        facts.files.pooling_folder
        if stored.is_trained and stored.name == pooling
        else None
    )


# ---- sizes and similarity --------------------------------------------------------------------------------------


def _embedding_dim_before_mrl(facts: Facts, hidden_dim: int) -> int:
    size = hidden_dim
    for folder in facts.files.dense if facts.files is not None else ():
        settings = read_dense(folder)
        if settings.in_features != size:
            raise UserError(
                f"{folder}: a Dense module for {settings.in_features} inputs follows {size} outputs"
            )
        size = settings.out_features
    if size != hidden_dim:
        facts.reasons["embedding_dim"] = "the model's own Dense modules"
    return size


def _matryoshka_sizes(
    facts: Facts, matryoshka: MatryoshkaSection | None, base_dim: int
) -> tuple[int, ...]:
    """Return the Matryoshka sizes; without Matryoshka training, those that the model was saved with."""
    if matryoshka is None or not matryoshka.use_mrl:
        return tuple(facts.of_saved("mrl_dims") or ())
    if matryoshka.mrl_dims:
        dims = tuple(matryoshka.mrl_dims)
        facts.reasons["mrl_dims"] = "mrl_dims in the config"
    else:
        halves = [base_dim]
        while halves[-1] % 2 == 0 and halves[-1] // 2 >= SMALLEST_MRL_DIM:
            halves.append(halves[-1] // 2)
        dims = tuple(halves)
        facts.reasons["mrl_dims"] = (
            f"the embedding's size and its halves down to {SMALLEST_MRL_DIM}"
        )
    too_large = [dim for dim in dims if dim > base_dim]
    if too_large:
        raise UserError(
            f"mrl_dims: {too_large[0]} is larger than the {base_dim}-dimensional embedding of {facts.options.model_name}; "
            f"set it to {base_dim} or less"
        )
    weights = matryoshka.mrl_weights
    if weights is not None and len(weights) != len(dims):
        raise UserError(
            f"mrl_weights has {len(weights)} entries and mrl_dims has {len(dims)} ({list(dims)}); "
            "give one weight per size"
        )
    return dims


def _has_projection(
    facts: Facts,
    matryoshka: MatryoshkaSection,
    mrl_dims: tuple[int, ...],
    base_dim: int,
) -> bool:
    """Return True if this run adds an MRL projection to an embedding of `base_dim`."""
    if not matryoshka.use_mrl:
        return False
    asked = matryoshka.mrl_projection
    adds_projection = max(mrl_dims) < base_dim if asked == "auto" else asked
    if adds_projection:
        facts.reasons["embedding_dim"] = (
            f"an MRL projection from {base_dim} to max(mrl_dims), by mrl_projection: {asked}"
        )
    return adds_projection


def _similarity(facts: Facts, of_loss: Similarity, *, for_use: bool) -> Similarity:
    own = (
        facts.files.similarity
        if facts.files is not None
        else facts.of_saved("similarity")
    )
    if for_use and own is not None:
        if own in get_args(Similarity):
            facts.reasons["similarity"] = "from the model's files"
            return cast(Similarity, own)
        log.warning(
            "%s: its files name the similarity %s, which vembed does not have: cosine is used",
            facts.options.model_name,
            own,
        )
    if own is not None and own != of_loss:
        facts.reasons["similarity"] = (
            f"similarity in the config, although the model's files say {own}"
        )
    return of_loss


def _normalize(facts: Facts, similarity: Similarity) -> bool:
    if facts.saved is not None:
        return facts.saved.normalize
    if facts.files is not None:
        facts.reasons["normalize"] = (
            f"modules.json has {'a' if facts.files.normalize else 'no'} Normalize module"
        )
        return facts.files.normalize
    return similarity == "cosine"


def _truncate_dim(facts: Facts, embedding_dim: int) -> int | None:
    own = facts.files.truncate_dim if facts.files is not None else None
    # A size that cuts nothing is no cut.
    if own is None or own >= embedding_dim:
        return None
    facts.reasons["truncate_dim"] = "from config_sentence_transformers.json"
    return own
