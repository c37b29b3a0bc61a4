"""Paths that a config names: which are files by their form, and which of them are missing. Opens nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vembed.config.schema import DataSection, ModelSection
from vembed.config.values import RESULT_OF
from vembed.errors import UserError
from vembed.names import exists, is_address, is_hub_model, is_pattern, similar_path

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


def missing_path(option: str, path: str) -> str | None:
    """Return a sentence about data that are not here and no name on the Hub, pattern or address; otherwise None."""
    if exists(path) or is_hub_dataset(path) or is_pattern(path) or is_address(path):
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
    if not exists(folder) and not is_hub_model(folder) and not is_given_elsewhere:
        problems.append(
            f"model_name: {folder} is not a folder (looked from {Path.cwd()}); give an existing folder or a Hub name "
            f"such as org/model{similar_path(folder)}"
        )
    if data.image_root is not None and not exists(data.image_root):
        problems.append(
            f"image_root: {data.image_root} does not exist (looked from {Path.cwd()})"
        )
    if problems:
        raise UserError("\nalso: ".join(problems))
