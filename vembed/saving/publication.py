"""Publication of a model: its files, a description of the training data, and the report of its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from vembed.errors import UserError
from vembed.evaluation.report.record import RunRecord, read_run
from vembed.saving.card import markdown_table

CARD = "README.md"
DATA_FILE = "training_data.md"
"""File with the description of the training data."""
REPORTS = ("report.html", "report.md")
MODEL_FOLDER = "final"
TEXT_FILES = frozenset(
    {".md", ".html", ".json", ".jsonl", ".txt", ".yaml", ".py", ".jinja"}
)
DATA_OPTIONS = (
    "column_mapping",
    "val_split",
    "max_negatives",
    "max_train_examples",
    "retrieval_mode",
    "homogeneous_batches",
    "sampling",
    "no_duplicates",
    "on_bad_record",
    "query_prompt",
    "document_prompt",
    "max_length",
)
"""Options that say how the data were read."""


@dataclass(frozen=True)
class File:
    """One file of a publication: a file on disk, or its bytes."""

    path: str
    """Path in the repository."""
    content: Path | bytes

    @property
    def size(self) -> int:
        """Number of bytes."""
        if isinstance(self.content, Path):
            return self.content.stat().st_size
        return len(self.content)

    def read(self) -> bytes:
        """Return all bytes."""
        if isinstance(self.content, Path):
            return self.content.read_bytes()
        return self.content


def publication(model: str, *, report: bool = True) -> list[File]:
    """Return the files to publish of a run (its output_dir) or of a model folder, the card last: a repository whose
    upload was cut has no card. `report`: with the report of the run, which shows texts of the validation data."""
    folder = Path(model).expanduser()
    reason = "there is no such folder"
    if (folder / "config.yaml").is_file():
        folder = folder / MODEL_FOLDER
        reason = "its run has not finished"
    if not folder.is_dir():
        raise UserError(
            f"{folder} cannot be published: {reason}; give the output_dir of a finished run, or a model"
        )
    has_modules = (folder / "modules.json").is_file()
    if not has_modules and not any(folder.rglob("*.safetensors")):
        raise UserError(
            f"{folder} has neither modules.json nor weights (*.safetensors), so it is not a model's folder"
        )
    files = model_files(folder)
    run = folder.parent
    if (run / "config.yaml").is_file():
        record = read_run(run)
        files.append(File(DATA_FILE, data_description(record).encode()))
        hidden = local_folders(record.config)
        for name in REPORTS if report else ():
            if (run / name).is_file():
                text = (run / name).read_text(encoding="utf-8", errors="replace")
                files.append(File(name, without(text, hidden).encode()))
    return sorted(files, key=lambda file: (file.path == CARD, -file.size))


def model_files(folder: Path) -> list[File]:
    """Return the files of a model's folder without hidden ones. Raise UserError for a link that leads out of it, whose
    target may be a file that nobody means to publish."""
    files = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if is_hidden or not path.is_file():
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path} is a link to {path.resolve()}: copy the file into the folder, or remove it"
            )
        files.append(File(relative.as_posix(), path))
    return files


def data_description(record: RunRecord) -> str:
    """Return a page about the training data: sources with counts, how they were read, validation data, warnings. It
    shows no text of the data and no folder of this machine."""
    summary = record.summary
    lines = [f"- {line}" for line in summary.data]
    blocks = ["# Training data"]
    blocks.append("\n".join(lines) or "Not known: the run has written no summary.")
    if summary.num_examples is not None:
        num_steps = summary.num_steps or 0
        blocks.append(f"{summary.num_examples:,d} examples; {num_steps:,d} steps.")
    settings = record.changed_settings()
    rows = []
    for name in DATA_OPTIONS:
        if settings.get(name) is not None:
            rows.append((name, str(settings[name])))
    if rows:
        blocks += ["## How they were read", markdown_table(("option", "value"), rows)]
    if summary.evaluation:
        blocks += ["## Validation data", f"- {summary.evaluation}"]
    if summary.warnings:
        warnings = [f"- {line}" for line in summary.warnings]
        blocks += ["## Warnings", "\n".join(warnings)]
    text = "\n\n".join(blocks) + "\n"
    return without(text, local_folders(record.config))


def local_folders(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the folders of this machine that a config names, longest first: they are not published."""
    folders = {str(Path.cwd()), str(Path.home())}
    for text in _texts(config):
        if text.startswith(("/", "~")):
            folders.add(str(PurePath(text).parent))
    # Not `/` itself, which is in every path.
    folders.discard("/")
    # Longest first: a folder inside another is replaced as a whole.
    return tuple(sorted(folders, key=len, reverse=True))


def without(text: str, folders: tuple[str, ...]) -> str:
    """Return a text without these folders: what was inside them is named by the rest of its path."""
    for folder in folders:
        text = text.replace(folder + "/", "").replace(folder, ".")
    return text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
