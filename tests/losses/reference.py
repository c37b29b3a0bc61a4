"""Every loss as its formula reads: dense, float64, plain autograd, masks by Python sets.

The reference of a loss is the function of its name in this file, or the function `reference` in
tests/losses/test_NAME.py. It returns the share of `batch.rank_rows` in L at one Matryoshka size. tests/parity uses it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.parts import from_its_test
from vembed.config.terms import ResolvedTerm, source_terms
from vembed.losses.batch import (
    LossBatch,
    TeacherScores,
    TeacherVectors,
    draw_mixtures,
)
from vembed.losses.declaration import LABEL_SCORES

TIE = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Plain:
    """What a formula reads: one term at one Matryoshka size."""

    batch: LossBatch
    term: ResolvedTerm
    z: Tensor
    """[U, d] the first coordinates of the embeddings."""
    x: Tensor
    """[U, d] the same, of length 1 for the cosine."""
    scale: Tensor | float
    """One over the temperature."""
    parameters: Mapping[str, Tensor]
    contents: list[set[int]]
    """Contents of each hard negative, or of its parts where it is a mixture."""

    @property
    def loss(self):
        return self.term.loss

    @property
    def rank_rows(self):
        return range(self.batch.num_rows)[self.batch.rank_rows]

    @property
    def zero(self):
        return self.x.sum() * 0.0

    def per_row(self, total):
        return total / max(1, self.batch.num_rows)


def reference_loss(
    batch, config, *, parameters=None, mrl_dims=(), model_temperature=None
):
    """The share of `batch.rank_rows` in L; with all rows it is L.

    `parameters`: the loss's learned parameters by name. `model_temperature`: that with
    which the model was trained.
    """
    total = batch.embeddings.double().sum() * 0.0
    terms = source_terms(
        config.objective,
        config.data,
        config.model.model_name,
        model_temperature=model_temperature,
    )[0]
    for number, term in enumerate(terms):
        learned = parameters_of(term, number, parameters or {})
        total = total + term.weight * _term(batch, config, term, learned, mrl_dims)
    return total


def prefix_of(term, number):
    """What the names of a term's learned parameters begin with."""
    return "" if term.is_alone else f"terms.{number}."


def parameters_of(term, number, parameters):
    """A term's learned parameters, by the names that they have in it."""
    prefix = prefix_of(term, number)
    learned = {}
    for name, value in parameters.items():
        if name.startswith(prefix):
            learned[name.removeprefix(prefix)] = value
    return learned


def scale_of(term, parameters):
    """One over the temperature, which may be learned."""
    if "temperature" in parameters:
        return 1.0 / parameters["temperature"]
    if "log_scale" in parameters:
        return parameters["log_scale"].exp()
    return 1.0 if term.temperature is None else 1.0 / term.temperature


def weighted_dims(config, dim, mrl_dims=()):
    """(size, weight) of each Matryoshka size."""
    matryoshka = config.matryoshka
    if matryoshka.mrl_dims is None:
        return [(dim, 1.0)]
    dims = mrl_dims if matryoshka.mrl_dims == "auto" else matryoshka.mrl_dims
    return list(zip(dims, matryoshka.mrl_weights or [1.0] * len(dims), strict=True))


def _term(batch, config, term, parameters, mrl_dims):
    cosine = config.objective.similarity == "cosine"
    content = batch.content.tolist()
    contents = [{content[u]} for u in batch.negative.tolist()]
    if getattr(term.loss, "mix_negatives", 0):
        batch, parts = with_plain_mixtures(batch, term, config.run.seed, cosine)
        contents += parts
    embeddings = batch.embeddings.double()
    dims = [(embeddings.shape[1], 1.0)]
    if term.loss.name != "anchor":
        dims = weighted_dims(config, embeddings.shape[1], mrl_dims)
    scale = scale_of(term, parameters)
    total = embeddings.sum() * 0.0
    for dim, weight in dims:
        z = x = embeddings[:, :dim]
        if cosine:
            x = normalize(x)
        plain = Plain(batch, term, z, x, scale, parameters, contents)
        total = total + weight * reference_of(term.loss.name)(plain)
    return total


