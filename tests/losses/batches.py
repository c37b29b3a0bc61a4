"""Small batches with duplicates of every kind, and what the tests compare."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.losses.reference import reference_loss
from vembed.config.schema import TrainConfig
from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.losses.build import build_loss


def config_of(**options: object) -> TrainConfig:
    return TrainConfig(model_name="none", data_path="none", **options)  # type: ignore[arg-type]


def make_batch(
    num_examples: int,
    *,
    dim: int = 12,
    seed: int = 0,
    max_positives: int = 1,
    max_negatives: int = 2,
    num_contents: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossBatch:
    """Examples with 1 .. max_positives positives and 0 .. max_negatives negatives, drawn from `num_contents` texts.

    Few texts mean many duplicates. A text has two embeddings, one as a query and one as a document, and some texts
    a third one, as if another rank had encoded them too.
    """
    draw = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    num_contents = num_contents or 6 * num_examples * (1 + max_positives + max_negatives)
    query, positive, example, negative, negative_example = [], [], [], [], []
    for e in range(num_examples):
        q = integer(0, num_contents - 1)
        for _ in range(integer(1, max_positives)):
            query.append(q)
            positive.append(num_contents + integer(0, 2 * num_contents - 1))
            example.append(100 + 7 * e)
        for _ in range(integer(0, max_negatives)):
            negative.append(num_contents + integer(0, 2 * num_contents - 1))
            negative_example.append(100 + 7 * e)
    used, place = torch.unique(torch.tensor(query + positive + negative), return_inverse=True)
    content = (used % num_contents) * 1_000_003 + 5
    shuffled = torch.randperm(used.numel(), generator=draw)
    embeddings = torch.randn(used.numel(), dim, generator=draw, dtype=torch.float64)
    place = torch.argsort(shuffled)[place]
    num_rows = len(query)
    return LossBatch(
        embeddings=(embeddings + 0.5).to(dtype).requires_grad_(),
        content=content[shuffled],
        query=place[:num_rows],
        positive=place[num_rows : 2 * num_rows],
        example=torch.tensor(example),
        negative=place[2 * num_rows :],
        negative_example=torch.tensor(negative_example, dtype=torch.int64),
        scores=(torch.randint(-4, 5, (num_rows,), generator=draw) / 4).to(torch.float64),
        own_rows=slice(None),
        own_negatives=slice(None),
    )


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def assert_close(found: Tensor, wanted: Tensor, tolerance: float, what: str, terms: float = 0.0) -> None:
    """Relative to the largest element of what is wanted, or to the size of the summed `terms` where that is larger.

    Terms that cancel leave their rounding errors: a gradient that is zero is found as some 1e-16 of its terms.
    """
    found, wanted = found.detach(), wanted.detach().to(torch.float64)
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    error = float((found.to(torch.float64) - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * max(largest, terms), f"{what}: off by {error:.3g} of {largest:.3g}, terms {terms:.3g}"


def term_sizes(batch: LossBatch, config: TrainConfig, loss: EmbeddingLoss) -> dict[str, float]:
    """Return the size of one row's terms in the loss ("loss") and in each gradient ("embeddings", names of parameters).

    Every score enters the loss as scale * score, the positive's and the candidates' with opposite signs. The derivative
    of a dot product is the other vector; that of a cosine is at most one over the embedding's norm.
    """
    parameters = {name: float(one.detach()) for name, one in loss.named_parameters()}
    scale, bias = loss.scale_and_bias() or (1.0 / config.temperature, -10.0)
    if config.loss in ("cosine", "triplet"):
        scale = 1.0
    rows = 1 if config.loss == "cosent" else max(1, batch.num_rows)  # cosent is one softmax over all pairs
    sizes = dict.fromkeys(["loss", "embeddings", *parameters], 0.0)
    dims = list(config.mrl_dims or []) if config.use_mrl else [batch.embeddings.shape[1]]
    for dim, weight in zip(dims, (config.mrl_weights if config.use_mrl else None) or [1.0] * len(dims), strict=True):
        norms = batch.embeddings.detach().double()[:, :dim].norm(dim=1)
        norms = norms[norms > 0]
        score, slope = 1.0, float(1 / norms.min())
        if config.similarity == "dot":
            score, slope = float(norms.max()) ** 2, float(norms.max())
        sizes["loss"] += weight * scale * score
        sizes["embeddings"] += weight * scale * slope / rows
        for name in parameters:
            by_scale = {"temperature": scale**2 * score, "log_scale": scale * score, "bias": 1.0}
            sizes[name] += weight * by_scale[name]
    if config.loss == "sigmoid":
        sizes["loss"] += abs(bias)
    return sizes


def check(batch: LossBatch, config: TrainConfig, loss: EmbeddingLoss | None = None, tolerance: float = 1e-12) -> None:
    """Loss and every gradient of vembed's loss equal those of the reference."""
    loss = (loss or build_loss(config)).double()
    parameters = dict(loss.named_parameters())
    scale, bias = parameters.get("temperature"), parameters.get("bias")
    if scale is not None:
        scale = 1.0 / scale
    elif "log_scale" in parameters:
        scale = parameters["log_scale"].exp()
    found = loss(batch)
    exact = replace(batch, embeddings=batch.embeddings.detach().double().requires_grad_())
    wanted = reference_loss(exact, config, scale=scale, bias=-10.0 if bias is None else bias)
    terms = term_sizes(batch, config, loss)
    assert_close(found, wanted, tolerance, "loss", terms["loss"])
    names = ["embeddings", *parameters]
    got = gradients(found, batch.embeddings, *parameters.values())
    want = gradients(wanted, exact.embeddings, *parameters.values())
    for name, g, w in zip(names, got, want, strict=True):
        assert_close(g, w, tolerance, f"gradient of {name}", terms[name])
