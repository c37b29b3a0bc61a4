"""check_server(): the embeddings of a running endpoint against those of the model, batch by batch."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vembed.errors import RunError, UserError
from vembed.export.check import Texts, distances, texts_to_compare
from vembed.export.exporting import evaluation_data
from vembed.inference.embedder import Embedder

BATCH = 16
TIMEOUT = 60
OPENAI, TEI = "/v1/embeddings", "/embed"


@dataclass(frozen=True)
class Endpoint:
    """A running server."""

    url: str
    """Address of the route."""
    model: str
    """Name that an OpenAI-compatible server knows the model by."""

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return [n, d] embeddings."""
        if self.url.endswith("embeddings"):
            answer = post(
                self.url,
                {"model": self.model, "input": texts, "encoding_format": "float"},
            )
            # OpenAI's format does not promise the order of the inputs.
            rows = sorted(answer["data"], key=lambda row: int(row["index"]))
            return np.array([row["embedding"] for row in rows], np.float32)
        return np.array(post(self.url, {"inputs": texts}), np.float32)


def post(url: str, values: dict[str, Any]) -> Any:
    """Return the JSON answer of a POST request. Raise UserError with what the server said."""
    body = json.dumps(values).encode()
    try:
        request = urllib.request.Request(
            url, body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace")
        raise UserError(f"{url} answers {error.code}: {said}") from error
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise UserError(
            f"{url} does not answer as an embedding server: {error}"
        ) from error


def check_address(url: str, model: str) -> None:
    """Raise UserError for a URL that is none, or stands in the place of the model."""
    addresses = ("http://", "https://")
    if model.startswith(addresses) and not url.startswith(addresses):
        raise UserError(
            f"{url} is no address, and {model} is one: the address comes first, then the model"
        )
    if not url.startswith(addresses):
        raise UserError(f"{url} is no address; give it as http://localhost:8080")


def find_endpoint(url: str, model: str) -> Endpoint:
    """Return the route of a server: the URL itself if it names one, otherwise the first that answers."""
    check_address(url, model)
    url = url.rstrip("/")
    if url.endswith(("/embeddings", "/embed")):
        return Endpoint(url, model)
    # A route that the server lacks answers 404: each is tried with one short text.
    routes = [url.removesuffix("/v1") + OPENAI, url + TEI]
    problems = []
    for route in routes:
        endpoint = Endpoint(route, model)
        try:
            endpoint.embed(["a"])
        except UserError as error:
            problems.append(str(error))
        else:
            return endpoint
    raise UserError("; ".join(problems))


def check_server(
    url: str,
    model: str,
    *,
    data: str | None = None,
    served_name: str | None = None,
    tolerance: float = 1e-3,
    say: Callable[[str], object] = print,
) -> float:
    """Compare a server with `model` and return the largest cosine distance. Raise RunError above `tolerance`.

    The prompts are sent as a part of each text: servers add none by themselves.
    """
    endpoint = find_endpoint(url, served_name or model)
    embedder = Embedder(
        model, device="cpu", torch_dtype="float32", mixed_precision="no"
    )
    texts = texts_to_compare(
        evaluation_data(model, data), embedder.description.max_length
    )
    prompts = {
        "query": embedder.description.query_prompt,
        "document": embedder.description.document_prompt,
    }
    # One kind in each batch: the model encodes a batch under one prompt.
    batches: list[Texts] = [
        [one for one in texts if one[1] == kind][start : start + BATCH]
        for kind in prompts
        for start in range(0, sum(one[1] == kind for one in texts), BATCH)
    ]
    largest = 0.0
    worst = ""
    for number, batch in enumerate(batches, start=1):
        kind = batch[0][1]
        served = endpoint.embed([prompts[kind] + text for text, _ in batch])
        own = embedder.encode([text for text, _ in batch], kind)
        if served.shape != own.shape:
            raise RunError(
                f"{endpoint.url} differs from {model}: embeddings of {list(served.shape)} for {list(own.shape)}"
            )
        apart = distances(own, served)
        say(
            f"batch {number} of {len(batches)}: {len(batch)} texts ({kind}), cosine distance {apart.max():.2g}"
        )
        if apart.max() > largest:
            largest, worst = float(apart.max()), batch[int(apart.argmax())][0]
    if largest > tolerance:
        raise RunError(
            f"{endpoint.url} differs from {model}: largest cosine distance {largest:.2g} (tolerance {tolerance:.2g}), "
            f"for the text {worst!r:.60}; compare its pooling, its maximum length and its tokenizer with the model's"
        )
    say(
        f"{endpoint.url} equals {model}: largest cosine distance {largest:.2g} (tolerance {tolerance:.2g})"
    )
    return largest
