"""Folder of an own model before training: config, code and tokenizer, as a folder of Transformers has them."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.dynamic_module_utils import get_relative_imports

from vembed.config.schema import ModelSection
from vembed.config.user_folders import cache_folder
from vembed.errors import UserError
from vembed.models.custom import modeling
from vembed.models.custom.classes import (
    OwnCode,
    check_class,
    find_class,
    name_of,
    trust,
    trusted_class,
)
from vembed.models.custom.modeling import (
    WEIGHTS,
    OwnConfig,
    accepted_inputs,
    construct,
    read_output,
)

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
_OF_THE_PACKAGE = re.compile(r"^\s*from\s+\.\s+import\b", re.MULTILINE)


def is_own(folder: Path) -> bool:
    """Return True if a folder holds an own model."""
    path = folder / "config.json"
    return path.is_file() and f'"{OwnConfig.model_type}"' in path.read_text(
        encoding="utf-8"
    )


def own_class(folder: Path) -> str | None:
    """Return the name of the class of a folder's own model; None for any other folder."""
    if not is_own(folder):
        return None
    return str(
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["class_name"]
    )


def own_folder(
    options: ModelSection, source: Path | None, tokenizer: Path | None
) -> Path:
    """Return the folder of the model that `model_class` names, and let this process run the class for it.

    `source`: the folder that `model_name` names, if it names one. A folder of an own model is used as it is; otherwise
    a folder is made in vembed's cache, named by its content. `tokenizer`: the folder of `tokenizer_name`.
    """
    assert options.model_class is not None
    code = find_class(options.model_class)
    if source is not None and is_own(source):
        _check_same(options, source)
        trust(source, code)
        return source
    arguments = dict(options.model_arguments or {})
    texts = "input_ids" in accepted_inputs(code.value)
    files = _tokenizer_files(tokenizer or source, options, needed=texts)
    weights = () if source is None else sorted(source.glob("*.safetensors"))
    settings = settings_of(code, arguments)
    identity = [
        settings,
        [[path.name, _digest(path)] for path in (*files, *weights, *code_files(code))],
    ]
    name = f"{code.name}-{hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()}"
    folder = _cache() / name
    if not folder.is_dir():
        partial = folder.with_name(f".{name}.{os.getpid()}")
        partial.mkdir(parents=True, exist_ok=True)
        for path in (*files, *weights):
            shutil.copy(path, partial / path.name)
        write_code(partial, code)
        if not texts or "pixel_values" in accepted_inputs(code.value):
            _write_image_processor(partial, settings)
        (partial / "config.json").write_text(
            json.dumps(settings, indent=2) + "\n", encoding="utf-8"
        )
        try:
            partial.rename(folder)
        except OSError:  # another process was faster, and has written the same
            shutil.rmtree(partial, ignore_errors=True)
    folder = folder.resolve()
    trust(folder, code)
    return folder


def store_weights(module: nn.Module) -> str:
    """Write the weights of a module that was given in Python to the cache; return their folder."""
    shared = set(modeling.tied_names(module))
    state = {
        f"own.{name}": tensor.detach().cpu().contiguous()
        for name, tensor in module.state_dict().items()
        if name not in shared
    }
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in state.items():
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    folder = _cache() / f"weights-{digest.hexdigest()}"
    if not (folder / WEIGHTS).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{os.getpid()}"
        save_file(state, partial, metadata={"format": "pt"})
        partial.replace(folder / WEIGHTS)
    return str(folder)


def write_code(folder: Path, code: OwnCode) -> None:
    """Write the wrapper and the user's files to a folder, so that it loads without vembed."""
    for path in code_files(code):
        shutil.copy(path, folder / path.name)
    text = Path(str(modeling.__file__)).read_text(encoding="utf-8")
    text += f"\n\nfrom .{code.file.stem} import {code.name}  # noqa: E402\n\nOwnModel = OwnModel.of({code.name})\n"
    (folder / CODE).write_text(text, encoding="utf-8")


def save_code(source: Path, folder: Path) -> None:
    """Write the code of the own model that was built from `source`: the user's file, or the code that came with it."""
    chosen = trusted_class(str(source))
    if (
        chosen is not None
        and chosen.backbone_class is not None
        and source.parent != _cache().resolve()
    ):
        write_code(
            folder,
            OwnCode(
                chosen.backbone_class,
                Path(inspect.getfile(chosen.backbone_class)).resolve(),
            ),
        )
        return
    for path in sorted(source.glob("*.py")):
        shutil.copy(path, folder / path.name)


def code_files(code: OwnCode) -> list[Path]:
    """Return the user's file and those beside it that it imports with a dot (`from .layers import Block`)."""
    files = dict[Path, None]()
    waiting = [code.file]
    while waiting:
        path = waiting.pop()
        if path.is_file() and path not in files:
            files[path] = None
            if _OF_THE_PACKAGE.search(path.read_text(encoding="utf-8")):
                raise UserError(
                    f"model_class: {path} imports a file as `from . import name`, which Transformers does not find "
                    "when it loads the saved model: write `from .name import ...`"
                )
            waiting += [
                path.parent / f"{name}.py" for name in get_relative_imports(path)
            ]
    return list(files)


# ---- facts about the class -----------------------------------------------------------------------------------------


