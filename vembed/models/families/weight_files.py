"""Weight files of a model folder: indexes, and the headers of safetensors files. Loads no weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vembed.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = ".safetensors"
EXPORT_FILE = "export.json"
"""File with the facts of an export: format, precision and the result of the check."""
INDEX = ".safetensors.index.json"
PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
METADATA = "__metadata__"
LONGEST_HEADER = 100 * 2**20
"""Bytes; the safetensors library has the same limit."""
BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Width of each type that a safetensors file can hold."""


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
        for name in _named_in(index):
            _check_name(index, "weight_map", name)
            if not (folder / name).is_file():
                raise UserError(
                    f"{index} names {name}, which is not a file in this folder; copy the model again"
                )
    settings = read_object(folder / "config.json") or {}
    named = settings.get("transformers_weights")
    if named is not None:
        _check_name(
            folder / "config.json",
            "transformers_weights",
            str(named).removesuffix(".index.json"),
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
    whole = folder / "model.safetensors"
    index = folder / ("model" + INDEX)
    if whole.exists():
        paths = [whole]
    elif index.exists():
        paths = [folder / name for name in sorted(set(_named_in(index)))]
    else:
        paths = sorted(
            path for path in folder.glob("*" + WEIGHTS) if path.name != ADAPTER_WEIGHTS
        )
    return {
        name: stored for path in paths for name, stored in read_header(path)[0].items()
    }


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata. Raise UserError unless the file is complete."""
    if not path.is_file():  # a pipe would be waited for
        raise UserError(
            f"{path} is not a regular file; weights are read from safetensors files only"
        )
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length < 2 or length > min(LONGEST_HEADER, size - 8):
                raise UserError(
                    f"{path} is not a safetensors file: its first 8 bytes are not the length of a header"
                )
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    if not isinstance(header, dict):
        raise UserError(
            f"{path} is not a safetensors file: its header is not a JSON object"
        )
    metadata = header.pop(METADATA, None) or {}
    tensors = {
        name: _stored(path, name, entry, 8 + length) for name, entry in header.items()
    }
    # Tensors follow each other without gaps, so the file ends where the last one does.
    needed = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if needed != size:
        raise UserError(
            f"{path} has {size:,d} bytes, and its header describes {needed:,d}: copy the file again"
        )
    return tensors, {
        str(key): str(value) for key, value in metadata.items()
    } if isinstance(metadata, dict) else {}


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that holds an object; None if it does not exist."""
    values = read_json(path)
    if values is not None and not isinstance(values, dict):
        raise UserError(f"{path} holds {_kind(values)} instead of a JSON object")
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


def _named_in(index: Path) -> list[str]:
    """Return the file names of an index."""
    values = read_object(index) or {}
    names = values.get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not isinstance(values.get("metadata"), dict)
    ):
        raise UserError(
            f"{index} is not an index of weights: it needs the objects weight_map and metadata"
        )
    return list(names.values())


def _check_name(path: Path, key: str, name: Any) -> None:
    if (
        not isinstance(name, str)
        or Path(name).name != name
        or "\\" in name
        or not name.endswith(WEIGHTS)
    ):
        raise UserError(
            f"{path}: {key} names {name!r}, and only plain names of .safetensors files in the same folder are read "
            "(no pickled weights, no other folder); save the model again with Transformers"
        )


def _stored(path: Path, name: str, entry: Any, start: int) -> Stored:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(entry["shape"])
        (begin, end) = entry["data_offsets"]
        is_sound = (
            all(
                isinstance(number, int) and number >= 0
                for number in (*shape, begin, end)
            )
            and begin <= end
        )
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise UserError(
            f"{path}: the header's entry for {name} is damaged; copy the file again"
        )
    if dtype not in BITS:
        raise UserError(
            f"{path}: {name} is stored as {dtype}, a type that safetensors does not have"
        )
    if math.prod(shape) * BITS[dtype] != (end - begin) * 8:
        raise UserError(
            f"{path}: {name} of the shape {list(shape)} in {dtype} does not fit into the {end - begin:,d} bytes that "
            "the header gives it; copy the file again"
        )
    return Stored(path, dtype, shape, start + begin, start + end)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return f"{value!r:.40}"
