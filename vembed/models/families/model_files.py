"""Locations of a model's files (local folder or Hub) and their small JSON files. No weights are read here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vembed.config.paths import is_hub_model, similar_path
from vembed.config.schema import ModelSection
from vembed.errors import UserError
from vembed.models.families.model_settings import (
    AdapterSettings,
    ModelSettings,
    ModuleSettings,
    PoolingSettings,
    TextSettings,
    read_modules,
    read_settings,
)
from vembed.models.families.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_weight_files,
    check_whole_weights,
    read_object,
)
from vembed.models.poolings.base import Pooling
from vembed.models.poolings.table import (
    MODE_FLAGS,
    POOLINGS,
    pooling_of_modes,
)

RUN_CONFIG = "config.yaml"
CHECKPOINT_STATE = "state.json"
"""Files that tell a run's folder and a checkpoint from a model."""
# No pickled weights, and no exports to other runtimes, which would double the download.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
_NOT_WANTED = ["onnx/*", "openvino/*", "consolidated*", "original/*", "*.onnx*"]
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
_VOCABULARY_SUFFIXES = frozenset({".model", ".spm", ".tiktoken", ".vocab"})
_WITHOUT_VOCABULARY = frozenset(
    {"ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"}
)
"""Tokenizers of bytes and characters."""
POOLING_MODULE = "vembed.models.poolings."
"""Begins the type of a module that is a pooling which Sentence Transformers does not
have: it refuses the model instead of pooling otherwise."""
STATIC = "StaticEmbedding"
"""Module of Sentence Transformers that is a table of token vectors and their mean."""


def model_folder(
    name: str, revision: str | None = None, *, option: str = "model_name"
) -> Path:
    """Return the local folder of a model, checked to name no weights but safetensors files of its own."""
    folder = _located(name, revision, option)
    check_weight_files(folder)
    return folder


def whole_model_folder(name: str, *, option: str) -> Path:
    """Return the local folder of a model that Transformers loads by itself: whole weights without an adapter."""
    folder = model_folder(name, option=option)
    check_whole_weights(folder)
    return folder


def _located(name: str, revision: str | None, option: str) -> Path:
    """Return the local folder of a model. A Hub model is downloaded into the Hub's cache first."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _inside_a_run(path, option).resolve()
    if path.is_file():
        raise UserError(
            f"{option}: {name} is a file; give the folder with the model's files, {path.parent}"
        )
    if not is_hub_model(name):
        raise UserError(
            f"{option}: {name} is not a folder; give an existing folder or a Hub name such as org/model"
            f"{similar_path(name)}"
        )
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_NOT_WANTED,
            )
        ).resolve()
    except GatedRepoError as error:
        raise UserError(
            f"{option}: {name} needs permission on the Hub; ask for access there and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"model_revision: {name} has no revision {revision!r} on the Hub"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{option}: {name} is neither a folder here nor a model on the Hub{similar_path(name)}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        raise UserError(
            f"{option}: {name}{at} is not a folder here, is not in the Hub's cache, and the Hub cannot be reached; "
            f"give a local folder, or fetch it once while online{similar_path(name)}"
        ) from error


def _inside_a_run(path: Path, option: str) -> Path:
    """Return the model's folder: `final/` of a run's folder, otherwise the folder itself."""
    if (
        (path / "config.json").is_file()
        or (path / "modules.json").is_file()
        or (path / ADAPTER_CONFIG).is_file()
    ):
        return path
    if (path / CHECKPOINT_STATE).is_file():
        raise UserError(
            f"{option}: {path} is a checkpoint, the state of a run and not a model: "
            f"`vembed export {path} FOLDER` makes a model of it"
        )
    if not (path / RUN_CONFIG).is_file():
        return path
    if (path / "final").is_dir():
        return path / "final"
    checkpoints = sorted(
        (
            checkpoint
            for checkpoint in path.glob("checkpoint-*")
            if checkpoint.name.removeprefix("checkpoint-").isdecimal()
        ),
        key=lambda checkpoint: int(checkpoint.name.removeprefix("checkpoint-")),
    )
    way = (
        f"; `vembed export {checkpoints[-1]} FOLDER` makes a model of its newest checkpoint"
        if checkpoints
        else ""
    )
    raise UserError(
        f"{option}: {path} is a run that has not finished, so it has no final/: resume it{way}"
    )


@dataclass(frozen=True)
class SentenceTransformersFiles:
    """Settings from a folder saved by Sentence Transformers."""

    backbone: Path
    """Folder of weights, config and tokenizer."""
    pooling_modes: tuple[str, ...] = ()
    """Modes of its Pooling module; several if their results are concatenated."""
    pooling: Pooling | None = None
    """The pooling that does the same; None: there is none."""
    pooling_folder: Path | None = None
    include_prompt: bool = True
    """False: prompt tokens are excluded from pooling."""
    dense: tuple[Path, ...] = ()
    """Folders of Dense modules, in order."""
    normalize: bool = False
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    """Prompt for inputs whose kind has no prompt of its own."""
    default_prompt_name: str | None = None
    """Name of that prompt among `prompts`."""
    similarity: str | None = None
    truncate_dim: int | None = None


ModelKind = Literal[
    "embedder", "reranker", "yes_no", "sparse encoder", "late-interaction model"
]
_KINDS: dict[str, ModelKind] = {
    "SentenceTransformer": "embedder",
    "CrossEncoder": "reranker",
    "SparseEncoder": "sparse encoder",
    "MultiVectorEncoder": "late-interaction model",
    "ColBERT": "late-interaction model",
}
"""`model_type` in config_sentence_transformers.json -> what a model gives."""


def kind_of(folder: Path) -> ModelKind:
    """Return what the model in a folder gives, by its files."""
    stated = _stated_kind(folder)
    if stated is not None:
        return _KINDS[stated]
    if (folder / "modules.json").is_file():
        return "embedder"
    config = read_object(folder / "config.json") or {}
    names = " ".join(config.get("architectures") or ())
    if "ForSequenceClassification" in names:
        return "reranker"
    return "yes_no" if "ForCausalLM" in names else "embedder"


def check_embedder(folder: Path) -> None:
    """Raise UserError if a folder's files say that its model gives no embeddings."""
    stated = _stated_kind(folder)
    if stated is None or _KINDS[stated] == "embedder":
        return
    kind = _KINDS[stated]
    way_out = {
        "reranker": "use it as a teacher or a judge, or give an embedding model",
    }.get(kind, "vembed has no such models yet: give an embedding model")
    raise UserError(
        f"{folder} holds a {stated} of Sentence Transformers, a {kind}, and no embedding model; {way_out}"
    )