def settings_of(code: OwnCode, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json. What the module gives is tried on two short inputs, without weights where that works."""
    module, hidden = _try_out(code, arguments)
    accepted = accepted_inputs(code.value)
    values: dict[str, Any] = {
        "model_type": OwnConfig.model_type,
        "architectures": ["OwnModel"],
        "auto_map": {
            "AutoConfig": f"{Path(CODE).stem}.OwnConfig",
            "AutoModel": f"{Path(CODE).stem}.OwnModel",
        },
        "class_name": code.name,
        "model_config": dict(arguments),
        "hidden_size": int(
            hidden.shape[1] if hidden.ndim in (2, 4) else hidden.shape[2]
        ),
        "inputs": list(accepted),
        "gives_vectors": hidden.ndim == 2,
        "reads_causally": bool(vars(code.value).get("is_causal", False)),
    }
    for name in ("max_positions", "image_size"):
        value = vars(module).get(name, vars(code.value).get(name, arguments.get(name)))
        if isinstance(value, int):
            values["max_position_embeddings" if name == "max_positions" else name] = (
                value
            )
    return values


def _try_out(code: OwnCode, arguments: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
    """Return a module without values, and the shape of what it gives for two inputs."""
    try:
        with init_empty_weights(include_buffers=True):
            module = construct(code.value, arguments)
        return module, forward_of(module, code.value, torch.device("meta"))
    except (
        RuntimeError,
        NotImplementedError,
    ):  # an operation that needs values: try it with values
        pass
    except TypeError as error:
        raise UserError(
            f"model_config: {dict(arguments)} does not fit {code.name}: {error}"
        ) from error
    with torch.random.fork_rng(devices=[]):
        module = construct(code.value, arguments)
    return module, forward_of(module, code.value, torch.device("cpu"))


def forward_of(
    module: nn.Module, backbone_class: type[nn.Module], device: torch.device
) -> Tensor:
    """Return what a module gives for two texts of three tokens, or two images, on a device."""
    accepted = accepted_inputs(backbone_class)
    inputs: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        inputs["input_ids"] = torch.ones(2, 3, dtype=torch.int64, device=device)
        if "attention_mask" in accepted:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    else:
        size = vars(module).get("image_size")
        side = size if isinstance(size, int) else 32
        inputs["pixel_values"] = torch.zeros(2, 3, side, side, device=device)
    with torch.no_grad():
        return read_output(module.eval()(**inputs))[0]


def _check_same(options: ModelSection, source: Path) -> None:
    saved = json.loads((source / "config.json").read_text(encoding="utf-8"))[
        "model_config"
    ]
    if options.model_arguments is not None and dict(options.model_arguments) != saved:
        raise UserError(
            f"model_config: {options.model_arguments} is not that of {source} ({saved}); leave it out, or start without "
            "that folder"
        )


def _tokenizer_files(
    folder: Path | None, options: ModelSection, *, needed: bool
) -> list[Path]:
    files = (
        []
        if folder is None
        else [folder / name for name in TOKENIZER if (folder / name).is_file()]
    )
    if needed and not any(
        path.name.startswith(("tokenizer", "vocab", "spiece")) for path in files
    ):
        raise UserError(
            f"model_class: {options.model_class} reads texts and needs a tokenizer: give tokenizer_name a folder or a "
            "Hub name (`vembed init --tokenizer FOLDER --data FILE` trains one on your data)"
        )
    return files


def _write_image_processor(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the image processor of a module with `image_size`, unless the user has given one."""
    if (folder / "preprocessor_config.json").is_file() or "image_size" not in settings:
        return
    side = settings["image_size"]
    values = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": side, "width": side},
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps(values, indent=2) + "\n", encoding="utf-8"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _cache() -> Path:
    return cache_folder() / "own"


# ---- Python objects given as options ------------------------------------------------------


MODEL = ("model_class", "model", "model_name")
"""Options that a class or a module may be given as."""
BLOCKS = ("fsdp", "fsdp_config", "distributed")
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def as_options(
    config: Mapping[str, Any], model: nn.Module | type[nn.Module] | None = None
) -> dict[str, Any]:
    """Return a config of plain values. `model`: a class or a module to train."""
    values: dict[str, Any] = {}
    trained = model
    for key, value in config.items():
        if key in MODEL and isinstance(value, nn.Module | type):
            if trained is not None:
                raise UserError(f"{key}: a second model is given; keep one of them")
            trained = value
        elif key in BLOCKS and isinstance(value, Mapping):
            values[key] = _without_objects(value)
        else:
            values |= _without_objects({key: value})
    return values if trained is None else values | _model_options(trained)


def _model_options(model: nn.Module | type[nn.Module]) -> dict[str, Any]:
    kind = model if isinstance(model, type) else type(model)
    check_class(kind, kind.__qualname__)
    options = {"model_class": name_of(kind)}
    if isinstance(model, nn.Module):
        options["model_name"] = store_weights(model)
    return options


def _without_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with torch's FSDP objects as the options that they stand for."""
    options: dict[str, Any] = {}
    for key, value in values.items():
        match value:
            case ModuleWrapPolicy():
                options[key] = "TRANSFORMER_BASED_WRAP"
                options["fsdp_transformer_layer_cls_to_wrap"] = sorted(
                    class_.__name__ for class_ in value._module_classes
                )
            case CPUOffload():
                options["fsdp_offload_params"] = bool(value.offload_params)
            case ShardingStrategy() | BackwardPrefetch():
                options[key] = value.name
            case MixedPrecision():
                dtypes = {
                    "param": value.param_dtype,
                    "reduce": value.reduce_dtype,
                    "buffer": value.buffer_dtype,
                }
                options |= {
                    f"fsdp_{name}_dtype": _DTYPES[dtype]
                    for name, dtype in dtypes.items()
                    if dtype is not None
                }
            case _ if key == "device_id":
                pass  # each process takes the device of its LOCAL_RANK
            case _:
                options[key] = value
    return options
