"""Compiled layers: the loss and gradients of plain ones, and on by themselves where they pay."""

from functools import partial

import pytest
import torch
import torch._inductor.config
from torch.distributed.fsdp import fully_shard

from tests import tiny
from tests.built import model_of
from tests.harness import run_ranks
from tests.measure import gradient_errors
from tests.models.families import config_for, gradients_of, loss_of, parts_for
from vembed.config.loading import resolve_run
from vembed.models import attention, precision
from vembed.models.families.backbones import layers_of
from vembed.parallel.devices import GPUS
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import OPERATIONS_PER_SECOND, place
from vembed.parallel.session import start_session

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
"""The compiler looks at attributes of all tensors."""


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    attention.register(attention.PACKED_ATTENTION)


def run_once(make, backend, **options):
    """Loss and gradients of a tiny model, with compiled layers unless `backend` is None."""
    config = config_for(make, mixed_precision="no", **options)
    model = model_of(config).train()
    if backend is not None:
        attention.register(attention.PACKED_ATTENTION, compiled_layers=True)
        precision.compile_layers(layers_of(model.backbone), backend)
    loss = loss_of(model(parts_for(model.description)))
    loss.backward()
    return loss.detach(), gradients_of(model), model


def one_layer(folder):
    """A BERT of one layer: compiling takes seconds for each."""
    return tiny.tiny_bert(folder, layers=1, hidden=16)


@pytest.mark.parametrize("options", [{}, {"use_lora": True}], ids=["all", "lora"])
def test_compiled_layers_give_the_loss_and_gradients_of_plain_ones(options):
    loss, gradients, model = run_once(one_layer, None, **options)
    actual, others, _ = run_once(one_layer, "aot_eager", **options)
    assert model.packs_texts(), "attention of packed texts is called as it is"
    assert torch.allclose(actual, loss, rtol=1e-5)
    assert max(gradient_errors(others, gradients).values()) < 1e-4


@pytest.mark.parametrize(
    ("options", "minutes", "is_on"),
    [
        ({}, 30.0, True),
        ({}, 1.0, False),
        ({"use_lora": True, "quantize_weights": "nf4"}, 30.0, False),
        ({"torch_compile": False}, 30.0, False),
        ({"torch_compile": True}, 1.0, True),
    ],
)
def test_long_runs_on_gpus_are_compiled(options, minutes, is_on):
    run = resolve_run(config_for(tiny.tiny_bert, **options), env={})
    ranks = RankInfo(0, 1, 0, 1)
    gpu = next(gpu for gpu in GPUS if gpu.name == "H100-80GB")
    placement = place(run, ranks, torch.device("cuda"), gpu.memory, gpu=gpu)
    placement = placement.for_work(minutes * 60 * OPERATIONS_PER_SECOND)
    assert placement.compilation.value is is_on
    assert placement.copies_weights is (not is_on and "quantize_weights" not in options)


class CountingBackend:
    """A compiler that counts the calls of its graphs."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, graph, _):
        def call(*inputs):
            self.num_calls += 1
            return graph(*inputs)

        return call


@pytest.mark.parametrize("options", [{}, {"padding_free": False}], ids=str)
def test_checkpointed_layers_are_compiled(options, monkeypatch):
    """Graphs are called in the forward pass, and again in the backward pass."""
    expected, gradients, _ = run_once(tiny.tiny_bert, None, **options)
    backend = CountingBackend()
    compile_layers = partial(precision.compile_layers, backend=backend)
    monkeypatch.setattr(precision, "compile_layers", compile_layers)
    options = {**options, "mixed_precision": "no", "torch_compile": True}
    config = config_for(tiny.tiny_bert, **options)
    with start_session(config) as session:
        model = model_of(config, recompute=True).train()
        loss = loss_of(model(parts_for(model.description)))
        num_forward_calls = backend.num_calls
        loss.backward()
        assert session.placement.compilation.value is True
    assert 0 < num_forward_calls < backend.num_calls, "the layers are run again"
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert max(gradient_errors(gradients_of(model), gradients).values()) < 1e-4


def sharded_gradients(is_compiled):
    """Return the calls of compiled graphs, and the gradients, of checkpointed layers under FSDP2."""
    config = config_for(tiny.tiny_qwen3, mixed_precision="no")
    model = model_of(config, recompute=not is_compiled)
    backend = CountingBackend()
    layers = layers_of(model.backbone)
    if is_compiled:
        attention.register(attention.PACKED_ATTENTION, compiled_layers=True)
        precision.compile_layers(layers, backend)
        precision.enable_checkpointing(layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    loss_of(model.train()(parts_for(model.description))).backward()
    gradients = {}
    for name, gradient in gradients_of(model).items():
        gradients[name] = gradient.full_tensor()
    return backend.num_calls, gradients


def test_checkpointed_layers_are_compiled_under_fsdp2():
    tiny.shared(tiny.tiny_qwen3)
    (_, expected), *_ = run_ranks(sharded_gradients, 2, False)
    for num_calls, gradients in run_ranks(sharded_gradients, 2, True):
        assert num_calls > 0
        assert max(gradient_errors(gradients, expected).values()) < 1e-4
