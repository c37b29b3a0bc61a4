"""Merged model folders: the weights of several models in one, written file by file and piece by piece."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vembed.models.families.backbones import file_dtype, read_config
from vembed.models.families.weight_files import read_object
from vembed.saving.files import ADAPTER_FOLDER, replaced_folder
from vembed.saving.layout import write_json
from vembed.weights.inputs import Source, check_pooling, check_tokenizers, matched
from vembed.weights.methods import Read, Recipe, merged_pieces
from vembed.weights.tensor_files import TensorEntry, TensorReader, TensorWriter

log = logging.getLogger("vembed")

RECIPE_FILE = "merge.json"
"""File in a merged model's folder that lists its sources."""


class Merge:
    """Models that fit together, and the base that they are compared with; ready to be merged by any recipe."""

    def __init__(self, sources: Sequence[Source], base: Source | None) -> None:
        """Raise where the models are not of one architecture, tokenizer and pooling."""
        self.sources = list(sources)
        self.base = base
        first = self.sources[0]
        self._names = [matched(first, other) for other in self.sources]
        self._base_names = matched(first, base) if base is not None else {}
        check_tokenizers([*self.sources, *([base] if base else [])])
        check_pooling(self.sources)

    def write(
        self, recipe: Recipe, target: Path, *, dtype: torch.dtype | None = None
    ) -> Path:
        """Write the merged model: the files of the first one, with the weights of all. `dtype`: None keeps the first
        one's."""
        first = self.sources[0]
        with replaced_folder(target) as folder:
            shutil.copytree(
                first.folder,
                folder,
                dirs_exist_ok=True,
                symlinks=False,
                ignore=lambda place, names: _not_copied(
                    first.folder, Path(place), names
                ),
            )
            for path in sorted(
                {file.path for held in first.files.values() for file in held.values()}
            ):
                self._write_file(
                    recipe, path, folder / path.relative_to(first.folder), dtype
                )
            _write_dtype(folder, dtype)
            write_json(folder / RECIPE_FILE, self.described(recipe))
            (folder / "README.md").write_text(
                _card(first.folder, self.described(recipe)), encoding="utf-8"
            )
        return target

    def of(self, chosen: Sequence[int]) -> Merge:
        """Return the merge of some of the models."""
        return Merge([self.sources[place] for place in chosen], self.base)

    def described(self, recipe: Recipe) -> dict[str, Any]:
        """Return the recipe with the models that it is for."""
        return {
            "models": [one.name for one in self.sources],
            "base": self.base.name
            if self.base is not None and recipe.needs_base
            else None,
            **asdict(recipe),
        }

    def _write_file(
        self, recipe: Recipe, path: Path, target: Path, dtype: torch.dtype | None
    ) -> None:
        relative = path.parent.relative_to(self.sources[0].folder).as_posix()
        part = "" if relative == "." else relative
        reader = TensorReader(path)
        entries = {
            name: TensorEntry(_stored(entry.dtype, dtype), entry.shape)
            for name, entry in reader.entries.items()
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        with TensorWriter(target, entries, reader.metadata) as writer:
            for name, entry in entries.items():
                models = self._readers(part, name)
                if models is None or not entry.dtype.is_floating_point:
                    # Counts and tables of positions have no mean; a pooler that some lack is never used.
                    writer.write(reader.read(name).to(entry.dtype))
                    continue
                base = None
                if self.base is not None and name in self._base_names[part]:
                    base = self.base.reader(part, self._base_names[part][name])
                if recipe.needs_base and base is None:
                    writer.write(reader.read(name).to(entry.dtype))
                    continue
                for piece in merged_pieces(recipe, name, entry.size, models, base):
                    writer.write(piece.to(entry.dtype))

    def _readers(self, part: str, name: str) -> list[Read] | None:
        if not all(name in names[part] for names in self._names):
            return None
        return [
            source.reader(part, names[part][name])
            for source, names in zip(self.sources, self._names, strict=True)
        ]


def _not_copied(root: Path, place: Path, names: Sequence[str]) -> set[str]:
    """Weights are written anew; an adapter, a recipe and a report are of another model."""
    left = {
        name
        for name in names
        if name.endswith(".safetensors") or name.startswith(("checkpoint-", "."))
    }
    if Path(os.path.relpath(place, root)) == Path():
        left |= {ADAPTER_FOLDER, RECIPE_FILE, "README.md", "onnx", "openvino"} & set(
            names
        )
    return left


def _stored(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def _write_dtype(folder: Path, dtype: torch.dtype | None) -> None:
    """Say in config.json what the weights are stored in, for those that load them."""
    if dtype is None or not (folder / "config.json").is_file():
        return
    settings = read_object(folder / "config.json") or {}
    name = str(dtype).removeprefix("torch.")
    # Unchanged if it says so already; `torch_dtype` is the key's older name and would contradict.
    if file_dtype(read_config(folder, trust_remote_code=False)) != dtype:
        settings.pop("torch_dtype", None)
        write_json(folder / "config.json", {**settings, "dtype": name})


def _card(folder: Path, described: Mapping[str, Any]) -> str:
    """Return the first model's card with what it was merged from in place of what it was trained on."""
    front = "---\nlibrary_name: sentence-transformers\ntags:\n- sentence-transformers\n- feature-extraction\n- merge\n---"
    models = "\n".join(f"- {_public(name)}" for name in described["models"])
    base = f"\n\nBase: {_public(described['base'])}" if described["base"] else ""
    settings = {
        key: value for key, value in described.items() if key not in ("models", "base")
    }
    text = (
        f"{front}\n\n# Embedding model\n\nMerged by vembed from:\n\n{models}{base}\n\n"
    )
    text += "```json\n" + json.dumps(settings, indent=2) + "\n```\n"
    if (folder / "vembed.json").is_file():
        text += '\n```python\nimport vembed\n\nmodel = vembed.Embedder("this-folder")\n```\n'
    return text


def _public(name: str) -> str:
    """A Hub name as it is; of a folder only its last two parts, which say nothing of the machine."""
    return (
        name
        if name.count("/") == 1 and not name.startswith((".", "~", "/"))
        else "/".join(Path(name).parts[-2:])
    )
