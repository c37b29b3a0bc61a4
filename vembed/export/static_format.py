"""StaticFormat: a student without layers, one vector per token and their mean, distilled from the model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from vembed.config.terms import Term
from vembed.data.examples import Kind
from vembed.export.check import encode_all
from vembed.export.formats import (
    ExportFormat,
    ExportJob,
    ExportReader,
    open_in_sentence_transformers,
    write_texts,
)
from vembed.files import write_json
from vembed.inference.embedder import Embedder
from vembed.losses.batch import EmbeddingLoss, LossBatch, TeacherVectors
from vembed.losses.build import TermLoss
from vembed.losses.vectors import Relational
from vembed.models.families.backbones import StaticConfig
from vembed.models.families.model_files import STATIC
from vembed.models.processors import load_tokenizer
from vembed.saving.files import MODULE

MAX_DIMS = 256
"""Most dimensions of a student."""
FREQUENCY_COEFFICIENT = 1e-4
"""Weight of a token: this / (this + its frequency), so that frequent tokens count little."""
TOKENS_PER_BATCH = 512
MAX_LENGTH_TOKENS = 65_536
"""As good as no limit. Sentence Transformers has no limit for this module."""

BATCH_TEXTS = 256
MAX_STEPS = 400
MAX_DISTILLATION_EPOCHS = 20
MIN_TRAINING_TEXTS = 32
LEARNING_RATE = 5e-3
HELD_OUT_FRACTION = 0.1
TEACHER = "model"


class StaticFormat(ExportFormat):
    """A table of token embeddings made by the model: each token alone through the model, principal components, weights
    by frequency; then trained on texts, so that its similarities follow the model's. It is another model, so that the
    check compares similarities and not vectors."""

    precisions = ("float32", "float16")
    packages = ("sentence_transformers",)
    install = "`pip install sentence-transformers`"

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        description = embedder.description
        if not description.traits.reads_only_text:
            return "a static student embeds texts, and this model also images"
        if not isinstance(load_tokenizer(description), PreTrainedTokenizerFast):
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
        if job.texts:
            # The student's tokens, without special ones; the teacher reads the texts with its own tokenizer and
            # prompts.
            texts = [text for text, _ in job.texts]
            encodings = backend.encode_batch(texts, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
            table = distil(table, ids, encode_all(job.embedder.encode, job.texts))
        # No special tokens.
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B")
        dtype = torch.float16 if job.precision == "float16" else torch.float32
        weights = {"embedding.weight": table.to(dtype).contiguous()}
        save_file(weights, folder / "model.safetensors")
        config = StaticConfig(
            *table.shape,
            dtype=str(dtype).removeprefix("torch."),
            architectures=["StaticModel"],
        )
        config.save_pretrained(folder)
        tokenizer.model_max_length = MAX_LENGTH_TOKENS
        tokenizer.save_pretrained(folder)
        (folder / "1_Normalize").mkdir()
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": MODULE + STATIC},
            {
                "idx": 1,
                "name": "1",
                "path": "1_Normalize",
                "type": MODULE + "Normalize",
            },
        ]
        write_json(folder / "modules.json", modules)
        write_texts(folder, "", "", MAX_LENGTH_TOKENS, "cosine")

    def reader(self, folder: Path) -> ExportReader:
        """Return the export in Sentence Transformers."""
        return StaticReader(folder)


class StaticReader:
    """A static model in Sentence Transformers."""

    def __init__(self, folder: Path) -> None:
        self.runtime = f"sentence-transformers {version('sentence-transformers')}"
        self.model = open_in_sentence_transformers(folder)

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:  # noqa: ARG002 - a student has no prompts
        """Return the token ids of a text."""
        encoding = self.model.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def encode(self, texts: list[str], kind: Kind | None) -> np.ndarray:  # noqa: ARG002 - a student has no prompts
        """Return [n, d] embeddings."""
        vectors: np.ndarray = self.model.encode(texts, show_progress_bar=False)
        return vectors.astype(np.float32)


def token_table(embedder: Embedder, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return [vocabulary, d] token vectors. Frequencies follow Zipf's law by the order of ids, as vocabularies are
    sorted by frequency; special tokens get zeros."""
    size = len(tokenizer)
    before, after = _special_tokens_around(tokenizer)
    chunks = []
    with torch.no_grad():
        for first in range(0, size, TOKENS_PER_BATCH):
            tokens = range(first, min(first + TOKENS_PER_BATCH, size))
            # Each token stands between the special tokens that the model was trained to see around a text.
            ids = torch.tensor([[*before, token, *after] for token in tokens])
            (vectors,) = embedder.model([("text", {"input_ids": ids})])
            chunks.append(vectors.float())
    vectors_VD = torch.cat(chunks)
    is_special = torch.zeros(size, dtype=torch.bool)
    for token in tokenizer.all_special_ids:
        if token < size:
            is_special[token] = True
    centred_VD = (vectors_VD - vectors_VD[~is_special].mean(dim=0)).double()
    covariance_DD = centred_VD[~is_special].T @ centred_VD[~is_special]
    # eigh gives ascending eigenvalues: the last vectors are the principal components.
    components_DD = torch.linalg.eigh(covariance_DD).eigenvectors.flip(1)
    num_dims = min(MAX_DIMS, vectors_VD.shape[1])
    shares = 1 / torch.arange(2, size + 2, dtype=torch.float64)
    frequency_V = shares / shares.sum()
    weight_V = FREQUENCY_COEFFICIENT / (FREQUENCY_COEFFICIENT + frequency_V)
    table_VD = (centred_VD @ components_DD[:, :num_dims]) * weight_V[:, None]
    table_VD[is_special] = 0.0
    table: Tensor = table_VD.float().contiguous()
    return table


