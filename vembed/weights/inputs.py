"""Models to be merged: where their tensors are, and whether they are of one architecture and one tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vembed.errors import UserError
from vembed.models.backbone_loading import is_never_used
from vembed.models.families.description import DESCRIPTION_FILE
from vembed.models.families.model_files import read_model, read_sentence_transformers
from vembed.models.families.weight_files import read_object
from vembed.models.processors import open_tokenizer
from vembed.saving.files import ADAPTER_FOLDER
from vembed.weights.methods import Read
from vembed.weights.tensor_files import TensorEntry, TensorReader

_VOCABULARIES = (
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)


@dataclass(frozen=True)
class Source:
    """A model folder with whole weights."""

    name: str
    """Name or path as given by the user."""
    folder: Path
    files: dict[str, dict[str, TensorReader]]
    """Subfolder (empty for the backbone's) -> tensor -> its file."""

    def entry(self, part: str, name: str) -> TensorEntry:
        """Return dtype and shape of a tensor."""
        return self.files[part][name].entries[name]

    def reader(self, part: str, name: str) -> Read:
        """Return a function that reads ranges of a tensor in float64."""
        file = self.files[part][name]

        def read(start: int, stop: int) -> Tensor:
            return file.read(name, start, stop).double()

        return read


def open_source(name: str, folder: Path | None = None) -> Source:
    """Find the weights of a model. `folder`: where they are, if not where `name` says."""
    found = folder if folder is not None else read_model(name).folder
    files: dict[str, dict[str, TensorReader]] = {}
    for path in sorted(found.rglob("*.safetensors")):
        place = path.relative_to(found)
        if place.parts[0] == ADAPTER_FOLDER or any(
            piece.startswith(("checkpoint-", ".")) for piece in place.parts
        ):
            continue
        part = place.parent.as_posix()
        reader = TensorReader(path)
        files.setdefault("" if part == "." else part, {}).update(
            dict.fromkeys(reader.entries, reader)
        )
    if "" not in files and not any(files.values()):
        raise UserError(
            f"{name} has no .safetensors file, and vembed merges no pickled weights"
        )
    return Source(name, found, files)


def default_base(sources: Sequence[Source]) -> str | None:
    """Return the model that all were tuned from, where their vembed.json say so and agree."""
    names = {
        str((read_object(one.folder / DESCRIPTION_FILE) or {}).get("name", ""))
        for one in sources
    }
    only = names.pop() if len(names) == 1 else ""
    return only or None


COMPUTED = frozenset({"position_ids", "token_type_ids", "inv_freq"})
"""Last parts of the names of buffers that are computed from the config: the same in every model of an architecture."""

# ---- checks ----------------------------------------------------------------------------------------------------


def matched(first: Source, other: Source) -> dict[str, dict[str, str]]:
    """Return, for each tensor of `first`, its name in `other`; raise where they are not of one architecture.

    Names may differ by a prefix (`bert.`, `model.`), as those of a base model with a head for another task do.
    Tensors that no embedding depends on may be missing.
    """
    kinds = [
        (read_object(one.folder / "config.json") or {}).get("model_type")
        for one in (first, other)
    ]
    # None: no config.json at the top of the folder, or none that names a type.
    if None not in kinds and kinds[0] != kinds[1]:
        raise UserError(
            f"{first.name} is a {kinds[0]} and {other.name} is a {kinds[1]}: only models of one architecture can be "
            "merged"
        )
    names: dict[str, dict[str, str]] = {}
    for part, held in first.files.items():
        theirs = other.files.get(part, {})
        names[part] = _matched_names(held, theirs)
        missing = [
            name
            for name in held
            if name not in names[part] and not _may_be_missing(name)
        ]
        if missing:
            where = f"{part}/{missing[0]}" if part else missing[0]
            raise UserError(
                f"{other.name} has no {where}, which {first.name} has ({len(missing):,d} such tensors): only models "
                "of one architecture can be merged"
            )
        for name, theirs_name in names[part].items():
            shapes = first.entry(part, name).shape, other.entry(part, theirs_name).shape
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"{name} has the shape {list(shapes[0])} in {first.name} and {list(shapes[1])} in {other.name}: "
                    "only models of one architecture can be merged"
                )
    return names


