"""Rules on names: data and logs beside the files that a run writes itself, and names that no file can have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vembed.config.entries import DataSource
from vembed.config.schema import TrainConfig
from vembed.config.violation import Violation

OWN_FILES = frozenset(
    {
        "config.yaml",
        "metrics.jsonl",
        "run.json",
        "report.html",
        "report.md",
        "final",
        "tensorboard",
        "logs",
    }
)
"""Files and folders of output_dir that a run writes, replaces or cuts."""
# Also what is beside them for a while: checkpoint-100.partial, .final.new, .hub, .probe-0 (of the test for a shared
# disk).
_CHECKPOINT = re.compile(r"checkpoint-\d+.*|\.(final|hub|probe-\d+).*")


def is_own(config: TrainConfig, name: str) -> bool:
    """Return whether a run writes a file or folder of this name into its output_dir."""
    return (
        name in OWN_FILES
        or name == config.logging.log_file
        or _CHECKPOINT.fullmatch(name) is not None
    )


def log_file_is_another(config: TrainConfig) -> Violation | None:
    """Return a violation where the log would be written into another file of the run."""
    if config.logging.log_file in OWN_FILES or _CHECKPOINT.fullmatch(
        config.logging.log_file
    ):
        said = f"log_file: {config.logging.log_file} is a file or folder that the run writes itself: give another name"
        return Violation(("log_file",), said)
    return None


def data_are_kept(config: TrainConfig) -> Violation | None:
    """Return a violation where a data file is among those that the run replaces or cuts."""
    output = Path(config.run.output_dir)
    for option in ("data_path", "val_data_path"):
        for name in _paths(config.options()[option]):
            place = Path(name)
            inside = (
                place.absolute().is_relative_to(output.absolute()) and place.exists()
            )
            first = (
                place.absolute().relative_to(output.absolute()).parts[:1]
                if inside
                else ()
            )
            if first and is_own(config, first[0]):
                said = (
                    f"{option}: {name} is in output_dir under a name that the run writes itself ({first[0]}), and "
                    "would be lost: move the data, or choose another output_dir"
                )
                return Violation((option, "output_dir"), said)
    return None


def names_are_text(config: TrainConfig) -> Violation | None:
    """Return a violation where a text cannot be written to config.yaml and to the report."""
    for option, value in config.options().items():
        for text in _texts(value):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                said = (
                    f"{option}: {text.encode(errors='replace').decode()!r:.200} has a lone surrogate at character "
                    f"{error.start + 1}, which no file can hold: write it as UTF-8"
                )
                return Violation((option,), said)
    return None


def _paths(value: Any) -> list[str]:
    entries = value if isinstance(value, list | tuple) else [value]
    return [
        one.path if isinstance(one, DataSource) else str(one)
        for one in entries
        if one is not None
    ]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, DataSource):
        yield from _texts(value.model_dump())
