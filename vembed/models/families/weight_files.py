"""Weight files of a model folder: indexes, and the headers of safetensors files. Loads no weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vembed.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = ".safetensors"
EXPORT_FILE = "export.json"
"""File with the facts of an export: format, precision and the result of the check."""
INDEX = ".safetensors.index.json"
PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: type and shape, and the bytes of the file where it begins and ends."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def check_weight_files(folder: Path) -> None:
    """Raise UserError if loading the folder's weights could read anything else than safetensors files of this folder.

    Every reader of model folders calls this first. Transformers opens what an index or `transformers_weights` in
    config.json names, also a pickle, and also in another folder.
    """
    for index in sorted(folder.glob("*" + INDEX)):
        names = (read_object(index) or {}).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise UserError(
                f"{index} is not an index of weights: it needs a weight_map"
            )
        for name in names.values():
            _check_name(index, "weight_map", name)
            if not (folder / name).is_file():
                raise UserError(
                    f"{index} names {name}, which is not a file in this folder; copy the model again"
                )
    path = folder / "config.json"
    named = (read_object(path) or {}).get("transformers_weights")
    if named is not None:
        _check_name(
            path, "transformers_weights", str(named).removesuffix(".index.json")
        )


def _check_name(path: Path, key: str, name: Any) -> None:
    is_plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
    if not is_plain or not name.endswith(WEIGHTS):
        raise UserError(
            f"{path}: {key} names {name!r}, and only plain names of .safetensors files in the same folder are read "
            "(no pickled weights, no other folder); save the model again with Transformers"
        )


def check_whole_weights(folder: Path) -> None:
    """Raise UserError unless the folder holds weights of its own and no adapter, which Transformers would follow."""
    check_weight_files(folder)
    if not list(folder.glob("*" + WEIGHTS)):
        exported = (read_object(folder / EXPORT_FILE) or {}).get("format")
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
            f"{folder / ADAPTER_CONFIG} stands beside whole weights, so that it is open which of them are meant: move "
            "the adapter's files, or the weights, into a folder of their own"
        )


def check_no_pickles(folder: Path) -> None:
    """Raise UserError if another library might read pickled weights anywhere in the folder."""
    for inner in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
        check_weight_files(inner)
        pickled = sorted(path for path in inner.iterdir() if path.suffix in PICKLED)
        if pickled and not list(inner.glob("*" + WEIGHTS)):
            raise UserError(
                f"{pickled[0]} is pickled, and vembed reads no pickled weights; save the model again"
            )


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors that a model is loaded from, by name: of the index, or of the folder's safetensors files."""
    check_weight_files(folder)
    index = folder / ("model" + INDEX)
    if (folder / "model.safetensors").exists():
        names = {"model.safetensors"}
    elif index.exists():
        names = set((read_object(index) or {})["weight_map"].values())
    else:
        names = {path.name for path in folder.glob("*" + WEIGHTS)} - {ADAPTER_WEIGHTS}
    tensors: dict[str, Stored] = {}
    for name in sorted(names):
        tensors |= read_header(folder / name)[0]
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
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), begin, end)
    return tensors, metadata


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that holds an object; None if it does not exist."""
    values = read_json(path)
    if values is not None and not isinstance(values, dict):
        raise UserError(
            f"{path} holds a {type(values).__name__} instead of a JSON object"
        )
    return values


def read_json(path: Path) -> Any:
    """Read a JSON file; None if it does not exist."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
