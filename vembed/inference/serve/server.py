"""EmbeddingServer: HTTP around a TextEncoder, one thread per connection."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

from vembed.errors import UserError
from vembed.inference.serve.encoder import TextEncoder
from vembed.inference.serve.protocol import ANSWERS, BadRequest

log = logging.getLogger("vembed")
MOST_BYTES = 64_000_000
"""Largest body of a request."""
SECONDS_IDLE = 120
"""Time after which a connection without a request is closed."""


class EmbeddingServer(ThreadingHTTPServer):
    """Answers requests for embeddings. `server_port` is the port, also where 0 asked for a free one."""

    daemon_threads = True
    request_queue_size = 128  # of connections at once: one that finds the queue full tries again after a second

    def __init__(
        self, load: Callable[[], TextEncoder], name: str, host: str, port: int
    ) -> None:
        """`load` gives the encoder. It is called when the address is known to be free, and connections are taken when
        it has returned."""
        self.name = name
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            with self._listening(host, port):
                self.server_bind()
            self.encoder = load()
            with self._listening(host, port):
                self.server_activate()
        except BaseException:
            self.server_close()
            raise

    @contextmanager
    def _listening(self, host: str, port: int) -> Iterator[None]:
        try:
            yield
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--host {host} --port {port} cannot be listened on ({error}); give others"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write no traceback about a client that leaves before it has its answer."""
        if isinstance(sys.exception(), ConnectionError):
            log.debug("%s has closed the connection", client_address)
        else:
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: EmbeddingServer
    protocol_version = "HTTP/1.1"  # connections stay open between requests
    timeout = SECONDS_IDLE
    wbufsize = -1  # head and body leave as one packet: a second one would wait 40 ms until the first is acknowledged

    def do_GET(self) -> None:
        """Answer /health, /v1/models and /info."""
        name = self.server.name
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._answer(
                200,
                {
                    "object": "list",
                    "data": [{"id": name, "object": "model", "owned_by": "vembed"}],
                },
            )
        elif self.path == "/info":
            self._answer(
                200,
                {"model_id": name, "max_input_length": self.server.encoder.max_length},
            )
        else:
            self._refuse(
                404,
                f"there is nothing to GET at {self.path}; POST to /v1/embeddings or /embed",
            )

    def do_POST(self) -> None:
        """Answer a request for embeddings."""
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True  # the body stays unread
            self._refuse(
                413 if length.isdecimal() else 411,
                f"give a body of at most {MOST_BYTES:,d} bytes",
            )
            return
        body = self.rfile.read(int(length))
        answer = ANSWERS.get(self.path.partition("?")[0])
        if answer is None:
            self._refuse(
                404, f"there is no {self.path}; POST to /v1/embeddings or /embed"
            )
            return
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise BadRequest("the body must be a JSON object")
            found = answer(self.server.encoder, self.server.name, asked)
        except (BadRequest, ValueError, UserError) as error:
            self._refuse(400, str(error))
        except Exception:  # the client gets an answer whatever happens here, and the next request is served
            log.exception("a request to %s failed", self.path)
            self._refuse(
                500, "the server could not compute this; its log has the reason"
            )
        else:
            self._answer(200, found)

    def _refuse(self, code: int, message: str) -> None:
        kind = (
            "server_error"
            if code >= HTTPStatus.INTERNAL_SERVER_ERROR
            else "invalid_request_error"
        )
        self._answer(code, {"error": {"message": message, "type": kind, "code": code}})

    def _answer(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request, unless the log is at DEBUG: texts are not for logs."""
        log.debug("%s %s", self.address_string(), format % args)


def serve(server: EmbeddingServer, say: Callable[[str], object] = print) -> None:
    """Answer requests until SIGINT or SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signal calls it
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
        server.server_close()