def reference_of(name):
    """The function of a loss's name in this file, or `reference` in the test file of the loss."""
    return globals().get(name) or from_its_test("losses", name, "reference")


def mean_over_rows(row_loss):
    """The loss whose value for each row is given."""

    def loss(plain):
        total = plain.zero
        for i in plain.rank_rows:
            total = total + row_loss(plain, i)
        return plain.per_row(total)

    return loss


def mean_over_terms(terms):
    """The mean of all terms. `terms` yields rows, each with a tensor of terms."""

    def loss(plain):
        total = plain.zero
        count = 0
        for i, values in terms(plain):
            count += values.numel()
            if i in plain.rank_rows:
                total = total + values.sum()
        return total / max(1, count)

    return loss


# ---- Losses over candidates -------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """An embedding of the batch in one of its places."""

    u: int
    """Row of the embeddings."""
    contents: set[int]
    """Its content, or those of its parts where it is a mixture."""
    example: int


def inputs_of(index, examples, contents):
    return list(map(Input, index.tolist(), contents, examples.tolist()))


class Rows:
    """Who is a candidate of whom, one row at a time."""

    def __init__(self, plain):
        batch = plain.batch
        self.loss = plain.loss
        self.x = plain.x
        self.guide = None
        if plain.term.guide is not None:
            self.guide = by_embedding(batch, plain.term.guide)
        content = [{value} for value in batch.content.tolist()]
        self.query = batch.query.tolist()
        self.positive = batch.positive.tolist()
        query_contents = [content[u] for u in self.query]
        positive_contents = [content[u] for u in self.positive]
        self.queries = inputs_of(batch.query, batch.example, query_contents)
        self.positives = inputs_of(batch.positive, batch.example, positive_contents)
        self.negatives = inputs_of(
            batch.negative, batch.negative_example, plain.contents
        )

    def forbidden(self, i):
        """Contents that are no negatives of row i."""
        contents = set(self.queries[i].contents)
        for positive in self.positives:
            if positive.example == self.queries[i].example:
                contents |= positive.contents
        return contents

    def allowed(self, i, inputs, *, are_own=False):
        """Embeddings of inputs that are negatives of row i, of other examples or of its own."""
        forbidden = self.forbidden(i)
        embeddings = []
        for entry in inputs:
            is_own = entry.example == self.queries[i].example
            if is_own is are_own and not entry.contents & forbidden:
                embeddings.append(entry.u)
        return embeddings

    def documents(self, i):
        """Embeddings of D_i, one entry per occurrence."""
        return self.other_documents(i) + self.own_negatives(i)

    def other_documents(self, i):
        """Those of D_i that come from other examples."""
        documents = self.allowed(i, self.positives)
        if self.loss.hard_negatives_scope != "own":
            documents += self.allowed(i, self.negatives)
        return documents

    def own_negatives(self, i):
        """Those of D_i that are hard negatives of the row's example."""
        return self.allowed(i, self.negatives, are_own=True)

    def queries_of_document(self, i):
        """Embeddings of R_i."""
        mine = self.queries[i]
        embeddings = []
        for j, other in enumerate(self.queries):
            is_known = self.positives[i].contents & self.forbidden(j)
            is_other = other.example != mine.example
            if is_other and other.contents != mine.contents and not is_known:
                embeddings.append(other.u)
        return embeddings

    def in_reach(self, scores, own_score):
        """Scores of the candidates that the margin leaves."""
        if self.loss.false_negative_margin is None:
            return scores
        ceiling = own_score.detach() + self.loss.false_negative_margin
        return scores[scores.detach() <= ceiling + TIE * ceiling.abs().clamp(min=1.0)]

    def scores(self, i, anchor, others):
        """Scores of an anchor with those of the others that the guide leaves."""
        if self.guide is not None:
            pair_score = self.guide[self.query[i]] @ self.guide[self.positive[i]]
            margin = self.loss.guide_margin
            if isinstance(margin, str):
                margin = float(margin[:-1]) / 100 * pair_score.abs()
            ceiling = pair_score - margin
            ceiling = ceiling + TIE * ceiling.abs().clamp(min=1.0)
            guided = [float(self.guide[anchor] @ self.guide[u]) for u in others]
            others = [
                u for u, score in zip(others, guided, strict=True) if score <= ceiling
            ]
        return self.x[others] @ self.x[anchor]

    def forward_scores(self, i):
        """The own pair's score and those of all candidates of the forward direction."""
        pair_score, others = self.scores_of_others(i)
        return pair_score, torch.cat((others, self.scores_of_own_negatives(i)))

    def scores_of_others(self, i):
        """The own pair's score and those of the candidates from other examples."""
        query = self.query[i]
        positive = self.positive[i]
        scores = [self.scores(i, query, self.other_documents(i))]
        if self.loss.same_side_negatives in ("queries", "both"):
            scores.append(self.scores(i, query, self.allowed(i, self.queries)))
        if self.loss.same_side_negatives in ("documents", "both"):
            scores.append(self.scores(i, positive, self.other_documents(i)))
        pair_score = self.x[query] @ self.x[positive]
        return pair_score, self.in_reach(torch.cat(scores), pair_score)

    def scores_of_own_negatives(self, i):
        """Scores of the hard negatives of the row's example."""
        query = self.query[i]
        positive = self.positive[i]
        scores = [self.scores(i, query, self.own_negatives(i))]
        if self.loss.same_side_negatives in ("documents", "both"):
            scores.append(self.scores(i, positive, self.own_negatives(i)))
        return self.in_reach(torch.cat(scores), self.x[query] @ self.x[positive])

    def reverse_scores(self, i):
        """The same for the reverse direction."""
        pair_score = self.x[self.query[i]] @ self.x[self.positive[i]]
        others = self.scores(i, self.positive[i], self.queries_of_document(i))
        return pair_score, self.in_reach(others, pair_score)


