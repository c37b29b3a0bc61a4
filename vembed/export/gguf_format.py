"""GgufFormat: a file for llama.cpp, written by its own converter and checked in llama-cpp-python or xllamacpp."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vembed.data.examples import Kind
from vembed.errors import RunError
from vembed.export.formats import (
    ExportFormat,
    ExportJob,
    ExportReader,
    FolderTexts,
    SafetensorsFormat,
)
from vembed.inference.embedder import Embedder
from vembed.models.poolings.table import POOLINGS

GGUF_FILE = "model.gguf"
CONVERTER = "convert_hf_to_gguf.py"
_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
NUM_SPECIAL_TOKENS = 8
"""Room for special tokens beside a text of the greatest length."""


class GgufFormat(ExportFormat):
    """GGUF. llama.cpp pools and normalises itself; a Dense module or truncation has no place in the file."""

    precisions = ("float32", "float16", "bfloat16", "int8")

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        if shutil.which(CONVERTER) is None:
            return (
                f"{CONVERTER} is not on the PATH: `git clone https://github.com/ggml-org/llama.cpp`, install its "
                "requirements, and add its folder to PATH"
            )
        if find_spec("llama_cpp") is None and find_spec("xllamacpp") is None:
            return (
                "neither llama-cpp-python nor xllamacpp, in which this format is checked, is installed: "
                "`pip install xllamacpp` (wheels) or `pip install llama-cpp-python` (compiled there)"
            )
        return None

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        description = embedder.description
        if not description.traits.reads_only_text:
            return "llama.cpp's embeddings are of text models"
        if embedder.head is not None or embedder.truncate_dim is not None:
            return (
                "llama.cpp has no Dense module and no truncate_dim; export it as onnx"
            )
        pooling = POOLINGS[description.pooling]
        if "gguf" not in pooling.servers:
            known = [
                other.name for other in POOLINGS.values() if "gguf" in other.servers
            ]
            return f"llama.cpp pools by {', '.join(known)}, and this model by {pooling.name}"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write `model.gguf` and, for the check, the tokenizer and prompts."""
        # The converter reads a folder of Transformers and rounds the weights itself.
        whole = folder / "whole"
        SafetensorsFormat().write(ExportJob(job.model, job.embedder, "float32"), whole)
        converter = shutil.which(CONVERTER)
        assert converter is not None
        command = [sys.executable, converter, str(whole)]
        command += ["--outfile", str(folder / GGUF_FILE)]
        command += ["--outtype", _TYPES[job.precision]]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            last_line = process.stderr.strip().splitlines()[-1:]
            raise RunError(f"{CONVERTER} failed: {last_line}")
        # The tokenizer files stay for the check.
        for path in whole.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                path.rename(folder / path.name)
        shutil.rmtree(whole)

    def reader(self, folder: Path) -> ExportReader:
        """Return the export in llama.cpp."""
        if find_spec("llama_cpp") is not None:
            return GgufReader(folder)
        return GgufServer(folder)


class GgufReader:
    """An export in llama.cpp, by llama-cpp-python."""

    def __init__(self, folder: Path) -> None:
        module = import_module("llama_cpp")
        self.runtime = f"llama.cpp (llama-cpp-python {module.__version__})"
        self.texts = FolderTexts(folder)
        # llama.cpp pools within one micro-batch (n_ubatch), so a whole text must fit into one.
        length = self.texts.max_length
        self.model: Any = module.Llama(
            str(folder / GGUF_FILE),
            embedding=True,
            n_ctx=length,
            n_batch=length,
            n_ubatch=length,
            verbose=False,
        )

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return llama.cpp's own token ids of a text with its prompt."""
        whole = self.texts.with_prompt(text, kind).encode()
        # special: prompts may hold special tokens in writing, such as <|im_end|>.
        ids: list[int] = self.model.tokenize(whole, add_bos=True, special=True)
        return ids[: self.texts.max_length]

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:
        """Return [n, d] embeddings."""
        vectors = []
        for text in texts:
            whole = self.texts.with_prompt(text, kind)
            vectors.append(self.model.embed(whole, normalize=True, truncate=True))
        return np.array(vectors, np.float32)


class GgufServer:
    """An export in llama.cpp's own server, inside this process, by xllamacpp."""

    def __init__(self, folder: Path) -> None:
        module = import_module("xllamacpp")
        self.runtime = f"llama.cpp (xllamacpp {module.__version__})"
        self.texts = FolderTexts(folder)
        settings = module.CommonParams()
        settings.model.path = str(folder / GGUF_FILE)
        settings.embedding = True
        settings.n_parallel = 1
        settings.cpuparams.n_threads = torch.get_num_threads()
        num_tokens = self.texts.max_length + NUM_SPECIAL_TOKENS
        settings.n_ctx = num_tokens
        settings.n_batch = num_tokens
        settings.n_ubatch = num_tokens
        self.server: Any = module.Server(settings)

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return the token ids of a text with its prompt, by the exported tokenizer: the server does not tell its
        own."""
        return self.texts.token_ids([text], kind)[0]

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:
        """Return [n, d] embeddings."""
        vectors = []
        for text in texts:
            ids = self.token_ids(text, kind)
            # The server refuses what is longer than its context; clients cut such texts, and so it is done here.
            is_cut = len(ids) >= self.texts.max_length
            content = ids if is_cut else self.texts.with_prompt(text, kind)
            answer = self.server.handle_embeddings({"input": content})
            if "data" not in answer:
                raise RunError(
                    f"llama.cpp gave no embedding of a text of {len(ids):,d} tokens: {answer}"
                )
            vectors.append(answer["data"][0]["embedding"])
        return np.array(vectors, np.float32)
