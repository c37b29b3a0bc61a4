"""SERVERS: the format that each server reads, and the command that starts it on an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from vembed.export.formats import FormatName
from vembed.models.families.description import ModelDescription
from vembed.models.poolings import MODEL_POOLING, POOLINGS

ServerName = Literal["tei", "vllm", "llama.cpp", "infinity", "fastembed"]
SERVER_NAMES: tuple[ServerName, ...] = get_args(ServerName)
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


@dataclass(frozen=True)
class Start:
    """Command that starts a server on an export."""

    command: str
    note: str = ""


def server_refusal(server: ServerName, description: ModelDescription) -> str | None:
    """Return why a server cannot run a model as it is; None: it can."""
    if server not in ("tei", "llama.cpp"):
        return None
    if description.pooling == MODEL_POOLING:
        return "it pools the tokens of texts, and this model pools itself"
    if server in POOLINGS[description.pooling].servers:
        return None
    known = [one.name for one in POOLINGS.values() if server in one.servers]
    return (
        f"it pools by {', '.join(known)}, and this model by {description.pooling}: use --for fastembed, whose graph "
        "has the pooling inside"
    )


def start_of(server: ServerName, folder: Path, description: ModelDescription) -> Start:
    """Return the start command of a server. Options that the server does not read from the folder are in it."""
    prompts = ""
    if description.query_prompt or description.document_prompt:
        prompts = (
            f"the server adds no prompt: send {description.query_prompt!r} before queries and "
            f"{description.document_prompt!r} before documents"
        )
    if server == "tei":
        pooling = POOLINGS[description.pooling].servers[server]
        return Start(
            f"text-embeddings-router --model-id {folder} --pooling {pooling} --port 8080",
            prompts,
        )
    if server == "vllm":
        return Start(f"vllm serve {folder} --runner pooling --port 8080", prompts)
    if server == "infinity":
        return Start(f"infinity_emb v2 --model-id {folder} --port 8080", prompts)
    if server == "llama.cpp":
        pooling = POOLINGS[description.pooling].servers[server]
        return Start(
            f"llama-server -m {folder / 'model.gguf'} --embeddings --pooling {pooling} --port 8080",
            prompts,
        )
    return Start(f"python {folder / FASTEMBED_FILE}", prompts)


def write_server_files(
    server: ServerName, folder: Path, description: ModelDescription, dim: int
) -> None:
    """Write the files beside the export that a server needs; only fastembed, which is started from Python, has one."""
    if server == "fastembed":
        text = _FASTEMBED.format(
            file=FASTEMBED_FILE, dim=dim, query=description.query_prompt
        )
        (folder / FASTEMBED_FILE).write_text(text, encoding="utf-8")
