"""Servers of other projects: which export each reads, and the command that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vembed.errors import UserError
from vembed.export.formats import FormatName
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
    server: ServerName, folder: Path, description: ModelDescription
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
    commands: dict[ServerName, str] = {
        "tei": f"text-embeddings-router --model-id {folder} --pooling {pooling} --port 8080",
        "vllm": f"vllm serve {folder} --runner pooling --port 8080",
        "infinity": f"infinity_emb v2 --model-id {folder} --port 8080",
        "llama.cpp": f"llama-server -m {gguf} --embeddings --pooling {pooling} --port 8080",
        "fastembed": f"python {folder / FASTEMBED_FILE}",
    }
    return {"start": commands[server], "note": note}


def write_server_files(
    server: ServerName, folder: Path, description: ModelDescription, dim: int
) -> None:
    """Write the files beside the export that a server needs; only fastembed, which is started from Python, has one."""
    if server == "fastembed":
        text = _FASTEMBED.format(
            file=FASTEMBED_FILE, dim=dim, query=description.query_prompt
        )
        (folder / FASTEMBED_FILE).write_text(text, encoding="utf-8")
