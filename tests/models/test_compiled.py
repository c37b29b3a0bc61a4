"""Compiled layers: the loss and gradients of plain ones, and on by themselves where they pay."""

from functools import partial

import pytest
import torch
import torch._inductor.config
from torch._dynamo.backends.debugging import aot_eager
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
    if "torch_compile" not in options:
        placement = placement.for_work(minutes * 60 * OPERATIONS_PER_SECOND)
    assert placement.compilation.value is is_on
    assert placement.copies_weights is (not is_on and "quantize_weights" not in options)


class CountingBackend:
    """A compiler that counts the calls of its graphs."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, graph, inputs):
        compiled = aot_eager(graph, inputs)

        def call(*inputs):
            self.num_calls += 1
            return compiled(*inputs)

        return call


def bert_of_one_layer(folder):
    """Compiling takes seconds for each layer."""
    return tiny.tiny_bert(folder, layers=1)


def qwen3_of_one_layer(folder):
    return tiny.tiny_qwen3(folder, layers=1)


def loss_and_gradients(model):
    loss = loss_of(model.train()(parts_for(model.description)))
    loss.backward()
    return loss.detach(), gradients_of(model)


@pytest.mark.parametrize(
    "options", [{}, {"padding_free": False, "use_lora": True}], ids=str
)
def test_checkpointed_layers_are_compiled(options, monkeypatch):
    """Graphs are called in the forward pass, and again in the backward pass."""
    options = {**options, "mixed_precision": "no"}
    plain = model_of(config_for(bert_of_one_layer, **options))
    expected, gradients = loss_and_gradients(plain)
    backend = CountingBackend()
    compile_layers = partial(precision.compile_layers, backend=backend)
    monkeypatch.setattr(precision, "compile_layers", compile_layers)
    config = config_for(bert_of_one_layer, torch_compile=True, **options)
    with start_session(config) as session:
        model = model_of(config, recompute=True, compiles=True).train()
        assert model.packs_texts() is plain.packs_texts()
        loss = loss_of(model(parts_for(model.description)))
        num_forward_calls = backend.num_calls
        loss.backward()
        assert session.placement.compilation.value is True
    assert 0 < num_forward_calls < backend.num_calls, "the layers are run again"
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert max(gradient_errors(gradients_of(model), gradients).values()) < 1e-4


def sharded_gradients(is_compiled):
    """Return the calls of compiled graphs, and the gradients, of checkpointed layers under FSDP2."""
    config = config_for(qwen3_of_one_layer, mixed_precision="no")
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
    _, shards = loss_and_gradients(model)
    gradients = {name: shard.full_tensor() for name, shard in shards.items()}
    return backend.num_calls, gradients


def plain_and_compiled():
    return [sharded_gradients(is_compiled) for is_compiled in (False, True)]


def test_checkpointed_layers_are_compiled_under_fsdp2():
    tiny.shared(qwen3_of_one_layer)
    ranks = run_ranks(plain_and_compiled, 2, process_group=True)
    for (_, expected), (num_calls, gradients) in ranks:
        assert num_calls > 0
        assert max(gradient_errors(gradients, expected).values()) < 1e-4
