"""Files of a model: where they are (local folder or Hub), their settings, and the headers of their weights. No weights
are loaded here.

From the bottom up: JSON and safetensors headers, the schemas of the small files, what Sentence Transformers writes,
and the folders that one model is read from.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from vembed.errors import UserError
from vembed.files import (
    existing,
    is_hub_model,
    read_json,
    read_json_object,
    similar_path,
)
from vembed.models.poolings.table import MODE_FLAGS, POOLINGS

# ---- JSON and safetensors headers ------------------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS_ENDING = ".safetensors"
EXPORT_FILE = "export.json"
"""File with the facts of an export: format, precision and the result of the check."""
INDEX = ".safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
METADATA = "__metadata__"


CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a type -> that of safetensors."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: type and shape, and the byte of the file where it begins."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Number of elements."""
    begin: int


def check_weight_files(folder: Path) -> None:
    """Raise UserError if loading the folder's weights could read anything else than safetensors files of this folder.

    Every reader of model folders calls this first. Transformers opens what an index or `transformers_weights` in
    config.json names, also a pickle, and also in another folder.
    """
    for index in sorted(folder.glob("*" + INDEX)):
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise UserError(
                f"{index} is not an index of weights: it needs a weight_map"
            )
        for name in names.values():
            _check_name(index, "weight_map", name)
    path = folder / "config.json"
    named = read_object(path).get("transformers_weights")
    if named is not None:
        _check_name(
            path, "transformers_weights", str(named).removesuffix(".index.json")
        )


def _check_name(
    path: Path,
    key: str,
    name: Any,
) -> None:
    is_plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
    if not is_plain or not name.endswith(WEIGHTS_ENDING):
        raise UserError(
            f"{path}: {key} names {name!r}, and only plain names of .safetensors files in the same folder are read "
            "(no pickled weights, no other folder); save the model again with Transformers"
        )


def check_whole_weights(folder: Path) -> None:
    """Raise UserError unless the folder holds weights of its own and no adapter, which Transformers would follow."""
    check_weight_files(folder)
    if not list(folder.glob("*" + WEIGHTS_ENDING)):
        exported = read_object(folder / EXPORT_FILE).get("format")
        if exported is not None:
            raise UserError(
                f"{folder} is an export in {exported}, which other programs run (onnx and openvino also "
                "`vembed serve`); give the model that it was made from"
            )
        raise UserError(
            f"{folder} has no .safetensors file, and vembed reads no pickled weights; "
            "load the model with Transformers once and save it again"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder / ADAPTER_CONFIG} and whole weights are in one folder, so it is unclear which of them to load: "
            "move the adapter's files, or the weights, to another folder"
        )


def check_no_pickles(folder: Path) -> None:
    """Raise UserError if another library might read pickled weights anywhere in the folder."""
    subfolders = [path for path in folder.rglob("*") if path.is_dir()]
    for inner in (folder, *sorted(subfolders)):
        check_weight_files(inner)
        pickled = sorted(path for path in inner.iterdir() if path.suffix in PICKLED)
        if pickled and not list(inner.glob("*" + WEIGHTS_ENDING)):
            raise UserError(
                f"{pickled[0]} is pickled, and vembed reads no pickled weights; save the model again"
            )


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a model by name, without those of an adapter."""
    tensors: dict[str, Stored] = {}
    for path in sorted(folder.glob("*" + WEIGHTS_ENDING)):
        if path.name != ADAPTER_WEIGHTS:
            tensors |= read_header(path)[0]
    return tensors


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata. Raise UserError unless the file is complete."""
    if not path.is_file():  # a pipe would be waited for
        raise UserError(
            f"{path} is not a regular file; weights are read from safetensors files only"
        )
    try:
        # The library compares types, shapes and offsets in the header with each other and with the file's size.
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{path} is not a safetensors file, or not a whole one ({error}): copy the file again"
        ) from error
    metadata = header.pop(METADATA, {})
    tensors = {}
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        begin = 8 + length + entry["data_offsets"][0]
        tensors[name] = Stored(path, entry["dtype"], shape, math.prod(shape), begin)
    return tensors, metadata


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; empty if it does not exist."""
    return read_json_object(path) if path.is_file() else {}


# ---- schemas of the small files -------------------------------------------------------


LIBRARY_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    OSError,
    RuntimeError,
    StrictDataclassError,
)
"""Exceptions that Transformers raises for settings that make no sense; which one depends on the model class."""
Positive = Annotated[int, Field(ge=1, le=2**31)]


class Settings(BaseModel):
    """Base of the schemas. Other libraries write more into these files than vembed reads."""

    model_config = ConfigDict(extra="allow", strict=True)


class ModuleSettings(Settings):
    """One module of modules.json."""

    path: str
    type: str


class PoolingSettings(Settings):
    """The config.json of a Pooling module; old files have one flag per pooling."""

    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True


class DenseSettings(Settings):
    """The config.json of a Dense module. vembed has none with a residual or on single tokens."""

    in_features: Positive
    out_features: Positive
    bias: bool = True
    activation_function: str | None = None
    use_residual: Literal[False] = False
    module_input_name: Literal["sentence_embedding"] = "sentence_embedding"


class AnswerSettings(Settings):
    """The config.json of a LogitScore module. vembed has none without a token for no."""

    true_token_id: int
    false_token_id: int


class ModelSettings(Settings):
    """config_sentence_transformers.json."""

    model_type: str | None = None
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: Positive | None = None


class TextSettings(Settings):
    """sentence_bert_config.json."""

    max_seq_length: Positive | None = None


class TokenizerSettings(Settings):
    """The keys of tokenizer_config.json that are read."""

    model_max_length: int | float | None = None
    padding_side: str | None = None


class AdapterSettings(Settings):
    """adapter_config.json."""

    base_model_name_or_path: Annotated[str, Field(min_length=1)]
    revision: str | None = None


Modules = Annotated[list[ModuleSettings], Field(min_length=1)]


def read_settings(
    path: Path,
    kind: Any,
    *,
    is_optional: bool = False,
) -> Any:
    """Return the contents of a JSON file by their schema `kind`. `is_optional`: a missing file has the defaults."""
    values = read_json(path) if path.is_file() else None
    if values is None and not is_optional:
        raise UserError(
            f"{path.parent} has no {path.name}, although the model's files name that folder"
        )
    try:
        return TypeAdapter(kind).validate_python({} if values is None else values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}") from error


def check_inside(
    path: Path,
    key: str,
    name: str,
) -> None:
    """Raise UserError if a name in a file leads out of its folder."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or "\0" in name:
        raise UserError(f"{path}: {key} {name!r} leads out of the model's folder")


