"""Decisions about one model, by its family and its files: family, pooling, attention, sizes and similarity."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from transformers import PretrainedConfig

from vembed.config.schema import MatryoshkaSection, ModelSection
from vembed.errors import UserError
from vembed.models.families import backbones
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription
from vembed.models.families.family import Evidence, Family
from vembed.models.families.model_files import (
    SentenceTransformersFiles,
    files_of,
    model_folder,
    tokenizer_folder,
)
from vembed.models.families.model_settings import (
    TokenizerSettings,
    read_dense,
    read_settings,
)
from vembed.models.families.table import FAMILIES, recognised_by
from vembed.models.families.weight_files import read_object
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS

_BGE_ZH = "\u4e3a\u8fd9\u4e2a\u53e5\u5b50\u751f\u6210\u8868\u793a\u4ee5\u7528\u4e8e\u68c0\u7d22\u76f8\u5173\u6587\u7ae0\uff1a"
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"

PUBLISHED: tuple[tuple[str, str, str, str], ...] = (
    (
        "multilingual-e5-large-instruct",
        _WEB_SEARCH + "Query: ",
        "",
        "instruction-tuned E5",
    ),
    ("e5-mistral-7b-instruct", _WEB_SEARCH + "Query: ", "", "instruction-tuned E5"),
    (
        r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?",
        "query: ",
        "passage: ",
        "E5",
    ),
    (
        r"bge-(small|base|large)-en(-v1\.5)?",
        "Represent this sentence for searching relevant passages: ",
        "",
        "BGE",
    ),
    (r"bge-(small|base|large)-zh(-v1\.5)?", _BGE_ZH, "", "BGE"),
    (r"nomic-embed-text-v1(\.5)?", "search_query: ", "search_document: ", "Nomic"),
    (r"qwen3-embedding-(0\.6b|4b|8b)", _WEB_SEARCH + "Query:", "", "Qwen3-Embedding"),
    (
        r"qwen3-vl-embedding-(2b|8b)",
        "Represent the user's input.",
        "Represent the user's input.",
        "Qwen3-VL-Embedding",
    ),
)
"""Pattern of the name's last part (lower case), query prompt, document prompt, model series."""
OF_QUERIES = ("query",)
OF_DOCUMENTS = ("document", "passage", "corpus")
"""Names of the prompts of queries and documents in a model's files."""


@dataclass
class Facts:
    """Facts about one model while its description is built."""

    options: ModelSection
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
        folder = tokenizer_folder(self.backbone, self.adapter)
        settings = (
            read_settings(folder / "tokenizer_config.json", TokenizerSettings)
            or TokenizerSettings()
        )
        return dict(settings).get(name)


def gather(options: ModelSection, *, use_qlora: bool) -> Facts:
    """Locate the model's files and read the small ones."""
    files = files_of(options)
    saved = read_object(files.folder / DESCRIPTION_FILE)
    if files.adapter is not None and use_qlora:
        raise UserError(
            f"use_qlora: {options.model_name} is an adapter without the weights below it; "
            "merge it first with `vembed export --merge`, and train the result"
        )
    return Facts(
        options=options,
        files=files.sentence_transformers,
        saved=None
        if saved is None
        else ModelDescription.from_dict(saved, files.folder),
        backbone=files.backbone,
        adapter=files.adapter,
        model_config=backbones.read_config(
            files.backbone, trust_remote_code=options.trust_remote_code
        ),
    )


def is_causal(facts: Facts, family: Family) -> bool:
    """Return True if attention is causal by default, before the option bidirectional_attention is applied."""
    return (
        backbones.is_decoder_only(facts.model_config)
        if family.is_causal is None
        else family.is_causal
    )


# ---- text settings ---------------------------------------------------------------------------------------------


def prompts(facts: Facts) -> tuple[str, str]:
    """Return the prompts of queries and documents."""
    return _prompt(facts, "query", OF_QUERIES), _prompt(facts, "document", OF_DOCUMENTS)


def other_prompts(facts: Facts) -> dict[str, str]:
    """Return the prompts of the model's files that are neither for queries nor for documents, by name."""
    if facts.saved is not None:
        return facts.saved.other_prompts
    named = facts.files.prompts if facts.files is not None else {}
    return {
        name: text
        for name, text in named.items()
        if name not in (*OF_QUERIES, *OF_DOCUMENTS)
    }


def default_prompt_name(facts: Facts) -> str | None:
    """Return the name under which the saved model has the default prompt of the model's files, if they name one."""
    if facts.saved is not None:
        return facts.saved.default_prompt_name
    name = facts.files.default_prompt_name if facts.files is not None else None
    # Other names for the prompt of documents are not saved.
    return "document" if name in OF_DOCUMENTS else name


def _prompt(
    facts: Facts, kind: Literal["query", "document"], names: tuple[str, ...]
) -> str:
    key = f"{kind}_prompt"
    asked = (
        facts.options.query_prompt if kind == "query" else facts.options.document_prompt
    )
    if asked is not None:
        facts.reasons[key] = f"{key} in the config"
        return asked
    if facts.saved is not None:
        facts.reasons[key] = f"from {DESCRIPTION_FILE}"
        return (
            facts.saved.query_prompt if kind == "query" else facts.saved.document_prompt
        )
    if facts.files is not None:
        for name in names:
            if name in facts.files.prompts:
                facts.reasons[key] = (
                    f"prompt {name!r} in config_sentence_transformers.json"
                )
                return facts.files.prompts[name]
        if facts.files.default_prompt is not None:
            facts.reasons[key] = "default prompt in config_sentence_transformers.json"
            return facts.files.default_prompt
    # A model whose files name any prompts is taken at its word; the table is for those published without.
    published = (
        None
        if facts.files is not None and facts.files.prompts
        else published_prompts(facts.options.model_name)
    )
    if published is None:
        return ""
    facts.reasons[key] = published[2]
    return published[0] if kind == "query" else published[1]


