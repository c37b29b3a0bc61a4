"""The losses as their formulas read: dense, float64, plain autograd, masks by Python sets. tests/parity uses it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.losses import reference_teachers as taught
from vembed.config.schema import TrainConfig
from vembed.config.terms import guide_of, loss_terms
from vembed.losses.batch import LossBatch

TIE = 64 * torch.finfo(torch.float64).eps


def reference_loss(
    batch: LossBatch,
    config: TrainConfig,
    *,
    parameters: Mapping[str, Tensor] | None = None,
    mrl_dims: Sequence[int] = (),
) -> Tensor:
    """The share of `batch.own_rows` in L; with own_rows = slice(None) it is L.

    `parameters`: the loss's learned parameters by name.
    """
    total = batch.embeddings.double().sum() * 0.0
    for number, (weight, term) in enumerate(loss_terms(config)):
        prefix = (
            ""
            if config.objective.losses is None and not config.objective.anchor_weight
            else f"terms.{number}."
        )
        own = {
            name.removeprefix(prefix): one
            for name, one in (parameters or {}).items()
            if name.startswith(prefix)
        }
        total = total + weight * term_loss(batch, term, own, mrl_dims)
    return total


def term_loss(
    batch: LossBatch,
    config: TrainConfig,
    parameters: Mapping[str, Tensor],
    mrl_dims: Sequence[int],
) -> Tensor:
    """The loss of a config with one term."""
    scale: Tensor | float = 1.0 / config.objective.temperature
    if "temperature" in parameters:
        scale = 1.0 / parameters["temperature"]
    elif "log_scale" in parameters:
        scale = parameters["log_scale"].exp()
    batch, contents = taught.with_plain_mixtures(batch, config)
    embeddings = batch.embeddings.double()
    dims = (
        list(config.matryoshka.mrl_dims or mrl_dims)
        if config.matryoshka.use_mrl
        else [embeddings.shape[1]]
    )
    if config.objective.loss == "anchor":
        dims = [embeddings.shape[1]]
    weights = (
        config.matryoshka.mrl_weights
        if config.matryoshka.use_mrl and len(dims) > 1
        else None
    ) or [1.0] * len(dims)
    total = embeddings.sum() * 0.0
    for dim, weight in zip(dims, weights, strict=True):
        z = x = embeddings[:, :dim]
        if config.objective.similarity == "cosine":
            x = torch.stack(
                [row / row.norm() if bool(row.any()) else row * 0.0 for row in x]
            )
        match config.objective.loss:
            case "infonce":
                loss = infonce(x, batch, config, scale, contents)
            case "sigmoid":
                loss = sigmoid(
                    x, batch, config, scale, parameters.get("bias", -10.0), contents
                )
            case "circle":
                loss = circle(x, batch, config, scale)
            case "angle":
                loss = angle(z, batch, scale)
            case "cosent":
                loss = cosent(x, batch, scale)
            case "cosine":
                loss = cosine(x, batch)
            case "triplet":
                loss = triplet(x, batch, config)
            case "kl":
                listed = config.objective.distill_candidates == "listed"
                loss = (taught.kl_listed if listed else kl_batch)(
                    x, batch, config, scale
                )
            case "score_mse":
                loss = taught.score_mse(x, batch, config, scale)
            case "margin_mse":
                loss = taught.margin_mse(x, batch, config)
            case "listwise":
                loss = taught.listwise(x, batch, config, scale)
            case "ranknet":
                loss = taught.ranknet(x, batch, config, scale)
            case "relational":
                loss = taught.relational(x, batch, config)
            case "spread_out":
                loss = taught.spread_out(x, batch, config)
            case "anchor":
                loss = taught.embedding(
                    z, batch, config, torch.eye(z.shape[1], dtype=torch.float64)
                )
            case "embedding":
                loss = taught.embedding(z, batch, config, parameters["projection"])
        total = total + weight * loss
    return total


class Rows:
    """Who is a candidate of whom, one row at a time."""

    def __init__(
        self,
        batch: LossBatch,
        config: TrainConfig,
        contents: list[set[int]] | None = None,
    ) -> None:
        """`contents`: those of each hard negative's parts, where some are mixtures."""
        self.config = config
        self.guide = (
            None
            if (name := guide_of(config)) is None
            else taught.by_embedding(batch, name)
        )
        content = batch.content.tolist()
        self.query, self.positive, self.negative = (
            batch.query.tolist(),
            batch.positive.tolist(),
            batch.negative.tolist(),
        )
        self.example, self.negative_example = (
            batch.example.tolist(),
            batch.negative_example.tolist(),
        )
        self.query_content = [content[u] for u in self.query]
        self.positive_content = [content[u] for u in self.positive]
        self.negative_content = [content[u] for u in self.negative]
        self.negative_contents = contents or [{one} for one in self.negative_content]
        self.own = range(len(self.query))[batch.own_rows]
        everything = config.objective.negatives_from == "all_ranks"
        self.rows = range(len(self.query)) if everything else self.own
        num_negatives = len(self.negative)
        self.negatives = (
            range(num_negatives)
            if everything
            else range(num_negatives)[batch.own_negatives]
        )

    def forbidden(self, i: int) -> set[int]:
        """Contents that are no negatives of row i."""
        of_example = {
            c
            for c, e in zip(self.positive_content, self.example, strict=True)
            if e == self.example[i]
        }
        return of_example | {self.query_content[i]}

    def documents(self, i: int) -> list[int]:
        """Embeddings of D_i, one entry per occurrence."""
        forbidden, by_content = self.forbidden(i), self.config.objective.mask_duplicates
        found = [
            self.positive[j]
            for j in self.rows
            if self.example[j] != self.example[i]
            and not (by_content and self.positive_content[j] in forbidden)
        ]
        for h in self.negatives:
            if (
                self.config.objective.hard_negatives_scope == "own"
                and self.negative_example[h] != self.example[i]
            ):
                continue
            if not (by_content and self.negative_contents[h] & forbidden):
                found.append(self.negative[h])
        return found

    def queries(self, i: int) -> list[int]:
        """Embeddings of Q_i."""
        forbidden, by_content = self.forbidden(i), self.config.objective.mask_duplicates
        return [
            self.query[j]
            for j in self.rows
            if self.example[j] != self.example[i]
            and not (by_content and self.query_content[j] in forbidden)
        ]

    def queries_of_document(self, i: int) -> list[int]:
        """Embeddings of R_i."""
        found = []
        for j in self.rows:
            same_query = self.query_content[j] == self.query_content[i]
            known = self.positive_content[i] in self.forbidden(j)
            if self.example[j] != self.example[i] and not (
                self.config.objective.mask_duplicates and (same_query or known)
            ):
                found.append(self.query[j])
        return found

    def in_reach(self, scores: Tensor, own_score: Tensor) -> Tensor:
        """Scores of the candidates that the margin leaves."""
        if self.config.objective.false_negative_margin is None:
            return scores
        ceiling = own_score.detach() + self.config.objective.false_negative_margin
        return scores[scores.detach() <= ceiling + TIE * ceiling.abs().clamp(min=1.0)]

    def scores(self, x: Tensor, i: int, anchor: int, others: list[int]) -> Tensor:
        """Scores of an anchor with those of the others that the guide leaves."""
        if self.guide is not None:
            own = self.query[i], self.positive[i]
            others = taught.in_reach_of_guide(
                self.guide, self.config, anchor, *own, others
            )
        return x[others] @ x[anchor]

    def forward_scores(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The own pair's score and those of all candidates of the forward direction."""
        query, positive = self.query[i], self.positive[i]
        scores = [self.scores(x, i, query, self.documents(i))]
        if self.config.objective.query_query_negatives:
            scores.append(self.scores(x, i, query, self.queries(i)))
        if self.config.objective.document_document_negatives:
            scores.append(self.scores(x, i, positive, self.documents(i)))
        own = x[query] @ x[positive]
        return own, self.in_reach(torch.cat(scores), own)

    def reverse_scores(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The same for the reverse direction."""
        own = x[self.query[i]] @ x[self.positive[i]]
        return own, self.in_reach(
            self.scores(x, i, self.positive[i], self.queries_of_document(i)), own
        )


def softmax_loss(
    own: Tensor, others: Tensor, scale: Tensor | float, config: TrainConfig
) -> Tensor:
    """-log(exp(own) / (exp(own) + sum exp(others))), with hardness_alpha and focal_gamma."""
    logits = others * scale + config.objective.hardness_alpha * others.detach()
    loss = torch.logsumexp(torch.cat(((own * scale)[None], logits)), 0) - own * scale
    if config.objective.focal_gamma and len(others):
        loss = (1 - torch.exp(-loss)) ** config.objective.focal_gamma * loss
    return loss


def infonce(
    x: Tensor,
    batch: LossBatch,
    config: TrainConfig,
    scale: Tensor | float,
    contents: list[set[int]],
) -> Tensor:
    rows, loss = Rows(batch, config, contents), x.sum() * 0.0
    for i in rows.own:
        row = softmax_loss(*rows.forward_scores(x, i), scale, config)
        if config.objective.bidirectional:
            row = (row + softmax_loss(*rows.reverse_scores(x, i), scale, config)) / 2
        loss = loss + row
    return loss / max(1, batch.num_rows)


def kl_batch(
    x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float
) -> Tensor:
    rows, loss = Rows(batch, config), x.sum() * 0.0
    vectors = taught.by_embedding(batch, str(taught.followed_teacher(config)))
    for i in rows.own:
        documents = [rows.positive[i], *rows.documents(i)]
        student, teacher = (
            x[documents] @ x[rows.query[i]],
            vectors[documents] @ vectors[rows.query[i]],
        )
        loss = loss + taught.divergence(
            student * scale, teacher * taught.target_scale(config)
        )
    return loss / max(1, batch.num_rows)


def sigmoid(
    x: Tensor,
    batch: LossBatch,
    config: TrainConfig,
    scale: Tensor | float,
    bias: Tensor | float,
    contents: list[set[int]],
) -> Tensor:
    rows, loss = Rows(batch, config, contents), x.sum() * 0.0
    zero = x.new_zeros(())
    for i in rows.own:
        own, others = rows.forward_scores(x, i)
        loss = loss + torch.logaddexp(-(own * scale + bias), zero)
        loss = loss + torch.logaddexp(others * scale + bias, zero).sum()
    return loss / max(1, batch.num_rows)


def circle(
    x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float
) -> Tensor:
    rows, loss, margin = (
        Rows(batch, config),
        x.sum() * 0.0,
        config.objective.circle_margin,
    )

    def of_row(own: Tensor, others: Tensor) -> Tensor:
        positive = torch.clamp(1 + margin - own, min=0.0).detach() * (own - 1 + margin)
        negative = torch.clamp(others + margin, min=0.0).detach() * (others - margin)
        return torch.logaddexp(
            torch.logsumexp(negative * scale, 0) - positive * scale, x.new_zeros(())
        )

    for i in rows.own:
        row = (
            of_row(*rows.forward_scores(x, i))
            if len(rows.forward_scores(x, i)[1])
            else x.sum() * 0.0
        )
        if config.objective.bidirectional:
            own, others = rows.reverse_scores(x, i)
            row = (row + (of_row(own, others) if len(others) else 0.0)) / 2
        loss = loss + row
    return loss / max(1, batch.num_rows)


def angle(z: Tensor, batch: LossBatch, scale: Tensor | float) -> Tensor:
    """As AnglE has it, with complex numbers."""
    half = z.shape[1] // 2
    numbers = torch.complex(z[:, :half], z[:, half:])
    first, second = numbers[batch.query], numbers[batch.positive]
    quotient = (first * second.conj()) / second.abs().square().sum(1, keepdim=True)
    quotient = quotient * second.abs().square().sum(1, keepdim=True).sqrt()
    quotient = quotient / first.abs().square().sum(1, keepdim=True).sqrt()
    return ordered(torch.abs((quotient.real + quotient.imag).sum(1)), batch, scale)


def cosent(x: Tensor, batch: LossBatch, scale: Tensor | float) -> Tensor:
    return ordered((x[batch.query] * x[batch.positive]).sum(1), batch, scale)


def ordered(similarity: Tensor, batch: LossBatch, scale: Tensor | float) -> Tensor:
    x = similarity
    higher, lower = torch.nonzero(
        batch.scores[:, None] > batch.scores[None, :], as_tuple=True
    )
    terms = torch.cat(
        (x.new_zeros(1), (similarity[lower] - similarity[higher]) * scale)
    )
    return (
        torch.logsumexp(terms, 0)
        * len(range(batch.num_rows)[batch.own_rows])
        / max(1, batch.num_rows)
    )


def cosine(x: Tensor, batch: LossBatch) -> Tensor:
    similarity = (x[batch.query] * x[batch.positive]).sum(1)
    return (similarity - batch.scores)[batch.own_rows].square().sum() / max(
        1, batch.num_rows
    )


def triplet(x: Tensor, batch: LossBatch, config: TrainConfig) -> Tensor:
    rows, loss, count = Rows(batch, config), x.sum() * 0.0, 0
    for i in range(batch.num_rows):
        for h, u in enumerate(rows.negative):
            duplicate = config.objective.mask_duplicates and rows.negative_content[
                h
            ] in rows.forbidden(i)
            if rows.negative_example[h] != rows.example[i] or duplicate:
                continue
            count += 1
            if i in rows.own:
                difference = (
                    x[u] @ x[rows.query[i]] - x[rows.positive[i]] @ x[rows.query[i]]
                )
                loss = loss + torch.clamp(
                    difference + config.objective.triplet_margin, min=0.0
                )
    return loss / max(1, count)
