"""The loss of a run as a module: one term, a weighted sum of several, one for each source."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vembed.config.schema import TrainConfig
from vembed.config.terms import Term, has_tasks, source_terms, task_numbers
from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.losses.declaration import StartValues
from vembed.losses.similarity import (
    Similarity,
    arithmetic_dtype,
    with_known_gradients,
)
from vembed.losses.stored_vectors import StoredVectors
from vembed.losses.tiles import Tiling

log = logging.getLogger("vembed")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Similarity function and Matryoshka sizes of a run."""

    cosine: bool = True
    dims: tuple[int, ...] = ()
    """Matryoshka sizes in the order of the config. Empty without Matryoshka."""
    weights: tuple[float, ...] | None = None
    """Weight of each size. None: 1 for each."""

    def similarity(self, embedding_dim: int) -> Similarity:
        """Return the similarity of embeddings. Without Matryoshka at the full size alone."""
        if self.dims and max(self.dims) > embedding_dim:
            raise ValueError(
                f"Matryoshka sizes {self.dims} for embeddings of size {embedding_dim}"
            )
        dims = self.dims or (embedding_dim,)
        weights: Sequence[float] = [1.0] * len(dims)
        if self.dims and self.weights:
            weights = self.weights
        return Similarity.at(dims, weights, cosine=self.cosine)


class TermLoss(EmbeddingLoss):
    """One term of a loss, with its similarity, its learned parameters and its teachers."""

    tiling: Tiling | None = None
    """Size of the tiles of scores, in place of one that fits in memory."""

    def __init__(
        self,
        term: Term,
        sizes: Sizes | None = None,
        start: StartValues | None = None,
    ) -> None:
        super().__init__()
        start = start or StartValues()
        self.declared = term.loss
        self.teacher = term.teacher
        self.guide = term.guide
        self.sizes = sizes or Sizes()
        self.seed = start.seed
        for name, value in term.loss.start_values(start).items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, batch: LossBatch) -> Tensor:
        """See EmbeddingLoss."""
        return self.declared.share(batch, self)

    def similarity(self, embeddings: Tensor) -> Similarity:
        """Return the similarity at all sizes, for embeddings [U, D]."""
        return self.sizes.similarity(embeddings.shape[1])

    def parameter(self, name: str, embeddings: Tensor) -> Tensor:
        """Return a learned parameter on the device and in the dtype of the scores."""
        value: Tensor = self.get_parameter(name)
        return value.to(embeddings.device, arithmetic_dtype(embeddings))

    def scale(self, embeddings: Tensor) -> Tensor:
        """Return 1 / temperature, learned or not, in the dtype of the scores."""
        if "temperature" in self._parameters:
            return 1.0 / self.parameter("temperature", embeddings)
        scale = 1.0 / dict(self.declared)["temperature"]
        dtype = arithmetic_dtype(embeddings)
        return embeddings.new_full((), scale, dtype=dtype)

    def project_parameters(self) -> None:
        """See EmbeddingLoss."""
        self.declared.clamp(dict(self.named_parameters()))

    def scale_and_bias(self) -> tuple[float, float] | None:
        """See EmbeddingLoss."""
        return self.declared.scale_and_bias(dict(self.named_parameters()))


class WeightedLosses(EmbeddingLoss):
    """L = sum over terms of weight * L_term.

    Terms are differentiated one after the other, so that one gradient of the embeddings
    is held, however many terms there are.
    """

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
        self.last: dict[str, Tensor] = {}
        """This rank's share of each term in the newest batch, without its weight."""

    def forward(self, batch: LossBatch) -> Tensor:
        """See EmbeddingLoss."""
        # One new leaf for all terms: `autograd.grad` frees a term's graph before the
        # next term begins.
        leaf = batch.embeddings.detach().to(arithmetic_dtype(batch.embeddings))
        leaf.requires_grad_(batch.embeddings.requires_grad)
        leaves: list[Tensor] = []
        inputs: list[Tensor] = []
        if torch.is_grad_enabled():
            learned = [value for value in self.parameters() if value.requires_grad]
            leaves += learned
            inputs += learned
            if leaf.requires_grad:
                leaves.append(leaf)
                inputs.append(batch.embeddings)
        gradients = [torch.zeros_like(tensor) for tensor in leaves]
        total = leaf.new_zeros(())
        for name, weight, term in zip(
            self.names, self.weights, self.terms, strict=True
        ):
            share = term(replace(batch, embeddings=leaf))
            self.last[name] = share.detach()
            total += weight * self.last[name]
            if not share.requires_grad:
                continue
            # What the term does not depend on has no gradient.
            term_gradients = torch.autograd.grad(share, leaves, allow_unused=True)
            for gradient, term_gradient in zip(gradients, term_gradients, strict=True):
                if term_gradient is not None:
                    gradient.add_(term_gradient, alpha=weight)
        return with_known_gradients(total, inputs, gradients)

    def term_shares(self, source: int) -> dict[str, Tensor]:
        """See EmbeddingLoss."""
        del source
        return dict(self.last)