def first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found: where it is, what is wrong, and the value."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']} ({first['input']!r:.60})"


def error_sentence(error: BaseException) -> str:
    """Return the first sentence of a library's error, with its kind where the message alone says nothing."""
    message = " ".join(str(error).split())
    text, _, _ = message.partition(". ")
    if isinstance(error, ValueError | OSError | ImportError) and text:
        return text
    return f"{type(error).__name__}: {text}"


# ---- folders and Sentence Transformers -----------------------------------------------------------------------------


RUN_CONFIG = "config.yaml"
CHECKPOINT_STATE = "state.json"
"""Files that tell a run's folder and a checkpoint from a model."""
# No pickled weights, and no exports to other runtimes, which would double the download.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
_NOT_WANTED = ["onnx/*", "openvino/*", "consolidated*", "original/*", "*.onnx*"]
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
_VOCABULARY_SUFFIXES = (".model", ".spm", ".tiktoken", ".vocab")
_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizers of bytes and characters."""
POOLING_MODULE = "vembed.models.poolings."
"""Begins the type of a module that is a pooling which Sentence Transformers does not
have: it refuses the model instead of pooling otherwise."""
ANSWER_SETTINGS = "1_LogitScore/config.json"
"""The tokens of the answers yes and no, of a decoder that was saved as a CrossEncoder."""
STATIC = "StaticEmbedding"
"""Module of Sentence Transformers that is a table of token vectors and their mean."""


def model_folder(
    name: str,
    revision: str | None = None,
    *,
    option: str = "",
) -> Path:
    """Return the local folder of a model, checked to name no weights but safetensors files of its own. A Hub model is
    downloaded into the Hub's cache first. `option`: what names the model in a config; empty for an argument."""
    place = f"{option}: " if option else ""
    path = Path(name).expanduser()
    if existing(name) and path.is_dir():
        has_config = (path / "config.json").is_file()
        if not has_config and (path / CHECKPOINT_STATE).is_file():
            raise UserError(
                f"{place}{path} is a checkpoint, the state of a run and not a model: "
                f"`vembed export {path} FOLDER` makes a model of it"
            )
        if not has_config and (path / RUN_CONFIG).is_file():
            # Of a run's folder the model is in final/.
            path /= "final"
            if not path.is_dir():
                raise UserError(
                    f"{place}{path.parent} is a run that has not finished, so it has no final/: resume it, or make a "
                    f"model of a checkpoint with `vembed export {path.parent}/checkpoint-STEP FOLDER`"
                )
        folder = path.resolve()
        check_weight_files(folder)
        return folder
    similar = similar_path(name)
    version = f"{name} (revision {revision or 'main'})"
    if not is_hub_model(name):
        raise UserError(
            f"{place}{name} is not a folder; give an existing folder or a Hub name such as org/model{similar}"
        )
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_NOT_WANTED,
            )
        ).resolve()
    # The tracebacks of the Hub's client say no more than these sentences.
    except GatedRepoError:
        raise UserError(
            f"{place}{name} needs permission on the Hub; ask for access there and log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        raise UserError(
            f"{place}{version} is neither a folder here nor a model on the Hub{similar}"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise UserError(
            f"{place}{version} is not a folder here, is not in the Hub's cache, and the Hub cannot be reached; give a "
            f"local folder, or fetch it once while online{similar}"
        ) from None
    check_weight_files(folder)
    return folder


def whole_model_folder(name: str, *, option: str) -> Path:
    """Return the local folder of a model that Transformers loads by itself: whole weights without an adapter."""
    folder = model_folder(name, option=option)
    check_whole_weights(folder)
    return folder


@dataclass(frozen=True)
class ModelFiles:
    """Folders that a model is read from, and the settings that Sentence Transformers has saved there. The defaults are
    those of a folder without them."""

    folder: Path
    """Folder that the user named."""
    backbone: Path
    """Folder of weights, config and tokenizer."""
    adapter: Path | None = None
    """Folder of an adapter for the backbone's weights."""
    pooling_modes: tuple[str, ...] = ()
    """Modes of its Pooling module; several if their results are concatenated."""
    pooling_folder: Path | None = None
    include_prompt: bool = True
    """False: prompt tokens are excluded from pooling."""
    dense: tuple[Path, ...] = ()
    """Folders of Dense modules, in order."""
    normalize: bool | None = None
    """Whether there is a Normalize module; None: there is no modules.json."""
    max_length: int | None = None
    settings: ModelSettings = field(default_factory=ModelSettings)
    prompts: dict[str, str] = field(default_factory=dict)
    """Name -> prompt. `settings.default_prompt_name` is for inputs whose kind has no prompt of its own."""


_KINDS = {
    "SentenceTransformer": "embedder",
    "CrossEncoder": "reranker",
    "SparseEncoder": "sparse encoder",
    "MultiVectorEncoder": "late-interaction model",
    "ColBERT": "late-interaction model",
}
"""`model_type` in config_sentence_transformers.json -> what a model gives."""


def _stated_kind(folder: Path) -> str | None:
    """Return what a model gives by the class of Sentence Transformers that its files state; None: they state none. An
    unknown class is a kind of its own."""
    path = folder / "config_sentence_transformers.json"
    stated: str | None = read_settings(path, ModelSettings, is_optional=True).model_type
    config = read_object(folder / "config.json")
    # CrossEncoder writes its settings into config.json, up to version 5 nothing else.
    if stated is None and "sentence_transformers" in config:
        return "reranker"
    return stated and _KINDS.get(stated, stated)


def kind_of(folder: Path) -> str:
    """Return what the model in a folder gives, by its files: embedder, reranker, yes_no or what vembed cannot use."""
    stated = _stated_kind(folder)
    if stated is not None:
        return stated
    if (folder / "modules.json").is_file():
        return "embedder"
    config = read_object(folder / "config.json")
    names = " ".join(config.get("architectures") or ())
    if "ForSequenceClassification" in names:
        return "reranker"
    return "yes_no" if "ForCausalLM" in names else "embedder"


def is_reranker(name: str) -> bool:
    """Return whether a model gives scores of pairs: a classifier, or a causal language model that answers yes or no."""
    return kind_of(model_folder(name)) in ("reranker", "yes_no")


def read_sentence_transformers(folder: Path) -> ModelFiles:
    """Read the Sentence Transformers files of a folder, if it has any."""
    path = folder / "modules.json"
    if not path.is_file():
        return ModelFiles(folder, folder)
    modules: list[ModuleSettings] = read_settings(path, Modules)
    kinds: list[str | None] = []
    for module in modules:
        check_inside(path, "path", module.path)
        # Code in the folder may have any name.
        is_known = module.type.startswith(("sentence_transformers.", "vembed."))
        kinds.append(module.type.rsplit(".", 1)[-1] if is_known else None)
    unsupported = None
    modes: tuple[str, ...] = ()
    inner = folder / modules[0].path
    first_kind = kinds[0]
    if first_kind == STATIC:
        modes = ("mean",)
    elif first_kind not in ("Transformer", "CLIPModel", "TwoTowers"):
        # Vision-language models had custom code before Sentence Transformers had chat templates (GME). vembed's
        # template is equivalent.
        values = read_object(inner / "config.json")
        if first_kind is not None or "vision_config" not in values:
            unsupported = modules[0].type
    pooling_folder = None
    include_prompt = True
    normalize = False
    dense = []
    for module, kind in zip(modules[1:], kinds[1:], strict=True):
        inner_folder = folder / module.path
        if module.type.endswith(".Pooling"):
            settings = read_settings(inner_folder / "config.json", PoolingSettings)
            include_prompt = settings.include_prompt
            # New files have a name or a list of names, old files one flag for each mode.
            flags = settings.model_extra or {}
            names = [mode for mode, flag in MODE_FLAGS.items() if flags.get(flag)]
            if isinstance(settings.pooling_mode, str):
                names = [settings.pooling_mode]
            elif settings.pooling_mode is not None:
                names = settings.pooling_mode
            modes = tuple(names) or ("mean",)
        elif module.type.startswith(POOLING_MODULE):
            modes = (module.type.removeprefix(POOLING_MODULE),)
            if modes[0] not in POOLINGS:
                raise UserError(
                    f"{path}: this version has no pooling {modes[0]}; it has {', '.join(POOLINGS)}"
                )
            pooling_folder = inner_folder
        # In another order it would be another model.
        elif kind == "Dense" and not normalize:
            dense.append(inner_folder)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":
            unsupported = unsupported or module.type
    if unsupported is not None:
        raise UserError(
            f"{path}: unsupported module type {unsupported} in this place (supported: Transformer, CLIPModel or "
            "StaticEmbedding, then Pooling, Dense and Normalize, in this order)"
        )
    backbone = inner if (inner / "config.json").is_file() else folder
    path = folder / "config_sentence_transformers.json"
    of_model: ModelSettings = read_settings(path, ModelSettings, is_optional=True)
    prompts = {
        name: text
        for name, text in (of_model.prompts or {}).items()
        if text is not None
    }
    if of_model.default_prompt_name not in prompts:
        of_model.default_prompt_name = None
    max_length = None
    # Older versions of Sentence Transformers named the file after other models.
    for settings_path in sorted(backbone.glob("sentence_*_config.json")):
        of_text = read_settings(settings_path, TextSettings)
        max_length = max_length or of_text.max_seq_length
    return ModelFiles(
        folder=folder,
        backbone=backbone,
        pooling_modes=modes,
        pooling_folder=pooling_folder,
        include_prompt=include_prompt,
        dense=tuple(dense),
        normalize=normalize,
        max_length=max_length,
        settings=of_model,
        prompts=prompts,
    )


def read_model(
    name: str,
    revision: str | None = None,
    *,
    is_reranker: bool = False,
    adapter: Path | None = None,
    option: str = "",
) -> ModelFiles:
    """Locate a model's files. For a folder with an adapter alone, follow the base model that it names.

    `is_reranker`: it is used as a reranker, of which modules after the Transformer do not count. `adapter`: the folder of
    the adapter whose base it is. `option`: what names the model in a config.
    """
    folder = model_folder(name, revision, option=option)
    kind = _stated_kind(folder) or "embedder"
    if kind != "embedder" and not (is_reranker and kind == "reranker"):
        wanted = "a reranker or an encoder" if is_reranker else "an embedding model"
        raise UserError(f"{folder} holds a {kind}: give {wanted}")
    if is_reranker:
        return ModelFiles(folder, folder)
    files = read_sentence_transformers(folder)
    backbone = files.backbone
    check_weight_files(backbone)
    weights = {path.name for path in backbone.glob("*.safetensors")}
    if not (backbone / ADAPTER_CONFIG).is_file() or weights - {ADAPTER_WEIGHTS}:
        return files
    # An adapter that names itself would be followed without end.
    if adapter is not None:
        raise UserError(
            f"{adapter} is an adapter on top of another adapter, {folder}; merge that one first"
        )
    settings = read_settings(backbone / ADAPTER_CONFIG, AdapterSettings)
    base = read_model(
        settings.base_model_name_or_path, settings.revision, adapter=folder
    )
    described = base if files.normalize is None else files
    return replace(described, folder=folder, backbone=base.backbone, adapter=backbone)


OWN_MODEL_TYPE = "vembed_own"
"""`model_type` of a module of the user's (UserModelConfig)."""


def is_own(folder: Path) -> bool:
    """Return True if a folder holds an own model."""
    return read_object(folder / "config.json").get("model_type") == OWN_MODEL_TYPE


def has_tokenizer_files(folder: Path) -> bool:
    """Return True if a folder has a vocabulary, or a tokenizer that needs none."""
    for path in folder.iterdir():
        if path.name in _VOCABULARIES or path.suffix in _VOCABULARY_SUFFIXES:
            return True
    settings = read_object(folder / _TOKENIZER_SETTINGS)
    # Code of the model's own may read any file.
    return "auto_map" in settings or (
        settings.get("tokenizer_class") in _WITHOUT_VOCABULARY
    )


def tokenizer_folder(backbone: Path, adapter: Path | None) -> Path:
    """Return the folder of a model's tokenizer and chat template: the adapter's where a whole tokenizer was saved with
    it, as peft and Sentence Transformers read it."""
    if adapter is None or not (adapter / _TOKENIZER_SETTINGS).is_file():
        return backbone
    return adapter if has_tokenizer_files(adapter) else backbone
