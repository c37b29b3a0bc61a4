"""infonce, sigmoid, circle, triplet: a positive against negatives.

Rows i = 1..N are the (query q_i, positive p_i) pairs of the global batch. e(i) is the
example that row i comes from, and P_e are the positives of example e. s is the
similarity, T the temperature. Candidates of row i:

D_i: every occurrence of a document in the batch, that is p_j of every row j and every
     hard negative, except those whose content is that of q_i or of one of P_e(i). The
     row's own p_i counts once and is never left out. Occurrences count: a text that is
     a negative of two examples counts twice.
Q_i: the query q_j of every row j, with the same exceptions.
R_i: for the reverse direction, the query q_j of every row j, except those for which p_i
     would be left out in the forward direction (p_i's content is that of q_j or of one
     of P_e(j)) and those whose content is that of q_i.
C_i: D_i, with same_side_negatives: queries Q_i too, with same_side_negatives: documents
     D_i once more, scored against p_i in place of q_i.

false_negative_margin m: candidates with a score above s(q_i,p_i) + m are left out. The
selection has no gradient. With Matryoshka each dim selects by its own scores.
guide g with margin m: candidates c with g(q_i,c) > g(q_i,p_i) - m are left out, where g
is the cosine of a teacher's vectors (against p_i in place of q_i: g(p_i,c)). A margin
of m % is m / 100 * |g(q_i,p_i)|.
hard_negatives_scope: own: a hard negative is in D_i only for rows of its own example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vembed.config.values import (
    FileReference,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    Percentage,
)
from vembed.losses.declaration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    CandidateLoss,
    LossDeclaration,
    StartValues,
    Temperature,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vembed.losses.batch import LossBatch
    from vembed.losses.build import TermModule
    from vembed.losses.tiles import RowLoss

START_BIAS = -10.0
"""Initial bias of SigLIP: at the start most pairs are classified as negative."""


class GuidedLoss(CandidateLoss):
    """Base class of the losses over C_i, with all options that choose candidates."""

    same_side_negatives: Literal["none", "queries", "documents", "both"] = "none"
    """Use the other queries of the batch as negatives of a query too (`queries`), or the documents of the batch as
    negatives of a positive document (`documents`), or both."""
    false_negative_margin: FiniteFloat | None = None
    """Mask candidates that score above the positive's score plus this margin. Default: none is masked."""
    guide: Annotated[str | None, FileReference("model")] = None
    """loss: infonce, sigmoid, circle: a teacher that says which candidates are no negatives: those that it scores above
    the row's own pair less `guide_margin`."""
    guide_margin: FiniteFloat | Percentage = 0.0
    """Distance below the own pair's score, by the guide, from which a candidate counts as a negative: a difference of
    scores, or a share of the own pair's score, as `5%`."""

    def tiled_share(
        self,
        batch: LossBatch,
        term: TermModule,
        row_loss: type[RowLoss],
        row_loss_options: Mapping[str, Any],
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        both_directions: bool = False,
        own_negatives_as_pairs: bool = False,
    ) -> Tensor:
        """Return 1/N times the sum of the row losses of this rank's rows. `row_loss_options`: keyword arguments of `row_loss`."""
        from vembed.losses.candidates import CandidateRule, plan_scores
        from vembed.losses.tiles import Guide, Scoring, tiled_loss

        rule = CandidateRule(
            self.hard_negatives_scope,
            query_query=self.same_side_negatives in ("queries", "both"),
            document_document=self.same_side_negatives in ("documents", "both"),
            both_directions=both_directions,
            own_negatives_as_pairs=own_negatives_as_pairs,
        )
        guide = None
        if term.guide is not None:
            vectors = batch.teacher_vectors(term.guide)
            # "5%" leaves out c with g(q,c) > g(q,p) - 0.05 |g(q,p)|, and 0.05 those with g(q,c) > g(q,p) - 0.05.
            if isinstance(self.guide_margin, str):
                share_of_score = float(self.guide_margin.rstrip("%")) / 100
                guide = Guide(vectors, share_of_score, is_relative=True)
            else:
                guide = Guide(vectors, self.guide_margin, is_relative=False)
        # N counts the rows of all ranks, of which this rank adds up its own. With both directions L is their mean.
        share = 1.0 / max(1, batch.num_rows)
        direction_factors = (share / 2, share / 2) if both_directions else (share,)
        scoring = Scoring(
            plan=plan_scores(batch, rule),
            similarity=term.similarity(batch.embeddings),
            row_loss=row_loss,
            row_loss_options=row_loss_options,
            direction_factors=direction_factors,
            margin_above_positive=self.false_negative_margin,
            guide=guide,
        )
        return tiled_loss(batch.embeddings, scoring, scale, bias)