def _stated_kind(folder: Path) -> str | None:
    """Return the `model_type` that a folder's files state; None: they state none."""
    path = folder / "config_sentence_transformers.json"
    settings = read_settings(path, ModelSettings)
    stated = None if settings is None else settings.model_type
    if stated is None:
        # CrossEncoder writes its settings into config.json, up to version 5 nothing else.
        config = read_object(folder / "config.json") or {}
        return "CrossEncoder" if "sentence_transformers" in config else None
    if stated not in _KINDS:
        raise UserError(
            f"{path}: model_type {stated!r} is unknown; vembed knows {', '.join(_KINDS)}"
        )
    return stated


def read_sentence_transformers(folder: Path) -> SentenceTransformersFiles | None:
    """Read the Sentence Transformers files of a folder; None if it has none."""
    modules = read_modules(folder)
    if modules is None:
        return None
    modes: tuple[str, ...] = ()
    pooling: Pooling | None = None
    pooling_folder: Path | None = None
    dense: list[Path] = []
    backbone = folder
    include_prompt = True
    normalize = False
    for position, module in enumerate(modules):
        kind = module.type.rsplit(".", 1)[-1]
        path = folder / module.path
        known = kind in ("Transformer", "CLIPModel", "TwoTowers") and not _is_own_code(
            module
        )
        if position == 0 and kind == STATIC and not _is_own_code(module):
            if not (path / "config.json").is_file():
                raise UserError(
                    f"{path} is a table of token vectors without a config.json: vembed reads those that it has written "
                    "(`vembed export --format static`), and Sentence Transformers reads this one"
                )
            backbone = path
            modes = ("mean",)
            pooling = pooling_of_modes(modes)
            continue
        if position == 0 and (known or (_is_own_code(module) and _reads_chats(path))):
            backbone = path if (path / "config.json").is_file() else folder
        elif kind == "Pooling":
            settings = read_settings(path / "config.json", PoolingSettings)
            if settings is None:
                raise UserError(
                    f"{path} has no config.json, although modules.json names it as a Pooling module"
                )
            modes = _pooling_modes(settings)
            include_prompt = settings.include_prompt
            pooling = pooling_of_modes(modes)
        elif module.type.startswith(POOLING_MODULE):
            name = module.type.removeprefix(POOLING_MODULE)
            if name not in POOLINGS:
                raise UserError(
                    f"{folder / 'modules.json'}: this version has no pooling {name}; it has {', '.join(POOLINGS)}"
                )
            modes = (name,)
            pooling = POOLINGS[name]
            pooling_folder = path
        elif kind == "Dense":
            if normalize:  # in another order it would be another model
                raise UserError(
                    f"{folder / 'modules.json'}: a Dense module behind Normalize; vembed reads Pooling, then Dense "
                    "modules, then Normalize"
                )
            dense.append(path)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout" or _is_own_code(module):
            raise UserError(
                f"{folder / 'modules.json'}: unsupported module type {module.type} "
                "(supported: Transformer, CLIPModel, StaticEmbedding, Pooling, Dense and Normalize)"
            )
    values = (
        read_settings(folder / "config_sentence_transformers.json", ModelSettings)
        or ModelSettings()
    )
    prompts = {
        name: text for name, text in (values.prompts or {}).items() if text is not None
    }
    default_name = (
        values.default_prompt_name if values.default_prompt_name in prompts else None
    )
    return SentenceTransformersFiles(
        backbone=backbone,
        pooling_modes=modes,
        pooling=pooling,
        pooling_folder=pooling_folder,
        include_prompt=include_prompt,
        dense=tuple(dense),
        normalize=normalize,
        max_length=_max_length(backbone),
        prompts=prompts,
        default_prompt=prompts[default_name] if default_name is not None else None,
        default_prompt_name=default_name,
        similarity=values.similarity_fn_name,
        truncate_dim=values.truncate_dim,
    )


