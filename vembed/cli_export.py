"""Verbs of the `vembed` command for models that leave vembed: export and check-server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vembed.cli_support import AnyModel, TrustRemoteCode, end, word
from vembed.errors import UserError

FORMATS = ("safetensors", "onnx", "static", "openvino", "gguf")
SERVERS = ("tei", "vllm", "llama.cpp", "infinity", "fastembed")
CheckData = Annotated[
    str | None, typer.Option("--data", help="Evaluation data for texts and nDCG. Default: those of the run.")
]


def export(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint of one, a model folder or an adapter.")],
    output: Annotated[str, typer.Argument(help="A new folder.")],
    form: Annotated[
        str,
        typer.Option("--format", help="safetensors, onnx, static, openvino or gguf. Default: a copy of the folder."),
    ] = "",
    precision: Annotated[
        str, typer.Option(help="float32, float16, bfloat16 or int8. Default: float32; of safetensors that of the file.")
    ] = "",
    check: Annotated[
        bool,
        typer.Option(
            help="Compare 200 texts through the export and the model; refuse an export that differs. "
            "A plain copy is not loaded."
        ),
    ] = True,
    data: CheckData = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest cosine distance. Default: 1e-4, 1e-3, 1e-2 or 5e-2 by precision.")
    ] = None,
    server: Annotated[
        str, typer.Option("--for", help="tei, vllm, llama.cpp, infinity or fastembed: its format and start command.")
    ] = "",
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into the weights.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a trained model in the format of another runtime, compared with the model; without --format, copy its
    folder, or make one of a checkpoint. --merge merges its adapter."""

    def call() -> None:
        if form:
            word("--format", form, FORMATS)
        if server:
            word("--for", server, SERVERS)
        if not (form or precision or server):
            from vembed.tools.export import run_export

            path = run_export(model, output, merge=merge)
            sys.stdout.write(f"wrote {path}\n")
            return
        if merge:
            raise UserError("--merge is for a copy; --format merges every adapter: leave it out")
        from vembed.tools.export import run_export_as

        run_export_as(
            model, output, form, precision, server, check=check, data=data, tolerance=tolerance,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip

    end(call)


def check_server(
    url: Annotated[str, typer.Argument(help="Address of an OpenAI-compatible or TEI endpoint: http://localhost:8080.")],
    model: AnyModel,
    data: CheckData = None,
    served_name: Annotated[
        str | None, typer.Option(help="Name of the model at the server. Default: MODEL as it is given.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest cosine distance.")] = 1e-3,
) -> None:
    """Compare a running embedding server with the model, batch by batch. Exit code 1 if they differ."""

    def call() -> None:
        from vembed.export.server_check import check_server as run_check
        from vembed.tools.model_argument import usable_model

        with usable_model(model) as found:
            run_check(
                url, found, data=data, served_name=served_name, tolerance=tolerance,
                say=lambda line: sys.stdout.write(line + "\n"),
            )  # fmt: skip

    end(call)
