"""ModelDescription: the facts about one model, decided once, logged with reasons and saved with the model.

`describe` decides them in one reading of the model's folder.
"""

import logging
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from transformers import PretrainedConfig, PreTrainedModel

from vembed.config.schema import (
    AdapterSection,
    MatryoshkaSection,
    ModelSection,
    ObjectiveSection,
)
from vembed.errors import UserError
from vembed.models.custom.modeling import UserModelConfig
from vembed.models.custom.own_code import own_folder
from vembed.models.families.backbones import (
    ALWAYS_CAUSAL,
    POSITIONS_AFTER_PADDING,
    Shape,
    is_decoder_only,
    model_class,
    read_config,
    shape_of,
)
from vembed.models.families.family import Family, Modality
from vembed.models.families.model_files import (
    DenseSettings,
    ModelFiles,
    ModelSettings,
    TokenizerSettings,
    check_inside,
    first_problem,
    model_folder,
    read_model,
    read_object,
    read_settings,
    tokenizer_folder,
)
from vembed.models.families.table import FAMILIES, FAMILY_OF_TYPE
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS

log = logging.getLogger(__name__)

DESCRIPTION_FILE = "vembed.json"
"""File with a saved model's description, in the model's folder."""
IMAGE_TOWER_FOLDER = "image_tower"
"""Folder of a composed model's image tower, inside the model's folder."""
NOT_SAVED = (
    "reasons",
    "dense",
    "token_dim",
    "pooling_folder",
    "adds_projection",
    "config_changes",
)
Size = Annotated[int, Field(ge=1)]
SimilarityName = Literal["cosine", "dot"]


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
    similarity: SimilarityName = "cosine"
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
    config_changes: dict[str, Any] = field(default_factory=dict)
    """Other values of keys in config.json, for this run. Not saved: the saved config.json has them."""
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
    adapter: Path | None = None
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
    def folder(self) -> Path:
        """The folder `source`."""
        return Path(self.source)

    @property
    def image_folder(self) -> Path:
        """Folder of the image tower and its processor."""
        return Path(self.image_source or self.source)

    @property
    def family_traits(self) -> Family:
        """The record of the model's family."""
        return FAMILIES[self.family]

    def read_config(self, folder: Path | None = None) -> PretrainedConfig:
        """Read the config of the weights in `source`, with the changes of this run. `folder`: of another tower."""
        changes = {}
        if folder in (None, self.folder):
            changes = self.config_changes
        return read_config(
            folder or self.folder,
            trust_remote_code=self.trust_remote_code,
            changes=changes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the saved description, without reasons and with paths relative to its folder."""
        values = asdict(self)
        # The saved folder is self-contained: paths of this machine mean nothing elsewhere, and are not published.
        values |= {"source": ".", "adapter": None}
        if self.image_source is not None:
            values["image_source"] = IMAGE_TOWER_FOLDER
        for name in NOT_SAVED:
            del values[name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], folder: Path) -> "ModelDescription":
        """Return the description that `to_dict` saved in `folder`."""
        path = folder / DESCRIPTION_FILE
        try:
            saved = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise UserError(f"{path}: {first_problem(error)}") from error
        if saved.family not in FAMILIES:
            raise UserError(
                f"{path}: family {saved.family!r} is not one of {', '.join(FAMILIES)}"
            )
        folders: dict[str, Any] = {}
        for name in ("source", "image_source"):
            inner = values.get(name)
            if inner is not None:
                check_inside(path, name, inner)
                folders[name] = str(folder / inner)
        return replace(saved, **folders)

    def summary(self) -> str:
        """Return the model's facts and their reasons, one line each, for the log."""
        output = f"embedding of {self.output_dim:,d} dimensions"
        if self.is_reranker:
            output = "reranker"
        lines = [
            f"{self.name or self.source}: {self.family}, {output}, "
            f"modalities {', '.join(self.modalities)}, layers {', '.join(self.layer_classes)}"
        ]
        values = asdict(self)
        lines += [
            f"{key}: {values[key]!r} ({reason})" for key, reason in self.reasons.items()
        ]
        return "\n  ".join(lines)

    @property
    def is_reranker(self) -> bool:
        """True: it gives scores of pairs, and no embeddings."""
        return self.scores is not None

    @property
    def output_dim(self) -> int:
        """Size of the vectors that `encode` returns."""
        return self.truncate_dim or self.embedding_dim

    @property
    def compares_unit_vectors(self) -> bool:
        """True: the similarity of two inputs is that of their vectors of length 1."""
        return self.normalize or self.similarity == "cosine"

    def with_(self, **changes: Any) -> "ModelDescription":
        """Return a copy with some fields changed."""
        return replace(self, **changes)


# ---- decisions ---------------------------------------------------------------------------------------------------


SMALLEST_MRL_DIM = 64

_BGE_ZH = "\u4e3a\u8fd9\u4e2a\u53e5\u5b50\u751f\u6210\u8868\u793a\u4ee5\u7528\u4e8e\u68c0\u7d22\u76f8\u5173\u6587\u7ae0\uff1a"
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"

PUBLISHED: tuple[tuple[str, str, str], ...] = (
    ("multilingual-e5-large-instruct", _WEB_SEARCH + "Query: ", ""),
    ("e5-mistral-7b-instruct", _WEB_SEARCH + "Query: ", ""),
    (
        r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?",
        "query: ",
        "passage: ",
    ),
    (
        r"bge-(small|base|large)-en(-v1\.5)?",
        "Represent this sentence for searching relevant passages: ",
        "",
    ),
    (r"bge-(small|base|large)-zh(-v1\.5)?", _BGE_ZH, ""),
    (r"nomic-embed-text-v1(\.5)?", "search_query: ", "search_document: "),
    (r"qwen3-embedding-(0\.6b|4b|8b)", _WEB_SEARCH + "Query:", ""),
    (
        r"qwen3-vl-embedding-(2b|8b)",
        "Represent the user's input.",
        "Represent the user's input.",
    ),
)
"""Pattern of the name's last part (lower case), query prompt, document prompt."""
RERANK_INSTRUCTION = (
    "Given a web search query, retrieve relevant passages that answer the query"
)
"""What a decoder is asked about each pair, unless `query_prompt` says it: that of Qwen3-Reranker."""
IMAGE_INSTRUCTION = (
    "Given a search query, retrieve relevant candidates that answer the query."
)
"""The same for a vision-language model: that of Qwen3-VL-Reranker."""
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Kind of input -> names of its prompt in a model's files."""
_FROM_SAVED = f"from {DESCRIPTION_FILE}"
NO_LIMIT = 10**9
"""Tokenizers without a maximum length say more."""
_POOLED_BY_MEAN = ("convnext", "convnextv2", "dinov3_convnext")


@dataclass
class _Reading:
    """What the user and the files say about one model, and the reasons for what was decided so far."""

    options: ModelSection
    files: ModelFiles
    saved: dict[str, Any]
    """Fields of the description that vembed saved with the model. Empty without one."""
    config: PretrainedConfig
    model_class: type[PreTrainedModel]
    reasons: dict[str, str] = field(default_factory=dict)


def describe_trained(
    model: ModelSection,
    matryoshka: MatryoshkaSection,
    objective: ObjectiveSection,
    adapters: AdapterSection,
) -> ModelDescription:
    """Return the description of the model that a run trains."""
    return describe(
        model,
        matryoshka,
        similarity=objective.similarity,
        use_qlora=adapters.use_qlora,
    )


def describe(
    model: ModelSection,
    matryoshka: MatryoshkaSection | None = None,
    *,
    similarity: SimilarityName = "cosine",
    use_qlora: bool = False,
    for_inference: bool = False,
) -> ModelDescription:
    """Return the description of a model for this run, with the reason for each decision.

    `similarity`: that of the loss. `use_qlora`: the weights are held in 4 bits.
    `for_inference`: of a finished model that is used, not trained: its files say the similarity and the maximum length.
    """
    name = str(own_folder(model)) if model.model_class else model.model_name
    files = read_model(
        name,
        model.model_revision,
        is_reranker=model.task == "rerank",
        option="" if for_inference else "model_name",
    )
    if files.adapter is not None and use_qlora:
        raise UserError(
            f"use_qlora: {model.model_name} is an adapter without the weights below it; "
            "merge it first with `vembed export --merge`, and train the result"
        )
    saved = read_object(files.folder / DESCRIPTION_FILE)
    if saved:
        saved = vars(ModelDescription.from_dict(saved, files.folder))
    trust = model.trust_remote_code
    # With model_class they are arguments of the class.
    changes = {} if model.model_class else dict(model.model_arguments or {})
    config = read_config(files.backbone, trust_remote_code=trust, changes=changes)
    chosen = model_class(config, trust_remote_code=trust)
    reading = _Reading(model, files, saved, config, chosen)
    reasons = reading.reasons
    family = _family(reading)
    shape = shape_of(
        files.backbone, config, chosen, family, reads_weights=not model.from_scratch
    )

    # ---- attention and pooling
    is_decoder = family.is_causal
    if is_decoder is None:
        is_decoder = is_decoder_only(config)
    if model.bidirectional_attention and config.model_type in ALWAYS_CAUSAL:
        raise UserError(
            f"bidirectional_attention: true has no effect on {model.model_name}, of the type {config.model_type}, whose tokens "
            "see only earlier ones: leave it out"
        )
    values = config.to_dict()
    # EmbeddingGemma's config says the first, other decoders the second.
    sees_all = is_decoder and (
        values.get("use_bidirectional_attention") is True
        or values.get("is_causal") is False
        or saved.get("bidirectional_attention", False)
        or model.bidirectional_attention
    )
    pooling = _pooling(reading, family, shape, is_causal=is_decoder and not sees_all)
    # Another pooling, which the user has chosen, does not have these weights.
    pooling_folder = files.pooling_folder if (pooling,) == files.pooling_modes else None

    # ---- sizes: pooled vectors -> Dense modules of the model -> MRL projection of this run
    hidden_dim = shape.hidden_dim
    if pooling != MODEL_POOLING:
        hidden_dim = POOLINGS[pooling].width(hidden_dim)
    image: dict[str, Any] = {"hidden_dim": hidden_dim}
    layer_classes = shape.layer_classes
    if family.is_composed:
        image, image_classes = _image_tower(reading, hidden_dim, matryoshka)
        layer_classes += image_classes
        hidden_dim = image["hidden_dim"]
    size = hidden_dim
    for folder in files.dense:
        settings: DenseSettings = read_settings(folder / "config.json", DenseSettings)
        if settings.in_features != size:
            raise UserError(
                f"{folder}: a Dense module for {settings.in_features} inputs follows {size} outputs"
            )
        size = settings.out_features
    mrl_dims = tuple(saved.get("mrl_dims", ()))
    adds_projection = False
    if matryoshka is not None and matryoshka.mrl_dims is not None:
        mrl_dims = _matryoshka_sizes(reading, matryoshka, size)
        adds_projection = bool(matryoshka.mrl_projection)
        if matryoshka.mrl_projection == "auto":
            adds_projection = max(mrl_dims) < size
        if adds_projection:
            reasons["embedding_dim"] = f"an MRL projection from {size} to max(mrl_dims)"
            size = max(mrl_dims)
    truncate_dim = None
    size_of_files = files.settings.truncate_dim or size
    if size_of_files < size and matryoshka is not None and matryoshka.mrl_dims:
        reasons["mrl_dims"] = f"not truncate_dim: {size_of_files} of the model's files"
    elif size_of_files < size:
        truncate_dim = size_of_files
        reasons["truncate_dim"] = f"of {size} dimensions, as the model's files say"

    # ---- similarity
    of_files = files.settings.similarity_fn_name or saved.get("similarity")
    if for_inference and of_files in get_args(SimilarityName):
        reasons["similarity"] = "from the model's files"
        similarity = cast(SimilarityName, of_files)
    elif for_inference and of_files is not None:
        log.warning(
            f"{model.model_name}: its files name the similarity {of_files}, which vembed does not have: cosine is used"
        )
    elif of_files not in (None, similarity):
        reasons["similarity"] = f"although the model's files say {of_files}"
    normalize = saved.get("normalize", files.normalize)
    if normalize is None:
        normalize = similarity == "cosine"
    elif similarity == "dot" and not for_inference and normalize:
        # The loss sees vectors of any length, so the saved model must give them.
        normalize = False
        reasons["normalize"] = (
            "similarity: dot trains lengths, which the model's files remove"
        )

    # ---- texts
    tokenizer_path = tokenizer_folder(files.backbone, files.adapter)
    tokenizer: TokenizerSettings = read_settings(
        tokenizer_path / "tokenizer_config.json", TokenizerSettings, is_optional=True
    )
    padding_side: Literal["left", "right"] = "right"
    is_rotary = is_decoder and "rope_parameters" in config.get_text_config().to_dict()
    # Absolute positions count from the first token, so left padding would shift them.
    if tokenizer.padding_side == "left" and is_rotary:
        padding_side = "left"
    default_prompt_name = files.settings.default_prompt_name
    if default_prompt_name in PROMPT_NAMES["document"]:
        default_prompt_name = "document"  # other names for it are not saved
    other_prompts = dict(files.prompts)
    for name in (*PROMPT_NAMES["query"], *PROMPT_NAMES["document"]):
        other_prompts.pop(name, None)
    description = ModelDescription(
        family=family.name,
        source=str(files.backbone),
        embedding_dim=size,
        pooling=pooling,
        modalities=tuple(family.forward_kinds),
        layer_classes=layer_classes,
        max_length=_max_length(reading, family, tokenizer, for_inference=for_inference),
        padding_side=padding_side,
        query_prompt=_prompt(reading, "query", model.query_prompt),
        document_prompt=_prompt(reading, "document", model.document_prompt),
        other_prompts=saved.get("other_prompts", other_prompts),
        default_prompt_name=saved.get("default_prompt_name", default_prompt_name),
        similarity=similarity,
        normalize=normalize,
        truncate_dim=truncate_dim,
        mrl_dims=mrl_dims,
        dense=files.dense,
        token_dim=shape.hidden_dim,
        pooling_folder=pooling_folder,
        adds_projection=adds_projection,
        config_changes=changes,
        bidirectional_attention=sees_all,
        min_pixels=model.min_pixels or saved.get("min_pixels"),
        max_pixels=model.max_pixels or saved.get("max_pixels"),
        adapter=files.adapter,
        quantized=use_qlora
        or (files.adapter is not None and saved.get("quantized", False)),
        name=model.model_name,
        revision=model.model_revision,
        trust_remote_code=trust,
        reasons=reasons,
        **image,
    )
    if model.task == "rerank":
        return _as_reranker(description, reading)
    return description


def _as_reranker(description: ModelDescription, reading: _Reading) -> ModelDescription:
    """Return the description of a reranker from that of its tower."""
    options = reading.options
    family = description.family_traits
    config = reading.config
    reads_pairs = family.reads_only_text or family.is_vision_language
    if not reads_pairs or family.is_composed or options.model_class:
        raise UserError(
            f"task: rerank: {description.name} is of the family {family.name}: give a text model or a vision-language model"
        )
    is_decoder = family.is_vision_language or is_decoder_only(config)
    classes = " ".join(config.architectures or ())
    scores = options.reranker_head
    if scores == "auto":
        answers = is_decoder and ("ForCausalLM" in classes or family.is_vision_language)
        by_kind = "answer" if answers else "label"
        scores = cast(Any, reading.saved.get("scores") or by_kind)
    if (scores == "answer" and not is_decoder) or (
        scores == "label" and family.is_vision_language
    ):
        raise UserError(
            f"reranker_head: {scores} is not for {description.name}, of the family {family.name}: leave it out"
        )
    pooling = "last" if is_decoder else config.to_dict().get("classifier_pooling")
    prompts = {"query_prompt": "", "document_prompt": ""}
    if scores == "answer":
        prompts["query_prompt"] = (
            IMAGE_INSTRUCTION if family.is_vision_language else RERANK_INSTRUCTION
        )
    path = reading.files.folder / "config_sentence_transformers.json"
    card: ModelSettings = read_settings(path, ModelSettings, is_optional=True)
    of_files: dict[str, Any] = {}
    if card.model_type == "CrossEncoder" and card.prompts:
        # It puts the prompt before the query, or asks it as the instruction.
        of_files["query_prompt"] = card.prompts.get(card.default_prompt_name or "")
    for source in (of_files, reading.saved, vars(options)):
        for key in prompts:
            if source.get(key) is not None:
                prompts[key] = source[key]
    return description.with_(
        scores=scores,
        embedding_dim=1,
        pooling=pooling or "cls",
        similarity="dot",
        normalize=False,
        padding_side="left" if scores == "answer" else description.padding_side,
        other_prompts={},
        default_prompt_name=None,
        reasons={"scores": "by reranker_head and the model's files"},
        **prompts,
    )


def _family(reading: _Reading) -> Family:
    """Return the model's family: what its files say, and the option model_family where it fits."""
    options = reading.options
    kind = str(reading.config.model_type)
    reason = f"model_type {kind} in config.json"
    if options.model_class is not None:
        reason = f"the forward of {options.model_class}"
    inputs = (
        reading.config.inputs if isinstance(reading.config, UserModelConfig) else ()
    )
    if reading.saved:
        detected = FAMILIES[reading.saved["family"]]
        reason = _FROM_SAVED
    elif kind in FAMILY_OF_TYPE:
        detected = FAMILY_OF_TYPE[kind]
    elif reading.model_class.main_input_name == "pixel_values":
        detected = FAMILIES["image_encoder"]
    elif "pixel_values" in inputs:
        detected = FAMILIES["own_text_image"]
    elif "vision_config" in reading.config.to_dict():
        raise UserError(
            f"{options.model_name} is of the type {kind}, a model of texts and images that vembed does not know; it knows "
            f"{', '.join(sorted(FAMILY_OF_TYPE))} (docs/extending.md adds a family)"
        )
    elif is_decoder_only(reading.config):
        detected = FAMILIES["text_decoder"]
    else:
        detected = FAMILIES["text_encoder"]
    has_tower = options.image_model_name is not None
    if has_tower and detected.reads_only_text:
        detected = FAMILIES["composed"]
        reason = f"image_model_name: {options.image_model_name} is its second tower"
    family = FAMILIES.get(options.model_family, detected)
    # Between encoder and decoder of texts the user may decide: a decoder may have been trained to see both sides.
    are_texts = family.reads_only_text and detected.reads_only_text
    if not (family == detected or are_texts) or (has_tower and not family.is_composed):
        raise UserError(
            f"model_family: {family.name} does not fit {options.model_name}, which is {detected.name} ({reason}): leave "
            "model_family out, and give image_model_name with a text model alone (it makes it composed)"
        )
    if options.model_family != "auto":
        reason = "model_family in the config"
    reading.reasons["family"] = reason
    return family


def _pooling(
    reading: _Reading,
    family: Family,
    shape: Shape,
    *,
    is_causal: bool,
) -> str:
    """Return the name of the pooling: the option's where it goes with the model, otherwise the model's own."""
    name = reading.options.model_name
    gives_vectors = (
        isinstance(reading.config, UserModelConfig) and reading.config.gives_vectors
    )
    files = reading.files
    facts = {
        "is_causal": is_causal,
        "is_image": "text" not in family.forward_kinds,
        "has_class_token": shape.has_class_token,
    }
    path = "1_Pooling/config.json"
    option = reading.options.pooling
    is_convolutional = reading.config.model_type in _POOLED_BY_MEAN
    if gives_vectors or family.pools_itself or is_convolutional:
        if option != "auto":
            raise UserError(
                f"pooling: {option} is not available for {name}, which gives one vector for each input itself; leave "
                "pooling out"
            )
        reading.reasons["pooling"] = "the model gives one vector for each input itself"
        # The vector of a module is repeated for every token, so that each pooling gives it.
        return "cls" if gives_vectors else MODEL_POOLING
    pooling = family.pooling
    reason = family.pooling_reason
    problem = None
    if reading.saved:
        pooling = reading.saved["pooling"]
        reason = _FROM_SAVED
    elif files.pooling_modes:
        reason = f"from {path}"
        problem = f"pools by {' and '.join(files.pooling_modes)}, which vembed cannot"
        # The pooling that does the same as all modes together.
        for known in POOLINGS.values():
            if set(known.modes or (known.name,)) == set(files.pooling_modes):
                pooling = known.name
                refusal = known.refusal(**facts)
                problem = f"pools by {pooling}: {refusal}" if refusal else None
                break
        if not files.include_prompt:
            problem = "leaves the prompt out of the pooling, which is not supported"
    elif "text" not in family.forward_kinds:
        pooling = _image_pooling(reading.config, shape)
        reason = "the class token of the image encoder, or the mean without one"
    elif is_causal and family.pooling != "last":
        pooling = "last"
        reason = (
            "a causal decoder's last token is the only one that has seen the whole text"
        )
    if option == "auto":
        if problem is not None:
            raise UserError(
                f"{path} of {name} {problem}; set pooling to {' or '.join(POOLINGS)}"
            )
        reading.reasons["pooling"] = reason
        return pooling
    refusal = POOLINGS[option].refusal(**facts)
    if refusal is not None:
        raise UserError(f"pooling: {option} on {name}: {refusal}")
    reading.reasons["pooling"] = "pooling in the config"
    return option


def _image_pooling(config: PretrainedConfig, shape: Shape) -> str:
    """Return an image encoder's default pooling.

    Without a class token the first position is a corner of the image (ResNet, Swin), so all positions are averaged.
    """
    if config.model_type in _POOLED_BY_MEAN:
        return MODEL_POOLING
    return "cls" if shape.has_class_token else "mean"


def _image_tower(
    reading: _Reading,
    text_dim: int,
    matryoshka: MatryoshkaSection | None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the description's fields for the image tower of a composed model, and its layer classes.

    `text_dim`: size of the text tower's output. Both towers are projected into one space, of size `hidden_dim`, for a
    new model that of the largest of mrl_dims.
    """
    options = reading.options
    saved = reading.saved
    if options.image_model_name is not None:
        folder = model_folder(options.image_model_name, option="image_model_name")
    else:
        folder = Path(saved["image_source"])
    trust = options.trust_remote_code
    config = read_config(folder, trust_remote_code=trust)
    chosen = model_class(config, trust_remote_code=trust)
    if chosen.main_input_name != "pixel_values":
        raise UserError(
            f"image_model_name: {folder} is of the type {config.model_type}, which is not an image encoder; "
            "give one such as a ViT, DINOv2 or ConvNeXt"
        )
    shape = shape_of(folder, config, chosen, FAMILIES["image_encoder"])
    shared_dim = min(text_dim, shape.hidden_dim)
    if saved and FAMILIES[saved["family"]].is_composed:
        shared_dim = saved["hidden_dim"]
    elif matryoshka is not None and isinstance(matryoshka.mrl_dims, list):
        shared_dim = max(matryoshka.mrl_dims)
    fields = {
        "hidden_dim": shared_dim,
        "text_hidden_dim": text_dim,
        "image_source": str(folder),
        "image_hidden_dim": shape.hidden_dim,
        "image_pooling": _image_pooling(config, shape),
    }
    return fields, shape.layer_classes


def _matryoshka_sizes(
    reading: _Reading,
    matryoshka: MatryoshkaSection,
    size: int,
) -> tuple[int, ...]:
    """Return the Matryoshka sizes of an embedding of `size` dimensions."""
    if isinstance(matryoshka.mrl_dims, list):
        dims = tuple(matryoshka.mrl_dims)
    else:
        dims = (size,)
        while dims[-1] % 2 == 0 and dims[-1] // 2 >= SMALLEST_MRL_DIM:
            dims += (dims[-1] // 2,)
    if max(dims) > size:
        raise UserError(
            f"mrl_dims: {max(dims)} is larger than the {size}-dimensional embedding of {reading.options.model_name}; "
            f"set it to {size} or less"
        )
    weights = matryoshka.mrl_weights
    if weights is not None and len(weights) != len(dims):
        raise UserError(
            f"mrl_weights has {len(weights)} entries and mrl_dims has {len(dims)} ({list(dims)}); "
            "give one weight per size"
        )
    return dims


def _prompt(
    reading: _Reading,
    kind: Literal["query", "document"],
    option: str | None,
) -> str:
    """Return the prompt of queries or documents: the option's, the files' or the one published for the model's name."""
    key = f"{kind}_prompt"
    files = reading.files
    if option is not None:
        return option
    if reading.saved:
        return str(reading.saved[key])
    for name in (*PROMPT_NAMES[kind], files.settings.default_prompt_name):
        if name in files.prompts:
            reading.reasons[key] = (
                f"prompt {name!r} in config_sentence_transformers.json"
            )
            return files.prompts[name]
    # A model whose files name any prompts is taken at its word; the table is for those published without.
    if files.prompts:
        return ""
    _, _, last = reading.options.model_name.rstrip("/").rpartition("/")
    last = last.lower()
    for pattern, query, document in PUBLISHED:
        if re.fullmatch(pattern, last):
            reading.reasons[key] = f"that of published models with the name {last}"
            return query if kind == "query" else document
    return ""


def _max_length(
    reading: _Reading,
    family: Family,
    tokenizer: TokenizerSettings,
    *,
    for_inference: bool,
) -> int:
    """Return the maximum text length in tokens. `for_inference`: a length that the caller or the model's own files name is
    not limited by the family's default, which bounds the time and memory of training."""
    option = reading.options.max_length
    text = reading.config.get_text_config()
    positions = text.to_dict().get("max_position_embeddings")
    rope = text.to_dict().get("rope_parameters") or {}
    positions_name = "positions"
    if rope.get("rope_type") == "longrope":
        # A longer text would change the rotations of all texts in its micro-batch.
        positions_name = "original positions (rope_type: longrope)"
        positions = rope["original_max_position_embeddings"]
    if positions and reading.config.model_type in POSITIONS_AFTER_PADDING:
        positions -= int(text.pad_token_id) + 1
    longest = family.longest_by_default
    if "text" not in family.forward_kinds:
        return option or longest
    if option is not None and (family.has_fixed_length or not for_inference):
        smallest = positions if family.has_fixed_length else 1
        if not smallest <= option <= (positions or option):
            raise UserError(
                f"max_length: {option} does not fit the {positions} {positions_name} of {reading.options.model_name}; leave "
                "it out, or lower it where the model takes texts of any length"
            )
        return option
    if family.has_fixed_length:
        return int(positions)
    of_files = reading.files.max_length
    limits = {"positions in config.json": positions, "max_length": option}
    if reading.saved:
        limits[_FROM_SAVED] = reading.saved["max_length"]
    elif of_files is not None:
        limits["sentence_bert_config.json"] = of_files
    else:
        limits["model_max_length in tokenizer_config.json"] = tokenizer.model_max_length
    is_named_by_files = of_files or (tokenizer.model_max_length or NO_LIMIT) < NO_LIMIT
    is_length_named = reading.saved or option or (for_inference and is_named_by_files)
    if not is_length_named:
        limits[f"default limit of {longest}; set max_length to change it"] = longest
    # The smallest limit holds, and its reason is logged.
    known = []
    for why, limit in limits.items():
        if limit is not None and limit > 0:
            known.append((int(limit), why))
    length, reading.reasons["max_length"] = min(known)
    return length
