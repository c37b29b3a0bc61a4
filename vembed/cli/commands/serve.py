"""`vembed serve`: an embedding server on this machine, and `vembed check-server`: a running one beside its model."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from vembed.cli.support import (
    AnyModel,
    CheckData,
    Result,
    TruncateDim,
    TrustRemoteCode,
    print_lines,
    usable_model,
)
from vembed.errors import require_package


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8080,
    served_name: str | None = None,
    api_key: Annotated[str | None, Option(envvar="VEMBED_API_KEY")] = None,
    device: str | None = None,
    truncate_dim: TruncateDim = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model over HTTP: OpenAI's /v1/embeddings and TEI's /embed, or /rerank of a reranker.

    The vectors are those of `vembed.Embedder`, the scores those of `vembed.Reranker`.

    Args:
        model: A model folder, a Hub name, a run, or an export to ONNX or OpenVINO.
        host: Address to listen on. 0.0.0.0: every network.
        port: 0: a free one, which is printed.
        served_name: Name of the model. Default: that of its run, or of its folder.
        api_key: Key that clients must send. Other users see arguments: set VEMBED_API_KEY.
        device: cpu, cuda or cuda:1. Default: the GPU if there is one.
    """
    for package in ("uvicorn", "starlette"):
        require_package(package, "serve")
    from vembed.files import short_name
    from vembed.inference.serve import RequestLimits, listen, open_encoder, server_of

    model_path = usable_model(model)
    # An address that is taken shows before the model is loaded, which may take minutes.
    with listen(host, port) as listener:
        encoder = open_encoder(
            model_path,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )
        routes = "/v1/embeddings (OpenAI) or /embed (TEI)"
        if encoder.gives_scores:
            routes = "/rerank (TEI, Cohere)"
        name = served_name or short_name(model_path)
        server = server_of(encoder, name, RequestLimits(), api_key)
        port = listener.getsockname()[1]
        # A program that starts the server waits for this line.
        print_lines(
            f"{model_path} at http://{host}:{port}: POST {routes}; Ctrl-C stops it"
        )
        server.run(sockets=[listener])
    print_lines("stopped")


def check_server(
    url: str,
    model: AnyModel,
    data: CheckData = None,
    served_name: str | None = None,
    tolerance: float = 1e-3,
) -> Result:
    """Compare a running embedding server with the model.

    Exit code 1 if they differ.

    Args:
        url: Address of an OpenAI-compatible endpoint, as TEI and vLLM have it: http://localhost:8080.
        served_name: Name of the model at the server. Default: MODEL as it is given.
        tolerance: Largest cosine distance.
    """
    from vembed.export.exporting import compare_server

    largest = compare_server(
        url,
        usable_model(model),
        data=data,
        served_name=served_name,
        tolerance=tolerance,
        log=print_lines,
    )
    return {
        "url": url,
        "model": model,
        "largest_distance": largest,
        "tolerance": tolerance,
    }
