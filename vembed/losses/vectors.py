"""embedding, anchor, relational, spread_out, none: losses on single inputs and all pairs.

They read no pairs, so that records of a single text will do. An occurrence is a query, a
positive or a hard negative of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.errors import UserError
from vembed.losses.declaration import LossDeclaration, StartValues, TeacherLoss

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.batch import LossBatch, TeacherVectors
    from vembed.losses.build import TermModule
    from vembed.losses.candidates import ExclusionMask
    from vembed.losses.similarity import Similarity

OCCURRENCES_AT_ONCE = 2048


class Embedding(TeacherLoss):
    """The distance to a teacher's vectors t, over all M = 2 N + H occurrences z.

        L = 1/M * sum_z 1 - cos( W z, t_z )

    W is learned with the model, and is no part of what is saved. At a smaller Matryoshka
    dim k only the first k coordinates of z and columns of W count. Inputs that the
    teacher does not know count as 0.
    """

    name = "embedding"
    summary = "the teacher's vectors, through a learned linear map"
    records = "texts"
    negatives = "optional"
    follows = "vectors"

    def start_values(self, start: StartValues) -> dict[str, Tensor]:
        """Return the identity where both widths are equal, otherwise a draw from the seed."""
        import torch

        assert start.embedding_dim is not None and start.teacher_dim is not None
        if start.embedding_dim == start.teacher_dim:
            return {"projection": torch.eye(start.embedding_dim)}
        draw = torch.Generator().manual_seed(start.seed)
        shape = (start.teacher_dim, start.embedding_dim)
        values = torch.randn(shape, generator=draw)
        return {"projection": values / start.embedding_dim**0.5}

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        teacher = batch.teacher_vectors(term.teacher)
        projection = term.parameter("projection", batch.embeddings)
        similarity = term.similarity(batch.embeddings)
        return _mean_distance(batch, teacher, projection, similarity)


class Anchor(LossDeclaration):
    """The distance to the embeddings of the start model, at the full width alone.

    The formula of `embedding` with W the identity: the mean of 1 - cos(z, t), with t the
    embedding that the start model gives to the same input.
    """

    name = "anchor"
    summary = "the embeddings of the start model, against forgetting"
    records = "texts"
    negatives = "optional"
    follows = "start_model"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        import torch

        from vembed.losses.similarity import Similarity

        teacher = batch.teacher_vectors(term.teacher)
        embeddings = batch.embeddings
        dim = embeddings.shape[1]
        teacher_dim = teacher.vectors.shape[1]
        if dim != teacher_dim:
            raise UserError(
                f"loss: anchor: the embeddings have {dim} dimensions, and those of {term.teacher} before "
                f"training have {teacher_dim}: leave out what changes the size (also truncate_dim "
                "in the model's files), or this loss"
            )
        identity = batch.like_scores(torch.eye(dim, device=embeddings.device))
        full_size = Similarity(term.run_similarity.cosine, (dim,))
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

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        import torch

        from vembed.losses.candidates import ExclusionMask

        rows = batch.rank_occurrences()
        num_occurrences = len(batch.occurrence_indices())
        columns = torch.arange(num_occurrences, device=rows.device)
        # The key of an occurrence is its number, on both sides. So the diagonal is left out.
        row_keys = rows[:, None].int()
        column_keys = columns[:, None].int()
        diagonal = ExclusionMask(row_keys, column_keys)
        coefficient = 1.0 / max(1, num_occurrences) ** 2
        teacher = batch.teacher_vectors(term.teacher)
        return _squared_errors(
            batch, term, rows, columns, (diagonal,), coefficient, teacher
        )


class SpreadOut(LossDeclaration):
    """Queries away from queries, and positives away from positives.

        L = 1/(N (N-1)) * sum_{i != j} s(q_i,q_j)^2 + 1/(N (N-1)) * sum_{i != j} s(p_i,p_j)^2

    Pairs of equal content do not count, and neither do those of one example.
    """

    name = "spread_out"
    summary = "queries away from each other, and documents away from each other"
    records = "texts"
    negatives = "unread"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        import torch

        from vembed.losses.batch import compact_keys, to_device_together
        from vembed.losses.candidates import ExclusionMask

        num_rows = batch.num_rows
        rank_rows = batch.rank_rows
        # Made on the host: a GPU would have to be waited for.
        host = batch.on_host()
        keys = {
            "content": compact_keys(host.content),
            "example": compact_keys(host.example),
        }
        keys = to_device_together(keys, batch.query.device)
        coefficient = 1.0 / max(1, num_rows * (num_rows - 1))
        occurrences = torch.arange(2 * num_rows, device=batch.query.device)
        share = batch.embeddings.new_zeros(())
        for index, columns in zip(
            (batch.query, batch.positive),
            torch.split(occurrences, num_rows),
            strict=True,
        ):
            # [R] keys: a row is not compared with rows of the same content or of the same example.
            masks = []
            for key in (keys["content"][index], keys["example"]):
                columns_of_key = key[:, None]
                masks.append(ExclusionMask(columns_of_key[rank_rows], columns_of_key))
            rows = columns[rank_rows]
            share = share + _squared_errors(
                batch, term, rows, columns, tuple(masks), coefficient
            )
        return share


class NoLoss(LossDeclaration):
    """Zero, for runs that train by the model's auxiliary losses alone."""

    name = "none"
    is_of_model = True
    summary = "the losses of the model itself alone train it"
    records = "texts"
    negatives = "unread"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """Return zero, with a zero gradient."""
        del term
        return batch.embeddings[:0].sum()


