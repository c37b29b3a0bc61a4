"""StaticFormat: a student without layers, one vector per token and their mean, distilled from the model."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from vembed.data.examples import Kind
from vembed.export.check import encode_all
from vembed.export.folder_texts import write_texts
from vembed.export.formats import ExportJob, ExportReader, WeightPrecision
from vembed.export.static_training import distil
from vembed.inference.embedder import Embedder
from vembed.models.backbone_loading import quiet_transformers
from vembed.models.families.model_files import STATIC
from vembed.models.families.static_model import StaticConfig
from vembed.models.processors import load_tokenizer
from vembed.saving.layout import MODULE

NUM_DIMS = 256
"""Most dimensions of a student."""
COEFFICIENT = 1e-4
"""Weight of a token: COEFFICIENT / (COEFFICIENT + its frequency), so that frequent tokens count little."""
TOKENS_AT_ONCE = 512
MAX_LENGTH = 65_536
"""Longest text in tokens: as good as no limit. Sentence Transformers has no limit for this module."""


class StaticFormat:
    """A table of token embeddings made by the model: each token alone through the model, principal components, weights
    by frequency; then trained on texts, so that its similarities follow the model's. It is another model, so that the
    check compares similarities and not vectors."""

    precisions: tuple[WeightPrecision, ...] = ("float32", "float16")

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        if find_spec("sentence_transformers") is None:
            return "sentence-transformers is not installed: `pip install sentence-transformers`"
        return None

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        if not embedder.description.traits.reads_only_text:
            return "a static student embeds texts, and this model also images"
        if not isinstance(
            load_tokenizer(embedder.description), PreTrainedTokenizerFast
        ):
            return "a static student needs the tokenizer as tokenizer.json"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the table, the tokenizer and modules.json."""
        tokenizer = load_tokenizer(job.embedder.description)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        table = token_table(job.embedder, tokenizer)
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        # The student's tokens, without special ones; the teacher reads the texts with its own tokenizer and prompts.
        if job.texts:
            ids = [
                one.ids
                for one in backend.encode_batch(
                    [text for text, _ in job.texts], add_special_tokens=False
                )
            ]
            table, _ = distil(table, ids, encode_all(job.embedder.encode, job.texts))
        backend.post_processor = TemplateProcessing(
            single="$A", pair="$A $B"
        )  # no special tokens
        dtype = torch.float16 if job.precision == "float16" else torch.float32
        save_file(
            {"embedding.weight": table.to(dtype).contiguous()},
            folder / "model.safetensors",
        )
        config = StaticConfig(
            *table.shape,
            dtype=str(dtype).removeprefix("torch."),
            architectures=["StaticModel"],
        )
        config.save_pretrained(folder)
        tokenizer.model_max_length = MAX_LENGTH
        tokenizer.save_pretrained(folder)
        (folder / "1_Normalize").mkdir()
        kinds = [("", STATIC), ("1_Normalize", "Normalize")]
        modules = [
            {"idx": at, "name": str(at), "path": path, "type": MODULE + kind}
            for at, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(
            json.dumps(modules, indent=2) + "\n", encoding="utf-8"
        )
        write_texts(folder, "", "", MAX_LENGTH, "cosine")

    def reader(self, folder: Path) -> ExportReader:
        """Return the export in Sentence Transformers."""
        return StaticReader(folder)


class StaticReader:
    """A static model in Sentence Transformers."""

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self.runtime = f"sentence-transformers {version('sentence-transformers')}"
        with quiet_transformers():
            self.model = SentenceTransformer(
                str(folder), device="cpu", local_files_only=True
            )

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:  # noqa: ARG002 - a student has no prompts
        """Return the token ids of a text."""
        found: list[int] = self.model.tokenizer.encode(
            text, add_special_tokens=False
        ).ids
        return found

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:  # noqa: ARG002 - a student has no prompts
        """Return [n, d] embeddings."""
        vectors: np.ndarray = self.model.encode(texts, show_progress_bar=False)
        return vectors.astype(np.float32)


def token_table(embedder: Embedder, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return [vocabulary, d] token vectors. Frequencies follow Zipf's law by the order of ids, as vocabularies are
    sorted by frequency; special tokens get zeros."""
    size = len(tokenizer)
    # Special tokens that the model was trained to see before and after a text; each token stands between them.
    around = tokenizer("a").input_ids
    inner = tokenizer("a", add_special_tokens=False).input_ids
    start = next(
        (at for at in range(len(around)) if around[at : at + len(inner)] == inner), 0
    )
    before, after = around[:start], around[start + len(inner) :]
    rows = []
    with torch.no_grad():
        for first in range(0, size, TOKENS_AT_ONCE):
            ids = [
                [*before, token, *after]
                for token in range(first, min(first + TOKENS_AT_ONCE, size))
            ]
            (vectors,) = embedder.model([("text", {"input_ids": torch.tensor(ids)})])
            rows.append(vectors.float())
    vectors = torch.cat(rows)
    special = torch.tensor(
        sorted({one for one in tokenizer.all_special_ids if one < size}),
        dtype=torch.int64,
    )
    kept = torch.ones(size, dtype=torch.bool)
    kept[special] = False
    centred = (vectors - vectors[kept].mean(dim=0)).double()
    covariance = centred[kept].T @ centred[kept]
    dim = min(NUM_DIMS, vectors.shape[1])
    # eigh gives ascending eigenvalues: the last vectors are the principal components.
    directions = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :dim]
    ranks = torch.arange(2, size + 2, dtype=torch.float64)
    frequency = (1 / ranks) / (1 / ranks).sum()
    table = (centred @ directions) * (COEFFICIENT / (COEFFICIENT + frequency))[:, None]
    table[special] = 0.0
    found: torch.Tensor = table.float().contiguous()
    return found
