"""serve(): uvicorn around the application, with limits on connections and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vembed.errors import UserError
from vembed.inference.serve.app import RequestLimits, Service
from vembed.inference.serve.encoder import Batcher, TextEncoder

BACKLOG = 512
HEAD_BYTES = 65_536
TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\n\r\n"
)


class Connection(H11Protocol):
    """A connection that is closed when its client takes too long to send a request or to take an answer."""

    def __init__(self, limits: RequestLimits, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits
        self.waits_since = time.monotonic()
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def waits_for_client(self) -> bool:
        """Return whether the request is not complete yet, or the last one is answered."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for a connection, or refuse it."""
        super().connection_made(transport)
        self._start_deadline()
        if len(self.connections) <= self.limits.connections:
            return
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection)
            and connection is not self
            and connection.waits_for_client
        ]
        if waiting:
            oldest = min(waiting, key=lambda connection: connection.waits_since)
            oldest.transport.abort()
        else:
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client. A request whose head is complete has no deadline here: the application has one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_deadline()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._start_deadline()
        super().on_response_complete()
        # The next request may have arrived already.
        if not self.cycle.response_complete:
            self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the deadline."""
        self._stop_deadline()
        super().connection_lost(exc)

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self.waits_since = time.monotonic()
        self.deadline = self.loop.call_later(
            self.limits.head_seconds, self.transport.abort
        )

    def _stop_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def serve(
    load: Callable[[], TextEncoder],
    name: str,
    *,
    host: str,
    port: int,
    api_key: str | None = None,
    limits: RequestLimits | None = None,
    on_ready: Callable[[int, bool], object],
) -> None:
    """Answer requests until SIGINT or SIGTERM, and then those that have arrived.

    `load` gives the encoder, after the address is known to be free. `on_ready` gets the port, also where 0 asked for a
    free one, and whether the model gives scores, when connections are taken.
    """
    limits = limits or RequestLimits()
    listener = bound_socket(host, port)
    try:
        encoder = load()
        batcher = Batcher(encoder)
        service = Service(batcher, name, limits, api_key)
        config = uvicorn.Config(
            service.app(),
            http=cast(type[asyncio.Protocol], partial(Connection, limits)),
            ws="none",
            lifespan="off",
            loop="asyncio",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=int(limits.head_seconds) + 1,
            timeout_graceful_shutdown=int(limits.drain_seconds),
        )
        listener.listen(BACKLOG)
        on_ready(listener.getsockname()[1], encoder.gives_scores)
        # uvicorn, having answered, raises the signals again that ended it. The process lives on.
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda *_: None)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        batcher.close()
    finally:
        listener.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that has the address and does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {host} --port {port} cannot be listened on ({error}); give others"
        ) from error
    return listener
