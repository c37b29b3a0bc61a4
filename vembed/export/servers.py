"""Servers of other projects: which export each reads, the command that starts it, and a comparison of its embeddings."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vembed.data.examples import Kind
from vembed.errors import RunError, UserError
from vembed.export.check import distances, evaluation_data, texts_to_compare
from vembed.export.formats import FormatName
from vembed.inference.embedder import Embedder
from vembed.models.families.description import ModelDescription
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS

ServerName = Literal["tei", "vllm", "llama.cpp", "infinity", "fastembed"]
FORMAT_OF: dict[ServerName, FormatName] = {
    "tei": "safetensors",
    "vllm": "safetensors",
    "llama.cpp": "gguf",
    "infinity": "safetensors",
    "fastembed": "onnx",
}
FASTEMBED_FILE = "use_fastembed.py"
_FASTEMBED = '''"""Loads this export in fastembed: `python {file}`."""

from pathlib import Path

from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

HERE = Path(__file__).resolve().parent
TextEmbedding.add_custom_model(
    model="vembed/export",
    pooling=PoolingType.DISABLED,  # pooling and normalisation are inside the graph
    normalization=False,
    sources=ModelSource(url="https://localhost/unused"),
    dim={dim},
    model_file="model.onnx",
)
model = TextEmbedding("vembed/export", specific_model_path=str(HERE))
print(next(iter(model.embed([{query!r} + "a query"])))[:5])
'''


def check_served(server: ServerName, description: ModelDescription) -> None:
    """Raise UserError if a server cannot run a model as it is."""
    if server not in ("tei", "vllm", "llama.cpp"):
        return
    reason = "it pools the tokens of texts, and this model pools itself"
    if description.pooling == MODEL_POOLING:
        if server == "vllm":
            return
    elif server in POOLINGS[description.pooling].servers:
        return
    else:
        known = [
            pooling.name for pooling in POOLINGS.values() if server in pooling.servers
        ]
        reason = (
            f"it pools by {', '.join(known)}, and this model by {description.pooling}: use --for fastembed, whose "
            "graph has the pooling inside"
        )
    raise UserError(f"--for {server}: {description.name} cannot be served: {reason}")


def start_of(
    server: ServerName,
    folder: Path,
    description: ModelDescription,
) -> dict[str, str | None]:
    """Return the command that starts a server on an export ("start"), and what to know about it ("note"). Options that
    the server does not read from the folder are in the command."""
    note = None
    if description.query_prompt or description.document_prompt:
        note = (
            f"the server adds no prompt: send {description.query_prompt!r} before queries and "
            f"{description.document_prompt!r} before documents"
        )
    pooling = ""
    if server in ("tei", "llama.cpp"):
        pooling = POOLINGS[description.pooling].servers[server]
    gguf = folder / "model.gguf"
    commands = {
        "tei": f"text-embeddings-router --model-id {folder} --pooling {pooling} --port 8080",
        "vllm": f"vllm serve {folder} --runner pooling --port 8080",
        "infinity": f"infinity_emb v2 --model-id {folder} --port 8080",
        "llama.cpp": f"llama-server -m {gguf} --embeddings --pooling {pooling} --port 8080",
        "fastembed": f"python {folder / FASTEMBED_FILE}",
    }
    return {"start": commands[server], "note": note}


def write_server_files(
    server: ServerName,
    folder: Path,
    description: ModelDescription,
    dim: int,
) -> None:
    """Write the files beside the export that a server needs; only fastembed, which is started from Python, has one."""
    if server == "fastembed":
        text = _FASTEMBED.format(
            file=FASTEMBED_FILE, dim=dim, query=description.query_prompt
        )
        (folder / FASTEMBED_FILE).write_text(text, encoding="utf-8")


# ---- a running server against the model that it should serve -----------------------------------------------------------


BATCH_TEXTS = 16
TIMEOUT_SECONDS = 60
OPENAI_ROUTE = "/v1/embeddings"
TEI_ROUTE = "/embed"


@dataclass(frozen=True)
class ServerEndpoint:
    """A running server of embeddings."""

    url: str
    """Address of the route."""
    model: str
    """Name that an OpenAI-compatible server knows the model by."""

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return [n, d] embeddings."""
        if not self.url.endswith("embeddings"):
            return np.array(post(self.url, {"inputs": texts}), np.float32)
        values = {"model": self.model, "input": texts, "encoding_format": "float"}
        answer = post(self.url, values)
        # OpenAI's format does not promise the order of the inputs.
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        return np.array([row["embedding"] for row in rows], np.float32)


