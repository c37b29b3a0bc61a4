"""InfoNCE with in-batch and hard negatives.

Rows i = 1..N are the (query q_i, positive p_i) pairs of the global batch; e(i) is the example that row i comes from,
and P_e are the positives of example e. s is the similarity, T the temperature.

    L = 1/N * sum_i l_i            l_i = -log( exp(s(q_i,p_i)/T) / Z_i )
    Z_i = exp(s(q_i,p_i)/T) + sum_{d in D_i} exp(s(q_i,d)/T)
          [+ sum_{j in Q_i} exp(s(q_i,q_j)/T)]        query_query_negatives
          [+ sum_{d in D_i} exp(s(p_i,d)/T)]          document_document_negatives

D_i: every occurrence of a document in the batch, that is p_j of every row j and every hard negative, except those
     whose content is that of q_i or of one of P_e(i). The row's own p_i counts once, above, and is never left out.
     Occurrences count: a text that is a negative of two examples counts twice.
Q_i: the query q_j of every row j, except those whose content is that of q_i or of one of P_e(i).

bidirectional: L is the mean of the above and of the reverse direction,
    l'_i = -log( exp(s(p_i,q_i)/T) / Z'_i )           Z'_i = exp(s(p_i,q_i)/T) + sum_{j in R_i} exp(s(p_i,q_j)/T)
R_i: the query q_j of every row j, except those for which p_i would be left out in the forward direction (p_i's content
     is that of q_j or of one of P_e(j)) and those whose content is that of q_i. There are no reverse q-q or d-d terms.

mask_duplicates: false: D_i, Q_i, R_i leave out only what row i's own example brought as query and positives.
false_negative_margin m: candidates of any kind with a score above s(q_i,p_i) + m are left out. The selection has no
gradient, and p_i always stays. With Matryoshka each size selects by its own scores.
guide g with margin m: candidates c of any kind with g(q_i,c) > g(q_i,p_i) - m (for d-d: g(p_i,c)) are left out. A
relative margin is m * |g(q_i,p_i)|. g is the cosine of a teacher's vectors.
hardness_alpha a: a candidate's logit s/T becomes s/T + a * s; the second part has no gradient.
focal_gamma g: l_i becomes (1 - exp(-l_i))^g * l_i.
mix_negatives: see mixing.py. The mixtures are hard negatives like the others.
hard_negatives_scope: own: a hard negative is in D_i only for the rows of the example that brought it.
negatives_from: own_rank: j and the hard negatives run over the own rank batch only; N stays that of the global batch.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.config.terms import guide_of
from vembed.losses.batch import LossBatch
from vembed.losses.candidates import find_candidates
from vembed.losses.mixing import with_mixtures
from vembed.losses.rows import Softmax
from vembed.losses.targets import Guide
from vembed.losses.temperature import TemperedLoss
from vembed.losses.tiles import Scoring, Tiling, tiled_loss


class InfoNCE(TemperedLoss):
    """The InfoNCE loss (loss: infonce)."""

    tiling: Tiling | None = None

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        config = self.config
        if config.objective.mix_negatives:
            batch = with_mixtures(batch, config)
        share = 1.0 / max(1, batch.num_rows)
        both = config.objective.bidirectional
        scale = self.scale_for(batch.embeddings)
        stretch = (
            1.0 + config.objective.hardness_alpha / scale.detach()
            if config.objective.hardness_alpha
            else None
        )
        scoring = Scoring(
            candidates=find_candidates(batch, config, both_directions=both),
            similarity=self.similarity_for(batch.embeddings),
            row_loss=partial(
                Softmax, stretch=stretch, focal_gamma=config.objective.focal_gamma
            ),
            coefficients=(share / 2, share / 2) if both else (share,),
            margin=config.objective.false_negative_margin,
            tiling=self.tiling,
            guide=guide_for(batch, config),
        )
        return tiled_loss(batch.embeddings, scoring, scale)


def guide_for(batch: LossBatch, config: TrainConfig) -> Guide | None:
    """Return the guide that the config names, with what it says about the batch."""
    name = guide_of(config)
    if name is None:
        return None
    vectors = batch.teacher_vectors(name, "guide")
    return Guide(
        vectors,
        config.objective.guide_margin,
        relative=config.objective.guide_margin_kind == "relative",
    )
