"""Small batches with duplicates of every kind, and what the tests compare."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from tests.losses.reference import (
    parameters_of,
    prefix_of,
    reference_loss,
    scale_of,
    weighted_dims,
)
from vembed.config.schema import TrainConfig
from vembed.config.terms import source_terms
from vembed.losses import similarity
from vembed.losses.batch import (
    LossBatch,
    TeacherScores,
    TeacherVectors,
)
from vembed.losses.build import build_loss
from vembed.losses.table import LOSS_ENTRY_ONLY
from vembed.losses.tiles import Tiling

TEACHER_DIM = 7
WEIGHT = 3.0
"""Weight of the loss in what is differentiated: its own backward pass has to take it into account."""
SIZES = {"embedding_dim": 12, "teacher_dims": {"vectors": TEACHER_DIM}}


@contextmanager
def tiled(rows, columns):
    """Inside, all tiles of scores have this size at most, and pairs are scored in chunks of three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "PAIRS_AT_ONCE", 3)
        size = Tiling(rows, columns)
        patch.setattr(Tiling, "for_scores", staticmethod(lambda *_: size))
        yield


def config_of(**options):
    entry = {name: options.pop(name) for name in LOSS_ENTRY_ONLY if name in options}
    if entry:
        options["losses"] = [{"loss": options.pop("loss", "infonce"), **entry}]
    return TrainConfig(model_name="none", data_path="none", **options)


def make_batch(
    num_examples,
    *,
    dim=12,
    seed=0,
    max_positives=1,
    max_negatives=2,
    num_contents=None,
    dtype=torch.float64,
):
    """Examples with 1 .. max_positives positives and 0 .. max_negatives negatives, drawn from `num_contents` texts.

    Few texts mean many duplicates. A text has two embeddings, one as a query and one as a document, and some texts
    a third one, as if another rank had encoded them too.
    """
    draw = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    def quarters(count):
        return torch.randint(-4, 5, (count,), generator=draw).double() / 4

    size = 1 + max_positives + max_negatives
    num_contents = num_contents or 6 * num_examples * size
    query = []
    positive = []
    example = []
    negative = []
    negative_example = []
    for number in range(num_examples):
        q = integer(0, num_contents - 1)
        for _ in range(integer(1, max_positives)):
            query.append(q)
            positive.append(integer(num_contents, 3 * num_contents - 1))
            example.append(100 + 7 * number)
        for _ in range(integer(0, max_negatives)):
            negative.append(integer(num_contents, 3 * num_contents - 1))
            negative_example.append(100 + 7 * number)
    inputs = torch.tensor(query + positive + negative)
    used, place = torch.unique(inputs, return_inverse=True)
    content = (used % num_contents) * 1_000_003 + 5
    shuffled = torch.randperm(len(used), generator=draw)
    embeddings = torch.randn(len(used), dim, generator=draw, dtype=torch.float64)
    place = torch.argsort(shuffled)[place]
    num_rows = len(query)
    num_negatives = len(negative)
    rows = (num_rows, num_rows, num_negatives)
    query_place, positive_place, negative_place = place.split(rows)
    negative_label_scores = quarters(num_negatives)
    batch = LossBatch(
        embeddings=(embeddings + 0.5).to(dtype).requires_grad_(),
        content=content[shuffled],
        query=query_place,
        positive=positive_place,
        example=torch.tensor(example),
        negative=negative_place,
        negative_example=torch.tensor(negative_example, dtype=torch.int64),
        label_scores=quarters(num_rows),
        rank_rows=slice(0, num_rows),
        rank_negatives=slice(0, num_negatives),
        negative_label_scores=negative_label_scores,
        batch_number=seed,
    )
    return replace(batch, teachers=teachers_of(batch, draw))


def rank_batches(batch, cuts):
    """The batch as ranks see it that hold the examples between the cuts."""
    examples = batch.example.unique()
    # Rows and negatives are in the order of their examples.
    bounds = torch.cat((examples, examples[-1:] + 1))[[0, *cuts, len(examples)]]
    rows = torch.searchsorted(batch.example, bounds).tolist()
    negatives = torch.searchsorted(batch.negative_example, bounds).tolist()
    parts = []
    for of_rows, of_negatives in zip(pairwise(rows), pairwise(negatives), strict=True):
        share = {"rank_rows": slice(*of_rows), "rank_negatives": slice(*of_negatives)}
        parts.append(replace(batch, **share))
    return parts