def _squared_errors(
    batch: LossBatch,
    term: TermModule,
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

    from vembed.losses.candidates import ColumnGroup, ScorePlan
    from vembed.losses.tiles import Scoring, SquaredErrorRows, tiled_loss

    # The table has this rank's rows first, then all columns. There is no positive pair: the rows stand in for both
    # sides of it, and the row loss does not count it.
    occurrence = torch.cat((rows, columns))
    row_entries = slice(0, rows.numel())
    column_entries = slice(rows.numel(), occurrence.numel())
    plan = ScorePlan(
        index=batch.occurrence_indices()[occurrence],
        occurrence=occurrence,
        local_queries=row_entries,
        local_positives=row_entries,
        column_groups=(ColumnGroup(row_entries, column_entries, masks),),
    )
    embeddings = batch.embeddings
    scoring = Scoring(
        plan=plan,
        similarity=term.similarity(embeddings),
        row_loss=SquaredErrorRows,
        direction_factors=(coefficient,),
        teacher=teacher,
    )
    scale = batch.like_scores(torch.ones((), device=embeddings.device))
    return tiled_loss(embeddings, scoring, scale)


def _mean_distance(
    batch: LossBatch,
    teacher: TeacherVectors,
    projection: Tensor,
    similarity: Similarity,
) -> Tensor:
    """Return this rank's share of the mean of 1 - cos(W z, t) over all M occurrences.

    `projection`: W [width, D]. With several dims, their weighted sum. Differentiable once, in the embeddings and W.
    """
    import torch

    from vembed.losses.similarity import KnownGradients, chunks

    occurrences = batch.rank_occurrences()
    index = batch.occurrence_indices()[occurrences]
    target_index = teacher.occurrence_indices()[occurrences]
    embeddings = batch.embeddings
    device = embeddings.device
    dtype = projection.dtype
    vectors = teacher.vectors.to(device, dtype)
    total = projection.new_zeros(())
    d_embeddings = torch.zeros_like(embeddings, dtype=dtype)
    d_projection = torch.zeros_like(projection)
    with torch.autocast(device.type, enabled=False):
        # Autograd for one chunk at a time: the projected vectors [M, width] of all occurrences never exist at once.
        for chunk in chunks(index.numel(), OCCURRENCES_AT_ONCE):
            with torch.enable_grad():
                z = embeddings.detach()[index[chunk]]
                z = z.to(dtype).requires_grad_()
                weight = projection.detach().requires_grad_()
                targets = vectors[target_index[chunk]]
                loss = _sum_of_distances(z, weight, targets, similarity)
            d_z, d_weight = torch.autograd.grad(loss, (z, weight))
            total += loss.detach()
            # An input that occurs several times gets the sum of the gradients of its occurrences.
            d_embeddings.index_add_(0, index[chunk], d_z)
            d_projection += d_weight
    gradients = (d_embeddings, d_projection)
    summed: Tensor = KnownGradients.apply(total, gradients, embeddings, projection)  # type: ignore[no-untyped-call]
    return summed / max(1, len(batch.occurrence_indices()))


def _sum_of_distances(
    z: Tensor,
    projection: Tensor,
    vectors: Tensor,
    similarity: Similarity,
) -> Tensor:
    """Return the sum over z [m, D] and dims of weight * (1 - cos(W z, t)), for the teacher's vectors t [m, width]."""
    import torch

    # Inputs that the teacher does not know have a vector of zeros, and count as 0.
    is_known = vectors.square().sum(1) > 0
    projected = vectors.new_zeros(vectors.shape)
    losses = []
    for part in similarity.parts:
        # The coordinates that this dim adds to the one before: W z of every dim for the price of the full one.
        columns = projection[:, part]
        projected = projected + z[:, part] @ columns.T
        squares = projected.square().sum(1)
        # A vector of zeros has the cosine 0 and no gradient.
        safe = torch.where(squares > 0, squares, torch.ones_like(squares))
        inverse_norm = safe.rsqrt() * (squares > 0)
        cosine = (projected * vectors).sum(1) * inverse_norm
        distances = (1.0 - cosine) * is_known
        losses.append(distances.sum())
    return similarity.total(torch.stack(losses))