def softmax_loss(plain, pair_score, others, alphas):
    """-log of the softmax at the own pair, among candidates that are hardened by these weights."""
    gamma = plain.loss.focal_gamma
    logits = others * plain.scale + alphas * others.detach()
    own_logit = pair_score * plain.scale
    value = torch.logsumexp(torch.cat((own_logit[None], logits)), 0) - own_logit
    if gamma and len(others):
        value = (1 - torch.exp(-value)) ** gamma * value
    return value


@mean_over_rows
def infonce(plain, i):
    if plain.batch.embeddings_are_scores:
        student, _ = listed(plain, [i])
        return -torch.log_softmax(student * plain.scale, 0)[0]
    rows = Rows(plain)
    alpha = plain.loss.hardness_alpha
    alpha_of_others = alpha if plain.loss.hardness_scope == "all" else 0.0
    pair_score, others = rows.scores_of_others(i)
    negatives = rows.scores_of_own_negatives(i)
    alphas = [alpha_of_others] * len(others) + [alpha] * len(negatives)
    scores = torch.cat((others, negatives))
    value = softmax_loss(plain, pair_score, scores, scores.new_tensor(alphas))
    if plain.loss.bidirectional:
        pair_score, others = rows.reverse_scores(i)
        reverse = softmax_loss(plain, pair_score, others, alpha_of_others)
        value = (value + reverse) / 2
    return value


