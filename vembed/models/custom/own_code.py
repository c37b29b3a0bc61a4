"""The user's own code: classes named as `path/to/file.py:Name` or `package.module:Name`, the folder of such a model
before training (config, code and tokenizer, as a folder of Transformers has them), and Python objects given as options."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.dynamic_module_utils import get_relative_imports

from vembed.errors import UserError, did_you_mean
from vembed.files import (
    cache_folder,
    sha256_of,
    short_hash,
    write_json,
    written_aside,
)
from vembed.models.custom import modeling
from vembed.models.custom.modeling import (
    WEIGHTS_FILE,
    UserModel,
    UserModelConfig,
    accepted_inputs,
    construct,
    read_output,
)
from vembed.models.families.model_files import is_own, model_folder

if TYPE_CHECKING:
    from vembed.config.schema import ModelSection

TRUSTED: dict[str, type[UserModel]] = {}
"""Folder -> model class of the user's file that a config of this process names for it. A folder that is not here brings
its own code, which runs with trust_remote_code alone."""
CODE = "modeling_vembed_own.py"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files of tokenizers and image processors."""
IMAGE_PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 2,
}
"""Image processor of a module with `image_size`, unless the user has given one."""
_OF_THE_PACKAGE = re.compile(r"^\s*from\s+\.\s+import\b", re.MULTILINE)


# ---- classes and functions by name -----------------------------------------------------------------------------------


def find(named: str, option: str) -> Any:
    """Return the class or function that `file.py:Name` or `package.module:Name` names. Raise UserError if there is
    none."""
    place, _, name = named.rpartition(":")
    if not place or not name:
        raise UserError(
            f"{option}: {named} must be path/to/file.py:Name or package.module:Name"
        )
    if place.endswith(".py"):
        module = _import_file(Path(place).expanduser(), option)
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise UserError(
                f"{option}: the module {place} cannot be imported ({error}); install it, or give path/to/file.py:Name"
            ) from error
    if name not in vars(module):
        raise UserError(
            f"{option}: {place} has no {name}{did_you_mean(name, vars(module))}"
        )
    return vars(module)[name]


def find_class(named: str) -> type[nn.Module]:
    """Return the backbone class that `model_class` names. Raise UserError if it cannot be one."""
    return checked_class(find(named, "model_class"), named)


def checked_class(value: Any, named: str) -> type[nn.Module]:
    """Return a class. Raise UserError unless it is a module whose forward takes texts or images."""
    if not (inspect.isclass(value) and issubclass(value, nn.Module)):
        raise UserError(f"model_class: {named} is not a class of torch.nn.Module")
    if not {"input_ids", "pixel_values"}.intersection(accepted_inputs(value)):
        raise UserError(
            f"model_class: the forward of {named} must take input_ids (with attention_mask), pixel_values, or both"
        )
    return value


def _import_file(path: Path, option: str) -> ModuleType:
    """Import a file once per process."""
    if not path.is_file():
        raise UserError(
            f"{option}: {path} is not a file here; give path/to/file.py:Name"
        )
    path = path.resolve()
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__")
        if file and Path(str(file)) == path:
            return module
    # A package of its own, so that `from .layers import Block` finds the file beside it.
    package = f"vembed_own_{short_hash(str(path.parent))}"
    if package not in sys.modules:
        parent = ModuleType(package)
        parent.__path__ = [str(path.parent)]
        sys.modules[package] = parent
    return importlib.import_module(f"{package}.{path.stem}")


# ---- the folder of a model -------------------------------------------------------------------------------------------


