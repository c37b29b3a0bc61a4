"""Data sets of the library `datasets`: folders that it saved, and names on the Hub. Images stay encoded."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from vembed.data.formats.base import ArrowRows, first_line
from vembed.errors import UserError, listed

log = logging.getLogger("vembed")

Role = Literal["train", "validation"]
_SPLITS: dict[Role, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "dev", "val", "test"),
}


class SavedDataset(ArrowRows):
    """A `datasets.Dataset`, memory-mapped from disk."""

    title = "a folder of `datasets.save_to_disk`"

    def __init__(
        self,
        name: str,
        folder: Path,
        dataset: Any,
    ) -> None:
        super().__init__(folder)
        self.name = name
        self.folder = folder
        self.columns = tuple(dataset.column_names)
        self._files = [Path(entry["filename"]) for entry in dataset.cache_files]
        self._table = dataset.with_format("arrow")[:]

    def table(self) -> pa.Table:
        """Return the rows."""
        return self._table

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on."""
        self._table = self._table.select(columns)

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return self._files


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is one that `datasets.save_to_disk` has written."""
    names = ("dataset_info.json", "dataset_dict.json", "state.json")
    return any((path / name).is_file() for name in names)


def has_validation_split(path: Path) -> bool:
    """Return whether a folder holds several splits, and one of them is for validation. A test split is not."""
    try:
        splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    validation = set(_SPLITS["validation"]) - {"test"}
    return "train" in splits and not validation.isdisjoint(splits)


def open_folder(path: Path, role: Role) -> SavedDataset:
    """Open a folder that `datasets.save_to_disk` has written: of several splits the one for this role."""
    import datasets  # the import takes a second, which runs on plain files avoid

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise UserError(
            f"{path} was saved by `datasets`, and is damaged: {first_line(error)}"
        ) from error
    return _of_split(str(path), path, dataset, role)


def open_hub(name: str, role: Role) -> SavedDataset:
    """Open a Hub dataset: `owner/name`, `owner/name:config` or `owner/name:config:split`."""
    import datasets

    repository, _, config_and_split = name.partition(":")
    config, _, split = config_and_split.partition(":")
    # What is there already is not fetched again. `datasets` shows the progress of each file on stderr.
    log.info(f"{name}: from the Hub, into {datasets.config.HF_DATASETS_CACHE}")
    try:
        dataset = datasets.load_dataset(repository, config or None, split=split or None)
    except (OSError, ValueError, KeyError, RuntimeError, pa.ArrowException) as error:
        raise UserError(
            f"{name} is no file or folder here, and as a dataset of the Hub it cannot be loaded: {first_line(error)}"
        ) from error
    return _of_split(name, Path.cwd(), dataset, role)


def _of_split(
    name: str,
    folder: Path,
    dataset: Any,
    role: Role,
) -> SavedDataset:
    """Return the reader of a dataset, or of the split for this role if it has several."""
    if not isinstance(dataset, dict):
        return SavedDataset(name, folder, dataset)
    names = list(dataset)
    if len(names) > 1:
        names = [split for split in _SPLITS[role] if split in dataset]
    if not names:
        raise UserError(
            f"{name} has the splits {listed(dataset)}, and none is called {' or '.join(_SPLITS[role])}"
        )
    return SavedDataset(name, folder, dataset[names[0]])
