"""embedding, anchor, relational, spread_out, none: losses on single inputs and all pairs.

They read no pairs, so that records of a single text will do. An occurrence is a query, a
positive or a hard negative of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.errors import UserError
from vembed.losses.declaration import Loss, MaskedLoss, StartValues, TeacherLoss

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.batch import LossBatch, TeacherVectors
    from vembed.losses.build import TermLoss
    from vembed.losses.candidates import ExclusionMask
    from vembed.losses.similarity import Similarity


class Embedding(TeacherLoss):
    """The distance to a teacher's vectors t, over all M = 2 N + H occurrences z.

        L = 1/M * sum_z 1 - cos( W z, t_z )

    W is learned with the model, and is no part of what is saved. At a smaller Matryoshka
    size k only the first k coordinates of z and columns of W count. Inputs that the
    teacher does not know count as 0.
    """

    name = "embedding"
    summary = "the teacher's vectors, through a learned linear map"
    records = "texts"
    negatives = "optional"
    follows = "vectors"

    def start_values(self, start: StartValues) -> dict[str, Tensor]:
        """Return the identity where the sizes are equal, otherwise a draw from the seed."""
        import torch

        if start.embedding_dim is None or start.teacher_dim is None:
            raise ValueError(
                "loss: embedding without embedding_dim and teacher_dims: pass both sizes"
            )
        if start.embedding_dim == start.teacher_dim:
            return {"projection": torch.eye(start.embedding_dim)}
        draw = torch.Generator().manual_seed(start.seed)
        values = torch.randn(start.teacher_dim, start.embedding_dim, generator=draw)
        return {"projection": values / start.embedding_dim**0.5}

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        teacher = batch.teacher_vectors(str(term.teacher), "loss: embedding")
        projection = term.parameter("projection", batch.embeddings)
        similarity = term.similarity(batch.embeddings)
        return _mean_distance(batch, teacher, projection, similarity)


class Anchor(Loss):
    """The distance to the embeddings of the start model, at the full size alone.

    The formula of `embedding` with W the identity: the mean of 1 - cos(z, t), with t the
    embedding that the start model gives to the same input.
    """

    name = "anchor"
    summary = "the embeddings of the start model, against forgetting"
    records = "texts"
    negatives = "optional"
    follows = "start_model"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        import torch

        from vembed.losses.similarity import Similarity, arithmetic_dtype

        teacher = batch.teacher_vectors(str(term.teacher), "loss: anchor")
        embeddings = batch.embeddings
        dim = embeddings.shape[1]
        teacher_dim = teacher.vectors.shape[1]
        if dim != teacher_dim:
            raise UserError(
                f"loss: anchor: the embeddings have {dim} dimensions, and those of {term.teacher} before "
                f"training have {teacher_dim}: leave out what changes the size, or this loss"
            )
        identity = torch.eye(
            dim, device=embeddings.device, dtype=arithmetic_dtype(embeddings)
        )
        full_size = Similarity.at((dim,), (1.0,), cosine=term.sizes.cosine)
        return _mean_distance(batch, teacher, identity, full_size)


class Relational(TeacherLoss):
    """The squared error of all similarities, over the M = 2 N + H occurrences a, b.

    L = 1/M^2 * sum_{a,b} ( s(a,b) - t(a,b) )^2

    A pair of an occurrence with itself does not count.
    """

    name = "relational"
    summary = "the teacher's similarities between all inputs of the batch"
    records = "texts"
    negatives = "optional"
    follows = "vectors"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        import torch

        from vembed.losses.candidates import ExclusionMask

        num = batch.num_rows
        rank_rows = batch.rank_rows
        num_inputs = 2 * num + batch.negative.numel()
        numbers = torch.arange(num_inputs, device=batch.query.device)
        # Occurrences are numbered: the N queries, the N positives, the H negatives.
        queries = numbers[:num][rank_rows]
        positives = numbers[num : 2 * num][rank_rows]
        negatives = numbers[2 * num :][batch.rank_negatives]
        rows = torch.cat((queries, positives, negatives))
        # Its own number is the key of an occurrence on both sides: equal keys are left
        # out, which is the diagonal.
        diagonal = ExclusionMask(rows[:, None].int(), numbers[:, None].int())
        coefficient = 1.0 / max(1, numbers.numel()) ** 2
        teacher = batch.teacher_vectors(str(term.teacher), "loss: relational")
        return _squared_errors(
            batch, term, rows, numbers, (diagonal,), coefficient, teacher
        )


class SpreadOut(MaskedLoss):
    """Queries away from queries, and positives away from positives.

        L = 1/(N (N-1)) * sum_{i != j} s(q_i,q_j)^2 + 1/(N (N-1)) * sum_{i != j} s(p_i,p_j)^2

    With mask_duplicates pairs of equal content do not count, and neither do those of one
    example.
    """

    name = "spread_out"
    summary = "queries away from each other, and documents away from each other"
    records = "texts"
    negatives = "unread"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        import torch

        from vembed.losses.candidates import ExclusionMask

        num = batch.num_rows
        rank_rows = batch.rank_rows
        numbers = torch.arange(2 * num, device=batch.query.device)
        content = torch.unique(batch.content, return_inverse=True)[1]
        example = torch.unique(batch.example, return_inverse=True)[1]
        shares = []
        for columns, inputs in (
            (numbers[:num], batch.query),
            (numbers[num:], batch.positive),
        ):
            # Without mask_duplicates only i == j is left out.
            keys = [columns]
            if self.mask_duplicates:
                keys = [content[inputs], example]
            masks = tuple(
                ExclusionMask(key[rank_rows, None].int(), key[:, None].int())
                for key in keys
            )
            coefficient = 1.0 / max(1, num * (num - 1))
            shares.append(
                _squared_errors(
                    batch, term, columns[rank_rows], columns, masks, coefficient
                )
            )
        return shares[0] + shares[1]


class NoLoss(Loss):
    """Zero, for runs that train by the model's own losses alone."""

    name = "none"
    is_of_model = True
    summary = "the losses of the model itself alone train it"
    records = "texts"
    negatives = "unread"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """Return zero, with a zero gradient."""
        del term
        return batch.embeddings[:0].sum()