def own_folder(options: ModelSection) -> Path:
    """Return the folder of the model that `model_class` names, and let this process run the class for it.

    A folder of an own model that `model_name` names is used as it is. Otherwise a folder is made in vembed's cache, named
    by its content.
    """
    assert options.model_class is not None
    source = None
    if options.model_name != options.model_class:
        source = model_folder(
            options.model_name, options.model_revision, option="model_name"
        )
    code = find_class(options.model_class)
    accepted = accepted_inputs(code)
    arguments = options.model_arguments
    if source is not None and is_own(source):
        saved = UserModelConfig.from_pretrained(source).model_config
        if arguments is not None and dict(arguments) != saved:
            raise UserError(
                f"model_config: {arguments} is not that of {source} ({saved}); leave it out, or start without that folder"
            )
        _trust(source, code)
        return source
    files = []
    texts = source
    if options.tokenizer_name is not None:
        texts = model_folder(options.tokenizer_name, option="tokenizer_name")
    if texts is not None:
        files = [texts / name for name in TOKENIZER if (texts / name).is_file()]
    has_tokenizer = any("processor" not in path.name for path in files)
    if "input_ids" in accepted and not has_tokenizer:
        raise UserError(
            f"model_class: {options.model_class} reads texts and needs a tokenizer: give tokenizer_name a folder or a "
            "Hub name (`vembed init --tokenizer FOLDER --data FILE` trains one on your data)"
        )
    if source is not None:
        files += sorted(source.glob("*.safetensors"))
    settings = settings_of(code, arguments or {})
    contents = [[path.name, sha256_of(path)] for path in (*files, *_code_files(code))]
    folder = _cache() / f"{code.__name__}-{short_hash(settings, contents)}"
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, partial / path.name)
        _write_code(partial, code)
        processor = partial / "preprocessor_config.json"
        if "image_size" in settings and not processor.is_file():
            side = settings["image_size"]
            values = {**IMAGE_PROCESSOR, "size": {"height": side, "width": side}}
            write_json(processor, values)
        write_json(partial / "config.json", settings)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster, and has written the same
            shutil.rmtree(partial, ignore_errors=True)
    folder = folder.resolve()
    _trust(folder, code)
    return folder


def _trust(folder: Path, code: type[nn.Module]) -> None:
    """Let this process build the model of a folder with the class that its config names."""
    known = TRUSTED.get(str(folder))
    if known is None or known.backbone_class is not code:
        TRUSTED[str(folder)] = UserModel.of(code)


def store_weights(module: nn.Module) -> str:
    """Write the weights of a module that was given in Python to the cache; return their folder."""
    shared = modeling.tied_names(module)
    state = {}
    for name, value in module.state_dict().items():
        if name not in shared:
            state[f"own.{name}"] = value.detach().cpu().contiguous()
    data = save(state, metadata={"format": "pt"})
    digest = hashlib.blake2b(data, digest_size=8)
    folder = _cache() / f"weights-{digest.hexdigest()}"
    if not (folder / WEIGHTS_FILE).is_file():
        with written_aside(folder / WEIGHTS_FILE) as partial:
            partial.write_bytes(data)
    return str(folder)


def save_code(source: Path, folder: Path) -> None:
    """Write the code of the own model that was built from `source`: the user's file, or the code that came with it."""
    trusted = TRUSTED.get(str(source))
    if trusted is not None and source.parent != _cache().resolve():
        assert trusted.backbone_class is not None
        _write_code(folder, trusted.backbone_class)
        return
    for path in sorted(source.glob("*.py")):
        shutil.copy(path, folder / path.name)


def _write_code(folder: Path, code: type[nn.Module]) -> None:
    """Write the wrapper and the user's files to a folder, so that it loads without vembed."""
    files = _code_files(code)
    for path in files:
        shutil.copy(path, folder / path.name)
    text = Path(str(modeling.__file__)).read_text(encoding="utf-8")
    text += f"\n\nfrom .{files[0].stem} import {code.__name__}  # noqa: E402\n\nUserModel = UserModel.of({code.__name__})\n"
    (folder / CODE).write_text(text, encoding="utf-8")


def _code_files(code: type[nn.Module]) -> list[Path]:
    """Return the user's file and those beside it that it imports with a dot (`from .layers import Block`)."""
    files = []
    waiting = [Path(inspect.getfile(code)).resolve()]
    for path in waiting:
        if path in files or not path.is_file():
            continue
        files.append(path)
        if _OF_THE_PACKAGE.search(path.read_text(encoding="utf-8")):
            raise UserError(
                f"model_class: {path} imports a file as `from . import name`, which Transformers does not find "
                "when it loads the saved model: write `from .name import ...`"
            )
        for name in get_relative_imports(path):
            waiting.append(path.parent / f"{name}.py")
    return files


