"""`vembed push`: a finished run, or a model folder, to a repository on the Hub."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from vembed.saving.hub import Hub, checked_name
from vembed.saving.publication import publication


@dataclass(frozen=True)
class Pushed:
    """Result: the repository and its files."""

    repository: str
    url: str
    """Address; empty in a dry run."""
    is_private: bool
    files: dict[str, int]
    """Bytes of each file."""
    num_sent: int
    """Files that the repository did not have."""


def run_push(
    model: str,
    repository: str,
    *,
    public: bool = False,
    report: bool = True,
    is_dry_run: bool = False,
) -> Pushed:
    """Push the files of a run or a model and print them; in a dry run only print them."""
    files = publication(model, report=report)
    sizes = {file.path: file.size for file in files}
    if is_dry_run:
        checked_name(repository)
        for path, size in sizes.items():
            sys.stdout.write(f"{size:>15,d} bytes  {path}\n")
        kind = "public" if public else "private"
        sys.stdout.write(
            f"would push {len(files)} files to {repository} ({kind}); nothing was sent\n"
        )
        return Pushed(repository, "", not public, sizes, 0)
    hub = Hub(repository, public=public, log=lambda line: sys.stdout.write(line + "\n"))
    hub.open()
    num_sent = hub.push(files, "Pushed by vembed")
    url = f"{hub.api.endpoint}/{hub.repository}"
    sys.stdout.write(f"{url}: {num_sent} of {len(files)} files were new\n")
    return Pushed(hub.repository, url, not public, sizes, num_sent)
