"""ExportFormat: the interface of an export format, what it is given, what reads its files, and the simplest one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

import numpy as np
import torch
from transformers import AutoTokenizer

from vembed.data.examples import Kind
from vembed.data.processing import MAX_CHARACTERS_PER_TOKEN, cut_words
from vembed.files import write_json
from vembed.inference.embedder import Embedder
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import quiet_transformers
from vembed.models.families.model_files import read_object
from vembed.saving.files import save_model

FormatName = Literal["safetensors", "onnx", "static", "openvino", "gguf"]
WeightPrecision = Literal["float32", "float16", "bfloat16", "int8"]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
WEIGHT_PRECISIONS: tuple[WeightPrecision, ...] = get_args(WeightPrecision)
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"


def log_nothing(line: str) -> None:
    """Take a line that nobody reads."""


@dataclass(frozen=True)
class ExportJob:
    """The model to export and how."""

    model: str
    """Name that the user gave."""
    embedder: Embedder
    """The model in float32. A format may change its attention function, so that its own vectors are computed first."""
    precision: WeightPrecision
    texts: Sequence[tuple[str, Kind]] = ()
    """Texts to train a student with; other formats need none."""
    log: Callable[[str], object] = log_nothing
    """Takes a line before each part that may take minutes."""


class ExportReader(Protocol):
    """An export in its own runtime. It uses the exported files alone."""

    runtime: str
    """Name and version of the runtime."""

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:
        """Return [n, d] float32 embeddings of the texts. `kind`: whose prompt is put before them; None for none."""
        ...

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return the ids that the runtime gives the model for a text."""
        ...


class ExportFormat(ABC):
    """One export format."""

    precisions: ClassVar[tuple[WeightPrecision, ...]]
    """Precisions of the weights that the format has."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that writing or checking it imports."""
    install: ClassVar[str] = ""
    """The command that installs them."""

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        names = [name for name in self.packages if find_spec(name) is None]
        if not names:
            return None
        return f"{', '.join(names)} not installed: {self.install}"

    @abstractmethod
    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""

    @abstractmethod
    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the export into an existing folder."""

    @abstractmethod
    def reader(self, folder: Path) -> ExportReader:
        """Return the export in its own runtime."""


class FolderTexts:
    """Prompts, tokenizer and maximum length of an exported folder, read from its files alone."""

    def __init__(self, folder: Path) -> None:
        stored = (read_object(folder / PROMPTS_FILE) or {}).get("prompts") or {}
        self.prompts = {name: prompt or "" for name, prompt in stored.items()}
        lengths = read_object(folder / LENGTH_FILE) or {}
        self.max_length = int(lengths["max_seq_length"])
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def with_prompt(self, text: str, kind: Kind | None) -> str:
        """Return a text with the prompt of its kind."""
        return self.prompts.get(kind or "", "") + text

    def token_ids(self, texts: Sequence[str], kind: Kind | None) -> list[list[int]]:
        """Return the token ids of each text with its prompt."""
        longest = MAX_CHARACTERS_PER_TOKEN * self.max_length
        from_left = self.tokenizer.truncation_side == "left"
        inputs = []
        for text in texts:
            whole = self.with_prompt(text, kind)
            inputs.append(cut_words(whole, longest, from_left=from_left))
        ids: list[list[int]] = self.tokenizer(
            inputs, truncation=True, max_length=self.max_length
        ).input_ids
        return ids

    def padded(
        self, rows: Sequence[Sequence[int]], length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return int64 `input_ids` and `attention_mask` [n, tokens] of a batch, padded to its longest text or to
        `length`, on the side that the tokenizer names."""
        width = length or max(len(row) for row in rows)
        ids = np.full((len(rows), width), self.tokenizer.pad_token_id, np.int64)
        mask = np.zeros((len(rows), width), np.int64)
        for number, row in enumerate(rows):
            start = width - len(row) if self.tokenizer.padding_side == "left" else 0
            ids[number, start : start + len(row)] = row
            mask[number, start : start + len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask}


def write_texts(
    folder: Path,
    query_prompt: str,
    document_prompt: str,
    max_length: int,
    similarity: str,
) -> None:
    """Write the files that FolderTexts and Sentence Transformers read, beside the tokenizer's own."""
    settings = {
        "model_type": "SentenceTransformer",
        "prompts": {"query": query_prompt, "document": document_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": similarity,
    }
    write_json(folder / PROMPTS_FILE, settings)
    lengths = {"max_seq_length": max_length, "do_lower_case": False}
    write_json(folder / LENGTH_FILE, lengths)


# ---- safetensors: the folder of Sentence Transformers, with weights in a chosen dtype ----------------------------------


class SafetensorsFormat(ExportFormat):
    """Whole weights, adapters merged, in the layout that Sentence Transformers, TEI, vLLM and infinity read."""

    precisions = ("float32", "float16", "bfloat16")
    packages = ("sentence_transformers",)
    install = "`pip install sentence-transformers`, or --no-check"

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        if "text" not in embedder.description.modalities:
            return "the check takes texts, and this model embeds images only: leave out --precision to copy it"
        if embedder.description.traits.sentence_transformers is None:
            return "Sentence Transformers cannot read its layout: leave out --precision to copy it"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the model's folder."""
        model = job.embedder.model
        assert isinstance(model, EmbeddingModel)  # an export has no shards
        dtype = getattr(torch, job.precision)
        save_model(folder, model, model.state_dict(), dtype=dtype)

    def reader(self, folder: Path) -> ExportReader:
        """Return the export in Sentence Transformers."""
        return SentenceTransformersReader(folder)


def open_in_sentence_transformers(folder: Path) -> Any:
    """Return a folder as a model of Sentence Transformers."""
    from sentence_transformers import SentenceTransformer

    with quiet_transformers():
        return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


class SentenceTransformersReader:
    """A folder in Sentence Transformers."""

    def __init__(self, folder: Path) -> None:
        self.runtime = f"sentence-transformers {version('sentence-transformers')}"
        self.folder = folder
        self.model = open_in_sentence_transformers(folder)

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return the token ids of a text with its prompt."""
        return FolderTexts(self.folder).token_ids([text], kind)[0]

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:
        """Return [n, d] embeddings."""
        options = {"show_progress_bar": False, "batch_size": 16}
        vectors: np.ndarray
        if kind == "query":
            vectors = self.model.encode_query(texts, **options)
        elif kind == "document":
            vectors = self.model.encode_document(texts, **options)
        else:
            # Without an empty prompt, `encode` would take the model's default one.
            vectors = self.model.encode(texts, prompt="", **options)
        return vectors.astype(np.float32)
