"""Commands of the `vembed` command for models that leave vembed: export, serve, check-server and push."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vembed.cli.support import (
    AnyModel,
    JsonOutput,
    TrustRemoteCode,
    end,
    json_result,
    word,
)
from vembed.errors import UserError

FORMATS = ("safetensors", "onnx", "static", "openvino", "gguf")
SERVERS = ("tei", "vllm", "llama.cpp", "infinity", "fastembed")
CheckData = Annotated[
    str | None,
    typer.Option(
        "--data", help="Evaluation data for texts and nDCG. Default: those of the run."
    ),
]


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run, a checkpoint of one, a model folder or an adapter.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Argument(
            metavar="OUTPUT",
            help="A new folder. With --check it may be left out: nothing is kept.",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="safetensors, onnx, static, openvino or gguf. Default: a copy of the folder.",
        ),
    ] = "",
    precision: Annotated[
        str,
        typer.Option(
            help="float32, float16, bfloat16 or int8. Default: float32, for safetensors that of the file."
        ),
    ] = "",
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Compare 200 texts through the export and the model, and refuse an export that differs. "
            "Default: yes, but a plain copy is not loaded. --check without --format takes safetensors.",
        ),
    ] = None,
    data: CheckData = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest cosine distance. Default: 1e-4, 1e-3, 1e-2 or 5e-2 by precision.",
        ),
    ] = None,
    server: Annotated[
        str,
        typer.Option(
            "--for",
            help="tei, vllm, llama.cpp, infinity or fastembed: its format and start command.",
        ),
    ] = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into the weights.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    json_file: JsonOutput = None,
) -> None:
    """Write a trained model in the format of another runtime, compared with the model.

    Without --format it is a copy of the model's folder, or a folder made of a checkpoint. --merge merges an adapter.

    `vembed export MODEL --check` writes nothing: it compares vembed's vectors with those of Sentence Transformers.
    """

    def call() -> None:
        if form:
            word("--format", form, FORMATS)
        if server:
            word("--for", server, SERVERS)
        if output is None and not check:
            raise UserError("give OUTPUT, a new folder; only --check goes without one")
        if output is not None and not (form or precision or server or check):
            from vembed.cli.commands.export import run_export

            with json_result(json_file) as on_result:
                path = run_export(model, output, merge=merge)
                sys.stdout.write(f"wrote {path}\n")
                on_result({"path": path, "format": "copy", "check": None})
            return
        if merge:
            raise UserError(
                "--merge is for a copy; --format merges every adapter: leave it out"
            )
        from vembed.cli.commands.export import run_export_as

        with json_result(json_file) as on_result:
            exported = run_export_as(
                model,
                output,
                form,
                precision,
                server,
                check=check is not False,
                data=data,
                tolerance=tolerance,
                trust_remote_code=trust_remote_code,
            )
            on_result(exported)

    end(call)


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, a Hub name, a run, a checkpoint, or an export to ONNX or OpenVINO.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0: every network.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: a free one, which is printed.")
    ] = 8080,
    served_name: Annotated[
        str | None, typer.Option(help="Name of the model. Default: that of its folder.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VEMBED_API_KEY",
            help="Key that clients must send. Other users see arguments: set VEMBED_API_KEY.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or cuda:1. Default: the GPU if there is one."),
    ] = None,
    truncate_dim: Annotated[
        int | None, typer.Option(min=1, help="Keep only the first so many numbers.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve embeddings over HTTP: OpenAI's /v1/embeddings and TEI's /embed.

    The vectors are those of `vembed.Embedder`.
    """

    def call() -> None:
        from vembed.cli.commands.model_argument import usable_model
        from vembed.cli.commands.serve import run_serve

        with usable_model(model) as model_path:
            run_serve(
                model_path,
                host=host,
                port=port,
                served_name=served_name,
                api_key=api_key,
                device=device,
                truncate_dim=truncate_dim,
                trust_remote_code=trust_remote_code,
            )

    end(call)


def check_server(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Address of an OpenAI-compatible or TEI endpoint: http://localhost:8080.",
        ),
    ],
    model: AnyModel,
    data: CheckData = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model at the server. Default: MODEL as it is given."
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest cosine distance.")] = 1e-3,
    json_file: JsonOutput = None,
) -> None:
    """Compare a running embedding server with the model, batch by batch.

    Exit code 1 if they differ.
    """

    def call() -> None:
        from vembed.cli.commands.model_argument import usable_model
        from vembed.export.server_check import check_address
        from vembed.export.server_check import check_server as run_check

        check_address(url, model)
        with json_result(json_file) as on_result, usable_model(model) as model_path:
            largest = run_check(
                url,
                model_path,
                data=data,
                served_name=served_name,
                tolerance=tolerance,
                log=lambda line: sys.stdout.write(line + "\n"),
            )
            on_result(
                {
                    "url": url,
                    "model": model,
                    "largest_distance": largest,
                    "tolerance": tolerance,
                }
            )

    end(call)


def push(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The output_dir of a finished run, or a model folder."
        ),
    ],
    repository: Annotated[
        str,
        typer.Argument(metavar="REPOSITORY", help="Repository on the Hub: user/name."),
    ],
    public: Annotated[
        bool,
        typer.Option("--public", help="Make the repository public. Default: private."),
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            help="With the report of the run, which shows texts of the validation data."
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and send nothing.")
    ] = False,
    json_file: JsonOutput = None,
) -> None:
    """Push a model to the Hub, with its card, the report and a description of the training data.

    The repository is private by default. The token is that of `hf auth login` or of HF_TOKEN. Files that are there
    already are not sent again.
    """

    def call() -> None:
        from vembed.cli.commands.push import run_push

        with json_result(json_file) as on_result:
            on_result(
                run_push(
                    model, repository, public=public, report=report, is_dry_run=dry_run
                )
            )

    end(call)