@mean_over_rows
def sigmoid(plain, i):
    scale = plain.scale
    bias = plain.parameters.get("bias", -10.0)
    zero = plain.x.new_zeros(())
    pair_score, others = Rows(plain).forward_scores(i)
    value = torch.logaddexp(-(pair_score * scale + bias), zero)
    return value + torch.logaddexp(others * scale + bias, zero).sum()


def circle_loss(plain, pair_score, others):
    if not len(others):
        return plain.zero
    margin = 0.25 if plain.loss.margin is None else plain.loss.margin
    weight = torch.clamp(1 + margin - pair_score, min=0.0).detach()
    positive = weight * (pair_score - 1 + margin)
    negative = torch.clamp(others + margin, min=0.0).detach() * (others - margin)
    exponent = torch.logsumexp(negative * plain.scale, 0) - positive * plain.scale
    return torch.logaddexp(exponent, plain.x.new_zeros(()))


@mean_over_rows
def circle(plain, i):
    rows = Rows(plain)
    value = circle_loss(plain, *rows.forward_scores(i))
    if plain.loss.bidirectional:
        value = (value + circle_loss(plain, *rows.reverse_scores(i))) / 2
    return value


@mean_over_terms
def triplet(plain):
    margin = 0.2 if plain.loss.margin is None else plain.loss.margin
    for i in range(plain.batch.num_rows):
        scores, _ = listed(plain, [i])
        yield i, torch.clamp(scores[1:] - scores[0] + margin, min=0.0)


# ---- Losses on scored pairs --------------------------------------------------------------


def cosent(plain):
    x = plain.x
    batch = plain.batch
    return _ordered(plain, (x[batch.query] * x[batch.positive]).sum(1))


def angle(plain):
    """As AnglE has it, with complex numbers."""
    half = plain.z.shape[1] // 2
    numbers = torch.complex(plain.z[:, :half], plain.z[:, half:])
    first = numbers[plain.batch.query]
    second = numbers[plain.batch.positive]
    quotient = (first * second.conj()) / second.abs().square().sum(1, keepdim=True)
    quotient = quotient * second.abs().square().sum(1, keepdim=True).sqrt()
    quotient = quotient / first.abs().square().sum(1, keepdim=True).sqrt()
    return _ordered(plain, torch.abs((quotient.real + quotient.imag).sum(1)))


def _ordered(plain, scores):
    labels = plain.batch.label_scores
    assert labels is not None
    higher, lower = torch.nonzero(labels[:, None] > labels[None, :], as_tuple=True)
    differences = (scores[lower] - scores[higher]) * plain.scale
    terms = torch.cat((scores.new_zeros(1), differences))
    return plain.per_row(torch.logsumexp(terms, 0) * len(plain.rank_rows))


def cosine(plain):
    x = plain.x
    batch = plain.batch
    scores = (x[batch.query] * x[batch.positive]).sum(1)
    return plain.per_row((scores - batch.label_scores)[batch.rank_rows].square().sum())


# ---- Losses on listed pairs --------------------------------------------------------------


def target(plain, row, negative):
    """The teacher's score of a row's own pair, or of its query with a hard negative."""
    batch = plain.batch
    name = plain.term.teacher
    if name in (None, LABEL_SCORES):
        if batch.label_scores is None:
            # Without scores the labels are those of positives and negatives.
            return torch.tensor(float(negative is None)).double()
        if negative is None:
            return batch.label_scores[row].double()
        return batch.negative_label_scores[negative].double()
    teacher = batch.teachers[str(name)]
    if isinstance(teacher, TeacherScores):
        score = (
            teacher.positive[row] if negative is None else teacher.negative[negative]
        )
        return score.double()
    vectors = by_embedding(batch, str(name))
    other = batch.positive[row] if negative is None else batch.negative[negative]
    return vectors[batch.query[row]] @ vectors[other]


