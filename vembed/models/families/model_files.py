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
    MODULES,
    AdapterSettings,
    ModelSettings,
    PoolingSettings,
    TextSettings,
    check_inside,
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
    POOLINGS,
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
    """Return the local folder of a model, checked to name no weights but safetensors files of its own. A Hub model is
    downloaded into the Hub's cache first."""
    path = Path(name).expanduser()
    if path.is_dir():
        folder = _inside_a_run(path, option).resolve()
        check_weight_files(folder)
        return folder
    if path.is_file():
        raise UserError(
            f"{option}: {name} is a file; give the folder with the model's files, {path.parent}"
        )
    similar = similar_path(name)
    if not is_hub_model(name):
        raise UserError(
            f"{option}: {name} is not a folder; give an existing folder or a Hub name such as org/model{similar}"
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
            f"{option}: {name} is neither a folder here nor a model on the Hub{similar}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{option}: {name} (revision {revision or 'main'}) is not a folder here, is not in the Hub's cache, and the "
            f"Hub cannot be reached; give a local folder, or fetch it once while online{similar}"
        ) from error
    check_weight_files(folder)
    return folder


def _inside_a_run(path: Path, option: str) -> Path:
    """Return the model's folder: `final/` of a run's folder, otherwise the folder itself."""
    for name in ("config.json", "modules.json", ADAPTER_CONFIG):
        if (path / name).is_file():
            return path
    if (path / CHECKPOINT_STATE).is_file():
        raise UserError(
            f"{option}: {path} is a checkpoint, the state of a run and not a model: "
            f"`vembed export {path} FOLDER` makes a model of it"
        )
    if not (path / RUN_CONFIG).is_file():
        return path
    if not (path / "final").is_dir():
        steps = [folder.name.partition("-")[2] for folder in path.glob("checkpoint-*")]
        newest = max((int(step) for step in steps if step.isdecimal()), default=None)
        way_out = "resume it"
        if newest is not None:
            way_out += f"; `vembed export {path}/checkpoint-{newest} FOLDER` makes a model of its newest checkpoint"
        raise UserError(
            f"{option}: {path} is a run that has not finished, so it has no final/: {way_out}"
        )
    return path / "final"


def whole_model_folder(name: str, *, option: str) -> Path:
    """Return the local folder of a model that Transformers loads by itself: whole weights without an adapter."""
    folder = model_folder(name, option=option)
    check_whole_weights(folder)
    return folder


@dataclass(frozen=True)
class SentenceTransformersFiles:
    """Settings from a folder saved by Sentence Transformers. The defaults are those of a folder without them."""

    backbone: Path
    """Folder of weights, config and tokenizer."""
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
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    """Name of the prompt for inputs whose kind has no prompt of its own."""
    similarity: str | None = None
    truncate_dim: int | None = None

    @property
    def pooling(self) -> Pooling | None:
        """The pooling that does the same as the modes together; None: there is none."""
        for pooling in POOLINGS.values():
            modes = pooling.modes or (pooling.name,)
            if set(modes) == set(self.pooling_modes):
                return pooling
        return None


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


def _stated_class(folder: Path) -> str | None:
    """Return the class of Sentence Transformers that a folder's files state; None: they state none."""
    path = folder / "config_sentence_transformers.json"
    settings = read_settings(path, ModelSettings) or ModelSettings()
    stated = settings.model_type
    # CrossEncoder writes its settings into config.json, up to version 5 nothing else.
    if stated is None and "sentence_transformers" in (
        read_object(folder / "config.json") or {}
    ):
        return "CrossEncoder"
    if stated is not None and stated not in _KINDS:
        raise UserError(
            f"{path}: model_type {stated!r} is unknown; vembed knows {', '.join(_KINDS)}"
        )
    return stated


def kind_of(folder: Path) -> ModelKind:
    """Return what the model in a folder gives, by its files."""
    stated = _stated_class(folder)
    if stated is not None:
        return _KINDS[stated]
    if (folder / "modules.json").is_file():
        return "embedder"
    config = read_object(folder / "config.json") or {}
    names = " ".join(config.get("architectures") or ())
    if "ForSequenceClassification" in names:
        return "reranker"
    return "yes_no" if "ForCausalLM" in names else "embedder"


