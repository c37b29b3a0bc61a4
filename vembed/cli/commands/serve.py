"""`vembed serve`: an embedding server on this machine."""

from __future__ import annotations

import sys

from vembed.config.places import short_name
from vembed.inference.serve.encoder import TextEncoder, open_encoder
from vembed.inference.serve.server import EmbeddingServer, serve


def run_serve(
    model: str,
    *,
    host: str,
    port: int,
    served_name: str | None = None,
    device: str | None = None,
    truncate_dim: int | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Serve a model until a signal."""

    def load() -> TextEncoder:
        return open_encoder(
            model,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )

    server = EmbeddingServer(load, served_name or short_name(model), host, port)
    say(
        f"{model} at http://{host}:{server.server_port}: POST /v1/embeddings (OpenAI) or /embed (TEI); Ctrl-C stops it"
    )
    serve(server, say)


def say(line: str) -> None:
    """Write a line at once: a program that starts the server waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
