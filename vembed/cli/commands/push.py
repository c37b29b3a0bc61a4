"""`vembed push`: a finished run, or a model folder, to a repository on the Hub."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from typer import Argument, Option


def push(
    model: Annotated[
        str,
        Argument(
            metavar="RUN", help="The output_dir of a finished run, or a model folder."
        ),
    ],
    repository: Annotated[
        str,
        Argument(metavar="REPOSITORY", help="Repository on the Hub: user/name."),
    ],
    public: Annotated[
        bool,
        Option("--public", help="Make the repository public. Default: private."),
    ] = False,
    report: Annotated[
        bool,
        Option(
            help="With the report of the run, which shows texts of the validation data."
        ),
    ] = True,
    dry_run: Annotated[
        bool, Option("--dry-run", help="List the files and send nothing.")
    ] = False,
) -> dict[str, Any]:
    """Push a model to the Hub, with its card, the report and a description of the training data.

    The repository is private by default. The token is that of `hf auth login` or of HF_TOKEN. Files that are there
    already are not sent again.
    """
    from vembed.saving.publication import Hub, checked_name, publication

    files = publication(model, report=report)
    sizes = {}
    for path, content in files.items():
        if isinstance(content, bytes):
            sizes[path] = len(content)
        else:
            sizes[path] = content.stat().st_size
    result: dict[str, Any] = {
        "repository": repository,
        "url": "",
        "is_private": not public,
        "files": sizes,
        "commit": "",
    }
    if dry_run:
        checked_name(repository)
        for path, size in sizes.items():
            sys.stdout.write(f"{size:>15,d} bytes  {path}\n")
        kind = "public" if public else "private"
        sys.stdout.write(
            f"would push {len(files)} files to {repository} ({kind}); nothing was sent\n"
        )
        return result
    hub = Hub(repository, public=public)
    hub.open()
    commit = hub.push(files, "Pushed by vembed")
    url = f"{hub.api.endpoint}/{hub.repository}"
    sys.stdout.write(f"{url}: has the {len(files)} files\n")
    return {**result, "repository": hub.repository, "url": url, "commit": commit}
