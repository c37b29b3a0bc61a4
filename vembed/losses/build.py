"""The loss of a run as a module: one term, a weighted sum of several, one for each source."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vembed.config.schema import TrainConfig
from vembed.config.terms import ResolvedTerm, losses_differ, source_groups, source_terms
from vembed.losses.batch import ListedPairs, LossBatch, LossModule
from vembed.losses.declaration import FixedTemperature, LossDeclaration, StartValues
from vembed.losses.similarity import (
    KnownGradients,
    Similarity,
    arithmetic_dtype,
    pair_scores,
)

log = logging.getLogger("vembed")

NUM_LEVELS = 256
EDGE = 1e-4
"""A value this near below a level, in levels, belongs to it."""
StoredForm = Literal["int8", "binary"]


class TermModule(LossModule):
    """One term of a loss, with its similarity, its learned parameters and its teachers."""

    declared: LossDeclaration

    def __init__(
        self,
        term: ResolvedTerm,
        similarity: Similarity,
        start: StartValues,
    ) -> None:
        super().__init__()
        self.declared = term.loss
        self.teacher = term.teacher
        self.follows_data = term.follows_data
        self.guide = term.guide
        self.run_similarity = similarity
        """Similarity of the run. Without Matryoshka it has no dims yet. `similarity` adds that of the embeddings."""
        self.seed = start.seed
        for name, value in term.loss.start_values(start).items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, batch: LossBatch) -> Tensor:
        """See LossModule."""
        return self.declared.share(batch, self)

    def similarity(self, embeddings: Tensor) -> Similarity:
        """Return the similarity at all dims, for embeddings [U, D]."""
        similarity = self.run_similarity
        if not similarity.dims:
            return Similarity(similarity.cosine, (embeddings.shape[1],))
        return similarity

    def scores(self, batch: LossBatch, pairs: ListedPairs) -> Tensor:
        """Return [K, n + P] the scores of listed pairs: similarities, or a reranker's own. Differentiable once."""
        if batch.embeddings_are_scores:
            positives = batch.positive[pairs.rows]
            negatives = batch.negative[pairs.negatives]
            scored = torch.cat((positives, negatives))
            return batch.embeddings[scored, 0][None]
        # One call for all pairs, so that their gradients are accumulated once.
        left, right = pairs.sides(batch)
        similarity = self.similarity(batch.embeddings)
        return pair_scores(batch.embeddings, left, right, similarity)

    def logits(self, batch: LossBatch, pairs: ListedPairs) -> Tensor:
        """Return [K, n + P] the scores of listed pairs, divided by the temperature."""
        return self.scores(batch, pairs) * self.scale(batch.embeddings)

    def mean(self, losses: Tensor, num: int) -> Tensor:
        """Return this rank's share of a mean over `num` terms of all ranks, for those of this rank [K, M].

        Losses of several dims are added with the weights of the dims.
        """
        total = self.run_similarity.total(losses.sum(1))
        return total / max(1, num)

    def parameter(self, name: str, embeddings: Tensor) -> Tensor:
        """Return a learned parameter on the device and in the dtype of the scores."""
        value = self.get_parameter(name)
        return value.to(embeddings.device, arithmetic_dtype(embeddings))

    def scale(self, embeddings: Tensor) -> Tensor:
        """Return 1 / temperature, learned or not, in the dtype of the scores."""
        if "temperature" in self._parameters:
            return 1.0 / self.parameter("temperature", embeddings)
        assert isinstance(self.declared, FixedTemperature)
        scale = 1.0 / self.declared.temperature
        dtype = arithmetic_dtype(embeddings)
        return embeddings.new_full((), scale, dtype=dtype)


