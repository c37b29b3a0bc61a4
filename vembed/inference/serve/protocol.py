"""Requests and answers of the two protocols, as plain values: OpenAI's `/v1/embeddings` and TEI's `/embed`."""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vembed.data.examples import LONE_SURROGATE, Kind, has_lone_surrogate
from vembed.inference.encoding import first_dims
from vembed.inference.serve.batching import Encoded
from vembed.inference.serve.encoder import ServedInput, TextEncoder

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
    """Time for the requests that are being answered when the server is stopped."""


class Refusal(Exception):  # noqa: N818 - an answer to the client, not a fault of the server
    """A request that is not answered. The message is for the client."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


def read_inputs(
    values: Values, key: str, kind_key: str, encoder: TextEncoder, limits: RequestLimits
) -> list[ServedInput]:
    """Return the inputs under `key`, with the prompt that `kind_key` asks for. Raise Refusal beyond the limits."""
    kind = values.get(kind_key)
    if kind not in (None, "query", "document"):
        said = reprlib.repr(kind)
        raise Refusal(
            400, f"{kind_key} is {said}; give query or document, or leave it out"
        )
    contents = _contents(values, key)
    if len(contents) > limits.inputs:
        raise Refusal(
            400,
            f"{key} has {len(contents):,d} texts; send at most {limits.inputs:,d} in one request",
        )
    for number, content in enumerate(contents):
        name = f"{key}[{number}]"
        if not isinstance(content, str):
            _check_token_ids(name, content, encoder)
            if kind is not None:
                raise Refusal(
                    400,
                    f"{kind_key} puts a prompt before texts, and {name} is token ids; leave it out",
                )
        elif len(content) > limits.text_characters:
            raise Refusal(
                413,
                f"{name} has {len(content):,d} characters; send at most {limits.text_characters:,d}",
            )
        elif has_lone_surrogate(content):
            raise Refusal(400, f"{name} {LONE_SURROGATE}: cut texts between characters")
    return [ServedInput(content, cast(Kind | None, kind)) for content in contents]


def _check_token_ids(name: str, ids: list[int], encoder: TextEncoder) -> None:
    if encoder.vocab_size is None:
        raise Refusal(400, f"{name}: this model takes texts, no token ids")
    if not 1 <= len(ids) <= encoder.max_length:
        raise Refusal(
            400,
            f"{name} has {len(ids):,d} token ids; this model takes 1 to {encoder.max_length:,d}",
        )
    if min(ids) < 0 or max(ids) >= encoder.vocab_size:
        raise Refusal(
            400,
            f"{name} has token ids from {min(ids)} to {max(ids)}; this model's own are 0 to {encoder.vocab_size - 1}",
        )


def openai_answer(values: Values, encoded: Encoded, model_name: str) -> Any:
    """Return the answer of `/v1/embeddings`."""
    vectors, num_tokens = encoded
    dimensions = values.get("dimensions")
    if dimensions is not None:
        if type(dimensions) is not int or not 1 <= dimensions <= vectors.shape[1]:
            raise Refusal(
                400,
                f"dimensions is {reprlib.repr(dimensions)}; this model gives 1 to {vectors.shape[1]}",
            )
        vectors = first_dims(vectors, dimensions, True)  # of length 1, as OpenAI's
    encoding = values.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise Refusal(
            400, f"encoding_format is {reprlib.repr(encoding)}; give float or base64"
        )
    rows = []
    for index, vector in enumerate(vectors):
        embedding: Any = vector.tolist()
        if encoding == "base64":
            embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        rows.append({"object": "embedding", "index": index, "embedding": embedding})
    return {
        "object": "list",
        "data": rows,
        "model": str(values.get("model") or model_name),
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _contents(values: Values, key: str) -> Sequence[str | list[int]]:
    """Return texts or lists of token ids. A single one need not be in a list."""
    content: Any = values.get(key)
    if isinstance(content, str) or _is_token_ids(content):
        return [content]
    if isinstance(content, list) and content:
        if all(isinstance(entry, str) for entry in content):
            return content
        if all(_is_token_ids(entry) for entry in content):
            return content
    raise Refusal(
        400,
        f"{key} must be a text, a list of texts, or lists of token ids, and is {reprlib.repr(content)}",
    )


def _is_token_ids(content: object) -> bool:
    if not isinstance(content, list) or not content:
        return False
    return all(type(number) is int for number in content)
