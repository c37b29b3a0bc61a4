"""`vembed export` and `push`: a trained model in a new folder or in another format, and on the Hub."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vembed.cli.support import (
    CheckData,
    Result,
    TrustRemoteCode,
    print_lines,
    print_progress,
    usable_model,
)
from vembed.config.values import FormatName, ServerName, WeightPrecision
from vembed.errors import UserError


def export(
    model: str,
    output: Annotated[str | None, Argument(metavar="OUTPUT")] = None,
    form: Annotated[FormatName | None, Option("--format")] = None,
    precision: WeightPrecision | None = None,
    check: bool | None = None,
    data: CheckData = None,
    tolerance: Annotated[float | None, Option(min=0.0)] = None,
    server: Annotated[ServerName | None, Option("--for")] = None,
    merge: bool = False,
    trust_remote_code: TrustRemoteCode = False,
) -> Result:
    """Write a trained model in the format of another runtime, compared with the model.

    Without --format it is a copy of the model's folder, or a folder made of a checkpoint. --merge merges an adapter.

    `vembed export MODEL --check` writes nothing: it compares vembed's vectors with those of Sentence Transformers.

    Args:
        model: A run, a checkpoint of one, a model folder or an adapter.
        output: A new folder. With --check it may be left out: nothing is kept.
        form: safetensors, onnx, static, openvino or gguf. Default: a copy of the folder.
        precision: float32, float16, bfloat16 or int8. Default: float32, for safetensors that of the file.
        check: Compare 200 texts through the export and the model, and refuse an export that differs. Default: yes, but a
            plain copy is not loaded. --check without --format takes safetensors.
        tolerance: Largest cosine distance. Default: 1e-4, 1e-3, 1e-2 or 5e-2 by precision.
        server: tei, vllm, llama.cpp, infinity or fastembed: its format and start command.
        merge: Merge an adapter into the weights.
    """
    if output is None and (server or not check):
        raise UserError("give OUTPUT, a new folder; only --check goes without one")
    if output is not None and Path(output).exists():
        raise UserError(f"{output} exists already; give a new folder")
    if output is not None and not (form or precision or server or check):
        path = copy_model(model, Path(output), merge=merge)
        print_lines(f"wrote {path}")
        return {"path": path, "format": "copy", "check": None}
    if merge:
        raise UserError(
            "--merge is for a copy; --format merges every adapter: leave it out"
        )
    from vembed.export.exporting import FORMAT_OF, export_model, start_of

    served_form = FORMAT_OF[server] if server else "safetensors"
    if server and form not in (None, served_form):
        raise UserError(
            f"--for {server} reads --format {served_form}, and --format {form} is asked for; leave one out"
        )

    with tempfile.TemporaryDirectory(prefix="vembed-") as scratch:
        exported = export_model(
            usable_model(model),
            output or Path(scratch, "export"),
            form or served_form,
            precision,
            check=check is not False,
            data=data,
            tolerance=tolerance,
            server=server,
            trust_remote_code=trust_remote_code,
            log=print_progress,
        )
    lines = ["not compared with the model (--no-check)"]
    if exported.check is not None:
        lines = exported.check.lines()
    print_lines(*(f"check: {line}" for line in lines))
    facts = {"path": output and exported.path, **exported.facts}
    if output is None:
        print_lines("nothing was kept: give OUTPUT to keep the export")
    else:
        print_lines(f"wrote {output}")
    if server:
        start = start_of(server, exported.path, exported.description)
        for name, text in start.items():
            if text is not None:
                print_lines(f"{name}: {text}")
        facts |= start
    return facts


def copy_model(
    model: str,
    target: Path,
    *,
    merge: bool = False,
) -> Path:
    """Copy a model, a run or an adapter to a new folder. A checkpoint is made into a model. With `merge`, write whole
    weights."""
    from vembed.models.families.model_files import is_reranker, read_model
    from vembed.saving.files import replaced_folder
    from vembed.weights.sources import is_checkpoint, whole_model

    # A checkpoint holds shards and optimizer state, which no other program reads: nothing to copy.
    if is_checkpoint(Path(model).expanduser()):
        whole_model(model, target)
        return target
    files = read_model(model, is_reranker=not merge and is_reranker(model))
    if not any(files.backbone.rglob("*.safetensors")) and files.adapter is None:
        raise UserError(
            f"{model} has no weights (*.safetensors), so there is no model to copy"
        )
    if not merge:
        with replaced_folder(target) as folder:  # a copy that is cut off has no name
            shutil.copytree(files.folder, folder, dirs_exist_ok=True)
        return target
    if whole_model(model, target) is None:
        raise UserError(
            f"{model} holds whole weights and no adapter to merge; leave out --merge to copy it"
        )
    return target


def push(
    run: str,
    repository: str,
    public: bool = False,
    report: bool = True,
    dry_run: bool = False,
) -> Result:
    """Push a model to the Hub, with its card, the report and a description of the training data.

    The repository is private by default. The token is that of `hf auth login` or of HF_TOKEN. Files that are there
    already are not sent again.

    Args:
        run: The output_dir of a finished run, or a model folder.
        repository: Repository on the Hub: user/name.
        public: Make the repository public. Default: private.
        report: With the report of the run, which shows texts of the validation data.
        dry_run: List the files and send nothing.
    """
    from vembed.saving.publication import Hub, checked_name, publication

    files = publication(run, report=report)
    sizes = {}
    for path, content in files.items():
        if isinstance(content, bytes):
            sizes[path] = len(content)
        else:
            sizes[path] = content.stat().st_size
    result = {
        "repository": repository,
        "url": "",
        "is_private": not public,
        "files": sizes,
        "commit": "",
    }
    if dry_run:
        checked_name(repository)
        for path, size in sizes.items():
            print_lines(f"{size:>15,d} bytes  {path}")
        kind = "public" if public else "private"
        print_lines(
            f"would push {len(files)} files to {repository} ({kind}); nothing was sent"
        )
        return result
    hub = Hub(repository, public=public)
    hub.open()
    commit = hub.push(files, "Pushed by vembed")
    url = f"{hub.api.endpoint}/{hub.repository}"
    print_lines(f"{url}: has the {len(files)} files")
    return {**result, "repository": hub.repository, "url": url, "commit": commit}
