"""The server. Service has its routes as a Starlette application, and Server runs it.

OpenAI's `/v1/embeddings` and TEI's `/embed` for embedding models, `/rerank` of TEI and Cohere for rerankers.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import os
import reprlib
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import uvicorn
from scipy.special import expit
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from vembed.data.examples import LONE_SURROGATE, Item, Kind, has_lone_surrogate
from vembed.data.features import Features
from vembed.data.formats.json_lines import refuse_constant
from vembed.errors import UserError, listed, nearest
from vembed.export.exporting import EXPORT_FORMATS, OnnxReranker
from vembed.export.onnx_format import GraphReader
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import encode_features, first_dims, unit_rows
from vembed.inference.reranker import Reranker
from vembed.models.families.model_files import EXPORT_FILE, is_reranker, read_object

log = logging.getLogger("vembed")
CLOSE = {"Connection": "close"}
BUSY = {"Retry-After": "1"}
DISCARD_SECONDS = 2.0
"""Time in which the body of a refused request is read and thrown away, so that its client gets to read the answer."""


Values = Mapping[str, Any]
"""The JSON object of a request."""


@dataclass(frozen=True)
class RequestLimits:
    """What the server takes from its clients. Each limit has its answer of 4xx."""

    connections: int = 512
    """Open connections. For one more, the oldest that waits for its client is closed; without one it gets 429."""
    body_bytes: int = 16_000_000
    """Body of a request; larger: 413."""
    held_bytes: int = 64_000_000
    """Bodies of all requests that are read, wait or are computed; more: 429."""
    text_characters: int = 1_000_000
    """One text; longer: 413."""
    inputs: int = 2048
    """Texts of one request, as at OpenAI; more: 400."""
    head_seconds: float = 30
    """Time from the connection or the last answer to the end of the next request's head. Then the connection is closed,
    also if its client has not taken its answer."""
    body_seconds: float = 30
    """Time for the body; slower: 408."""
    wait_seconds: float = 120
    """Time that a request waits for the model; longer: 429."""
    drain_seconds: float = 30
    """Time for the requests that have arrived when the server is stopped; longer: 503."""


class Refusal(Exception):  # noqa: N818 - an answer to the client, not a fault of the server
    """A request that is not answered. The message is for the client."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


