"""The losses that follow teachers as their formulas read: dense, float64, loops over rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.config.terms import SCORES, followed_teacher
from vembed.losses.batch import LossBatch
from vembed.losses.mixing import draw_mixtures
from vembed.losses.targets import TeacherScores, TeacherVectors

TIE = 64 * torch.finfo(torch.float64).eps


def by_embedding(batch: LossBatch, name: str) -> Tensor:
    """[U, E] the teacher's vector of each embedding."""
    teacher = batch.teachers[name]
    assert isinstance(teacher, TeacherVectors)
    vectors = teacher.vectors.double()
    found = vectors.new_zeros(batch.embeddings.shape[0], vectors.shape[1])
    for mine, theirs in (
        (batch.query, teacher.query),
        (batch.positive, teacher.positive),
        (batch.negative, teacher.negative),
    ):
        found[mine] = vectors[theirs]
    return found


def with_plain_mixtures(
    batch: LossBatch, config: TrainConfig
) -> tuple[LossBatch, list[set[int]]]:
    """The batch with mixed negatives, and the contents of each hard negative's parts."""
    content = batch.content.tolist()
    contents = [{content[u]} for u in batch.negative.tolist()]
    if not config.objective.mix_negatives or config.objective.loss != "infonce":
        return batch, contents
    drawn = draw_mixtures(batch, config.run.seed, config.objective.mix_negatives)
    embeddings, negative, examples = (
        [batch.embeddings],
        batch.negative.tolist(),
        batch.negative_example.tolist(),
    )
    vectors = {
        name: [by_embedding(batch, name)]
        for name, one in batch.teachers.items()
        if isinstance(one, TeacherVectors)
    }
    num = batch.embeddings.shape[0]
    for left, right, share, example in zip(
        *(x.tolist() for x in (drawn.left, drawn.right, drawn.share, drawn.example)),
        strict=True,
    ):
        u, v = negative[left], negative[right]
        one, two = batch.embeddings[u], batch.embeddings[v]
        if config.objective.similarity == "cosine":
            one, two = one / one.norm(), two / two.norm()
        embeddings.append((share * one + (1 - share) * two)[None])
        for parts in vectors.values():
            mixed = share * parts[0][u] + (1 - share) * parts[0][v]
            parts.append((mixed / mixed.norm())[None])
        contents.append({content[u], content[v]})
        negative.append(num)
        num += 1
        examples.append(example)
    mixed_negative = torch.tensor(negative, dtype=torch.int64)
    teachers = {
        name: TeacherVectors(
            torch.cat(parts), batch.query, batch.positive, mixed_negative
        )
        for name, parts in vectors.items()
    }
    extended = replace(
        batch,
        embeddings=torch.cat(embeddings),
        content=torch.cat((batch.content, torch.full((num - len(batch.content),), -7))),
        negative=mixed_negative,
        negative_example=torch.tensor(examples, dtype=torch.int64),
        teachers={**batch.teachers, **teachers},
    )
    return extended, contents


def in_reach_of_guide(
    guide: Tensor,
    config: TrainConfig,
    anchor: int,
    query: int,
    positive: int,
    others: list[int],
) -> list[int]:
    """The embeddings that the guide leaves as negatives."""
    own = guide[query] @ guide[positive]
    margin = config.objective.guide_margin * (
        own.abs() if config.objective.guide_margin_kind == "relative" else 1.0
    )
    ceiling = own - margin
    ceiling = ceiling + TIE * ceiling.abs().clamp(min=1.0)
    return [u for u in others if not bool(guide[anchor] @ guide[u] > ceiling)]


def targets(
    batch: LossBatch, config: TrainConfig, row: int, negative: int | None
) -> Tensor:
    """The teacher's score of a row's own pair or of its query with a hard negative."""
    name = followed_teacher(config)
    if name in (None, SCORES):
        assert batch.scores is not None
        if negative is None:
            return batch.scores[row]
        return (
            torch.tensor(float("nan"))
            if batch.negative_scores is None
            else batch.negative_scores[negative]
        )
    teacher = batch.teachers[str(name)]
    if isinstance(teacher, TeacherScores):
        return teacher.positive[row] if negative is None else teacher.negative[negative]
    vectors = by_embedding(batch, str(name))
    other = batch.positive[row] if negative is None else batch.negative[negative]
    return vectors[batch.query[row]] @ vectors[other]


def own_negatives(batch: LossBatch, config: TrainConfig, row: int) -> list[int]:
    """Hard negatives of a row's example, less duplicates of its query and positives."""
    content = batch.content
    same = batch.example == batch.example[row]
    forbidden = {int(content[u]) for u in batch.positive[same]} | {
        int(content[batch.query[row]])
    }
    return [
        h
        for h in range(batch.negative.numel())
        if batch.negative_example[h] == batch.example[row]
        and not (
            config.objective.mask_duplicates
            and int(content[batch.negative[h]]) in forbidden
        )
    ]


def listed(
    x: Tensor, batch: LossBatch, config: TrainConfig, row: int
) -> tuple[Tensor, Tensor]:
    """Student's and teacher's scores of a row's own pair and its example's hard negatives."""
    negatives = own_negatives(batch, config, row)
    documents = [int(batch.positive[row]), *(int(batch.negative[h]) for h in negatives)]
    wanted = [
        targets(batch, config, row, None),
        *(targets(batch, config, row, h) for h in negatives),
    ]
    return x[documents] @ x[batch.query[row]], torch.stack(
        [one.double() for one in wanted]
    )