def own_negatives(plain, row):
    """Hard negatives of a row's example, less duplicates of its query and positives."""
    batch = plain.batch
    content = batch.content
    same = batch.example == batch.example[row]
    forbidden = {int(content[u]) for u in batch.positive[same]}
    forbidden.add(int(content[batch.query[row]]))
    negatives = []
    for h in range(batch.negative.numel()):
        is_duplicate = int(content[batch.negative[h]]) in forbidden
        if batch.negative_example[h] == batch.example[row] and not is_duplicate:
            negatives.append(h)
    return negatives


def listed(plain, rows):
    """Student's and teacher's scores of the rows' own pairs and of the first row's hard negatives."""
    batch = plain.batch
    negatives = own_negatives(plain, rows[0])
    documents = [int(batch.positive[i]) for i in rows]
    documents += [int(batch.negative[h]) for h in negatives]
    targets = [target(plain, i, None) for i in rows]
    targets += [target(plain, rows[0], h) for h in negatives]
    student = plain.x[documents] @ plain.x[batch.query[rows[0]]]
    if batch.embeddings_are_scores:
        student = plain.z[documents, 0]
    return student, torch.stack(targets)


def lists(plain):
    """For each example its first row, and the scores of all its documents."""
    for example in plain.batch.example.unique().tolist():
        rows = (plain.batch.example == example).nonzero().flatten().tolist()
        yield rows[0], *listed(plain, rows)


def teacher_scale(plain):
    return 1.0 / (plain.loss.teacher_temperature or plain.loss.temperature)


@mean_over_rows
def kl(plain, i):
    student, teacher = listed(plain, [i])
    if plain.loss.distill_candidates == "batch":
        rows = Rows(plain)
        vectors = by_embedding(plain.batch, str(plain.term.teacher))
        documents = [rows.positive[i], *rows.documents(i)]
        student = plain.x[documents] @ plain.x[rows.query[i]]
        teacher = vectors[documents] @ vectors[rows.query[i]]
    log_p = torch.log_softmax(teacher * teacher_scale(plain), 0)
    log_q = torch.log_softmax(student * plain.scale, 0)
    return (log_p.exp() * (log_p - log_q)).sum()


@mean_over_rows
def score_mse(plain, i):
    student, teacher = listed(plain, [i])
    expected = torch.softmax(teacher * teacher_scale(plain), 0)
    return (torch.softmax(student * plain.scale, 0) - expected).square().mean()


@mean_over_terms
def margin_mse(plain):
    for i in range(plain.batch.num_rows):
        student, teacher = listed(plain, [i])
        errors = (student[0] - student[1:]) - (teacher[0] - teacher[1:])
        yield i, errors.square()


@mean_over_terms
def listwise(plain):
    for first, student, teacher in lists(plain):
        known = ~teacher.isnan()
        expected = torch.softmax(teacher[known] * teacher_scale(plain), 0)
        log_softmax = torch.log_softmax(student[known] * plain.scale, 0)
        yield first, -(expected * log_softmax).sum()


@mean_over_terms
def ranknet(plain):
    for first, student, teacher in lists(plain):
        values = teacher.nan_to_num(nan=-float("inf"))
        better, worse = torch.nonzero(values[:, None] > values, as_tuple=True)
        differences = (student[worse] - student[better]) * plain.scale
        yield first, torch.logaddexp(differences, plain.x.new_zeros(()))


@mean_over_terms
def bce(plain):
    for first, student, teacher in lists(plain):
        labels = teacher.nan_to_num(nan=0.0)
        if plain.term.teacher not in (None, LABEL_SCORES):
            labels = labels.sigmoid()
        yield first, torch.log1p(student.exp()) - labels * student


@mean_over_terms
def mse(plain):
    for first, student, teacher in lists(plain):
        yield first, (student - teacher).square()


# ---- Losses on vectors -------------------------------------------------------------------


def of_rank(batch, queries, positives, negatives):
    """What belongs to this rank's inputs, of what belongs to all of them."""
    mine = (
        queries[batch.rank_rows],
        positives[batch.rank_rows],
        negatives[batch.rank_negatives],
    )
    return torch.cat(mine)


