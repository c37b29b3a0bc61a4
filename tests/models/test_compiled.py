"""Compiled layers: the loss and gradients of plain ones, and on by themselves where they pay."""

import os
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
from vembed.config.schema import TrainConfig
from vembed.models import attention, precision
from vembed.models.families.backbones import layers_of
from vembed.parallel.devices import GPUS
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import OPERATIONS_PER_SECOND, place
from vembed.parallel.session import start_session

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
"""The compiler looks at attributes of all tensors."""

H100 = next(gpu for gpu in GPUS if gpu.name == "H100-80GB")


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


INDUCTOR = pytest.mark.skipif(
    "INDUCTOR" not in os.environ,
    reason="a minute of the C++ compiler: INDUCTOR=1 runs it",
)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)]
)
@pytest.mark.parametrize("options", [{}, {"use_lora": True}], ids=["all", "lora"])
def test_compiled_layers_give_the_loss_and_gradients_of_plain_ones(backend, options):
    make = one_layer
    loss, gradients, model = run_once(make, None, **options)
    # Without vectors, whose headers the C++ compiler reads for seconds.
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        actual, others, _ = run_once(make, backend, **options)
    assert model.packs_texts(), "attention of packed texts is called as it is"
    assert torch.allclose(actual, loss, rtol=1e-5)
    assert max(gradient_errors(others, gradients).values()) < 1e-4


def on_gpu(**options):
    config = TrainConfig(
        model_name=str(tiny.shared(tiny.tiny_bert)), data_path="-", **options
    )
    ranks = RankInfo(0, 1, 0, 1)
    return place(
        resolve_run(config, env={}), ranks, torch.device("cuda"), H100.memory, gpu=H100
    )


@pytest.mark.parametrize(
    ("options", "minutes", "is_on", "reason"),
    [
        (
            {},
            30.0,
            True,
            "auto: about 30.0 minutes of arithmetic; compiling takes about one",
        ),
        ({}, 1.0, False, "auto: about 1.0 minutes of arithmetic, less than 5"),
        (
            {"use_lora": True, "quantize_weights": "nf4"},
            30.0,
            False,
            "auto: layers of 4 bits are not compiled",
        ),
        ({"torch_compile": False}, 30.0, False, "torch_compile"),
        ({"torch_compile": True}, 1.0, True, "torch_compile"),
    ],
)
def test_long_runs_on_gpus_are_compiled(options, minutes, is_on, reason):
    placement = on_gpu(**options).for_work(minutes * 60 * OPERATIONS_PER_SECOND)
    assert (placement.compilation.value, placement.compilation.reason) == (
        is_on,
        reason,
    )
    assert placement.copies_weights is (not is_on and "quantize_weights" not in options)


def test_a_dry_run_says_what_is_left_to_a_gpu():
    folder = str(tiny.shared(tiny.tiny_bert))
    lines = resolve_run(
        TrainConfig(model_name=folder, data_path="-", strategy="fsdp"), env={}
    ).left_to_gpus()
    assert [line.split(" where ")[0].split(" in runs")[0] for line in lines] == [
        "on a GPU gradient checkpointing is off",
        "on a GPU layers are compiled",
    ]
    plain = TrainConfig(
        model_name=folder,
        data_path="-",
        torch_compile=False,
        gradient_checkpointing=True,
    )
    assert resolve_run(plain, env={}).left_to_gpus() == []


@pytest.mark.parametrize("options", [{}, {"padding_free": False}], ids=str)
def test_checkpointed_layers_are_compiled(options, monkeypatch):
    """A backend counts the calls of compiled graphs: in the forward pass, and again in the backward pass."""
    expected, gradients, _ = run_once(tiny.tiny_bert, None, **options)
    graph_calls = []

    def backend(graph, _):
        def call(*inputs):
            graph_calls.append(graph)
            return graph(*inputs)

        return call

    compile_layers = partial(precision.compile_layers, backend=backend)
    monkeypatch.setattr(precision, "compile_layers", compile_layers)
    config = config_for(
        tiny.tiny_bert, mixed_precision="no", torch_compile=True, **options
    )
    with start_session(config) as session:
        model = model_of(config, recompute=True).train()
        loss = loss_of(model(parts_for(model.description)))
        num_forward_calls = len(graph_calls)
        loss.backward()
        assert session.placement.compilation.value is True
    assert num_forward_calls > 0
    assert len(graph_calls) > num_forward_calls, "the layers are run again"
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert max(gradient_errors(gradients_of(model), gradients).values()) < 1e-4


def sharded_gradients(is_compiled):
    """Return the calls of compiled graphs, and the gradients, of checkpointed layers under FSDP2."""
    model = model_of(
        config_for(tiny.tiny_qwen3, mixed_precision="no"), recompute=not is_compiled
    )
    graph_calls = []

    def backend(graph, _):
        def call(*inputs):
            graph_calls.append(graph)
            return graph(*inputs)

        return call

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
    return len(graph_calls), gradients


def test_checkpointed_layers_are_compiled_under_fsdp2():
    tiny.shared(tiny.tiny_qwen3)
    (_, expected), *_ = run_ranks(sharded_gradients, 2, False)
    for num_calls, gradients in run_ranks(sharded_gradients, 2, True):
        assert num_calls > 0
        assert max(gradient_errors(gradients, expected).values()) < 1e-4