class InfoNCE(GuidedLoss, Temperature):
    """The InfoNCE loss with in-batch and hard negatives.

        L = 1/N * sum_i -log( exp(s(q_i,p_i)/T) / Z_i )
        Z_i = exp(s(q_i,p_i)/T) + sum_{c in C_i} exp(s(q_i,c)/T)

    bidirectional: L is the mean of this and of the same with s(p_i,q_i) against the
    queries R_i.
    hardness_alpha a: the logit s/T of a candidate becomes s/T + a * s, where the second
    part has no gradient. hardness_scope: own: only that of a hard negative of e(i).
    focal_gamma g: the loss l of a row becomes (1 - exp(-l))^g * l.
    """

    name = "infonce"
    reads_lists = True
    is_cross_entropy = True
    summary = "the positive above all other candidates of the batch"
    records = "matches"
    negatives = "optional"
    takes_model_temperature = True

    bidirectional: bool = False
    """Also score each positive against all queries. The loss is the mean of both directions."""
    hardness_alpha: NonNegativeFloat = 0.0
    """loss: infonce: add this times a candidate's similarity to its logit, as a constant: hard negatives count more."""
    hardness_scope: Literal["all", "own"] = "all"
    """Candidates that `hardness_alpha` changes: all of them, or the hard negatives of the row's own example alone."""
    focal_gamma: NonNegativeFloat = 0.0
    """loss: infonce: a row whose positive has the probability p counts (1 - p) ** focal_gamma times."""
    mix_negatives: NonNegativeInt = 0
    """loss: infonce: so many further hard negatives per example, each mixed from two of its own."""

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        from vembed.losses.batch import with_mixtures
        from vembed.losses.tiles import SoftmaxRows

        if batch.embeddings_are_scores:
            # Of a reranker the candidates are the hard negatives of the row's example.
            pairs = batch.listed_by_row()
            log_probabilities = pairs.log_softmax(term.logits(batch, pairs))
            # [1, n + P]. The positive pair of each row comes first, one for each group.
            positives = log_probabilities[:, : pairs.num_groups]
            return -term.mean(positives, batch.num_rows)
        if self.mix_negatives:
            batch = with_mixtures(
                batch, term.seed, self.mix_negatives, cosine=term.run_similarity.cosine
            )
        scale = term.scale(batch.embeddings)
        stretch = None
        if self.hardness_alpha:
            # s/T + a s = (1 + a T) s/T, with the scale 1/T.
            stretch = 1.0 + self.hardness_alpha / scale.detach()
        stretches_own_only = self.hardness_scope == "own"
        row_loss_options = {
            "stretch": stretch,
            "stretches_own_only": stretches_own_only,
            "focal_gamma": self.focal_gamma,
        }
        return self.tiled_share(
            batch,
            term,
            SoftmaxRows,
            row_loss_options,
            scale,
            both_directions=self.bidirectional,
            own_negatives_as_pairs=stretches_own_only,
        )