def relational(plain):
    batch = plain.batch
    x = plain.x
    vectors = by_embedding(batch, str(plain.term.teacher))
    inputs = (batch.query, batch.positive, batch.negative)
    everything = torch.cat(inputs)
    number = torch.arange(len(everything))
    columns = of_rank(batch, *number.split(list(map(len, inputs))))
    rows = everything[columns]
    errors = x[rows] @ x[everything].T - vectors[rows] @ vectors[everything].T
    is_other = columns[:, None] != number
    return (errors.square() * is_other).sum() / max(1, len(everything)) ** 2


def spread_out(plain):
    batch = plain.batch
    x = plain.x
    total = plain.zero
    num = batch.num_rows
    for index in (batch.query, batch.positive):
        content = batch.content[index]
        differ = content[:, None] != content
        differ &= batch.example[:, None] != batch.example
        squares = (x[index] @ x[index].T).square() * differ
        total = total + squares[batch.rank_rows].sum() / max(1, num * (num - 1))
    return total


def embedding(plain):
    return _distances(plain, plain.parameters["projection"])


def anchor(plain):
    return _distances(plain, torch.eye(plain.z.shape[1], dtype=torch.float64))


def _distances(plain, projection):
    batch = plain.batch
    z = plain.z
    total = plain.zero
    vectors = by_embedding(batch, str(plain.term.teacher))
    inputs = of_rank(batch, batch.query, batch.positive, batch.negative)
    for u in inputs.tolist():
        projected = projection[:, : z.shape[1]].double() @ z[u]
        if bool(vectors[u].any()):
            total = total + 1 - projected @ vectors[u] / projected.norm()
    return total / max(1, 2 * batch.num_rows + batch.negative.numel())


def none(plain):
    return plain.zero


# ---- Teachers and mixtures ---------------------------------------------------------------


def by_embedding(batch, name):
    """[U, E] the teacher's vector of each embedding."""
    teacher = batch.teachers[name]
    assert isinstance(teacher, TeacherVectors)
    vectors = teacher.vectors.double()
    actual = vectors.new_zeros(batch.embeddings.shape[0], vectors.shape[1])
    actual[batch.query] = vectors[teacher.query]
    actual[batch.positive] = vectors[teacher.positive]
    actual[batch.negative] = vectors[teacher.negative]
    return actual


def with_plain_mixtures(batch, term, seed, cosine):
    """The batch with mixed negatives, and the contents of each mixture's parts."""
    drawn = draw_mixtures(batch, seed, dict(term.loss)["mix_negatives"])
    left = batch.negative[drawn.left]
    right = batch.negative[drawn.right]
    share = drawn.share[:, None]
    contents = torch.stack((batch.content[left], batch.content[right]), 1).tolist()

    def with_mixtures(vectors, parts):
        mixtures = share * parts[left] + (1 - share) * parts[right]
        return torch.cat((vectors, mixtures))

    embeddings = batch.embeddings
    parts = normalize(embeddings) if cosine else embeddings
    mixed = len(embeddings) + torch.arange(len(left))
    negative = torch.cat((batch.negative, mixed))
    teachers = dict(batch.teachers)
    for name, answers in batch.teachers.items():
        if isinstance(answers, TeacherVectors):
            vectors = by_embedding(batch, name)
            vectors = normalize(with_mixtures(vectors, vectors))
            inputs = (batch.query, batch.positive, negative)
            teachers[name] = TeacherVectors(vectors, *inputs)
    no_content = torch.full((len(left),), -7)
    extended = replace(
        batch,
        embeddings=with_mixtures(embeddings, parts),
        content=torch.cat((batch.content, no_content)),
        negative=negative,
        negative_example=torch.cat((batch.negative_example, drawn.example)),
        teachers=teachers,
    )
    return extended, list(map(set, contents))
