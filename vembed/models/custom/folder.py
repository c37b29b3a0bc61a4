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
from vembed.errors import UserError
from vembed.files import cache_folder, write_json
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
from vembed.models.families.model_files import is_own

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


def own_class(folder: Path) -> str | None:
    """Return the name of the class of a folder's own model; None for any other folder."""
    if not is_own(folder):
        return None
    return str(OwnConfig.from_pretrained(folder).class_name)


def own_folder(
    options: ModelSection, source: Path | None, tokenizer: Path | None
) -> Path:
    """Return the folder of the model that `model_class` names, and let this process run the class for it.

    `source`: the folder that `model_name` names, if it names one. A folder of an own model is used as it is; otherwise
    a folder is made in vembed's cache, named by its content. `tokenizer`: the folder of `tokenizer_name`.
    """
    assert options.model_class is not None
    code = find_class(options.model_class)
    arguments = options.model_arguments
    if source is not None and is_own(source):
        saved = OwnConfig.from_pretrained(source).model_config
        if arguments is not None and dict(arguments) != saved:
            raise UserError(
                f"model_config: {arguments} is not that of {source} ({saved}); leave it out, or start without that folder"
            )
        trust(source, code)
        return source
    reads_texts = "input_ids" in accepted_inputs(code.value)
    files: list[Path] = []
    texts = tokenizer or source
    if texts is not None:
        files = [texts / name for name in TOKENIZER if (texts / name).is_file()]
    names = " ".join(path.name for path in files)
    if reads_texts and not re.search(r"\b(tokenizer|vocab|spiece)", names):
        raise UserError(
            f"model_class: {options.model_class} reads texts and needs a tokenizer: give tokenizer_name a folder or a "
            "Hub name (`vembed init --tokenizer FOLDER --data FILE` trains one on your data)"
        )
    if source is not None:
        files += sorted(source.glob("*.safetensors"))
    settings = settings_of(code, arguments or {})
    identity: list[Any] = [settings]
    for path in (*files, *code_files(code)):
        with path.open("rb") as file:
            identity.append(
                [path.name, hashlib.file_digest(file, "blake2b").hexdigest()]
            )
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    folder = _cache() / f"{code.name}-{digest}"
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, partial / path.name)
        write_code(partial, code)
        processor = partial / "preprocessor_config.json"
        reads_images = "pixel_values" in accepted_inputs(code.value)
        if reads_images and "image_size" in settings and not processor.is_file():
            side = settings["image_size"]
            values = {**IMAGE_PROCESSOR, "size": {"height": side, "width": side}}
            write_json(processor, values)
        write_json(partial / "config.json", settings)
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
    trusted = trusted_class(str(source))
    if trusted is not None and source.parent != _cache().resolve():
        assert trusted.backbone_class is not None
        file = Path(inspect.getfile(trusted.backbone_class)).resolve()
        write_code(folder, OwnCode(trusted.backbone_class, file))
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
    module: nn.Module
    try:
        with init_empty_weights(include_buffers=True):
            module = construct(code.value, arguments)
        hidden = forward_of(module, code.value, torch.device("meta"))
    except TypeError as error:
        raise UserError(
            f"model_config: {dict(arguments)} does not fit {code.name}: {error}"
        ) from error
    except (RuntimeError, NotImplementedError):  # an operation that needs values
        with torch.random.fork_rng(devices=[]):
            module = construct(code.value, arguments)
        hidden = forward_of(module, code.value, torch.device("cpu"))
    stem = Path(CODE).stem
    values: dict[str, Any] = {
        "model_type": OwnConfig.model_type,
        "architectures": ["OwnModel"],
        "auto_map": {
            "AutoConfig": f"{stem}.OwnConfig",
            "AutoModel": f"{stem}.OwnModel",
        },
        "class_name": code.name,
        "model_config": dict(arguments),
        # [n, dim], [n, tokens, dim] or, of a convolutional network, [n, channels, height, width].
        "hidden_size": int(hidden.shape[2 if hidden.ndim == 3 else 1]),
        "inputs": list(accepted_inputs(code.value)),
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


def _cache() -> Path:
    return cache_folder() / "own"


# ---- Python objects given as options ------------------------------------------------------


MODEL = ("model_class", "model", "model_name")
"""Options that a class or a module may be given as."""
BLOCKS = ("fsdp", "fsdp_config", "distributed")


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
            values[key] = {}
            for inner_key, inner_value in value.items():
                values[key] |= _option(inner_key, inner_value)
        else:
            values |= _option(key, value)
    if trained is not None:
        kind = trained if isinstance(trained, type) else type(trained)
        check_class(kind, kind.__qualname__)
        values["model_class"] = name_of(kind)
    if isinstance(trained, nn.Module):
        values["model_name"] = store_weights(trained)
    return values


def _option(key: str, value: Any) -> dict[str, Any]:
    """Return an option, with one of torch's FSDP objects as the options that it stands for."""
    if isinstance(value, ModuleWrapPolicy):
        names = sorted(kind.__name__ for kind in value._module_classes)
        return {
            key: "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": names,
        }
    if isinstance(value, CPUOffload):
        return {"fsdp_offload_params": bool(value.offload_params)}
    if isinstance(value, ShardingStrategy | BackwardPrefetch):
        return {key: value.name}
    if isinstance(value, MixedPrecision):
        options = {}
        for part in ("param", "reduce", "buffer"):
            dtype = vars(value)[f"{part}_dtype"]
            if dtype is not None:
                options[f"fsdp_{part}_dtype"] = str(dtype).removeprefix("torch.")
        return options
    # Each process takes the device of its LOCAL_RANK.
    return {} if key == "device_id" else {key: value}
