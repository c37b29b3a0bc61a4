"""`vembed serve`: an embedding server on this machine."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from vembed.config.paths import short_name
from vembed.errors import UserError
from vembed.inference.serve.encoder import TextEncoder, open_encoder


def run_serve(
    model: str,
    *,
    host: str,
    port: int,
    served_name: str | None = None,
    api_key: str | None = None,
    device: str | None = None,
    truncate_dim: int | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Serve a model until a signal."""
    for package in ("uvicorn", "starlette"):
        if find_spec(package) is None:
            raise UserError(
                f"{package} is not installed: `pip install 'vembed[serve]'`"
            )
    from vembed.inference.serve.server import serve

    def load() -> TextEncoder:
        return open_encoder(
            model,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )

    def announce(port: int) -> None:
        print_line(
            f"{model} at http://{host}:{port}: POST /v1/embeddings (OpenAI) or /embed (TEI); Ctrl-C stops it"
        )

    serve(
        load,
        served_name or short_name(model),
        host=host,
        port=port,
        api_key=api_key,
        on_ready=announce,
    )
    print_line("stopped")


def print_line(line: str) -> None:
    """Write a line at once: a program that starts the server waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
