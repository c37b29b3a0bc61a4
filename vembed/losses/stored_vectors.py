"""quantize_embeddings: the loss of the embeddings as they will be stored, beside that of the float embeddings.

With Q(e) the embedding e in its stored form, brought back to floats, and L the loss that the config names,

    loss = 1/2 L(E) + 1/2 L(Q(E))

binary   Q(e) = |e| / sqrt(d) * sign(e), sign(0) = -1. The first k coordinates of Q(e) are the signs of a Matryoshka
         embedding of size k, so that every size is trained.
int8     u = e / |e|; each coordinate of u is the middle of one of 256 levels between its lowest and highest value over
         all embeddings of the global batch, times |e|. A smaller size has the first coordinates of the same levels.

The derivative is straight-through: that of Q is that of the identity, so that d loss / d e = 1/2 dL/de + 1/2 dL/dQ(e).
For the cosine, which does not depend on |e|, the part along e is removed. Ranks hold the same gathered embeddings, so
that levels and gradients do not depend on their number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.losses.similarity import arithmetic_dtype

NUM_LEVELS = 256
EDGE = 1e-4
"""A value this near below a level, in levels, belongs to it."""
StoredForm = Literal["int8", "binary"]


class StoredVectors(EmbeddingLoss):
    """The mean of a loss of the float embeddings and of the same loss of the stored ones."""

    def __init__(self, inner: EmbeddingLoss, form: StoredForm, *, cosine: bool) -> None:
        super().__init__()
        self.inner = inner
        self.form = form
        self.cosine = cosine

    def forward(self, batch: LossBatch) -> Tensor:
        """See EmbeddingLoss."""
        vectors = as_stored(batch.embeddings, self.form, cosine=self.cosine)
        stored: Tensor = self.inner(replace(batch, embeddings=vectors))
        # The float embeddings last: the terms that are logged are theirs.
        as_floats: Tensor = self.inner(batch)
        return 0.5 * as_floats + 0.5 * stored

    def term_shares(self, source: int) -> dict[str, Tensor]:
        """See EmbeddingLoss."""
        return self.inner.term_shares(source)


def as_stored(embeddings: Tensor, form: StoredForm, *, cosine: bool) -> Tensor:
    """Return [U, D] embeddings in their stored form, with a straight-through derivative."""
    floats = embeddings.to(arithmetic_dtype(embeddings))
    unit = F.normalize(floats, dim=1)
    with torch.no_grad():
        stored = _signs(unit) if form == "binary" else _levels(unit)
        shift = stored - unit
    if cosine:
        # Through the normalisation, whose derivative has no part along the embedding.
        return unit + shift
    lengths: Tensor = torch.linalg.vector_norm(floats.detach(), dim=1, keepdim=True)
    return floats + shift * lengths


def _signs(unit: Tensor) -> Tensor:
    """Return vectors of signs, of length 1."""
    length = unit.new_full((), float(unit.shape[1]) ** -0.5)
    return torch.where(unit > 0, length, -length)


def _levels(unit: Tensor) -> Tensor:
    """Return the middles of the levels, as `vembed encode --precision int8` stores them."""
    low = unit.min(dim=0).values
    high = unit.max(dim=0).values
    steps = torch.where(high > low, (high - low) / (NUM_LEVELS - 1), 1.0)
    # The highest value stands on the edge of the last level, where rounding would decide, and processors differ in it.
    levels = ((unit - low) / steps + EDGE).clamp(0, NUM_LEVELS - 1).floor()
    return torch.where(high > low, low + (levels + 0.5) * steps, unit)
