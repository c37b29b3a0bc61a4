"""Number formats, extreme values, autograd's contract, and the memory that the losses ask for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.losses.batches import (
    SIZES,
    check,
    config_of,
    gradients,
    make_batch,
    tiled,
)
from tests.losses.test_contract import COMBINED, cases_of
from tests.losses.test_definition import batch_of
from vembed.losses.build import build_loss
from vembed.losses.table import LOSSES

CASES = [
    *COMBINED,
    {"similarity": "dot", "temperature": 1.0, "mrl_dims": [8, 3]},
    *(cases_of(LOSSES[name])[0] for name in LOSSES if name != "none"),
]


class OfGpus(TorchDispatchMode):
    """Refuses what `torch.use_deterministic_algorithms` refuses on GPUs, and allows on CPUs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        refused = name in ("histc", "median", "put", "put_")
        if name == "bincount":
            refused = any(isinstance(argument, Tensor) for argument in args[1:2])
        if name in ("cumsum", "cumsum_"):
            refused = args[0].is_floating_point()
        if refused:
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", CASES, ids=str)
def test_float32(options):
    """Also in deterministic runs on GPUs."""
    batch = make_batch(24, max_positives=2, num_contents=150, dtype=torch.float32)
    config = config_of(**options)
    loss = build_loss(config, **SIZES)
    with OfGpus():
        value = loss(batch)
        (gradient,) = gradients(value, batch.embeddings)
    assert value.dtype == gradient.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(loss(batch), value)
    check(batch, config, tolerance=1e-5)


# Angle adds the halves of a vector first, in the vector's own dtype.
@pytest.mark.parametrize(
    "options", [case for case in CASES if case.get("loss") != "angle"], ids=str
)
def test_low_precision_embeddings_are_scored_in_float32(options):
    loss = build_loss(config_of(**options), **SIZES)
    low = make_batch(24, num_contents=150, dtype=torch.bfloat16)
    exact = replace(low, embeddings=low.embeddings.detach().float().requires_grad_())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss(low)
        (gradient,) = gradients(actual, low.embeddings)
    expected = loss(exact)
    (wanted_gradient,) = gradients(expected, exact.embeddings)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, wanted_gradient.bfloat16())


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_extreme_logits(similarity):
    """Differences of thousands between logits neither overflow nor lose the largest."""
    for factor in (1e-3, 1.0, 30.0):
        batch = make_batch(8, seed=5)
        embeddings = batch.embeddings.detach() * factor
        batch = replace(batch, embeddings=embeddings.requires_grad_())
        largest = 1.0
        if similarity == "dot":
            largest = float(embeddings.detach().square().sum(1).max())
        # What float64 can tell apart among logits of that size.
        resolution = torch.finfo(torch.float64).eps * largest / 0.005
        config = config_of(similarity=similarity, temperature=0.005, bidirectional=True)
        check(batch, config, tolerance=max(1e-12, resolution))


def test_small_losses_keep_their_digits_in_float32():
    embeddings = torch.eye(2).repeat_interleave(2, dim=0)
    batch = batch_of([(0, 0, 1), (1, 2, 3)], embeddings=embeddings)
    loss = build_loss(config_of(temperature=0.04))(batch)
    assert float(loss.detach()) == pytest.approx(1.3887943864964e-11, rel=1e-5)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("options", CASES, ids=str)
def test_memory_grows_with_the_rows_and_not_with_their_square(options):
    loss = build_loss(config_of(**options), **SIZES)
    largest = []
    for num_examples in (90, 180):
        batch = make_batch(num_examples, max_negatives=1, num_contents=30)
        with tiled(10, 4000), LargestTensor() as opened:
            loss(batch).backward()
        largest.append(opened.num_elements)
    assert largest[1] < num_examples**2 / 2
    assert largest[1] < 2.2 * largest[0]
