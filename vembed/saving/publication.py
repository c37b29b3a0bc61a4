"""Publication of a model: its files, a description of the training data, the report of its run, and the repository on the
Hub that they are pushed to. The token comes from the environment or the login alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from vembed.errors import RunError, UserError
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
LARGE_FILE_BYTES = 10_000_000
"""From here a file is a commit of its own, so that a push that was cut goes on behind it."""
PATHS_PER_REQUEST = 500
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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


# ---- the Hub -----------------------------------------------------------------


class Hub:
    """A model repository. Nothing is sent before `open`."""

    def __init__(
        self,
        repository: str,
        *,
        public: bool = False,
        log: Callable[[str], object] = print,
    ) -> None:
        from huggingface_hub import HfApi, get_token

        self.repository = checked_name(repository)
        self.public = public
        self.log = log
        token = get_token()
        if not token:
            raise UserError(
                f"push to {repository}: no token of the Hub is here: log in (`hf auth login`) or set HF_TOKEN; it is "
                "read from there alone"
            )
        self._token = token
        self.api = HfApi()

    def open(self) -> None:
        """Make the repository if it is missing: private, unless `public`. Raise UserError for a public one that is
        there already, unless `public`."""
        with _reaching(self.repository):
            # The Hub completes a name without a user.
            self.repository = self.api.create_repo(
                self.repository, private=not self.public, exist_ok=True
            ).repo_id
            is_private = self.api.repo_info(self.repository).private
        if not is_private and not self.public:
            raise UserError(
                f"push to {self.repository}: the repository is public, and a private one is asked for: give --public "
                "to vembed push, or another name"
            )

    def push(
        self, files: Sequence[File], message: str, *, tag: str | None = None
    ) -> int:
        """Send the files that the repository does not have with this content; return how many were sent. Large files
        are commits of their own, and the card is in the last one. `tag`: a name for the result."""
        from huggingface_hub import CommitOperationAdd

        for file in files:
            is_text = PurePosixPath(file.path).suffix in TEXT_FILES
            if is_text and self._token.encode() in file.read():
                raise UserError(
                    f"{file.path} holds your token of the Hub, and would publish it: remove it there"
                )
        with _reaching(self.repository):
            stored: dict[str, Any] = {}
            # The names go in the body of a request: pieces bound its size.
            for start in range(0, len(files), PATHS_PER_REQUEST):
                paths = [file.path for file in files[start : start + PATHS_PER_REQUEST]]
                for info in self.api.get_paths_info(self.repository, paths):
                    stored[info.path] = info
            changed = [
                file for file in files if not _is_same(file, stored.get(file.path))
            ]
            is_alone = {
                file.path
                for file in changed
                if file.size >= LARGE_FILE_BYTES and file.path != CARD
            }
            groups = [[file] for file in changed if file.path in is_alone]
            groups.append([file for file in changed if file.path not in is_alone])
            for group in groups:
                operations = []
                for file in group:
                    content: str | bytes = str(file.content)
                    if isinstance(file.content, bytes):
                        content = file.content
                    operations.append(CommitOperationAdd(file.path, content))
                if operations:
                    self.api.create_commit(
                        self.repository, operations, commit_message=message
                    )
                    self.log(f"pushed {', '.join(file.path for file in group)}")
            if tag is not None:
                self.api.create_tag(
                    self.repository, tag=tag, tag_message=message, exist_ok=True
                )
        return len(changed)


def checked_name(repository: str) -> str:
    """Return the name of a repository. Raise UserError for what cannot be one."""
    if not _NAME.fullmatch(repository) or ".." in repository:
        raise UserError(
            f"{repository!r} is no name of a repository on the Hub; give user/name"
        )
    return repository


def _is_same(file: File, stored: Any) -> bool:
    """Return whether the Hub's record of a file has its content: the SHA-256 of large files, git's hash of others."""
    if stored is None or stored.size != file.size:
        return False
    data = file.read()
    if stored.lfs is not None:
        return bool(stored.lfs.sha256 == hashlib.sha256(data).hexdigest())
    blob = b"blob %d\0" % len(data) + data
    digest = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
    return bool(stored.blob_id == digest)


@contextmanager
def _reaching(repository: str) -> Iterator[None]:
    """Raise a UserError or a RunError of one sentence for what the Hub or the network refuses."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # Bases of HfHubHTTPError: the errors of the HTTP library, whose name differs by version. RuntimeError: a large file
    # was not taken.
    failures: Any = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(
            f"push to {repository}: HF_HUB_OFFLINE is set; unset it to reach the Hub"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = (error.server_message or str(error).splitlines()[0]).strip()
        if status in (401, 403):
            raise UserError(
                f"push to {repository}: the Hub refuses this token ({status}: {reason}); it must be allowed to write"
            ) from error
        raise RunError(
            f"push to {repository}: the Hub answers {status} ({reason}); the same command goes on"
        ) from error
    except failures as error:
        raise RunError(
            f"push to {repository}: {type(error).__name__}: {error}; what was sent stays, and the same command goes on"
        ) from error
