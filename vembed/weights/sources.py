"""Models to be merged: checkpoints and adapters made whole, tensors read and written piece by piece, and whether models are
of one architecture and one tokenizer."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.config.terms import needed_teachers
from vembed.errors import UserError
from vembed.files import check_weights
from vembed.losses.build import build_loss
from vembed.models.building import build_model, load_embedder, stored_scale_and_bias
from vembed.models.families.backbones import is_never_used
from vembed.models.families.description import DESCRIPTION_FILE, describe_trained
from vembed.models.families.model_files import (
    CODES,
    METADATA,
    Stored,
    has_tokenizer_files,
    kind_of,
    read_header,
    read_model,
    read_object,
    read_sentence_transformers,
)
from vembed.models.precision import saved_dtype, store_rounded
from vembed.models.processors import open_tokenizer
from vembed.parallel.parameters import full_state_dict
from vembed.saving.files import ADAPTER_FOLDER, save_model
from vembed.training.checkpoint import folders as integrity
from vembed.training.checkpoint.checkpointer import (
    TrainedState,
    read_state,
    restore,
    stored_tensors,
)
from vembed.training.hooks.base import Hooks
from vembed.training.hooks.evaluations import WeightAverage

log = logging.getLogger("vembed")

# ---- safetensors files, so that no tensor has to be whole in memory ------------------------------------------------

DTYPE_BY_CODE = {code: getattr(torch, name) for name, code in CODES.items()}
Read = Callable[[int, int], Tensor]
"""(start, stop) -> that range of a flattened tensor in float64, as a new tensor, which the caller may change."""
_ALIGNMENT = 8
"""Bytes: the data of a safetensors file begin at a multiple of it."""


def read_range(entry: Stored, start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` of a flattened tensor, as they are stored. It maps no memory, so that what was
    read can be given back."""
    dtype = DTYPE_BY_CODE[entry.dtype]
    num_bytes = (stop - start) * dtype.itemsize
    offset = entry.begin + start * dtype.itemsize
    data = np.fromfile(entry.path, np.uint8, num_bytes, offset=offset)
    return torch.from_numpy(data).view(dtype)