class WeightedLosses(LossModule):
    """L = sum over terms of weight * L_term.

    Terms are differentiated one after the other, so that one gradient of the embeddings
    is held, however many terms there are.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        terms: Sequence[LossModule],
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.weights = tuple(weights)
        self.terms = nn.ModuleList(terms)

    def forward(self, batch: LossBatch) -> Tensor:
        """See LossModule."""
        # All terms read one new leaf [T, D]. `autograd.grad` frees a term's graph before the next term begins.
        dtype = arithmetic_dtype(batch.embeddings)
        leaf = batch.embeddings.detach().to(dtype).requires_grad_()
        learned = [value for value in self.parameters() if value.requires_grad]
        leaves = [*learned, leaf]
        inputs = [*learned, batch.embeddings]
        gradients = [torch.zeros_like(tensor) for tensor in leaves]
        total = leaf.new_zeros(())
        shares = {}
        for name, weight, term in zip(
            self.names, self.weights, self.terms, strict=True
        ):
            share = term(replace(batch, embeddings=leaf))
            shares[name] = share.detach()
            total += weight * shares[name]
            if not share.requires_grad:
                continue
            # What the term does not depend on has no gradient.
            term_gradients = torch.autograd.grad(share, leaves, allow_unused=True)
            for gradient, term_gradient in zip(gradients, term_gradients, strict=True):
                if term_gradient is not None:
                    gradient.add_(term_gradient, alpha=weight)
        self.term_shares = shares
        loss: Tensor = KnownGradients.apply(total, gradients, *inputs)  # type: ignore[no-untyped-call]
        return loss


class LossBySource(LossModule):
    """The loss of the source that a batch comes from.

    All ranks are in the same source at the same step.
    """

    def __init__(self, sources: Sequence[LossModule]) -> None:
        """`sources`: the loss of each source. Sources of one task have the same one."""
        super().__init__()
        # Each module once, for its parameters.
        self.sources = nn.ModuleList(dict.fromkeys(sources))
        # By the index of the source. A module may occur several times.
        self._sources = tuple(sources)

    def forward(self, batch: LossBatch) -> Tensor:
        """See LossModule."""
        loss = self._sources[batch.source_index]
        share = loss.forward(batch)
        self.term_shares = loss.term_shares
        return share


def build_loss(
    config: TrainConfig,
    *,
    mrl_dims: Sequence[int] = (),
    start_scale: float | None = None,
    start_bias: float | None = None,
    embedding_dim: int | None = None,
    teacher_dims: Mapping[str, int] | None = None,
) -> LossModule:
    """Return the loss that the config selects.

    `mrl_dims`: the model's Matryoshka dims, used with `mrl_dims: auto`.
    `start_scale`, `start_bias`: the model's learned values (CLIP, SigLIP). A
    learned temperature or scale starts from them, unless the config gives a
    `temperature`. `embedding_dim`, `teacher_dims`: sizes of the embeddings and of each
    teacher's vectors, for `loss: embedding`.
    """
    cosine = config.objective.similarity == "cosine"
    similarity = Similarity(cosine)
    dims = config.matryoshka.mrl_dims
    if dims is not None:
        if dims == "auto":
            dims = list(mrl_dims)
        assert dims, "mrl_dims: auto needs the dims of the model"
        weights = config.matryoshka.mrl_weights or [1.0] * len(dims)
        ascending_dims, weights_of_dims = zip(
            *sorted(zip(dims, weights, strict=True)), strict=True
        )
        similarity = Similarity(cosine, ascending_dims, weights_of_dims)
    seed = config.run.seed
    start = StartValues(start_scale, start_bias, embedding_dim, seed=seed)
    terms_by_source = source_terms(
        config.objective,
        config.data,
        config.model.model_name,
        model_temperature=None if start_scale is None else 1.0 / start_scale,
        is_reranker=config.model.task == "rerank",
    )
    has_several = losses_differ(config.data)
    # For each source the index of the first source of its task: sources of one task share a loss, and so its learned
    # parameters. Without tasks all sources have the loss of the first.
    first_of_task = source_groups(config.data) if has_several else [0]
    by_task = {}
    for index in sorted(set(first_of_task)):
        terms = terms_by_source[index]
        by_task[index] = _loss_of_terms(terms, similarity, start, teacher_dims or {})
    loss = by_task[0]
    if has_several:
        loss = LossBySource([by_task[index] for index in first_of_task])
    form = config.objective.quantize_embeddings
    return loss if form is None else StoredVectors(loss, form, cosine=cosine)


def _loss_of_terms(
    terms: Sequence[ResolvedTerm],
    similarity: Similarity,
    start: StartValues,
    teacher_dims: Mapping[str, int],
) -> LossModule:
    """Return the loss of one source: one term, or the weighted sum of several. Log the temperatures."""
    losses = []
    names = [term.loss.name for term in terms]
    labels = []
    for index, name in enumerate(names):
        label = name
        if names.count(name) > 1:
            # Two terms of one loss are logged as NAME_1 and NAME_2.
            label = f"{name}_{names[: index + 1].count(name)}"
        labels.append(label)
    for term in terms:
        teacher_dim = teacher_dims.get(str(term.teacher))
        term_start = replace(start, teacher_dim=teacher_dim)
        value = term.temperature
        source = term.temperature_source
        if value is not None and term.loss.learns_temperature():
            if source == "given":
                # It comes before that of the model.
                term_start = replace(term_start, scale=None)
            elif start.scale is not None:
                value = 1 / start.scale
                source = "with which this model was trained"
            source += ", learned from there"
        if value is not None and source not in ("given", "default"):
            log.info(f"temperature of {term.loss.name}: {value:.3g} ({source})")
        losses.append(TermModule(term, similarity, term_start))
    if len(terms) == 1 and terms[0].is_alone:
        return losses[0]
    return WeightedLosses(labels, [term.weight for term in terms], losses)


# ---- The loss of stored embeddings ------------------------------------------------------


class StoredVectors(LossModule):
    """quantize_embeddings: the loss of the embeddings as they will be stored, beside that of the float embeddings.

    With Q(e) the embedding e in its stored form, brought back to floats, and L the loss that the config names,

        loss = 1/2 L(E) + 1/2 L(Q(E))

    binary   Q(e) = |e| / sqrt(d) * sign(e), sign(0) = -1. The first k coordinates of Q(e) are the signs of a Matryoshka
             embedding of k numbers, so that every dim is trained.
    int8     u = e / |e|; each coordinate of u is the middle of one of 256 levels between its lowest and highest value over
             all embeddings of the global batch, times |e|. A smaller dim has the first coordinates of the same levels.

    The derivative is straight-through: that of Q is that of the identity, so that d loss / d e = 1/2 dL/de + 1/2 dL/dQ(e).
    For the cosine, which does not depend on |e|, the part along e is removed. Ranks hold the same gathered embeddings, so
    that levels and gradients do not depend on their number.
    """

    def __init__(
        self,
        inner: LossModule,
        form: StoredForm,
        *,
        cosine: bool,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.form = form
        self.cosine = cosine

    def forward(self, batch: LossBatch) -> Tensor:
        """See LossModule."""
        vectors = as_stored(batch.embeddings, self.form, cosine=self.cosine)
        stored: Tensor = self.inner(replace(batch, embeddings=vectors))
        as_floats: Tensor = self.inner(batch)
        # Logged are the terms of the float embeddings.
        self.term_shares = self.inner.term_shares
        return 0.5 * as_floats + 0.5 * stored


def as_stored(
    embeddings: Tensor,
    form: StoredForm,
    *,
    cosine: bool,
) -> Tensor:
    """Return [U, D] embeddings in their stored form, with a straight-through derivative."""
    floats = embeddings.to(arithmetic_dtype(embeddings))
    unit = F.normalize(floats, dim=1)
    with torch.no_grad():
        if form == "binary":
            # Vectors of signs, of length 1.
            dim = unit.shape[1]
            length = unit.new_full((), float(dim) ** -0.5)
            stored = torch.where(unit > 0, length, -length)
        else:
            # The middles of the levels, as `vembed encode --precision int8` stores them.
            low, high = unit.aminmax(dim=0)
            varies = high > low
            highest = NUM_LEVELS - 1
            steps = torch.where(varies, (high - low) / highest, 1.0)
            # The highest value stands on the edge of the last level, where rounding would decide, and processors differ
            # in it.
            levels = (unit - low) / steps + EDGE
            levels = levels.clamp(0, highest).floor()
            middles = low + (levels + 0.5) * steps
            stored = torch.where(varies, middles, unit)
        shift = stored - unit
    if cosine:
        # Through the normalisation, whose derivative has no part along the embedding.
        return unit + shift
    constant = floats.detach()
    lengths: Tensor = torch.linalg.vector_norm(constant, dim=1, keepdim=True)
    return floats + shift * lengths