def max_length(facts: Facts, family: Family, *, for_use: bool) -> int:
    """Return the maximum text length in tokens. `for_use`: a length that the model's own files name is not limited by
    the family's default, which bounds the time and memory of training."""
    asked = facts.options.max_length
    text = facts.model_config.get_text_config()
    positions = text.to_dict().get("max_position_embeddings")
    if (
        positions is not None
        and positions > 0
        and facts.model_type in backbones.POSITIONS_AFTER_PADDING
    ):
        positions -= int(text.pad_token_id) + 1
    if not family.reads_text:
        facts.reasons["max_length"] = "an image encoder reads no text"
        return asked or family.longest_by_default
    if family.has_fixed_length:
        if asked not in (None, positions):
            raise UserError(
                f"max_length: {asked} does not fit {facts.options.model_name}: SigLIP pads every text to the "
                f"{positions} tokens it was trained with; leave max_length out"
            )
        facts.reasons["max_length"] = (
            "SigLIP pads every text to its number of positions"
        )
        return int(positions)
    if asked is not None:
        if positions is not None and asked > positions:
            raise UserError(
                f"max_length: {asked} is more than the {positions} positions of {facts.options.model_name}; "
                f"set it to {positions} or less"
            )
        facts.reasons["max_length"] = "max_length in the config"
        return asked
    longest = family.longest_by_default
    limits = {
        "positions in config.json": positions,
        f"default limit of {longest}; set max_length to change it": longest,
    }
    if facts.saved is not None:
        limits = {f"from {DESCRIPTION_FILE}": facts.saved.max_length}
    elif facts.files is not None and facts.files.max_length is not None:
        of_files = {"sentence_bert_config.json": facts.files.max_length}
        limits = (
            {"positions in config.json": positions, **of_files}
            if for_use
            else limits | of_files
        )
    else:
        limits["model_max_length in tokenizer_config.json"] = facts.of_tokenizer(
            "model_max_length"
        )
    # The smallest limit holds, and its reason is logged. Tokenizers without a limit say 1e30.
    known = {
        why: int(limit)
        for why, limit in limits.items()
        if limit is not None and limit > 0
    }
    reason = min(known, key=lambda why: known[why])
    facts.reasons["max_length"] = reason
    return known[reason]


def padding_side(facts: Facts, family: Family) -> Literal["left", "right"]:
    """Return the padding side: the tokenizer's for decoders with rotary positions, otherwise right.

    Absolute positions count from the first token, so left padding would shift them.
    """
    if facts.of_tokenizer("padding_side") != "left":
        return "right"
    if (
        is_causal(facts, family)
        and "rope_parameters" in facts.model_config.get_text_config().to_dict()
    ):
        return "left"
    facts.reasons["padding_side"] = (
        "its positions count from the first token, although the tokenizer pads on the left"
    )
    return "right"


def published_prompts(name: str) -> tuple[str, str, str] | None:
    """Return query prompt, document prompt and reason for a model known by name; otherwise None."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    for pattern, query, document, what in PUBLISHED:
        if re.fullmatch(pattern, last):
            return (
                query,
                document,
                f"{what} models were trained with it; recognised by the name {last}",
            )
    return None


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
    is_bidirectional = causal and (
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
            if is_bidirectional
            else "a causal decoder"
        )
    return asked or is_bidirectional


def _pooling(
    facts: Facts, family: Family, shape: backbones.Shape, *, causal: bool
) -> str:
    pooling, reason = _own_pooling(facts, family, shape, causal=causal)
    asked = facts.options.pooling
    if asked == "auto":
        if pooling is None:
            raise UserError(reason)
        facts.reasons["pooling"] = reason
        return pooling
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
    if pooling is None or pooling == asked:
        facts.reasons["pooling"] = f"pooling: {asked}"
    else:
        facts.reasons["pooling"] = (
            f"pooling: {asked}, although {pooling} is the model's own: {reason}"
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
    adds_projection = max(mrl_dims) < base_dim if asked == "auto" else bool(asked)
    if adds_projection:
        facts.reasons["embedding_dim"] = (
            f"an MRL projection from {base_dim} to max(mrl_dims), by mrl_projection: {asked}"
        )
    return adds_projection


def _similarity(facts: Facts, of_loss: Similarity, *, for_use: bool) -> Similarity:
    of_files = (
        facts.files.similarity
        if facts.files is not None
        else facts.of_saved("similarity")
    )
    if for_use and of_files is not None:
        if of_files in get_args(Similarity):
            facts.reasons["similarity"] = "from the model's files"
            return cast(Similarity, of_files)
        log.warning(
            "%s: its files name the similarity %s, which vembed does not have: cosine is used",
            facts.options.model_name,
            of_files,
        )
    if of_files is not None and of_files != of_loss:
        facts.reasons["similarity"] = (
            f"similarity in the config, although the model's files say {of_files}"
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
    dim = facts.files.truncate_dim if facts.files is not None else None
    # A size that cuts nothing is no cut.
    if dim is None or dim >= embedding_dim:
        return None
    facts.reasons["truncate_dim"] = "from config_sentence_transformers.json"
    return dim