def write_header(
    file: BinaryIO, entries: Mapping[str, Stored], metadata: Mapping[str, str]
) -> None:
    """Begin a new safetensors file. The values of the tensors are to be written behind it, in the order of `entries`."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, entry in entries.items():
        end = offset + entry.size * DTYPE_BY_CODE[entry.dtype].itemsize
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    # The format: 8 bytes with the header's length, the header (JSON, padded with spaces), the tensors. Offsets count from
    # the end of the header.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)


# ---- models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFolder:
    """A model folder with whole weights."""

    name: str
    """Name or path as given by the user."""
    folder: Path
    files: dict[str, dict[str, Stored]]
    """Subfolder (empty for the backbone's) -> name -> tensor."""

    def reader(self, part: str, name: str) -> Read:
        """Return a function that reads ranges of a tensor in float64."""
        entry = self.files[part][name]
        return lambda start, stop: read_range(entry, start, stop).double()


def open_source(name: str, folder: Path | None = None) -> ModelFolder:
    """Find the weights of a model. `folder`: where they are, if not where `name` says."""
    root = folder if folder is not None else read_model(name).folder
    files: dict[str, dict[str, Stored]] = {}
    for path in sorted(root.rglob("*.safetensors")):
        relative = path.relative_to(root)
        is_other = any(part.startswith(("checkpoint-", ".")) for part in relative.parts)
        if is_other or relative.parts[0] == ADAPTER_FOLDER:
            continue
        subfolder = relative.parent.as_posix().removeprefix(".")
        tensors = files.setdefault(subfolder, {})
        tensors |= read_header(path)[0]
    for subfolder in files:
        check_weights(root / subfolder)
    if not files:
        raise UserError(
            f"{name} has no .safetensors file, and vembed merges no pickled weights"
        )
    return ModelFolder(name, root, files)


def default_base(sources: Sequence[ModelFolder]) -> str | None:
    """Return the model that all were tuned from, where their vembed.json say so and agree."""
    names = set()
    for source in sources:
        description = read_object(source.folder / DESCRIPTION_FILE)
        names.add(str(description.get("name", "")))
    return names.pop() or None if len(names) == 1 else None


COMPUTED = frozenset({"position_ids", "token_type_ids", "inv_freq"})
"""Last parts of the names of buffers that are computed from the config: the same in every model of an architecture."""

# ---- checks ----------------------------------------------------------------------------------------------------


def matched(first: ModelFolder, other: ModelFolder) -> dict[str, dict[str, str]]:
    """Return, for each tensor of `first`, its name in `other`; raise where they are not of one architecture.

    Names may differ by a prefix (`bert.`, `model.`), as those of a base model with a head for another task do.
    Tensors that no embedding depends on may be missing.
    """
    first_type, other_type = (
        read_object(source.folder / "config.json").get("model_type")
        for source in (first, other)
    )
    if first_type and other_type and first_type != other_type:
        raise UserError(
            f"{first.name} is a {first_type} and {other.name} is a {other_type}: only models of one architecture can "
            "be merged"
        )
    names = {}
    for part, tensors in first.files.items():
        names[part] = _matched_names(tensors, other.files.get(part, {}))
        for name, entry in tensors.items():
            other_name = names[part].get(name)
            # Older versions of Transformers saved what newer ones compute from the config.
            may_lack = is_never_used(name) or name.rsplit(".", 1)[-1] in COMPUTED
            if other_name is None and may_lack:
                continue
            shape = entry.shape
            other_shape = None
            if other_name is not None:
                other_shape = other.files[part][other_name].shape
            if shape != other_shape:
                raise UserError(
                    f"{name} has the shape {shape} in {first.name} and {other_shape} in {other.name}: only models of "
                    "one architecture can be merged"
                )
        # What only the other one has may be a head for another task, but no further layer.
        used = set(names[part].values())
        kinds = {_without_numbers(name) for name in used}
        for name in other.files.get(part, {}):
            if name not in used and _without_numbers(name) in kinds:
                raise UserError(
                    f"{other.name} has {name} and {first.name} does not: only models of one architecture can be merged"
                )
    return names


def _without_numbers(name: str) -> str:
    """Return a tensor's name without the number of its layer."""
    return re.sub(r"\d+", "", name)


def _matched_names(names: Iterable[str], held: Mapping[str, Stored]) -> dict[str, str]:
    # The probe is the longest name, which is the most specific: it is found under one prefix only.
    probe = max(names, key=len)
    adds = ""
    lacks = ""
    for name in held:
        if name.endswith(f".{probe}"):
            adds = name.removesuffix(probe)
        elif probe.endswith(f".{name}"):
            lacks = probe.removesuffix(name)
    matched_names = {}
    for name in names:
        other_name = adds + name.removeprefix(lacks)
        if other_name in held:
            matched_names[name] = other_name
    return matched_names


def check_fit(sources: Sequence[ModelFolder], base: ModelFolder | None) -> None:
    """Raise unless all models are of one architecture, vocabulary and pooling. With another vocabulary a row of an
    embedding matrix would be two words' mean."""
    first = sources[0]
    vocabulary = _vocabulary(first.folder)
    settings = _embedding_settings(first.folder)
    for other in sources[1:] if base is None else [*sources[1:], base]:
        matched(first, other)
        other_vocabulary = _vocabulary(other.folder)
        are_known = None not in (vocabulary, other_vocabulary)
        if are_known and vocabulary != other_vocabulary:
            raise UserError(
                f"{first.name} and {other.name} have different tokenizers: the rows of their embeddings mean different "
                "tokens, so their weights cannot be merged"
            )
        other_settings = _embedding_settings(other.folder)
        are_known = bool(settings and other_settings) and other is not base
        if are_known and settings != other_settings:
            raise UserError(
                f"{first.name} and {other.name} embed in different ways ({settings}, {other_settings}): merge models of "
                "one pooling and one head"
            )


def _embedding_settings(folder: Path) -> dict[str, Any]:
    """Return how a model makes one vector of its tokens; empty where its folder does not name it, and for a reranker."""
    if kind_of(folder) == "reranker":
        return {}
    files = read_sentence_transformers(folder)
    if files.normalize is None:
        return {}
    return {
        "pooling": files.pooling_modes,
        "normalize": files.normalize,
        "Dense modules": len(files.dense),
    }


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the tokens and their numbers; None for a model without a tokenizer."""
    if not has_tokenizer_files(folder):
        return None
    tokenizer = open_tokenizer(folder, trust_remote_code=False)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


# ---- checkpoints of a run and adapters, as folders of whole models -----------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of a run."""
    return (folder / integrity.STATE).is_file() and (
        folder / integrity.MANIFEST
    ).is_file()


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints of a run, oldest first."""
    checkpoints = [path for _, path in integrity.list_checkpoints(run)]
    if len(checkpoints) < count:
        raise UserError(
            f"{run} has {len(checkpoints)} checkpoints, and the last {count} are asked for: set save_steps and "
            "save_total_limit so that the run keeps more of them"
        )
    return checkpoints[-count:]


def whole_model(name: str, folder: Path) -> Path | None:
    """Write a checkpoint or an adapter to `folder` as a model with whole weights; None where `name` is one already."""
    path = Path(name).expanduser()
    if is_checkpoint(path):
        return _from_checkpoint(path, folder)
    files = read_model(name)
    if files.adapter is None:
        return None
    embedder = load_embedder(name)
    return save_model(folder, embedder, embedder.state_dict())


def _from_checkpoint(checkpoint: Path, folder: Path) -> Path:
    problems = integrity.verify(checkpoint)
    if problems:
        raise UserError(f"{checkpoint} is damaged ({problems[0]}); leave it out")
    saved = read_state(checkpoint)
    config = TrainConfig(**saved["config"])
    description = describe_trained(
        config.model, config.matryoshka, config.objective, config.adapters
    )
    embedder = build_model(
        description,
        config.model,
        config.adapters,
        objective=config.objective,
        seed=config.run.seed,
    )
    scale, bias = stored_scale_and_bias(description) or (None, None)
    size = description.embedding_dim
    teachers = needed_teachers(config.objective, config.data, config.model)
    loss = build_loss(
        config,
        mrl_dims=description.mrl_dims,
        start_scale=scale,
        start_bias=bias,
        embedding_dim=size,
        teacher_dims={teacher.label: size for teacher in teachers},
    )
    # The loss is built only for its learned scale and bias, which are stored beside the weights; no optimizer state is
    # read.
    stored = stored_tensors(checkpoint)
    for name, parameter in loss.named_parameters(prefix="loss"):
        # The checkpoint knows the size of a teacher's vectors without the teacher.
        shape = stored[name].size
        if parameter.shape != shape:
            parameter.data = torch.empty(shape)
    hooks = Hooks([])
    if config.optimizer.ema is not None:
        average = WeightAverage(config.optimizer.ema)
        average.follow(embedder)
        hooks.append(average)
    # no_dist: rank 0 alone reads, inside a process group of several ranks too; others would wait in a collective.
    trained = TrainedState(embedder, loss, of_hooks=hooks.tensors())
    restore(trained, checkpoint, no_dist=True)
    if hooks:
        average.put(average.tensors())
    weights = full_state_dict(embedder)
    learned = loss.logit_scale_and_bias()
    if learned is not None:
        embedder.write_logit_scale_and_bias(*learned, weights)
    # As training/final.py stores them: rounded as int8 layers compute with them.
    store_rounded(embedder, weights)
    log.info("%s: step %d", checkpoint, saved["loop"]["step"])
    return save_model(
        folder,
        embedder,
        weights,
        dtype=saved_dtype(config.model.torch_dtype, description),
    )