def _special_tokens_around(
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[list[int], list[int]]:
    whole = tokenizer("a").input_ids
    inner = tokenizer("a", add_special_tokens=False).input_ids
    for start in range(len(whole)):
        stop = start + len(inner)
        if whole[start:stop] == inner:
            return whole[:start], whole[stop:]
    return [], whole[len(inner) :]


# ---- training ------------------------------------------------------------------------------------------------------


def distil(
    table_VD: Tensor,
    token_ids: Sequence[Sequence[int]],
    teacher_NE: np.ndarray,
) -> Tensor:
    """Return the table trained so that similarities of texts follow those of the model.

    `token_ids`, `teacher_NE`: of each text, its tokens and the model's vector. Texts without a token are left out. The
    loss is `loss: relational` of training: the squared difference of the student's and the model's similarities over
    all pairs of a batch. A tenth of the texts is held out; the table with the smallest loss on them is kept.
    """
    used = [number for number, ids in enumerate(token_ids) if len(ids)]
    if len(used) < MIN_TRAINING_TEXTS:
        return table_VD
    texts = [torch.tensor(token_ids[number]) for number in used]
    vectors_NE = F.normalize(torch.from_numpy(teacher_NE[used]).float(), dim=1)
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(texts), generator=draw)
    num_held_out = max(int(HELD_OUT_FRACTION * len(texts)), 2)
    held_out = order[:num_held_out][: 2 * BATCH_TEXTS]
    trained = order[num_held_out:]
    num_epochs = max(
        min(MAX_DISTILLATION_EPOCHS, MAX_STEPS * BATCH_TEXTS // len(trained)), 1
    )
    num_steps = num_epochs * -(-len(trained) // BATCH_TEXTS)
    loss = TermLoss(Term(1.0, Relational(), teacher=TEACHER, guide=None))

    table = table_VD.clone().requires_grad_()
    optimizer = torch.optim.AdamW([table], lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (num_steps + 1)
    )
    # The untrained table takes part, so that training never makes a student worse on the held-out texts.
    best_table = table_VD
    with torch.no_grad():
        best_loss = float(_relational(loss, table_VD, texts, vectors_NE, held_out))
    for _ in range(num_epochs):
        shuffled = trained[torch.randperm(len(trained), generator=draw)]
        for batch in torch.split(shuffled, BATCH_TEXTS):
            if len(batch) < 2:
                continue
            batch_loss = _relational(loss, table, texts, vectors_NE, batch)
            # A gradient of the table alone: parameters that a loss may have are not trained here.
            (table.grad,) = torch.autograd.grad(batch_loss, table)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            held_out_loss = float(_relational(loss, table, texts, vectors_NE, held_out))
        if held_out_loss < best_loss:
            best_loss = held_out_loss
            best_table = table.detach().clone()
    return best_table


def embed(table_VD: Tensor, texts: Sequence[Tensor]) -> Tensor:
    """Return [n, d] means of the tokens' vectors."""
    # embedding_bag takes the offsets at which texts begin: the sums of the lengths before each.
    lengths = torch.tensor([0, *(len(text) for text in texts[:-1])])
    offsets = lengths.cumsum(0)
    return F.embedding_bag(torch.cat(list(texts)), table_VD, offsets, mode="mean")


def _relational(
    loss: EmbeddingLoss,
    table_VD: Tensor,
    texts: Sequence[Tensor],
    vectors_NE: Tensor,
    numbers: Tensor,
) -> Tensor:
    """Return the loss of a batch: one half of the texts stands for queries, the other for positives."""
    half = len(numbers) // 2
    numbers = numbers[: 2 * half]
    query = torch.arange(half)
    positive = torch.arange(half, 2 * half)
    no_rows = torch.empty(0, dtype=torch.int64)
    teacher = TeacherVectors(vectors_NE[numbers], query, positive, no_rows)
    batch = LossBatch(
        embeddings=embed(table_VD, [texts[number] for number in numbers.tolist()]),
        content=torch.arange(2 * half),
        query=query,
        positive=positive,
        example=query,
        negative=no_rows,
        negative_example=no_rows,
        scores=None,
        rank_rows=slice(0, half),
        rank_negatives=slice(0, 0),
        teachers={TEACHER: teacher},
    )
    value: Tensor = loss(batch)
    return value
