"""Publication of a model: its files, the report of its run, and the repository on the Hub that they are pushed to. The
token comes from the environment or the login alone."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from vembed.errors import RunError, UserError
from vembed.evaluation.report.record import read_run
from vembed.models.families.model_files import error_sentence

CARD = "README.md"
REPORTS = ("report.html", "report.md")
MODEL_FOLDER = "final"
TEXT_FILES = frozenset(
    {".md", ".html", ".json", ".jsonl", ".txt", ".yaml", ".py", ".jinja"}
)
_PATH = re.compile(r'"([/~][^"]*)')
"""In JSON: a text that is an absolute path."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


Files = dict[str, Path | bytes]
"""Path in the repository -> a file on disk, or its bytes."""


def publication(model: str, *, report: bool = True) -> Files:
    """Return the files to publish of a run (its output_dir) or of a model folder. `report`: with the report of the run,
    which shows texts of the validation data."""
    folder = Path(model).expanduser()
    if (folder / "config.yaml").is_file():
        folder = folder / MODEL_FOLDER
    has_modules = (folder / "modules.json").is_file()
    if not has_modules and not any(folder.rglob("*.safetensors")):
        raise UserError(
            f"{folder} cannot be published, because it is not there or no model: give the output_dir of a finished run, or "
            "a model's folder"
        )
    files = model_files(folder)
    run = folder.parent
    if (run / "config.yaml").is_file():
        hidden = local_folders(read_run(run).config)
        for name in REPORTS if report else ():
            if (run / name).is_file():
                text = (run / name).read_text(encoding="utf-8", errors="replace")
                files[name] = without(text, hidden).encode()
    return files


def model_files(folder: Path) -> Files:
    """Return the files of a model's folder without hidden ones. Raise UserError for a link that leads out of it, whose
    target may be a file that nobody means to publish."""
    files: Files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_hidden = "/." in f"/{name}"
        if is_hidden or not path.is_file():
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path} is a link to {path.resolve()}: copy the file into the folder, or remove it"
            )
        files[name] = path
    return files


def local_folders(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the folders of this machine that a config names, longest first: they are not published."""
    folders = {str(Path.cwd()), str(Path.home())}
    for text in _PATH.findall(json.dumps(config, default=str, ensure_ascii=False)):
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


# ---- the Hub -----------------------------------------------------------------


class Hub:
    """A model repository. Nothing is sent before `open`."""

    def __init__(self, repository: str, *, public: bool = False) -> None:
        from huggingface_hub import HfApi, get_token

        self.repository = checked_name(repository)
        self.public = public
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

    def push(self, files: Files, message: str) -> str:
        """Send the files in one commit and return its URL. What the Hub has already is not sent again, also after a
        push that was cut."""
        from huggingface_hub import CommitOperationAdd

        operations = []
        for path, content in files.items():
            if PurePosixPath(path).suffix in TEXT_FILES:
                data = content if isinstance(content, bytes) else content.read_bytes()
                if self._token.encode() in data:
                    raise UserError(
                        f"{path} holds your token of the Hub, and would publish it: remove it there"
                    )
            operations.append(CommitOperationAdd(path, content))
        with _reaching(self.repository):
            commit = self.api.create_commit(
                self.repository, operations, commit_message=message
            )
        return str(commit.commit_url)


def checked_name(repository: str) -> str:
    """Return the name of a repository. Raise UserError for what cannot be one."""
    if not _NAME.fullmatch(repository) or ".." in repository:
        raise UserError(
            f"{repository!r} is no name of a repository on the Hub; give user/name"
        )
    return repository


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
    except failures as error:
        message = error_sentence(error)
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (
            401,
            403,
        ):
            raise UserError(
                f"push to {repository}: the Hub refuses this token ({message}); it must be allowed to write"
            ) from error
        raise RunError(
            f"push to {repository}: {message}; what was sent stays, and the same command goes on"
        ) from error
