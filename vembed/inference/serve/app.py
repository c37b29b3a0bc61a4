"""build_app(): the routes of the server as a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from vembed.errors import UserError
from vembed.inference.serve.batching import Batcher, Encoded
from vembed.inference.serve.protocol import (
    Refusal,
    RequestLimits,
    Values,
    openai_answer,
    read_inputs,
)

log = logging.getLogger("vembed")
CLOSE = {"Connection": "close"}
BUSY = {"Retry-After": "1"}
DISCARD_SECONDS = 2.0
"""Time in which the body of a refused request is read and thrown away, so that its client gets to read the answer."""

Answer = Callable[[Request, Values], Awaitable[Any]]
"""Answer of a POST route: from the JSON object of a request to a JSON value."""


class Service:
    """The routes, and what they share: one model, its limits and its metrics."""

    def __init__(
        self, batcher: Batcher, name: str, limits: RequestLimits, api_key: str | None
    ) -> None:
        self.batcher = batcher
        self.name = name
        self.limits = limits
        self.api_key = api_key
        self.metrics = batcher.metrics
        self.held_bytes = 0
        # A route for rerankers is one more line here.
        self.answers: Mapping[str, Answer] = {
            "/v1/embeddings": self.openai_embeddings,
            "/embeddings": self.openai_embeddings,
            "/embed": self.tei_embeddings,
        }

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.get),
            Route("/v1/models", self.get),
            Route("/info", self.get),
        ]
        routes += [Route(path, self.post, methods=["POST"]) for path in self.answers]
        app = Starlette(
            routes=routes, exception_handlers={HTTPException: self.no_such_route}
        )
        app.router.redirect_slashes = False
        return app

    async def openai_embeddings(self, request: Request, values: Values) -> Any:
        """Return the vectors of the texts as they are sent. `input_type`, which OpenAI does not have: query or document
        puts the model's prompt before them."""
        encoded = await self.encode(request, values, "input", "input_type")
        return await asyncio.to_thread(openai_answer, values, encoded, self.name)

    async def tei_embeddings(self, request: Request, values: Values) -> Any:
        """Return a list of vectors. `prompt_name`: query or document."""
        embeddings, _ = await self.encode(request, values, "inputs", "prompt_name")
        return await asyncio.to_thread(embeddings.tolist)

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Say that the server runs. It needs no key."""
        return json_response(200, {"status": "ok"})

    async def get(self, request: Request) -> Response:
        """Return the metrics, or the served model as OpenAI and TEI list their own."""
        if (refusal := self._key_refusal(request)) is not None:
            return refusal_response(refusal)
        if request.url.path == "/metrics":
            return Response(
                self.metrics.text(self.batcher.num_waiting),
                media_type="text/plain; version=0.0.4",
            )
        if request.url.path == "/info":
            max_length = self.batcher.encoder.max_length
            info = {"model_id": self.name, "max_input_length": max_length}
            return json_response(200, info)
        model = {"id": self.name, "object": "model", "owned_by": "vembed"}
        return json_response(200, {"object": "list", "data": [model]})

    async def no_such_route(self, request: Request, error: Exception) -> Response:
        """Answer a request for another path or with another method."""
        assert isinstance(error, HTTPException)
        path = request.url.path
        message = f"there is no {request.method} {path:.200}; POST to /v1/embeddings or /embed"
        await discard_body(request)
        return refusal_response(Refusal(error.status_code, message, CLOSE))

    async def post(self, request: Request) -> Response:
        """Answer a request that has a JSON object as its body."""
        path = request.url.path
        start = time.monotonic()
        try:
            response = await self._answered(request, self.answers[path])
        except Refusal as refusal:
            if refusal.headers is not None and "Connection" in refusal.headers:
                await discard_body(request)
            response = refusal_response(refusal)
        except ClientDisconnect:
            log.debug("%s has closed the connection", request.client)
            response = Response(status_code=499)
        except Exception:
            # The client gets an answer whatever happens, and the next request is served.
            log.exception("a request to %s failed", path)
            message = "the server could not compute this; its log has the reason"
            response = refusal_response(Refusal(500, message))
        seconds = time.monotonic() - start
        self.metrics.count_request(path, response.status_code, seconds)
        return response

    async def _answered(self, request: Request, answer: Answer) -> Response:
        refusal = self._key_refusal(request) or self._length_refusal(request)
        if refusal is not None:
            raise refusal
        async with self._body(request) as body:
            values = await asyncio.to_thread(parse_object, body)
            return await asyncio.to_thread(
                json_response, 200, await answer(request, values)
            )

    def _key_refusal(self, request: Request) -> Refusal | None:
        if self.api_key is None:
            return None
        sent = request.headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(sent, f"Bearer {self.api_key}".encode()):
            return None
        return Refusal(
            401,
            "this server needs its key: send the header Authorization: Bearer KEY",
            {"WWW-Authenticate": "Bearer", **CLOSE},
        )

    def _length_refusal(self, request: Request) -> Refusal | None:
        length = request.headers.get("content-length")
        if length is not None and "transfer-encoding" in request.headers:
            # Another server before this one may take the other header: then the two see different requests.
            return Refusal(
                400, "send Content-Length or Transfer-Encoding, not both", CLOSE
            )
        if length is not None and int(length) > self.limits.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Refusal:
        return Refusal(
            413, f"send a body of at most {self.limits.body_bytes:,d} bytes", CLOSE
        )

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read the body of a request. Its bytes count as held until the request is answered."""
        body = bytearray()
        seconds = self.limits.body_seconds
        try:
            try:
                async with asyncio.timeout(seconds):
                    async for chunk in request.stream():
                        body += chunk
                        self.held_bytes += len(chunk)
                        if len(body) > self.limits.body_bytes:
                            raise self._too_large()
                        if self.held_bytes > self.limits.held_bytes:
                            raise Refusal(
                                429,
                                "the server holds too many requests; send this one again",
                                {**BUSY, **CLOSE},
                            )
            except TimeoutError:
                raise Refusal(
                    408, f"the body took longer than {seconds:g} s", CLOSE
                ) from None
            yield body
        finally:
            self.held_bytes -= len(body)

    async def encode(
        self, request: Request, values: Values, key: str, kind_key: str
    ) -> Encoded:
        """Return the embeddings of a request when its turn has come. `key`, `kind_key`: of its inputs and their kind."""
        inputs = read_inputs(values, key, kind_key, self.batcher.encoder, self.limits)
        result = self.batcher.submit(inputs)
        encoded = asyncio.wrap_future(result)
        client_gone = asyncio.create_task(wait_for_disconnect(request))
        waiting: set[asyncio.Future[Any]] = {encoded, client_gone}
        await asyncio.wait(
            waiting,
            timeout=self.limits.wait_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        has_gone = client_gone.done()
        client_gone.cancel()
        if not result.done() and result.cancel():
            if has_gone:
                raise ClientDisconnect
            raise Refusal(
                429,
                f"the server is busy: this request has waited {self.limits.wait_seconds:g} s",
                BUSY,
            )
        try:
            return await encoded
        except UserError as error:
            raise Refusal(400, str(error)) from error


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def discard_body(request: Request) -> None:
    """Read what a client still sends, so that it does not lose the answer. One that waits for a word to begin sends
    nothing."""
    if "expect" in request.headers:
        return
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for _ in request.stream():
                pass


def parse_object(body: bytearray) -> Values:
    """Return the JSON object of a request."""
    try:
        values = json.loads(body, parse_constant=refuse_constant)
    except RecursionError:
        message = "the body is nested too deeply; send an object of texts and lists"
        raise Refusal(400, message) from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise Refusal(400, "the body must be a JSON object")
    return values


def refuse_constant(name: str) -> None:
    """Raise for NaN and the infinities, which JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


def refusal_response(refusal: Refusal) -> Response:
    """Return an error as OpenAI's clients read it."""
    is_fault = refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    error = {
        "message": str(refusal),
        "type": "server_error" if is_fault else "invalid_request_error",
        "code": refusal.status,
    }
    return json_response(refusal.status, {"error": error}, refusal.headers)


def json_response(
    status: int, value: Any, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer in JSON."""
    return Response(json.dumps(value), status, headers, media_type="application/json")