def read_sentence_transformers(folder: Path) -> SentenceTransformersFiles | None:
    """Read the Sentence Transformers files of a folder; None if it has none."""
    path = folder / "modules.json"
    modules = read_settings(path, MODULES)
    if modules is None:
        return None
    modes: tuple[str, ...] = ()
    pooling_folder = None
    include_prompt = True
    normalize = False
    dense: list[Path] = []
    backbone = folder
    for position, module in enumerate(modules):
        check_inside(path, "path", module.path)
        inner = folder / module.path
        # Code in the folder may have any name, and stands for none of these modules.
        is_known = module.type.startswith(("sentence_transformers.", "vembed."))
        kind = module.type.rsplit(".", 1)[-1] if is_known else "code of its own"
        if position == 0 and kind == STATIC:
            if not (inner / "config.json").is_file():
                raise UserError(
                    f"{inner} is a table of token vectors without a config.json: vembed reads those that it has written "
                    "(`vembed export --format static`), and Sentence Transformers reads this one"
                )
            backbone = inner
            modes = ("mean",)
        elif position == 0 and (
            kind in ("Transformer", "CLIPModel", "TwoTowers")
            # Vision-language models had custom code before Sentence Transformers had chat templates (GME). vembed's
            # template is equivalent.
            or (
                not is_known
                and "vision_config" in (read_object(inner / "config.json") or {})
            )
        ):
            backbone = inner if (inner / "config.json").is_file() else folder
        elif module.type.rsplit(".", 1)[-1] == "Pooling":
            settings = read_settings(inner / "config.json", PoolingSettings)
            if settings is None:
                raise UserError(
                    f"{inner} has no config.json, although modules.json names it as a Pooling module"
                )
            modes = settings.modes()
            include_prompt = settings.include_prompt
        elif module.type.startswith(POOLING_MODULE):
            modes = (module.type.removeprefix(POOLING_MODULE),)
            if modes[0] not in POOLINGS:
                raise UserError(
                    f"{path}: this version has no pooling {modes[0]}; it has {', '.join(POOLINGS)}"
                )
            pooling_folder = inner
        elif (
            kind == "Dense" and not normalize
        ):  # in another order it would be another model
            dense.append(inner)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":
            raise UserError(
                f"{path}: unsupported module type {module.type} in this place (supported: Transformer, CLIPModel or "
                "StaticEmbedding, then Pooling, Dense and Normalize, in this order)"
            )
    values = (
        read_settings(folder / "config_sentence_transformers.json", ModelSettings)
        or ModelSettings()
    )
    prompts = {
        name: text for name, text in (values.prompts or {}).items() if text is not None
    }
    max_length = None
    # Older versions of Sentence Transformers named the file after other models.
    for settings_path in sorted(backbone.glob("sentence_*_config.json")):
        text_settings = read_settings(settings_path, TextSettings)
        if text_settings is not None and max_length is None:
            max_length = text_settings.max_seq_length
    return SentenceTransformersFiles(
        backbone=backbone,
        pooling_modes=modes,
        pooling_folder=pooling_folder,
        include_prompt=include_prompt,
        dense=tuple(dense),
        normalize=normalize,
        max_length=max_length,
        prompts=prompts,
        default_prompt_name=(
            values.default_prompt_name
            if values.default_prompt_name in prompts
            else None
        ),
        similarity=values.similarity_fn_name,
        truncate_dim=values.truncate_dim,
    )


@dataclass(frozen=True)
class ModelFiles:
    """Folders that a model is read from."""

    folder: Path
    """Folder that the user named."""
    backbone: Path
    """Folder of weights, config and tokenizer."""
    adapter: Path | None
    """Folder of an adapter for the backbone's weights; None without one."""
    sentence_transformers: SentenceTransformersFiles


def read_model(
    name: str, revision: str | None = None, *, is_reranker: bool = False
) -> ModelFiles:
    """Locate a model's files. For a folder with an adapter alone, follow the base model that it names.

    `is_reranker`: it is used as a reranker, of which modules after the Transformer do not count.
    """
    folder = model_folder(name, revision)
    stated = _stated_class(folder)
    kind = "embedder" if stated is None else _KINDS[stated]
    if is_reranker and kind in ("embedder", "reranker"):
        check_weight_files(folder)
        return ModelFiles(folder, folder, None, SentenceTransformersFiles(folder))
    if is_reranker:
        raise UserError(f"{folder} holds a {kind}: give a reranker or an encoder")
    if kind != "embedder":
        raise UserError(
            f"{folder} holds a {stated} of Sentence Transformers, a {kind}, and no embedding model: give an embedding "
            "model (a reranker can be a teacher or a judge)"
        )
    files = read_sentence_transformers(folder)
    backbone = folder if files is None else files.backbone
    check_weight_files(backbone)
    if not _is_adapter(backbone):
        return ModelFiles(
            folder, backbone, None, files or SentenceTransformersFiles(backbone)
        )
    settings = read_settings(backbone / ADAPTER_CONFIG, AdapterSettings)
    assert settings is not None
    below = model_folder(settings.base_model_name_or_path, settings.revision)
    # Before the base is read: an adapter that names itself would be followed without end. Below, the base's backbone
    # may be in a subfolder.
    base = None if _is_adapter(below) else read_model(str(below))
    if base is None or base.adapter is not None:
        raise UserError(
            f"{folder} is an adapter on top of another adapter, {below}; merge that one first"
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
        return read_model(
            options.model_name,
            options.model_revision,
            is_reranker=options.task == "rerank",
        )
    from vembed.models.custom.folder import own_folder

    source = None
    if options.model_name != options.model_class:
        source = model_folder(options.model_name, options.model_revision)
    tokenizer = None
    if options.tokenizer_name is not None:
        tokenizer = model_folder(options.tokenizer_name, option="tokenizer_name")
    return read_model(str(own_folder(options, source, tokenizer)))