def _squared_errors(
    batch: LossBatch,
    term: TermLoss,
    rows: Tensor,
    columns: Tensor,
    masks: tuple[ExclusionMask, ...],
    coefficient: float,
    teacher: TeacherVectors | None = None,
) -> Tensor:
    """Return coefficient * the sum of squared errors over occurrences rows x columns.

    The error is the difference to the teacher's score, or to 0. `masks` leave pairs out.
    """
    import torch

    from vembed.losses.candidates import FORWARD, LossCandidates, ScoreBlock
    from vembed.losses.row_losses import SquaredErrorRows
    from vembed.losses.similarity import arithmetic_dtype
    from vembed.losses.tiles import Scoring, tiled_loss

    # The table holds this rank's rows first, then all columns. There is no own pair:
    # the rows stand in for both sides of it.
    occurrence = torch.cat((rows, columns))
    row_positions = slice(0, rows.numel())
    column_positions = slice(rows.numel(), occurrence.numel())
    inputs = torch.cat((batch.query, batch.positive, batch.negative))
    candidates = LossCandidates(
        index=inputs[occurrence],
        occurrence=occurrence,
        queries=row_positions,
        positives=row_positions,
        score_blocks=(ScoreBlock("query", column_positions, masks, FORWARD),),
        explicit=(),
    )
    scoring = Scoring(
        candidates=candidates,
        similarity=term.similarity(batch.embeddings),
        row_loss=SquaredErrorRows,
        is_separable=True,
        coefficients=(coefficient,),
        margin=None,
        tiling=term.tiling,
        teacher=teacher,
    )
    embeddings = batch.embeddings
    scale = torch.ones((), dtype=arithmetic_dtype(embeddings), device=embeddings.device)
    return tiled_loss(embeddings, scoring, scale)


def _mean_distance(
    batch: LossBatch,
    teacher: TeacherVectors,
    projection: Tensor,
    similarity: Similarity,
) -> Tensor:
    """Return this rank's share of the mean of 1 - cos(W z, t) over all occurrences."""
    import torch

    from vembed.losses.projection import projected_distances

    rank_rows = batch.rank_rows
    negatives = batch.rank_negatives
    inputs = torch.cat(
        (batch.query[rank_rows], batch.positive[rank_rows], batch.negative[negatives])
    )
    targets = torch.cat(
        (
            teacher.query[rank_rows],
            teacher.positive[rank_rows],
            teacher.negative[negatives],
        )
    )
    distances = projected_distances(
        batch.embeddings,
        projection,
        teacher.vectors.to(batch.embeddings.device, projection.dtype),
        inputs,
        targets,
        similarity,
    )
    return distances / max(1, 2 * batch.num_rows + batch.negative.numel())
