"""SigLIP's pairwise sigmoid loss: binary classification of every (query, candidate) pair.

    L = 1/N * sum_i [ softplus(-(t s(q_i,p_i) + b)) + sum_{c in C_i} softplus(t s(q_i,c) + b) ]

with learned scale t and bias b. C_i are the candidates of row i as InfoNCE defines them, with all of its options:
content that equals the row's query or one of its positives is left out. With query_query_negatives and
document_document_negatives the additional pairs are negatives. A (query, document) pair counts once and has no
direction, so `bidirectional` has no effect here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vembed.config.entries import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossBatch
from vembed.losses.candidates import find_candidates
from vembed.losses.infonce import guide_for
from vembed.losses.matryoshka import arithmetic_dtype
from vembed.losses.rows import Sigmoid
from vembed.losses.temperature import ScoredLoss
from vembed.losses.tiles import Scoring, Tiling, tiled_loss

START_BIAS = -10.0
"""Initial bias of SigLIP: at the start most pairs are classified as negative."""


class SigmoidLoss(ScoredLoss):
    """The sigmoid loss (loss: sigmoid). Starts from the model's scale and bias, else from 1 / temperature and -10."""

    tiling: Tiling | None = None

    def __init__(
        self,
        config: TrainConfig,
        mrl_dims: Sequence[int],
        start_scale: float | None,
        start_bias: float | None,
    ) -> None:
        super().__init__(config, mrl_dims)
        scale = (
            1.0 / config.objective.temperature if start_scale is None else start_scale
        )
        # Learned as a logarithm, as in CLIP and SigLIP: equal steps change the scale by equal factors.
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = nn.Parameter(
            torch.tensor(START_BIAS if start_bias is None else start_bias)
        )
        self.project_parameters()

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        embeddings = batch.embeddings
        scoring = Scoring(
            candidates=find_candidates(batch, self.config, both_directions=False),
            similarity=self.similarity_for(embeddings),
            row_loss=Sigmoid,
            coefficients=(1.0 / max(1, batch.num_rows),),
            margin=self.config.objective.false_negative_margin,
            tiling=self.tiling,
            guide=guide_for(batch, self.config),
            is_separable=True,
        )
        dtype = arithmetic_dtype(embeddings)
        scale = self.log_scale.to(embeddings.device, dtype).exp()
        return tiled_loss(
            embeddings, scoring, scale, self.bias.to(embeddings.device, dtype)
        )

    def project_parameters(self) -> None:
        """Clamp the scale to [1, 200], the inverse of the temperature's range."""
        with torch.no_grad():
            self.log_scale.clamp_(
                -math.log(HIGHEST_TEMPERATURE), -math.log(LOWEST_TEMPERATURE)
            )

    def scale_and_bias(self) -> tuple[float, float]:
        """Return the learned scale and bias."""
        return math.exp(float(self.log_scale.detach())), float(self.bias.detach())
