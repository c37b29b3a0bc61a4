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
hard_negatives_scope: own: a hard negative is in D_i only for the rows of the example that brought it.
negatives_from: own_rank: j and the hard negatives run over the own rank batch only; N stays that of the global batch.
"""

from __future__ import annotations

from torch import Tensor

from vembed.losses.batch import LossBatch
from vembed.losses.candidates import find_candidates
from vembed.losses.rows import Softmax
from vembed.losses.temperature import TemperedLoss
from vembed.losses.tiles import Scoring, Tiling, tiled_loss


class InfoNCE(TemperedLoss):
    """The InfoNCE loss (loss: infonce)."""

    tiling: Tiling | None = None

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        share = 1.0 / max(1, batch.num_rows)
        both = self.config.bidirectional
        scoring = Scoring(
            candidates=find_candidates(batch, self.config, both_directions=both),
            similarity=self.similarity_for(batch.embeddings),
            row_loss=Softmax,
            coefficients=(share / 2, share / 2) if both else (share,),
            margin=self.config.false_negative_margin,
            tiling=self.tiling,
        )
        return tiled_loss(batch.embeddings, scoring, self.scale_for(batch.embeddings))