class LossBySource(EmbeddingLoss):
    """The loss of the source that a batch comes from.

    All ranks are in the same source at the same step.
    """

    def __init__(self, sources: Sequence[EmbeddingLoss]) -> None:
        """`sources`: the loss of each source. Sources of one task have the same one."""
        super().__init__()
        self.sources = nn.ModuleList(dict.fromkeys(sources))
        self._sources = tuple(sources)

    def forward(self, batch: LossBatch) -> Tensor:
        """See EmbeddingLoss."""
        return self._sources[batch.source].forward(batch)

    def term_shares(self, source: int) -> dict[str, Tensor]:
        """See EmbeddingLoss."""
        return self._sources[source].term_shares(source)


def build_loss(
    config: TrainConfig,
    *,
    mrl_dims: Sequence[int] = (),
    start_scale: float | None = None,
    start_bias: float | None = None,
    embedding_dim: int | None = None,
    teacher_dims: Mapping[str, int] | None = None,
) -> EmbeddingLoss:
    """Return the loss that the config selects.

    `mrl_dims`: the model's Matryoshka sizes, used with `mrl_dims: auto`.
    `start_scale`, `start_bias`: the model's learned values (CLIP, SigLIP). A
    learned temperature or scale starts from them, unless the config gives a
    `temperature`. `embedding_dim`, `teacher_dims`: sizes of the embeddings and of each
    teacher's vectors, for `loss: embedding`.
    """
    cosine = config.objective.similarity == "cosine"
    sizes = Sizes(cosine)
    if config.matryoshka.mrl_dims is not None:
        dims = tuple(mrl_dims)
        if config.matryoshka.mrl_dims != "auto":
            dims = tuple(config.matryoshka.mrl_dims)
        assert dims, "mrl_dims: auto needs the sizes of the model"
        weights = config.matryoshka.mrl_weights
        sizes = Sizes(cosine, dims, tuple(weights) if weights else None)
    start = StartValues(
        start_scale, start_bias, embedding_dim, None, seed=config.run.seed
    )
    model_temperature = None if start_scale is None else 1.0 / start_scale
    terms = source_terms(
        config.objective,
        config.data,
        config.model.model_name,
        model_temperature,
        is_reranker=config.model.task == "rerank",
    )
    numbers = task_numbers(config.data) if has_tasks(config.data) else [0]
    tasks: dict[int, EmbeddingLoss] = {}
    for number in sorted(set(numbers)):
        tasks[number] = _sum(terms[number], sizes, start, teacher_dims or {})
    loss = tasks[0]
    if has_tasks(config.data):
        loss = LossBySource([tasks[number] for number in numbers])
    form = config.objective.quantize_embeddings
    return loss if form is None else StoredVectors(loss, form, cosine=cosine)


def _sum(
    terms: Sequence[Term],
    sizes: Sizes,
    start: StartValues,
    teacher_dims: Mapping[str, int],
) -> EmbeddingLoss:
    """Return the loss of one source: one term, or the weighted sum of several."""
    losses = []
    names = [term.loss.name for term in terms]
    labels = []
    for index, term in enumerate(terms):
        label = term.loss.name
        if names.count(label) > 1:
            label += f"_{names[:index].count(label) + 1}"
        labels.append(label)
        teacher_dim = teacher_dims.get(str(term.teacher))
        term_start = replace(_term_start(term, start), teacher_dim=teacher_dim)
        losses.append(TermLoss(term, sizes, term_start))
    if len(terms) == 1 and terms[0].is_alone:
        return losses[0]
    return WeightedLosses(labels, [term.weight for term in terms], losses)


def _term_start(term: Term, start: StartValues) -> StartValues:
    """Return the values that a term's parameters start from, and log its temperature.

    A temperature that the config gives comes before that of the model.
    """
    if term.temperature is None:
        return start
    label = "temperature" if term.is_alone else f"temperature of {term.loss.name}"
    is_given = term.temperature_source == "given"
    if not term.loss.learns_temperature():
        if term.temperature_source not in ("given", "default"):
            log.info("%s: %.3g (%s)", label, term.temperature, term.temperature_source)
        return start
    value = term.temperature
    reason = "as given" if is_given else "default"
    if start.scale is not None:
        trained = f"{1 / start.scale:.3g}, with which this model was trained"
        reason = f"as given, not at {trained}"
        if not is_given:
            value = 1 / start.scale
            reason = "with which this model was trained"
    log.info("%s: learned, starting at %.3g (%s)", label, value, reason)
    return replace(start, scale=None) if is_given else start
