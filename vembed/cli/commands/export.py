"""`vembed export`: a trained model in a new folder: a copy, with its adapter merged, or in another format."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from vembed.errors import UserError

log = logging.getLogger("vembed")


def run_export(model: str, output: str, *, merge: bool = False) -> Path:
    """Copy `model` (a model, a run or an adapter) to the new folder `output`. A checkpoint is made into a model. With
    `merge`, write whole weights."""
    target = Path(output)
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    # Imported late: torch takes seconds, and the check above needs none of it.
    from vembed.models.families.model_files import read_model
    from vembed.saving.files import replaced_folder
    from vembed.weights.checkpoints import is_checkpoint, whole_model

    # A checkpoint holds shards and optimizer state, which no other program reads: nothing to copy.
    if is_checkpoint(Path(model).expanduser()):
        made = whole_model(model, target)
        assert made is not None
        return made
    files = read_model(model)
    if not any(files.backbone.rglob("*.safetensors")) and files.adapter is None:
        raise UserError(
            f"{model} has no weights (*.safetensors), so there is no model to copy"
        )
    if not merge:
        with replaced_folder(target) as folder:  # a copy that is cut off has no name
            shutil.copytree(files.folder, folder, dirs_exist_ok=True)
        return target
    if files.adapter is None:
        raise UserError(
            f"{model} holds whole weights and no adapter to merge; leave out --merge to copy it"
        )
    from vembed.models.embedding_model import load_embedder
    from vembed.saving.files import save_model

    embedder = load_embedder(model)
    state = embedder.state_dict()
    return save_model(target, embedder, state)


def run_export_as(
    model: str,
    output: str | None,
    form: str,
    precision: str,
    server: str,
    *,
    check: bool = True,
    data: str | None = None,
    tolerance: float | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Export `model` in a format, or for a server, and print the result of the check and the start command. Return
    them as JSON values. `output` None: only the check, of an export that is not kept."""
    if output is None and server:
        raise UserError(
            f"--for {server} writes files for the server: give OUTPUT, a new folder"
        )
    if output is not None and Path(output).exists():
        raise UserError(f"{output} exists already; give a new folder")
    from vembed.cli.commands.model_argument import usable_model
    from vembed.export.exporting import export_model, precision_named
    from vembed.export.formats import FORMATS, PRECISIONS
    from vembed.export.servers import FORMAT_OF, SERVER_NAMES, start_of

    served = next((name for name in SERVER_NAMES if name == server), None)
    served_form = FORMAT_OF[served] if served is not None else "safetensors"
    chosen = next((name for name in FORMATS if name == form), served_form)
    if served is not None and chosen != served_form:
        raise UserError(
            f"--for {server} reads --format {served_form}, and --format {form} is asked for; leave one out"
        )
    weight_precision = precision_named(precision)
    if precision and weight_precision is None:
        raise UserError(f"--precision {precision}: give one of {', '.join(PRECISIONS)}")

    with (
        usable_model(model) as model_path,
        tempfile.TemporaryDirectory(prefix="vembed-") as scratch,
    ):
        done = export_model(
            model_path,
            output or Path(scratch, "export"),
            chosen,
            weight_precision,
            check=check,
            data=data,
            tolerance=tolerance,
            server=served,
            trust_remote_code=trust_remote_code,
            log=_log,
        )
    for line in (
        done.check.lines()
        if done.check is not None
        else ["not compared with the model (--no-check)"]
    ):
        sys.stdout.write(f"check: {line}\n")
    sys.stdout.write(
        "nothing was kept: give OUTPUT to keep the export\n"
        if output is None
        else f"wrote {output}\n"
    )
    facts: dict[str, Any] = {
        "path": None if output is None else done.path,
        **done.facts,
    }
    if served is not None:
        start = start_of(served, done.path, done.description)
        for name, text in start.items():
            if text is not None:
                sys.stdout.write(f"{name}: {text}\n")
        facts |= start
    return facts


def _log(line: str) -> None:
    """Write a line to stderr at once: the parts of an export take seconds to minutes each."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
