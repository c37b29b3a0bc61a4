"""Losses on whole score matrices: kl over the batch's candidates, relational, and spread_out. All in tiles."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vembed.config.terms import followed_teacher
from vembed.losses.batch import LossBatch
from vembed.losses.candidates import (
    FORWARD,
    Candidates,
    ExclusionMask,
    ScoreBlock,
    find_candidates,
)
from vembed.losses.matryoshka import arithmetic_dtype
from vembed.losses.targets import TeacherVectors
from vembed.losses.teacher_rows import Divergence, SquaredError
from vembed.losses.temperature import ScoredLoss, TemperedLoss
from vembed.losses.tiles import Scoring, Tiling, tiled_loss


class BatchDivergence(TemperedLoss):
    """loss: kl, distill_candidates: batch. With C_i the candidates that InfoNCE has for row i, and p_i itself,

        L = 1/N * sum_i KL( softmax_{c in C_i}(t(q_i,c) / T') || softmax_{c in C_i}(s(q_i,c) / T) )

    t are dot products of the teacher's vectors, T' is teacher_temperature.
    """

    tiling: Tiling | None = None

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        config = self.config
        target_scale = 1.0 / (
            config.objective.teacher_temperature or config.objective.temperature
        )
        scoring = Scoring(
            candidates=find_candidates(
                batch,
                config.changed(
                    **{
                        "query_query_negatives": False,
                        "document_document_negatives": False,
                    }
                ),
                both_directions=False,
            ),
            similarity=self.similarity_for(batch.embeddings),
            row_loss=partial(Divergence, target_scale=target_scale),
            coefficients=(1.0 / max(1, batch.num_rows),),
            margin=None,
            tiling=self.tiling,
            teacher=batch.teacher_vectors(
                str(followed_teacher(config)), "loss: kl with distill_candidates: batch"
            ),
        )
        return tiled_loss(batch.embeddings, scoring, self.scale_for(batch.embeddings))


class Relational(ScoredLoss):
    """loss: relational. Over all M = 2 N + H occurrences a, b of queries, positives and hard negatives in the batch,

    L = 1/M^2 * sum_{a,b} ( s(a,b) - t(a,b) )^2        a pair of an occurrence with itself does not count
    """

    tiling: Tiling | None = None

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own occurrences' part of L."""
        num, device = batch.num_rows, batch.query.device
        numbers = torch.arange(2 * num + batch.negative.numel(), device=device)
        own = batch.own()
        # Occurrences are numbered: the N queries, the N positives, then the H hard negatives.
        mine = torch.cat(
            (
                numbers[:num][own],
                numbers[num : 2 * num][own],
                numbers[2 * num :][batch.own_hard_negatives()],
            )
        )
        teacher = batch.teacher_vectors(
            str(followed_teacher(self.config)), "loss: relational"
        )
        # An occurrence has its own number as key on both sides: equal keys are left out, which is the diagonal.
        same = ExclusionMask(
            mine[:, None].to(torch.int32), numbers[:, None].to(torch.int32)
        )
        return squared_errors(
            self,
            batch,
            mine,
            numbers,
            (same,),
            1.0 / max(1, numbers.numel()) ** 2,
            teacher,
        )


class SpreadOut(ScoredLoss):
    """loss: spread_out. Queries away from queries and positives away from positives:

        L = 1/(N (N-1)) * sum_{i != j} s(q_i,q_j)^2  +  1/(N (N-1)) * sum_{i != j} s(p_i,p_j)^2

    With mask_duplicates pairs of equal content do not count, and neither do those of one example.
    """

    tiling: Tiling | None = None

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        num, own = batch.num_rows, batch.own()
        numbers = torch.arange(2 * num, device=batch.query.device)
        loss = batch.embeddings.new_zeros((), dtype=arithmetic_dtype(batch.embeddings))
        for which, index in (
            (numbers[:num], batch.query),
            (numbers[num:], batch.positive),
        ):
            # Without mask_duplicates only i == j is left out; with it equal contents, and rows of one example.
            keys = [which]
            if self.config.objective.mask_duplicates:
                content = torch.unique(batch.content, return_inverse=True)[1]
                example = torch.unique(batch.example, return_inverse=True)[1]
                keys = [content[index], example]
            exclusion_masks = tuple(
                ExclusionMask(
                    key[own, None].to(torch.int32), key[:, None].to(torch.int32)
                )
                for key in keys
            )
            loss = loss + squared_errors(
                self,
                batch,
                which[own],
                which,
                exclusion_masks,
                1.0 / max(1, num * (num - 1)),
                None,
            )
        return loss


def squared_errors(
    loss: Relational | SpreadOut,
    batch: LossBatch,
    rows: Tensor,
    columns: Tensor,
    exclusion_masks: tuple[ExclusionMask, ...],
    coefficient: float,
    teacher: TeacherVectors | None,
) -> Tensor:
    """coefficient * the sum of squared differences between student and teacher (or 0) over occurrences rows x columns,
    less what the exclusion_masks leave out."""
    # The table holds the own rows first, then all columns. There is no own pair: rows stand in for both sides of it.
    occurrence = torch.cat((rows, columns))
    own = slice(0, rows.numel())
    candidates = Candidates(
        index=torch.cat((batch.query, batch.positive, batch.negative))[occurrence],
        occurrence=occurrence,
        queries=own,
        positives=own,
        score_blocks=(
            ScoreBlock(
                "query",
                slice(rows.numel(), occurrence.numel()),
                exclusion_masks,
                FORWARD,
            ),
        ),
        explicit=(),
    )
    scoring = Scoring(
        candidates=candidates,
        similarity=loss.similarity_for(batch.embeddings),
        row_loss=SquaredError,
        is_separable=True,
        coefficients=(coefficient,),
        margin=None,
        tiling=loss.tiling,
        teacher=teacher,
    )
    one = torch.ones(
        (), dtype=arithmetic_dtype(batch.embeddings), device=batch.embeddings.device
    )
    return tiled_loss(batch.embeddings, scoring, one)
