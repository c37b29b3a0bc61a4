"""Weighted sums of losses on one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.losses.matryoshka import arithmetic_dtype


class WeightedLosses(EmbeddingLoss):
    """L = sum over terms of weight * L_term. Terms are differentiated one after the other, so that one gradient of the
    embeddings is held, however many terms there are."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        terms: Sequence[EmbeddingLoss],
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.weights = tuple(weights)
        self.terms = nn.ModuleList(terms)
        self._terms = tuple(terms)
        self.last: dict[str, Tensor] = {}
        """This rank's share of each term in the newest batch, without its weight."""

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        parameters = [one for one in self.parameters() if one.requires_grad]
        loss: Tensor = _Sum.apply(batch.embeddings, self, batch, *parameters)  # type: ignore[no-untyped-call]
        return loss

    def project_parameters(self) -> None:
        """See EmbeddingLoss."""
        for term in self._terms:
            term.project_parameters()

    def term_shares(self, source: int) -> dict[str, Tensor]:
        """See EmbeddingLoss."""
        del source
        return dict(self.last)

    def scale_and_bias(self) -> tuple[float, float] | None:
        """Those of the first term that has learned ones."""
        found = (term.scale_and_bias() for term in self._terms)
        return next((one for one in found if one is not None), None)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        losses: WeightedLosses,
        batch: LossBatch,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.dtype = embeddings.dtype
        # One new leaf for all terms: `autograd.grad` frees a term's graph before the next term begins.
        embeddings = (
            embeddings.detach()
            .to(arithmetic_dtype(embeddings))
            .requires_grad_(ctx.needs_input_grad[0])
        )
        batch = replace(batch, embeddings=embeddings)
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        wanted = [
            one
            for one, is_needed in zip((embeddings, *parameters), needed, strict=True)
            if is_needed
        ]
        gradients: list[Tensor | None] = [None] * len(wanted)
        total = embeddings.new_zeros(())
        for name, weight, term in zip(
            losses.names, losses.weights, losses.terms, strict=True
        ):
            with torch.set_grad_enabled(bool(wanted)):
                value = term(batch)
            losses.last[name] = value.detach()
            total = total + weight * losses.last[name]
            if value.requires_grad:
                add_gradients(
                    gradients,
                    torch.autograd.grad(value, wanted, allow_unused=True),
                    weight,
                )
        # What no term depends on gets zeros: `backward` returns one tensor for each input that needs a gradient.
        zeros = (
            torch.zeros_like(one) if found is None else found
            for one, found in zip(wanted, gradients, strict=True)
        )
        ctx.save_for_backward(*zeros)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        scaled = [
            next(saved) * d_loss if needed else None for needed in ctx.needs_input_grad
        ]
        return (None if scaled[0] is None else scaled[0].to(ctx.dtype), *scaled[1:])


def add_gradients(
    total: list[Tensor | None], more: Sequence[Tensor | None], weight: float
) -> None:
    """total += weight * more, in place; None stands for zeros."""
    for number, gradient in enumerate(more):
        if gradient is not None:
            before = total[number]
            total[number] = (
                gradient * weight
                if before is None
                else before.add_(gradient, alpha=weight)
            )