def teachers_of(batch, draw):
    """`vectors`: one for each embedding, in another order; one of them is unknown. `scores`: one for each pair."""
    num, dim = batch.embeddings.shape

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    place = torch.randperm(num, generator=draw)
    vectors = normalize(normal(num, TEACHER_DIM) + 0.3)
    vectors[place[0]] = 0.0
    before = normalize(batch.embeddings.detach().double() + 0.5 * normal(num, dim))
    before[place[0]] = 0.0
    inputs = (batch.query, batch.positive, batch.negative)
    return {
        "none": TeacherVectors(before, *inputs),
        "vectors": TeacherVectors(vectors, *(place[index] for index in inputs)),
        "reranker": TeacherScores(
            normal(batch.num_rows), normal(batch.negative.numel())
        ),
    }


def gradients(loss, *inputs):
    actual = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g
        for g, x in zip(actual, inputs, strict=True)
    ]


def assert_close(actual, expected, tolerance, what, terms=0.0):
    """Relative to the largest element of what is wanted, or to the size of the summed `terms` where that is larger.

    Terms that cancel leave their rounding errors: a gradient that is zero is found as some 1e-16 of its terms.
    """
    actual = actual.detach()
    expected = expected.detach().to(torch.float64)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    error = (
        float((actual.to(torch.float64) - expected).abs().max())
        if expected.numel()
        else 0.0
    )
    assert error <= tolerance * max(largest, terms), (
        f"{what}: off by {error:.3g} of {largest:.3g}, terms {terms:.3g}"
    )


def term_sizes(batch, config, loss):
    """Return the size of one row's terms in the loss ("loss") and in each gradient ("embeddings", names of parameters).

    Every score enters the loss as scale * score, the positive's and the candidates' with opposite signs. The derivative
    of a dot product is the other vector; that of a cosine is at most one over the embedding's norm.
    """
    parameters = {
        name: parameter.detach() for name, parameter in loss.named_parameters()
    }
    sizes = dict.fromkeys(["loss", "embeddings", *parameters], 0.0)
    terms = source_terms(config.objective, config.data, config.model.model_name)[0]
    for number, term in enumerate(terms):
        learned = parameters_of(term, number, parameters)
        for name, size in _sizes_of_a_term(batch, config, term, learned).items():
            prefix = prefix_of(term, number) if name in learned else ""
            sizes[prefix + name] += term.weight * size
    return sizes


def _sizes_of_a_term(batch, config, term, parameters):
    loss = term.loss
    scale = float(scale_of(term, parameters))
    target = 0.0
    if loss.follows not in ("nobody", "start_model"):
        options = dict(loss)
        divisor = options.get("teacher_temperature") or options.get("temperature")
        target = 4.0 / (divisor or 1.0)
    rows = 1 if loss.ranks_pairs else max(1, batch.num_rows)
    sizes = dict.fromkeys(["loss", "embeddings", *parameters], 0.0)
    for dim, weight in weighted_dims(config, batch.embeddings.shape[1]):
        norms = batch.embeddings.detach().double()[:, :dim].norm(dim=1)
        norms = norms[norms > 0]
        score = 1.0
        slope = float(1 / norms.min())
        if config.objective.similarity == "dot":
            score = float(norms.max()) ** 2
            slope = float(norms.max())
        squares = ("relational", "spread_out", "margin_mse", "circle")
        power = 2 if loss.name in squares else 1
        sizes["loss"] += weight * (scale * score + target) ** power
        sizes["embeddings"] += (
            weight * scale * slope * (score + target) ** (power - 1) / rows
        )
        by_parameter = {"temperature": scale**2 * score, "log_scale": scale * score}
        for name in parameters:
            sizes[name] += weight * by_parameter.get(name, 1.0)
    if "bias" in parameters:
        sizes["loss"] += abs(float(parameters["bias"]))
    return sizes


def check(batch, config, loss=None, tolerance=1e-12):
    """Loss and every gradient of vembed's loss equal those of the reference. Both are part of a larger sum, with a
    weight."""
    loss = (loss or build_loss(config, **SIZES)).double()
    parameters = dict(loss.named_parameters())
    actual = loss(batch)
    exact = replace(
        batch, embeddings=batch.embeddings.detach().double().requires_grad_()
    )
    expected = reference_loss(exact, config, parameters=parameters)
    terms = term_sizes(batch, config, loss)
    assert_close(actual, expected, tolerance, "loss", terms["loss"])
    names = ["embeddings", *parameters]
    inputs = parameters.values()
    gradients_found = gradients(WEIGHT * actual, batch.embeddings, *inputs)
    want = gradients(WEIGHT * expected, exact.embeddings, *inputs)
    for name, g, w in zip(names, gradients_found, want, strict=True):
        size = WEIGHT * terms[name]
        assert_close(g, w, tolerance, f"gradient of {name}", size)
