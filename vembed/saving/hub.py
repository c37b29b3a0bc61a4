"""Hub: a repository on the Hub that files are pushed to. The token comes from the environment or the login alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from vembed.errors import RunError, UserError
from vembed.saving.publication import CARD, TEXT_FILES, File

LARGE_FILE_BYTES = 10_000_000
"""From here a file is a commit of its own, so that a push that was cut goes on behind it."""
PATHS_PER_REQUEST = 500
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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