def settings_of(code: type[nn.Module], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json. What the module gives is tried on two short inputs, without weights where that works."""
    try:
        with init_empty_weights(include_buffers=True):
            module = construct(code, arguments)
        hidden = _output_of(module, torch.device("meta"))
    except TypeError as error:
        raise UserError(
            f"model_config: {dict(arguments)} does not fit {code.__name__}: {error}"
        ) from error
    except (RuntimeError, NotImplementedError):  # an operation that needs values
        with torch.random.fork_rng(devices=[]):
            module = construct(code, arguments)
        hidden = _output_of(module, torch.device("cpu"))
    stem = Path(CODE).stem
    values = {
        "model_type": UserModelConfig.model_type,
        "architectures": ["UserModel"],
        "auto_map": {
            "AutoConfig": f"{stem}.UserModelConfig",
            "AutoModel": f"{stem}.UserModel",
        },
        "class_name": code.__name__,
        "model_config": dict(arguments),
        # [n, dim], [n, tokens, dim] or, of a convolutional network, [n, channels, height, width].
        "hidden_size": int(hidden.shape[2 if hidden.ndim == 3 else 1]),
        "inputs": list(accepted_inputs(code)),
        "gives_vectors": hidden.ndim == 2,
        "reads_causally": bool(vars(code).get("is_causal", False)),
    }
    keys = {"max_positions": "max_position_embeddings", "image_size": "image_size"}
    for name, key in keys.items():
        # Of the module or its class, else of its constructor's arguments.
        value = getattr(module, name, arguments.get(name))
        if isinstance(value, int):
            values[key] = value
    return values


def _output_of(module: nn.Module, device: torch.device) -> Tensor:
    """Return what a module gives for two texts of three tokens, or two images, on a device."""
    accepted = accepted_inputs(type(module))
    inputs = {}
    if "input_ids" in accepted:
        for name in {"input_ids", "attention_mask"}.intersection(accepted):
            inputs[name] = torch.ones(2, 3, dtype=torch.int64, device=device)
    else:
        size = getattr(module, "image_size", None)
        side = size if isinstance(size, int) else 32
        inputs["pixel_values"] = torch.zeros(2, 3, side, side, device=device)
    with torch.no_grad():
        return read_output(module.eval()(**inputs))[0]


def _cache() -> Path:
    return cache_folder() / "own"


# ---- Python objects given as options ---------------------------------------------------------------------------------


MODEL = ("model_class", "model", "model_name")
"""Options that a class or a module may be given as."""
STRATEGY_BLOCKS = ("fsdp", "fsdp_config", "distributed")


def as_options(
    config: Mapping[str, Any], model: nn.Module | type[nn.Module] | None = None
) -> dict[str, Any]:
    """Return a config of plain values: torch's FSDP objects are the options that they stand for. `model`: a class or a
    module to train."""
    values: dict[str, Any] = {}
    trained = model
    for key, value in config.items():
        if key in MODEL and isinstance(value, nn.Module | type):
            if trained is not None:
                raise UserError(f"{key}: a second model is given; keep one of them")
            trained = value
        elif key in STRATEGY_BLOCKS and isinstance(value, Mapping):
            values[key] = as_options(value)
        elif isinstance(value, ModuleWrapPolicy):
            names = sorted(kind.__name__ for kind in value._module_classes)
            values[key] = "TRANSFORMER_BASED_WRAP"
            values["fsdp_transformer_layer_cls_to_wrap"] = names
        elif isinstance(value, CPUOffload):
            values["fsdp_offload_params"] = bool(value.offload_params)
        elif isinstance(value, ShardingStrategy | BackwardPrefetch):
            values[key] = value.name
        elif isinstance(value, MixedPrecision):
            for part in ("param", "reduce", "buffer"):
                dtype = vars(value)[f"{part}_dtype"]
                if dtype is not None:
                    name = str(dtype).removeprefix("torch.")
                    values[f"fsdp_{part}_dtype"] = name
        elif key != "device_id":  # each process takes the device of its LOCAL_RANK
            values[key] = value
    if trained is not None:
        kind = trained if isinstance(trained, type) else type(trained)
        checked_class(kind, kind.__qualname__)
        file = inspect.getsourcefile(kind) if kind.__module__ != "builtins" else None
        if file is None or not Path(file).is_file() or "." in kind.__qualname__:
            raise UserError(
                f"model_class: {kind.__qualname__} is not a class at the top of a Python file, and the saved model must "
                "carry that file: put it into one"
            )
        values["model_class"] = f"{Path(file).resolve()}:{kind.__qualname__}"
    if isinstance(trained, nn.Module):
        values["model_name"] = store_weights(trained)
    return values