def post(url: str, values: dict[str, Any]) -> Any:
    """Return the JSON answer of a POST request. Raise UserError with what the server answered."""
    body = json.dumps(values).encode()
    try:
        request = urllib.request.Request(
            url, body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        content = error.read(300).decode(errors="replace")
        raise UserError(f"{url} answers {error.code}: {content}") from error
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise UserError(
            f"{url} does not answer as an embedding server: {error}"
        ) from error


def check_address(url: str, model: str) -> None:
    """Raise UserError for a URL that is none, or stands in the place of the model."""
    schemes = ("http://", "https://")
    if url.startswith(schemes):
        return
    if model.startswith(schemes):
        raise UserError(
            f"{url} is no address, and {model} is one: the address comes first, then the model"
        )
    raise UserError(f"{url} is no address; give it as http://localhost:8080")


def find_endpoint(url: str, model: str) -> ServerEndpoint:
    """Return the route of a server: the URL itself if it names one, otherwise the first that answers."""
    check_address(url, model)
    url = url.rstrip("/")
    if url.endswith(("/embeddings", TEI_ROUTE)):
        return ServerEndpoint(url, model)
    # A route that the server lacks answers 404: each is tried with one short text.
    problems = []
    for route in (url.removesuffix("/v1") + OPENAI_ROUTE, url + TEI_ROUTE):
        endpoint = ServerEndpoint(route, model)
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
    log: Callable[[str], object] = print,
) -> float:
    """Compare a server with `model` and return the largest cosine distance. Raise RunError above `tolerance`.

    The prompts are sent as a part of each text: servers add none by themselves.
    """
    endpoint = find_endpoint(url, served_name or model)
    embedder = Embedder(
        model, device="cpu", torch_dtype="float32", mixed_precision="no"
    )
    description = embedder.description
    texts = texts_to_compare(evaluation_data(model, data), description.max_length)
    batches: list[tuple[Kind, str, list[str]]] = []
    # One kind in each batch: the model encodes a batch under one prompt.
    prompts: dict[Kind, str] = {
        "query": description.query_prompt,
        "document": description.document_prompt,
    }
    for kind, prompt in prompts.items():
        of_kind = [text for text, text_kind in texts if text_kind == kind]
        for start in range(0, len(of_kind), BATCH_TEXTS):
            batches.append((kind, prompt, of_kind[start : start + BATCH_TEXTS]))
    largest = 0.0
    worst_text = ""
    for number, (kind, prompt, batch) in enumerate(batches, start=1):
        served = endpoint.embed([prompt + text for text in batch])
        wanted = embedder.encode(batch, kind)
        if served.shape != wanted.shape:
            raise RunError(
                f"{endpoint.url} differs from {model}: embeddings of {list(served.shape)} for {list(wanted.shape)}"
            )
        batch_distances = distances(wanted, served)
        worst = int(batch_distances.argmax())
        distance = float(batch_distances[worst])
        log(
            f"batch {number} of {len(batches)}: {len(batch)} texts ({kind}), cosine distance {distance:.2g}"
        )
        if distance > largest:
            largest = distance
            worst_text = batch[worst]
    compared = f"largest cosine distance {largest:.2g} (tolerance {tolerance:.2g})"
    if largest > tolerance:
        raise RunError(
            f"{endpoint.url} differs from {model}: {compared}, for the text {worst_text[:60]!r}; "
            "compare its pooling, its maximum length and its tokenizer with the model's"
        )
    log(f"{endpoint.url} equals {model}: {compared}")
    return largest