def _may_be_missing(name: str) -> bool:
    """Return whether models of one architecture may differ in having a tensor: no embedding depends on it, or older
    versions of Transformers saved what newer ones compute from the config."""
    return is_never_used(name) or name.rsplit(".", 1)[-1] in COMPUTED


def _matched_names(
    wanted: Iterable[str], held: Mapping[str, TensorReader]
) -> dict[str, str]:
    wanted = list(wanted)
    if all(name in held for name in wanted if not _may_be_missing(name)):
        return {name: name for name in wanted if name in held}
    probe = max((name for name in wanted if not _may_be_missing(name)), key=len)
    longer = {name.removesuffix(probe) for name in held if name.endswith(f".{probe}")}
    shorter = {probe.removesuffix(name) for name in held if probe.endswith(f".{name}")}
    # The probe is the longest name, which is the most specific: it is found under one prefix only.
    for prefix in sorted(longer):
        found = {name: prefix + name for name in wanted if prefix + name in held}
        if probe in found:
            return found
    for prefix in sorted(shorter):
        found = {
            name: name.removeprefix(prefix)
            for name in wanted
            if name.removeprefix(prefix) in held
        }
        if probe in found:
            return found
    return {name: name for name in wanted if name in held}


def check_tokenizers(sources: Sequence[Source]) -> None:
    """Raise unless all models have one vocabulary: a row of an embedding matrix would be two words' mean."""
    first = sources[0]
    prints = [_vocabulary(one.folder) for one in sources]
    for other, found in zip(sources[1:], prints[1:], strict=True):
        if None not in (prints[0], found) and found != prints[0]:
            raise UserError(
                f"{first.name} and {other.name} have different tokenizers: the rows of their embeddings mean different "
                "tokens, so their weights cannot be merged"
            )


def check_pooling(sources: Sequence[Source]) -> None:
    """Raise unless all models make one vector of their tokens in the same way."""
    first = sources[0]
    ways = [_way(one.folder) for one in sources]
    for other, way in zip(sources[1:], ways[1:], strict=True):
        if ways[0] is not None and way is not None and way != ways[0]:
            different = {
                key: (value, way[key])
                for key, value in ways[0].items()
                if way[key] != value
            }
            said = "; ".join(
                f"{key}: {one!r} and {two!r}" for key, (one, two) in different.items()
            )
            raise UserError(
                f"{first.name} and {other.name} embed in different ways ({said}): merge models of one pooling and one "
                "head"
            )


def _way(folder: Path) -> dict[str, Any] | None:
    files = read_sentence_transformers(folder)
    if files is None:
        return None
    return {
        "pooling": files.pooling_modes,
        "normalize": files.normalize,
        "Dense modules": len(files.dense),
    }


def _vocabulary(folder: Path) -> str | None:
    """Return a fingerprint of the tokens and their numbers; None for a model without a tokenizer."""
    values = read_object(folder / "tokenizer.json")
    if values is not None and "vocab" in values.get("model", {}):
        added = [(one["id"], one["content"]) for one in values.get("added_tokens", ())]
        vocabulary = values["model"]["vocab"]
        if isinstance(
            vocabulary, dict
        ):  # added tokens are in it or not, as the library that wrote it pleased
            pairs = {**vocabulary, **{content: number for number, content in added}}
            return _digest(sorted(pairs.items()))
        return _digest([vocabulary, sorted(added)])
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return None
    return _digest(
        sorted(open_tokenizer(folder, trust_remote_code=False).get_vocab().items())
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