def target_scale(config: TrainConfig) -> float:
    return 1.0 / (config.objective.teacher_temperature or config.objective.temperature)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = torch.log_softmax(teacher, 0), torch.log_softmax(student, 0)
    return (log_p.exp() * (log_p - log_q)).sum()


def kl_listed(
    x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float
) -> Tensor:
    loss = x.sum() * 0.0
    for i in range(batch.num_rows)[batch.own_rows]:
        student, teacher = listed(x, batch, config, i)
        loss = loss + divergence(student * scale, teacher * target_scale(config))
    return loss / max(1, batch.num_rows)


def score_mse(
    x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float
) -> Tensor:
    loss = x.sum() * 0.0
    for i in range(batch.num_rows)[batch.own_rows]:
        student, teacher = listed(x, batch, config, i)
        errors = torch.softmax(student * scale, 0) - torch.softmax(
            teacher * target_scale(config), 0
        )
        loss = loss + errors.square().mean()
    return loss / max(1, batch.num_rows)


def margin_mse(x: Tensor, batch: LossBatch, config: TrainConfig) -> Tensor:
    loss, count = x.sum() * 0.0, 0
    for i in range(batch.num_rows):
        student, teacher = listed(x, batch, config, i)
        count += len(student) - 1
        if i in range(batch.num_rows)[batch.own_rows]:
            loss = (
                loss
                + ((student[0] - student[1:]) - (teacher[0] - teacher[1:]))
                .square()
                .sum()
            )
    return loss / max(1, count)


def lists(
    x: Tensor, batch: LossBatch, config: TrainConfig
) -> list[tuple[int, Tensor, Tensor]]:
    """For each example its first row, the student's and the teacher's scores of all its documents."""
    found = []
    for example in batch.example.unique().tolist():
        rows = (batch.example == example).nonzero().flatten().tolist()
        negatives = own_negatives(batch, config, rows[0])
        query = x[batch.query[rows[0]]]
        documents = [
            *(int(batch.positive[i]) for i in rows),
            *(int(batch.negative[h]) for h in negatives),
        ]
        wanted = [targets(batch, config, i, None) for i in rows]
        wanted += [targets(batch, config, rows[0], h) for h in negatives]
        found.append(
            (
                rows[0],
                x[documents] @ query,
                torch.stack([one.double() for one in wanted]),
            )
        )
    return found


def listwise(
    x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float
) -> Tensor:
    loss, found = x.sum() * 0.0, lists(x, batch, config)
    for first, student, teacher in found:
        if first in range(batch.num_rows)[batch.own_rows]:
            known = ~teacher.isnan()
            wanted = torch.softmax(teacher[known] * target_scale(config), 0)
            loss = loss - (wanted * torch.log_softmax(student[known] * scale, 0)).sum()
    return loss / max(1, len(found))


def ranknet(
    x: Tensor, batch: LossBatch, config: TrainConfig, scale: Tensor | float
) -> Tensor:
    loss, count = x.sum() * 0.0, 0
    for first, student, teacher in lists(x, batch, config):
        values = teacher.nan_to_num(nan=-float("inf"))
        for a in range(len(values)):
            for b in range(len(values)):
                if values[a] > values[b]:
                    count += 1
                    if first in range(batch.num_rows)[batch.own_rows]:
                        loss = loss + torch.logaddexp(
                            (student[b] - student[a]) * scale, x.new_zeros(())
                        )
    return loss / max(1, count)


def relational(x: Tensor, batch: LossBatch, config: TrainConfig) -> Tensor:
    vectors = by_embedding(batch, str(followed_teacher(config)))
    everything = torch.cat((batch.query, batch.positive, batch.negative))
    own = torch.cat(
        (
            batch.query[batch.own_rows],
            batch.positive[batch.own_rows],
            batch.negative[batch.own_negatives],
        )
    )
    number = torch.arange(len(everything))
    mine = torch.cat(
        (
            number[: batch.num_rows][batch.own_rows],
            number[batch.num_rows : 2 * batch.num_rows][batch.own_rows],
            number[2 * batch.num_rows :][batch.own_negatives],
        )
    )
    errors = x[own] @ x[everything].T - vectors[own] @ vectors[everything].T
    return (errors.square() * (mine[:, None] != number)).sum() / max(
        1, len(everything)
    ) ** 2


def spread_out(x: Tensor, batch: LossBatch, config: TrainConfig) -> Tensor:
    loss, num = x.sum() * 0.0, batch.num_rows
    for index in (batch.query, batch.positive):
        differ = ~torch.eye(num, dtype=torch.bool)
        if config.objective.mask_duplicates:
            content = batch.content[index]
            differ = (content[:, None] != content) & (
                batch.example[:, None] != batch.example
            )
        squares = (x[index] @ x[index].T).square() * differ
        loss = loss + squares[batch.own_rows].sum() / max(1, num * (num - 1))
    return loss


def embedding(
    z: Tensor, batch: LossBatch, config: TrainConfig, projection: Tensor
) -> Tensor:
    """z: the first coordinates, not normalised."""
    vectors = by_embedding(batch, str(followed_teacher(config)))
    own = torch.cat(
        (
            batch.query[batch.own_rows],
            batch.positive[batch.own_rows],
            batch.negative[batch.own_negatives],
        )
    )
    num, loss = 2 * batch.num_rows + batch.negative.numel(), z.sum() * 0.0
    for u in own.tolist():
        projected = projection[:, : z.shape[1]].double() @ z[u]
        if bool(vectors[u].any()):
            loss = loss + 1 - projected @ vectors[u] / projected.norm()
    return loss / max(1, num)