@dataclass
class Service:
    """The routes, and what they share: one model, its limits and its metrics."""

    batcher: Batcher
    name: str
    limits: RequestLimits
    api_key: str | None
    held_bytes: int = 0
    num_requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answered requests by route and status."""
    total_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.answers = {
            "/v1/embeddings": self.openai_embeddings,
            "/embeddings": self.openai_embeddings,
            "/embed": self.tei_embeddings,
            "/rerank": self.rerank,
            "/v1/rerank": self.rerank,
            "/v2/rerank": self.rerank,
        }

    def app(self) -> Starlette:
        """Return the application."""
        routes = [Route("/health", self.health)]
        routes += [
            Route(path, self.get) for path in ("/metrics", "/v1/models", "/info")
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
        inputs = self._inputs(values, "input", "input_type")
        encoded = await self.compute(request, inputs)
        return await asyncio.to_thread(self._openai_answer, values, encoded)

    async def tei_embeddings(self, request: Request, values: Values) -> Any:
        """Return a list of vectors. `prompt_name`: query or document."""
        normalize = values.get("normalize")
        if normalize is False and self.batcher.encoder.gives_unit_vectors:
            raise Refusal("normalize is false, and this model normalises; leave it out")
        inputs = self._inputs(values, "inputs", "prompt_name")
        embeddings, _ = await self.compute(request, inputs)
        embeddings = cut_vectors(embeddings, values)
        if normalize:
            embeddings = unit_rows(embeddings)
        return await asyncio.to_thread(embeddings.tolist)

    async def rerank(self, request: Request, values: Values) -> Any:
        """Return the scores of the documents of a query, best first: `texts` as TEI has them, `documents` as Cohere."""
        is_tei = "texts" in values
        if is_tei and "documents" in values:
            raise Refusal("send texts (TEI) or documents (Cohere), not both")
        key = "texts" if is_tei else "documents"
        documents = self._texts(values, key)
        queries = self._texts(values, "query")
        if len(queries) != 1:
            raise Refusal(f"there are {len(queries):,d} queries; send one")
        top_n = values.get("top_n")
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise Refusal(f"top_n is {reprlib.repr(top_n)}; give a whole number from 1")
        inputs = [ServedInput(document, query=queries[0]) for document in documents]
        rows_of_scores, num_tokens = await self.compute(request, inputs)
        scores = rows_of_scores[:, 0].astype(np.float64)
        if not (is_tei and values.get("raw_scores")):
            scores = expit(scores)
        rows = []
        for index in np.argsort(-scores, kind="stable").tolist()[:top_n]:
            score = float(scores[index])
            if is_tei:
                row = {"index": index, "score": score}
                if values.get("return_text"):
                    row["text"] = documents[index]
            else:
                row = {"index": index, "relevance_score": score}
                if values.get("return_documents"):
                    row["document"] = {"text": documents[index]}
            rows.append(row)
        if is_tei:
            return rows
        return {
            "model": self.name,
            "results": rows,
            "usage": {"total_tokens": num_tokens},
        }

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Say that the server runs. It needs no key."""
        return JSONResponse({"status": "ok"})

    async def get(self, request: Request) -> Response:
        """Return the metrics, or the served model as OpenAI and TEI list their own."""
        try:
            self._check_headers(request)
        except Refusal as refusal:
            return refusal_response(refusal)
        if request.url.path == "/metrics":
            return Response(self.metrics(), media_type="text/plain; version=0.0.4")
        if request.url.path == "/info":
            max_length = self.batcher.encoder.max_length
            info = {"model_id": self.name, "max_input_length": max_length}
            return JSONResponse(info)
        model = {"id": self.name, "object": "model", "owned_by": "vembed"}
        return JSONResponse({"object": "list", "data": [model]})

    async def no_such_route(self, request: Request, error: Any) -> Response:
        """Answer a request for another path or with another method."""
        path = request.url.path
        message = f"there is no {request.method} {path:.200}; {self._routes()}"
        await discard_body(request)
        return refusal_response(Refusal(message, error.status_code, CLOSE))

    async def post(self, request: Request) -> Response:
        """Answer a request that has a JSON object as its body."""
        path = request.url.path
        start = time.monotonic()
        try:
            self._check_headers(request)
            async with self._body(request) as body:
                values = await asyncio.to_thread(parse_object, body)
                if path.endswith("/rerank") != self.batcher.encoder.gives_scores:
                    raise Refusal(
                        f"{path} is of another kind of model; {self._routes()}"
                    )
                if values.get("truncate") is False:
                    max_length = self.batcher.encoder.max_length
                    raise Refusal(
                        f"truncate is false, and this server cuts inputs at {max_length:,d} tokens; leave it out",
                    )
                answer = await self.answers[path](request, values)
                response: Response = await asyncio.to_thread(JSONResponse, answer)
        except Refusal as refusal:
            if "Connection" in refusal.headers:
                await discard_body(request)
            response = refusal_response(refusal)
        except asyncio.CancelledError:
            # uvicorn cancels what is not answered in time when it was told to stop.
            message = (
                f"the server stops, and this request was not computed within {self.limits.drain_seconds:g} s; send it to "
                "another one"
            )
            response = refusal_response(Refusal(message, 503, CLOSE))
        except ClientDisconnect:
            log.debug("%s has closed the connection", request.client)
            response = Response(status_code=499)
        except Exception:
            # The client gets an answer whatever happens, and the next request is served.
            log.exception("a request to %s failed", path)
            message = "the server could not compute this; its log has the reason"
            response = refusal_response(Refusal(message, 500))
        self.num_requests[path, response.status_code] += 1
        self.total_seconds += time.monotonic() - start
        return response

    def metrics(self) -> str:
        """Return what the server has done, in the text format of Prometheus."""
        lines = ["# TYPE vembed_requests_total counter"]
        for (route, status), count in sorted(self.num_requests.items()):
            labels = f'route="{route}",status="{status}"'
            lines.append(f"vembed_requests_total{{{labels}}} {count}")
        lines += [
            "# TYPE vembed_request_seconds summary",
            f"vembed_request_seconds_sum {self.total_seconds}",
            f"vembed_request_seconds_count {self.num_requests.total()}",
        ]
        for name in ("batches", "inputs", "tokens"):
            lines += [
                f"# TYPE vembed_{name}_total counter",
                f"vembed_{name}_total {self.batcher.counts[name]}",
            ]
        lines += [
            "# TYPE vembed_waiting_requests gauge",
            f"vembed_waiting_requests {len(self.batcher.waiting)}",
        ]
        return "\n".join(lines) + "\n"

    def _routes(self) -> str:
        if self.batcher.encoder.gives_scores:
            return f"{self.name} is a reranker: POST to /rerank"
        return f"{self.name} is an embedding model: POST to /v1/embeddings or /embed"

    def _check_headers(self, request: Request) -> None:
        """Raise Refusal without the server's key, or with two lengths of a body."""
        headers = request.headers
        sent = headers.get("authorization", "").encode("latin-1")
        key = f"Bearer {self.api_key}".encode()
        if self.api_key is not None and not hmac.compare_digest(sent, key):
            raise Refusal(
                "send the server's key: the header Authorization: Bearer KEY",
                401,
                {"WWW-Authenticate": "Bearer", **CLOSE},
            )
        if "content-length" in headers and "transfer-encoding" in headers:
            # Another server before this one may take the other header: then the two see different requests.
            raise Refusal(
                "send Content-Length or Transfer-Encoding, not both", headers=CLOSE
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
                            raise Refusal(
                                f"send a body of at most {self.limits.body_bytes:,d} bytes",
                                413,
                                CLOSE,
                            )
                        if self.held_bytes > self.limits.held_bytes:
                            raise Refusal(
                                "the server holds too many requests; send this one again",
                                429,
                                {**BUSY, **CLOSE},
                            )
            except TimeoutError:
                raise Refusal(
                    f"the body took longer than {seconds:g} s", 408, CLOSE
                ) from None
            yield body
        finally:
            self.held_bytes -= len(body)

    async def compute(self, request: Request, inputs: Sequence[ServedInput]) -> Encoded:
        """Return what the model gives for the inputs of a request when its turn has come."""
        job = self.batcher.submit(inputs)
        client_gone = asyncio.create_task(wait_for_disconnect(request))
        await asyncio.wait(
            (job.result, client_gone),
            timeout=self.limits.wait_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        has_gone = client_gone.done()
        client_gone.cancel()
        # A request whose turn has come is computed to its end, also when it has waited long or its client has gone.
        if job in self.batcher.waiting:
            self.batcher.waiting.remove(job)
            if has_gone:
                raise ClientDisconnect
            raise Refusal(
                f"the server is busy: this request has waited {self.limits.wait_seconds:g} s",
                429,
                BUSY,
            )
        try:
            return await job.result
        except UserError as error:
            raise Refusal(str(error)) from error

    def _inputs(
        self,
        values: Values,
        key: str,
        kind_key: str,
    ) -> list[ServedInput]:
        """Return the inputs under `key`, with the prompt that `kind_key` asks for. Raise Refusal beyond the limits."""
        kind = values.get(kind_key)
        if kind not in (None, "query", "document"):
            said = reprlib.repr(kind)
            raise Refusal(
                f"{kind_key} is {said}; give query or document, or leave it out"
            )
        encoder = self.batcher.encoder
        content = content_of(values, key)
        # A single text, or the token ids of one, need not be in a list.
        is_list = isinstance(content, list) and content and type(content[0]) is not int
        contents = content if is_list else [content]
        self._check_count(key, contents)
        are_texts = isinstance(contents[0], str)
        for number, content in enumerate(contents):
            name = f"{key}[{number}]"
            if are_texts and isinstance(content, str):
                if not content:
                    raise Refusal(f"{name} is an empty text; leave it out")
                self._check_text(name, content)
                continue
            are_ids = isinstance(content, list) and {*map(type, content)} == {int}
            if are_texts or not are_ids:
                raise Refusal(
                    f"{key} must be a text, a list of texts, or lists of token ids, and has {reprlib.repr(content)}",
                )
            if kind is not None:
                raise Refusal(
                    f"{kind_key} puts a prompt before texts, and {name} is token ids; leave it out",
                )
            if encoder.vocab_size is None:
                raise Refusal(f"{name}: this model takes texts, no token ids")
            are_known = min(content) >= 0 and max(content) < encoder.vocab_size
            if len(content) > encoder.max_length or not are_known:
                raise Refusal(
                    f"{name} must be at most {encoder.max_length:,d} token ids from 0 to {encoder.vocab_size - 1}, and is "
                    f"{reprlib.repr(content)}"
                )
        return [ServedInput(content, kind) for content in contents]

    def _texts(self, values: Values, key: str) -> list[str]:
        """Return the text under `key`, or its list of texts. Cohere's documents may be objects with a `text`."""
        content = content_of(values, key)
        entries = content if isinstance(content, list) else [content]
        self._check_count(key, entries)
        texts = []
        for number, entry in enumerate(entries):
            text = entry.get("text") if isinstance(entry, dict) else entry
            if not isinstance(text, str):
                expected = "one text" if key == "query" else "a text or a list of texts"
                raise Refusal(
                    f"{key} must be {expected}, and has {reprlib.repr(entry)}"
                )
            self._check_text(f"{key}[{number}]", text)
            texts.append(text)
        return texts

    def _check_count(self, key: str, contents: Sequence[Any]) -> None:
        if not 1 <= len(contents) <= self.limits.inputs:
            raise Refusal(
                f"{key} has {len(contents):,d} texts; send 1 to {self.limits.inputs:,d} in one request",
            )

    def _check_text(self, name: str, text: str) -> None:
        if len(text) > self.limits.text_characters:
            raise Refusal(
                f"{name} has {len(text):,d} characters; send at most {self.limits.text_characters:,d}",
                413,
            )
        if has_lone_surrogate(text):
            raise Refusal(f"{name} {LONE_SURROGATE}: cut texts between characters")

    def _openai_answer(self, values: Values, encoded: Encoded) -> Any:
        """Return the answer of `/v1/embeddings`."""
        vectors, num_tokens = encoded
        vectors = cut_vectors(vectors, values)
        encoding = values.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise Refusal(
                f"encoding_format is {reprlib.repr(encoding)}; give float or base64"
            )
        rows = []
        for index, vector in enumerate(vectors):
            embedding = vector.tolist()
            if encoding == "base64":
                embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            rows.append({"object": "embedding", "index": index, "embedding": embedding})
        return {
            "object": "list",
            "data": rows,
            "model": self.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def discard_body(request: Request) -> None:
    """Read what a client still sends, so that it does not lose the answer."""
    # RuntimeError: the body has been read to its end.
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for _ in request.stream():
                pass


def parse_object(body: bytearray) -> Values:
    """Return the JSON object of a request."""
    try:
        values = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise Refusal("the body must be a JSON object")
    return values


def content_of(values: Values, key: str) -> Any:
    """Return what a body has under a key. Raise Refusal if it has no such key."""
    if key in values:
        return values[key]
    misspelt = nearest(key, values)
    hint = "" if misspelt is None else f". Write {key} in place of {misspelt}"
    raise Refusal(f"{key} is missing: the body has {listed(values) or 'no keys'}{hint}")


def cut_vectors(vectors: np.ndarray, values: Values) -> np.ndarray:
    """Return the first `dimensions` of the vectors where a request asks for them, of length 1 unless it says otherwise."""
    dimensions = values.get("dimensions")
    if dimensions is None:
        return vectors
    if type(dimensions) is not int or not 1 <= dimensions <= vectors.shape[1]:
        raise Refusal(
            f"dimensions must be a whole number from 1 to {vectors.shape[1]}, and is {reprlib.repr(dimensions)}"
        )
    return first_dims(vectors, dimensions, values.get("normalize") is not False)


def refusal_response(refusal: Refusal) -> Response:
    """Return an error as OpenAI's clients read it."""
    is_fault = refusal.status >= 500
    error = {
        "message": str(refusal),
        "type": "server_error" if is_fault else "invalid_request_error",
        "code": refusal.status,
    }
    return JSONResponse({"error": error}, refusal.status, refusal.headers)


# ---- uvicorn around the application, with limits on connections and an orderly end -------------------------------------


BACKLOG = 512
MAX_HEAD_BYTES = 65_536
TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\n\r\n"
)


class Connection(H11Protocol):
    """A connection that is closed when its client takes too long to send a request or to take an answer."""

    def __init__(self, limits: RequestLimits, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for a connection, or refuse it."""
        super().connection_made(transport)
        self._start_deadline()
        if len(self.connections) <= self.limits.connections:
            return
        waiting = []
        connection: Any
        for connection in self.connections:
            cycle = connection.cycle
            # The request is not complete yet, the last one is answered, or its answer is not taken.
            waits = cycle is None or cycle.response_complete or cycle.more_body
            waits |= connection.flow.write_paused
            if waits and connection is not self:
                waiting.append(connection)
        if waiting:
            oldest = min(waiting, key=lambda connection: connection.waits_since)
            oldest.transport.abort()
        else:
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client. A request whose head is complete has no deadline here: the application has one."""
        super().data_received(data)
        self._end_deadline_of_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.deadline.cancel()
        self._start_deadline()
        super().on_response_complete()
        # The next request may have arrived already.
        self._end_deadline_of_request()

    def pause_writing(self) -> None:
        """Wait for the client, which does not take its answer."""
        super().pause_writing()
        self.deadline.cancel()
        self._start_deadline()

    def resume_writing(self) -> None:
        """Go on: the client has taken its answer."""
        super().resume_writing()
        self._end_deadline_of_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the deadline."""
        self.deadline.cancel()
        super().connection_lost(exc)

    def _end_deadline_of_request(self) -> None:
        """End the deadline where the application has a request, and the client takes what it is sent."""
        cycle = self.cycle
        has_request = cycle is not None and not cycle.response_complete
        if has_request and not self.flow.write_paused:
            self.deadline.cancel()

    def _start_deadline(self) -> None:
        self.waits_since = time.monotonic()
        self.deadline = self.loop.call_later(
            self.limits.head_seconds, self.transport.abort
        )


class Server(uvicorn.Server):
    """Server that a second signal ends at once, without the requests that the first one leaves it to answer."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Stop taking requests, or end the process where that is asked for again."""
        if self.should_exit:
            # No exception: the thread that runs the model would be waited for.
            os._exit(128 + sig)
        # uvicorn's own handler has the signal raised again at the end, but the process lives on.
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return the socket of an address, which takes connections from now on. Port 0 asks for a free one."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {host} --port {port} cannot be listened on ({error}); give others"
        ) from error


def server_of(
    encoder: TextEncoder,
    name: str,
    limits: RequestLimits,
    api_key: str | None = None,
) -> Server:
    """Return the server of a model. `run` answers requests until SIGINT or SIGTERM, and then those that have arrived. A second
    signal ends the process."""
    service = Service(Batcher(encoder), name, limits, api_key)
    config = uvicorn.Config(
        service.app(),
        http=cast(type[asyncio.Protocol], partial(Connection, limits)),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=int(limits.head_seconds) + 1,
        timeout_graceful_shutdown=int(limits.drain_seconds),
    )
    return Server(config)


# ---- what the server asks: an Embedder, a Reranker or an export in its own runtime, and the Batcher that asks it ---


SERVED_RUNTIMES = ("onnx", "openvino")
"""Formats of exports that the server runs in their own runtime."""
MAX_BATCH_INPUTS = 512
"""Inputs of several requests that are encoded together. A longer request is encoded alone."""

Encoded = tuple[np.ndarray, int]
"""[n, d] float32 embeddings or [n, 1] scores of a request, and the number of its tokens."""


EncodedInputs = tuple[np.ndarray, list[int]]
"""[n, d] float32 embeddings or [n, 1] scores of several inputs, and the number of tokens of each."""


@dataclass(frozen=True)
class ServedInput:
    """One input of a request: a text, or the token ids of one."""

    content: str | list[int]
    kind: Kind | None = None
    """Whose prompt is put before the text. None: no prompt."""
    query: str | None = None
    """Query that a reranker reads with the text, a document."""


class TextEncoder(ABC):
    """A model that the server asks, from one thread."""

    max_length: int
    """Tokens of the longest input. Longer texts are truncated."""
    vocab_size: int | None = None
    """Token ids are below this number. None: the model takes texts only."""
    gives_scores = False
    """True: a reranker. Its inputs have queries."""
    gives_unit_vectors = True

    @abstractmethod
    def encode(self, inputs: Sequence[ServedInput]) -> EncodedInputs:
        """Return what the model gives for the inputs."""


class ModelEncoder(TextEncoder):
    """A model in this process."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        description = embedder.description
        if "text" not in description.modalities:
            raise UserError(
                f"{description.source} embeds images only, and the server's protocols send texts"
            )
        self.max_length = description.max_length
        self.has_fixed_length = description.family_traits.has_fixed_length
        self.gives_unit_vectors = description.normalize
        # The ids of a conversation would have to bring its template along.
        texts = embedder.featuriser.texts
        if texts is not None and not description.family_traits.is_vision_language:
            self.vocab_size = len(texts.tokenizer)

    def encode(self, inputs: Sequence[ServedInput]) -> EncodedInputs:
        """See TextEncoder."""
        featuriser = self.embedder.featuriser
        items = []
        for served in inputs:
            if isinstance(served.content, str):
                prompt = None if served.kind else ""
                item = Item(text=served.content, prompt=prompt)
                items.append((item, served.kind or "document"))
        tokenized = iter(featuriser.features(items))
        features = []
        for served in inputs:
            if isinstance(served.content, str):
                features.append(next(tokenized))
                continue
            token_ids = np.array(served.content, np.int32)
            length = self.max_length if self.has_fixed_length else len(token_ids)
            features.append(Features("text", length, 0, 0, token_ids=token_ids))
        embeddings = encode_features(
            self.embedder.model, featuriser, features, self.embedder.device
        )
        num_tokens = []
        for feature in features:
            ids = feature.token_ids
            num_tokens.append(0 if ids is None else len(ids))
        return self.embedder.finish(embeddings, None), num_tokens


class PairScorer(TextEncoder):
    """A reranker in this process, or its export to ONNX."""

    gives_scores = True

    def __init__(self, reranker: Reranker | OnnxReranker) -> None:
        self.reranker = reranker
        self.max_length = reranker.description.max_length

    def encode(self, inputs: Sequence[ServedInput]) -> EncodedInputs:
        """See TextEncoder."""
        pairs = []
        for served in inputs:
            query = Item(text=served.query)
            document = Item(text=str(served.content))
            pairs.append((query, document))
        features = self.reranker.featuriser.features(pairs)
        scores = self.reranker.scores_of(features)
        return scores, [feature.length for feature in features]


class ExportEncoder(TextEncoder):
    """An export to ONNX or OpenVINO, in that runtime."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """`facts`: those of its `export.json`."""
        export_format = EXPORT_FORMATS[facts["format"]]
        missing = export_format.missing()
        if missing is not None:
            raise UserError(f"{folder}: {missing}")
        self.reader: GraphReader = export_format.reader(folder)
        self.max_length = self.reader.texts.max_length
        self.gives_unit_vectors = facts["normalized"]
        self.vocab_size = len(self.reader.texts.tokenizer)

    def encode(self, inputs: Sequence[ServedInput]) -> EncodedInputs:
        """See TextEncoder."""
        rows = [
            self.reader.texts.token_ids([served.content], served.kind)[0]
            if isinstance(served.content, str)
            else served.content
            for served in inputs
        ]
        return self.reader.encode_ids(rows), [len(row) for row in rows]


def open_encoder(
    model: str,
    *,
    device: str | None = None,
    truncate_dim: int | None = None,
    trust_remote_code: bool = False,
) -> TextEncoder:
    """Return the encoder of a model, a run, or a folder that `vembed export` wrote."""
    folder = Path(model).expanduser()
    facts = read_object(folder / EXPORT_FILE)
    format_name = str(facts.get("format"))
    is_export = format_name in SERVED_RUNTIMES
    if is_export and (truncate_dim is not None or device not in (None, "cpu")):
        raise UserError(
            f"{model} is an export to {format_name}: it runs on the CPU at its own size"
        )
    if is_reranker(model):
        if is_export:
            return PairScorer(OnnxReranker(folder))
        if truncate_dim is not None:
            raise UserError(
                f"--truncate-dim {truncate_dim}: {model} is a reranker and gives scores; leave it out"
            )
        return PairScorer(
            Reranker(model, device=device, trust_remote_code=trust_remote_code)
        )
    if is_export:
        return ExportEncoder(folder, facts)
    return ModelEncoder(
        Embedder(
            model,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )
    )


@dataclass(frozen=True, eq=False)
class Job:
    """The inputs of a request, and what the model gives for them."""

    inputs: Sequence[ServedInput]
    result: asyncio.Future[Encoded]


class Batcher:
    """A queue of requests, which one thread encodes in the order of their arrival."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.encoder = encoder
        self.counts: Counter[str] = Counter()
        """Batches, inputs and tokens that the model has computed."""
        self.waiting: deque[Job] = deque()
        """Requests whose turn has not come. One that is taken out is not computed."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vembed-serve")
        self._work: asyncio.Task[None] | None = None

    def submit(self, inputs: Sequence[ServedInput]) -> Job:
        """Queue a request."""
        job = Job(inputs, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._encode_waiting())
        return job

    async def _encode_waiting(self) -> None:
        while self.waiting:
            batch: list[Job] = []
            num_inputs = 0
            while self.waiting:
                num_inputs += len(self.waiting[0].inputs)
                if batch and num_inputs > MAX_BATCH_INPUTS:
                    break
                batch.append(self.waiting.popleft())
            await self._encode(batch)

    async def _encode(self, batch: list[Job]) -> None:
        inputs: list[ServedInput] = []
        for job in batch:
            inputs += job.inputs
        loop = asyncio.get_running_loop()
        try:
            embeddings, num_tokens = await loop.run_in_executor(
                self._thread, self.encoder.encode, inputs
            )
        except Exception as error:
            if len(batch) > 1:
                # The fault is in one of the requests: the others get their answers.
                for job in batch:
                    await self._encode([job])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        self.counts["batches"] += 1
        self.counts["inputs"] += len(inputs)
        self.counts["tokens"] += sum(num_tokens)
        start = 0
        for job in batch:
            stop = start + len(job.inputs)
            answer = embeddings[start:stop], sum(num_tokens[start:stop])
            # The server stops, and has refused the request.
            if not job.result.done():
                job.result.set_result(answer)
            start = stop
