"""distil(): token vectors of a static student, trained so that similarities of texts follow those of the model.

The loss is `loss: relational` of training: the squared difference of the student's and the model's similarities over
all pairs of a batch. A tenth of the texts is held out; the table with the smallest loss on them is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vembed.config.terms import Term
from vembed.losses.batch import EmbeddingLoss, LossBatch, TeacherVectors
from vembed.losses.build import TermLoss
from vembed.losses.vectors import Relational

BATCH = 256
MOST_STEPS = 400
MOST_EPOCHS = 20
FEWEST_TEXTS = 32
"""Texts below which nothing is trained."""
LEARNING_RATE = 5e-3
HELD_OUT = 0.1
TEACHER = "model"


def distil(
    table_VD: Tensor, token_ids: Sequence[Sequence[int]], teacher_NE: np.ndarray
) -> tuple[Tensor, int]:
    """Return the trained table and the number of steps. `token_ids`, `teacher_NE`: of each text, its tokens and the
    model's vector. Texts without a token are left out."""
    known = [number for number, ids in enumerate(token_ids) if len(ids)]
    if len(known) < FEWEST_TEXTS:
        return table_VD, 0
    texts = [torch.tensor(token_ids[number]) for number in known]
    vectors = F.normalize(torch.from_numpy(teacher_NE[known]).float(), dim=1)
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(texts), generator=draw)
    num_held = max(int(HELD_OUT * len(texts)), 2)
    held, rest = order[:num_held], order[num_held:]
    num_epochs = max(min(MOST_EPOCHS, MOST_STEPS * BATCH // len(rest)), 1)
    num_steps = num_epochs * -(-len(rest) // BATCH)
    loss = TermLoss(Term(1.0, Relational(), teacher=TEACHER, guide=None))

    table = table_VD.clone().requires_grad_()
    optimizer = torch.optim.AdamW([table], lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (num_steps + 1)
    )
    # The untrained table takes part, so that training never makes a student worse on the held-out texts.
    best, least = table_VD, _loss_of(loss, table_VD, texts, vectors, held[: 2 * BATCH])
    for _ in range(num_epochs):
        for some in torch.split(rest[torch.randperm(len(rest), generator=draw)], BATCH):
            if len(some) < 2:
                continue
            optimizer.zero_grad()
            # A gradient of the table alone: parameters that a loss may have are not trained here.
            table.grad = torch.autograd.grad(
                _relational(loss, table, texts, vectors, some), table
            )[0]
            optimizer.step()
            schedule.step()
        found = _loss_of(loss, table.detach(), texts, vectors, held[: 2 * BATCH])
        if found < least:
            best, least = table.detach().clone(), found
    return best, num_steps


def embed(table_VD: Tensor, texts: Sequence[Tensor]) -> Tensor:
    """Return [n, d] means of the tokens' vectors."""
    # embedding_bag takes the offsets at which texts begin: the sums of the lengths before each.
    lengths = torch.tensor([0, *(len(one) for one in texts[:-1])])
    return F.embedding_bag(
        torch.cat(list(texts)), table_VD, lengths.cumsum(0), mode="mean"
    )


def _loss_of(
    loss: EmbeddingLoss,
    table: Tensor,
    texts: Sequence[Tensor],
    vectors: Tensor,
    some: Tensor,
) -> float:
    with torch.no_grad():
        return float(_relational(loss, table, texts, vectors, some))


def _relational(
    loss: EmbeddingLoss,
    table: Tensor,
    texts: Sequence[Tensor],
    vectors: Tensor,
    some: Tensor,
) -> Tensor:
    """Return the loss of a batch: one half of the texts stands for queries, the other for positives."""
    half = len(some) // 2
    query, positive, none = (
        torch.arange(half),
        torch.arange(half, 2 * half),
        torch.empty(0, dtype=torch.int64),
    )
    batch = LossBatch(
        embeddings=embed(
            table, [texts[number] for number in some[: 2 * half].tolist()]
        ),
        content=torch.arange(2 * half),
        query=query,
        positive=positive,
        example=query,
        negative=none,
        negative_example=none,
        scores=None,
        own_rows=slice(None),
        own_negatives=slice(None),
        teachers={
            TEACHER: TeacherVectors(vectors[some[: 2 * half]], query, positive, none)
        },
    )
    found: Tensor = loss(batch)
    return found
