"""The losses as their formulas read: dense, float64, plain autograd, masks by Python sets. tests/parity uses it too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossBatch

TIE = 64 * torch.finfo(torch.float64).eps


def reference_loss(
    batch: LossBatch,
    config: TrainConfig,
    *,
    scale: Tensor | float | None = None,
    bias: Tensor | float = -10.0,
    mrl_dims: Sequence[int] = (),
) -> Tensor:
    """The share of `batch.own_rows` in L; with own_rows = slice(None) it is L.

    scale: 1 / temperature, or the sigmoid loss's learned scale; by default from the config.
    """
    embeddings = batch.embeddings.double()
    scale = 1.0 / config.temperature if scale is None else scale
    dims = list(config.mrl_dims or mrl_dims) if config.use_mrl else [embeddings.shape[1]]
    weights = (config.mrl_weights if config.use_mrl else None) or [1.0] * len(dims)
    total = embeddings.sum() * 0.0
    for dim, weight in zip(dims, weights, strict=True):
        x = embeddings[:, :dim]
        if config.similarity == "cosine":
            x = torch.stack([row / row.norm() if bool(row.any()) else row * 0.0 for row in x])
        match config.loss:
            case "infonce":
                loss = infonce(x, batch, config, scale)
            case "sigmoid":
                loss = sigmoid(x, batch, config, scale, bias)
            case "cosent":
                loss = cosent(x, batch, scale)
            case "cosine":
                loss = cosine(x, batch)
            case "triplet":
                loss = triplet(x, batch, config)
        total = total + weight * loss
    return total


class Rows:
    """Who is a candidate of whom, one row at a time."""

    def __init__(self, batch: LossBatch, config: TrainConfig) -> None:
        self.config = config
        content = batch.content.tolist()
        self.query, self.positive, self.negative = (
            batch.query.tolist(),
            batch.positive.tolist(),
            batch.negative.tolist(),
        )
        self.example, self.negative_example = batch.example.tolist(), batch.negative_example.tolist()
        self.query_content = [content[u] for u in self.query]
        self.positive_content = [content[u] for u in self.positive]
        self.negative_content = [content[u] for u in self.negative]
        self.own = range(len(self.query))[batch.own_rows]
        everything = config.negatives_from == "all_ranks"
        self.rows = range(len(self.query)) if everything else self.own
        num_negatives = len(self.negative)
        self.negatives = range(num_negatives) if everything else range(num_negatives)[batch.own_negatives]

    def forbidden(self, i: int) -> set[int]:
        """Contents that are no negatives of row i."""
        of_example = {c for c, e in zip(self.positive_content, self.example, strict=True) if e == self.example[i]}
        return of_example | {self.query_content[i]}

    def documents(self, i: int) -> list[int]:
        """Embeddings of D_i, one entry per occurrence."""
        forbidden, by_content = self.forbidden(i), self.config.mask_duplicates
        found = [
            self.positive[j]
            for j in self.rows
            if self.example[j] != self.example[i] and not (by_content and self.positive_content[j] in forbidden)
        ]
        for h in self.negatives:
            if self.config.hard_negatives_scope == "own" and self.negative_example[h] != self.example[i]:
                continue
            if not (by_content and self.negative_content[h] in forbidden):
                found.append(self.negative[h])
        return found

    def queries(self, i: int) -> list[int]:
        """Embeddings of Q_i."""
        forbidden, by_content = self.forbidden(i), self.config.mask_duplicates
        return [
            self.query[j]
            for j in self.rows
            if self.example[j] != self.example[i] and not (by_content and self.query_content[j] in forbidden)
        ]

    def queries_of_document(self, i: int) -> list[int]:
        """Embeddings of R_i."""
        found = []
        for j in self.rows:
            same_query = self.query_content[j] == self.query_content[i]
            known = self.positive_content[i] in self.forbidden(j)
            if self.example[j] != self.example[i] and not (self.config.mask_duplicates and (same_query or known)):
                found.append(self.query[j])
        return found

    def in_reach(self, scores: Tensor, own_score: Tensor) -> Tensor:
        """Scores of the candidates that the margin leaves."""
        if self.config.false_negative_margin is None:
            return scores
        ceiling = own_score.detach() + self.config.false_negative_margin
        return scores[scores.detach() <= ceiling + TIE * ceiling.abs().clamp(min=1.0)]

    def forward_scores(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The own pair's score and those of all candidates of the forward direction."""
        query, positive = x[self.query[i]], x[self.positive[i]]
        scores = [x[self.documents(i)] @ query]
        if self.config.query_query_negatives:
            scores.append(x[self.queries(i)] @ query)
        if self.config.document_document_negatives:
            scores.append(x[self.documents(i)] @ positive)
        return query @ positive, self.in_reach(torch.cat(scores), query @ positive)

    def reverse_scores(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The same for the reverse direction."""
        query, positive = x[self.query[i]], x[self.positive[i]]
        return query @ positive, self.in_reach(x[self.queries_of_document(i)] @ positive, query @ positive)


def softmax_loss(own: Tensor, others: Tensor, scale: Tensor | float) -> Tensor:
    """-log(exp(own) / (exp(own) + sum exp(others)))."""
    return torch.logsumexp(torch.cat((own[None], others)) * scale, 0) - own * scale


def infonce(x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float) -> Tensor:
    rows, loss = Rows(batch, config), x.sum() * 0.0
    for i in rows.own:
        row = softmax_loss(*rows.forward_scores(x, i), scale)
        if config.bidirectional:
            row = (row + softmax_loss(*rows.reverse_scores(x, i), scale)) / 2
        loss = loss + row
    return loss / max(1, batch.num_rows)


def sigmoid(x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    rows, loss = Rows(batch, config), x.sum() * 0.0
    zero = x.new_zeros(())
    for i in rows.own:
        own, others = rows.forward_scores(x, i)
        loss = loss + torch.logaddexp(-(own * scale + bias), zero)
        loss = loss + torch.logaddexp(others * scale + bias, zero).sum()
    return loss / max(1, batch.num_rows)


def cosent(x: Tensor, batch: LossBatch, scale: Tensor | float) -> Tensor:
    similarity = (x[batch.query] * x[batch.positive]).sum(1)
    higher, lower = torch.nonzero(batch.scores[:, None] > batch.scores[None, :], as_tuple=True)
    terms = torch.cat((x.new_zeros(1), (similarity[lower] - similarity[higher]) * scale))
    return torch.logsumexp(terms, 0) * len(range(batch.num_rows)[batch.own_rows]) / max(1, batch.num_rows)


def cosine(x: Tensor, batch: LossBatch) -> Tensor:
    similarity = (x[batch.query] * x[batch.positive]).sum(1)
    return (similarity - batch.scores)[batch.own_rows].square().sum() / max(1, batch.num_rows)


def triplet(x: Tensor, batch: LossBatch, config: TrainConfig) -> Tensor:
    rows, loss, count = Rows(batch, config), x.sum() * 0.0, 0
    for i in range(batch.num_rows):
        for h, u in enumerate(rows.negative):
            duplicate = config.mask_duplicates and rows.negative_content[h] in rows.forbidden(i)
            if rows.negative_example[h] != rows.example[i] or duplicate:
                continue
            count += 1
            if i in rows.own:
                difference = x[u] @ x[rows.query[i]] - x[rows.positive[i]] @ x[rows.query[i]]
                loss = loss + torch.clamp(difference + config.triplet_margin, min=0.0)
    return loss / max(1, count)
