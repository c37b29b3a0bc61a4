"""Requests and answers of the two protocols, as plain values: OpenAI's `/v1/embeddings` and TEI's `/embed`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from vembed.data.examples import LONE_SURROGATE, Kind, has_lone_surrogate
from vembed.inference.encoding import first_dims
from vembed.inference.serve.encoder import TextEncoder

MOST_INPUTS = 2048
"""Texts of one request, as at OpenAI."""
Values = Mapping[str, Any]


class BadRequest(Exception):  # noqa: N818 - the name of its HTTP status
    """A request that cannot be answered; the message is for the client."""


def openai_answer(encoder: TextEncoder, name: str, asked: Values) -> Any:
    """Return the answer to `/v1/embeddings`: the vectors of the texts as they are sent. `input_type`, which OpenAI does
    not have: query or document puts the model's prompt before them."""
    vectors, num_tokens = encoder.encode(*_texts(asked, "input", "input_type"))
    dimensions = asked.get("dimensions")
    if dimensions is not None:
        if (
            isinstance(dimensions, bool)
            or not isinstance(dimensions, int)
            or not 1 <= dimensions <= vectors.shape[1]
        ):
            raise BadRequest(
                f"dimensions is {dimensions!r}; this model gives 1 to {vectors.shape[1]}"
            )
        vectors = first_dims(vectors, dimensions, True)  # of length 1, as OpenAI's
    form = asked.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadRequest(f"encoding_format is {form!r}; give float or base64")
    rows = [
        {"object": "embedding", "index": at, "embedding": _row(row, form)}
        for at, row in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {
        "object": "list",
        "data": rows,
        "model": str(asked.get("model") or name),
        "usage": usage,
    }


def tei_answer(encoder: TextEncoder, name: str, asked: Values) -> Any:  # noqa: ARG001 - TEI's answer has no name
    """Return the answer to `/embed`: a list of vectors. `prompt_name`: query or document."""
    vectors, _ = encoder.encode(*_texts(asked, "inputs", "prompt_name"))
    found: list[list[float]] = vectors.tolist()
    return found


ANSWERS: Mapping[str, Callable[[TextEncoder, str, Values], Any]] = {
    "/v1/embeddings": openai_answer,
    "/embeddings": openai_answer,
    "/embed": tei_answer,
}
"""Answers by route."""


def _texts(asked: Values, key: str, kind_key: str) -> tuple[list[str], Kind | None]:
    given = asked.get(key)
    texts = [given] if isinstance(given, str) else given
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) for text in texts)
    ):
        raise BadRequest(
            f"{key} must be a text or a list of texts (token ids are not read), and is {given!r:.80}"
        )
    if len(texts) > MOST_INPUTS:
        raise BadRequest(
            f"{key} has {len(texts):,d} texts; send at most {MOST_INPUTS:,d} in one request"
        )
    for number, text in enumerate(texts):
        if has_lone_surrogate(text):
            raise BadRequest(
                f"{key}[{number}] {LONE_SURROGATE}: cut texts between characters"
            )
    kind = asked.get(kind_key)
    if kind is None:
        return texts, None
    if kind == "query":
        return texts, "query"
    if kind == "document":
        return texts, "document"
    raise BadRequest(f"{kind_key} is {kind!r}; give query or document, or leave it out")


def _row(vector: np.ndarray, form: Literal["float", "base64"] | str) -> Any:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found
