"""SafetensorsFormat: the folder of Sentence Transformers, with weights in a chosen dtype."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vembed.data.examples import Kind
from vembed.export.formats import ExportFormat, ExportJob, ExportReader, FolderTexts
from vembed.inference.embedder import Embedder
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import quiet_transformers
from vembed.saving.files import save_model


class SafetensorsFormat(ExportFormat):
    """Whole weights, adapters merged, in the layout that Sentence Transformers, TEI, vLLM and infinity read."""

    precisions = ("float32", "float16", "bfloat16")

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        if find_spec("sentence_transformers") is None:
            return (
                "sentence-transformers, in which this format is checked, is not installed: "
                "`pip install sentence-transformers`, or --no-check"
            )
        return None

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