class Circle(GuidedLoss):
    """The circle loss, with the candidates of InfoNCE.

        L = 1/N * sum_i log( 1 + exp(-a_i (s(q_i,p_i) - 1 + m) / T)
                                 * sum_{c in C_i} exp(b_ic (s(q_i,c) - m) / T) )
        a_i = max(0, 1 + m - s(q_i,p_i))        b_ic = max(0, s(q_i,c) + m)

    a and b have no gradient: scores that are far from their optimum, 1 + m and -m, weigh
    more. T is 1 / gamma of the paper, m is `margin`, by default 0.25.
    """

    name = "circle"
    summary = (
        "the same as infonce, by weights that grow with the distance to the optimum"
    )
    records = "matches"
    negatives = "optional"

    bidirectional: bool = False
    """Also score each positive against all queries. The loss is the mean of both directions."""
    margin: NonNegativeFloat | None = None
    """loss: circle: similarities of 1 - margin for positives and below the margin for negatives are good enough.
    Default: 0.25. loss: triplet: minimum difference between the similarities of the positive and the negative. Default:
    0.2."""

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        from vembed.losses.tiles import CircleRows

        margin = 0.25 if self.margin is None else self.margin
        row_loss_options = {"temperature": self.temperature, "margin": margin}
        return self.tiled_share(
            batch,
            term,
            CircleRows,
            row_loss_options,
            term.scale(batch.embeddings),
            both_directions=self.bidirectional,
        )


class Sigmoid(GuidedLoss):
    """The loss of SigLIP: a yes or a no for every (query, candidate) pair.

        L = 1/N * sum_i [ softplus(-(t s(q_i,p_i) + b))
                          + sum_{c in C_i} softplus(t s(q_i,c) + b) ]

    The scale t and the bias b are learned. They start from the model's own, otherwise
    from 1 / temperature and -10. A pair counts once and has no direction.
    """

    name = "sigmoid"
    summary = "each pair a yes or a no of its own (SigLIP)"
    records = "matches"
    negatives = "optional"

    def learns_temperature(self) -> bool:
        """See LossDeclaration."""
        return True

    def start_values(self, start: StartValues) -> dict[str, Tensor]:
        """See LossDeclaration."""
        import torch

        scale = 1.0 / self.temperature if start.scale is None else start.scale
        scale = min(max(scale, 1.0 / HIGHEST_TEMPERATURE), 1.0 / LOWEST_TEMPERATURE)
        bias = START_BIAS if start.bias is None else start.bias
        # Learned as a logarithm, as in CLIP and SigLIP: equal steps change the scale by equal factors.
        return {
            "log_scale": torch.tensor(math.log(scale)),
            "bias": torch.tensor(bias),
        }

    def clamp(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep the scale in [1, 200], the inverse of the temperature's range."""
        lowest = -math.log(HIGHEST_TEMPERATURE)
        highest = -math.log(LOWEST_TEMPERATURE)
        parameters["log_scale"].data.clamp_(lowest, highest)

    def logit_scale_and_bias(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[float, float]:
        """See LossDeclaration."""
        log_scale = float(parameters["log_scale"].detach())
        bias = float(parameters["bias"].detach())
        return math.exp(log_scale), bias

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        from vembed.losses.tiles import SigmoidRows

        # Each logit is t s + b, whose sign says yes or no. No logit depends on another one.
        scale = term.parameter("log_scale", batch.embeddings).exp()
        bias = term.parameter("bias", batch.embeddings)
        return self.tiled_share(batch, term, SigmoidRows, {}, scale, bias)


class Triplet(LossDeclaration):
    """The triplet loss: the mean over all M triplets (row i, hard negative n of it).

        L = 1/M * sum over triplets of max(0, s(q_i,n) - s(q_i,p_i) + margin)

    Negatives with the content of the row's query or of one of its
    positives are dropped.
    """

    name = "triplet"
    reads_lists = True
    summary = "the positive closer than each given negative, by a margin"
    records = "matches"
    negatives = "each"

    margin: NonNegativeFloat | None = None
    """See Circle."""

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        pairs = batch.listed_by_row()
        margins = pairs.margins(term.scores(batch, pairs))  # [K, P]
        margin = 0.2 if self.margin is None else self.margin
        losses = (margin - margins).relu()
        # M counts the triplets of all ranks, so the ranks' shares add up to L.
        return term.mean(losses, pairs.num_negative_pairs)