def _max_length(backbone: Path) -> int | None:
    """Read the maximum length from sentence_bert_config.json; older versions named the file after other models."""
    for path in sorted(backbone.glob("sentence_*_config.json")):
        settings = read_settings(path, TextSettings)
        if settings is not None and settings.max_seq_length is not None:
            return settings.max_seq_length
    return None


@dataclass(frozen=True)
class ModelFiles:
    """Folders that a model is read from."""

    folder: Path
    """Folder that the user named."""
    backbone: Path
    """Folder of weights, config and tokenizer."""
    adapter: Path | None
    """Folder of an adapter for the backbone's weights; None without one."""
    sentence_transformers: SentenceTransformersFiles | None


def read_model(name: str, revision: str | None = None) -> ModelFiles:
    """Locate a model's files. For a folder with an adapter alone, follow the base model that it names."""
    folder = model_folder(name, revision)
    check_embedder(folder)
    files = read_sentence_transformers(folder)
    backbone = folder if files is None else files.backbone
    check_weight_files(backbone)
    if not _is_adapter(backbone):
        return ModelFiles(folder, backbone, None, files)
    settings = read_settings(backbone / ADAPTER_CONFIG, AdapterSettings)
    assert settings is not None
    below = model_folder(settings.base_model_name_or_path, settings.revision)
    # Before the base is read: an adapter that names itself would be followed without end. Below, the base's backbone
    # may be in a subfolder.
    if _is_adapter(below):
        raise UserError(
            f"{folder} is an adapter on top of another adapter, {below}; merge that one first"
        )
    base = read_model(settings.base_model_name_or_path, settings.revision)
    if base.adapter is not None:
        raise UserError(
            f"{folder} is an adapter on top of another adapter, {base.folder}; merge that one first"
        )
    return ModelFiles(
        folder, base.backbone, backbone, files or base.sentence_transformers
    )


def _is_adapter(folder: Path) -> bool:
    """Return True if a folder holds an adapter and no weights of a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and all(
        path.name == ADAPTER_WEIGHTS for path in folder.glob("*.safetensors")
    )


def has_tokenizer_files(folder: Path) -> bool:
    """Return True if a folder has a vocabulary, or a tokenizer that needs none."""
    for path in folder.iterdir():
        if path.name in _VOCABULARIES or path.suffix in _VOCABULARY_SUFFIXES:
            return True
    settings = read_object(folder / _TOKENIZER_SETTINGS) or {}
    # Code of the model's own may read any file.
    return "auto_map" in settings or (
        settings.get("tokenizer_class") in _WITHOUT_VOCABULARY
    )


def tokenizer_folder(backbone: Path, adapter: Path | None) -> Path:
    """Return the folder of a model's tokenizer: the adapter's where a whole tokenizer was saved with it, as peft and
    Sentence Transformers read it."""
    if adapter is None or not (adapter / _TOKENIZER_SETTINGS).is_file():
        return backbone
    return (
        adapter
        if any((adapter / name).is_file() for name in _VOCABULARIES)
        else backbone
    )


def files_of(options: ModelSection) -> ModelFiles:
    """Locate the files of the model that the options name: `model_name`, or `model_class` with the weights in it."""
    if options.model_class is None:
        return read_model(options.model_name, options.model_revision)
    from vembed.models.custom.folder import (
        own_folder,  # imports torch, which only own models need here
    )

    source = (
        None
        if options.model_name == options.model_class
        else model_folder(options.model_name, options.model_revision)
    )
    tokenizer = None
    if options.tokenizer_name is not None:
        tokenizer = model_folder(options.tokenizer_name, option="tokenizer_name")
    return read_model(str(own_folder(options, source, tokenizer)))


def _is_own_code(module: ModuleSettings) -> bool:
    """Return True if a module is custom Python code in the folder."""
    return not module.type.startswith(("sentence_transformers.", "vembed."))


def _reads_chats(folder: Path) -> bool:
    """Return True for vision-language models.

    Before Sentence Transformers supported chat templates they had custom code (GME); vembed's template is equivalent.
    """
    return "vision_config" in (read_object(folder / "config.json") or {})


def _pooling_modes(settings: PoolingSettings) -> tuple[str, ...]:
    """Return the modes of a Pooling module. Old files have one flag per mode, new files a name or a list of names."""
    modes = settings.pooling_mode
    flags = settings.model_extra or {}
    if modes is None:
        chosen = tuple(mode for mode, flag in MODE_FLAGS.items() if flags.get(flag))
        return chosen or ("mean",)
    return (modes,) if isinstance(modes, str) else tuple(modes)
