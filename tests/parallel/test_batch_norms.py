"""Batch norms over two processes against one: shared by sync_batchnorm, and a warning where they are not."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import vembed
from tests.harness import run_ranks
from tests.measure import gradient_errors
from tests.parallel.steps import config_of, listen
from tests.tiny import shared, tiny_bert, tiny_resnet
from vembed.parallel import collectives
from vembed.parallel.parameters import share_batch_norms
from vembed.parallel.session import start_session

INPUTS = torch.randn(7, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def small_network():
    torch.manual_seed(0)
    norms = (
        nn.BatchNorm2d(4),
        nn.BatchNorm1d(6, momentum=None),
        nn.BatchNorm1d(2, affine=False),
    )
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        norms[0],
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 6),
        norms[1],
        nn.Linear(6, 2),
        norms[2],
    ).double()


def step(model, inputs):
    outputs = model(inputs.double())
    loss = (outputs.sigmoid() * torch.linspace(-1, 1, outputs.shape[1])).sum() / len(
        INPUTS
    )
    loss.backward()
    return float(loss.detach())


def found_in(model, loss):
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return (
        loss,
        gradients,
        {name: buffer.double() for name, buffer in model.named_buffers()},
    )


def on_ranks(folder, sync):
    """One step on uneven parts of the inputs: 5 and 2 images."""
    lines = listen()
    with start_session(
        config_of(folder, strategy="ddp", sync_batchnorm=sync)
    ) as session:
        model = session.prepare(small_network())
        loss = step(model, INPUTS[:5] if session.rank == 0 else INPUTS[5:])
        collectives.GradientSync((), model.parameters()).finish()
        return found_in(model, collectives.sum_scalars([loss])[0]), [
            line for line in lines if "batch norms" in line
        ]


@pytest.mark.promise("C05")
def test_shared_batch_norms_are_those_of_one_process():
    model = small_network().train()
    loss, gradients, buffers = found_in(model, step(model, INPUTS))
    for (entry, gradients_found, buffers_found), lines in run_ranks(
        on_ranks, 2, str(shared(tiny_bert)), True, process_group=False
    ):
        assert entry == pytest.approx(loss, rel=1e-12)
        assert max(gradient_errors(gradients_found, gradients).values()) < 1e-12
        for name, buffer in buffers.items():
            torch.testing.assert_close(
                buffers_found[name], buffer, rtol=1e-12, atol=1e-14, msg=name
            )
        assert lines in (
            ["sync_batchnorm: 3 batch norms share their statistics among processes"],
            [],
        )


def test_an_image_that_repeats_across_ranks_counts_as_often_as_it_occurs(tmp_path):
    """A network with batch norms trained on two processes and on one, where the images 0 and 1 are on both ranks."""
    for number in range(6):
        draw = np.random.default_rng(number)
        pixels = draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    rows = []
    for query, positive in ((0, 1), (0, 2), (3, 1), (4, 5), (4, 1), (0, 5)):
        image = {"image": f"{query}.png"}
        rows.append({"query": image, "positive": {"image": f"{positive}.png"}})
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model_name": str(shared(tiny_resnet)),
        "data_path": str(data),
        "global_batch_size": 6,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "use_gradient_cache": False,
        "sync_batchnorm": True,
        "report_to": "none",
    }
    weights = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        config = {**options, "output_dir": str(folder)}
        if world_size == 2:
            config["strategy"] = "ddp"
        run_ranks(train_here, world_size, config, process_group=False)
        weights.append(load_file(folder / "final" / "model.safetensors"))
    (one_process, two_processes) = weights
    means = [name for name in one_process if name.endswith("running_mean")]
    assert means
    start = load_file(shared(tiny_resnet) / "model.safetensors")
    for name, value in one_process.items():
        torch.testing.assert_close(
            two_processes[name], value, rtol=1e-4, atol=1e-5, msg=name
        )
    assert (one_process[means[0]] - start[means[0]]).abs().max() > 1e-3


def train_here(config):
    vembed.train(config)


def test_batch_norms_that_are_not_shared_are_said_to_break_parity():
    model = small_network().train()
    loss = step(model, INPUTS)
    (first, (line,)), (other, _) = run_ranks(
        on_ranks, 2, str(shared(tiny_bert)), False, process_group=False
    )
    assert first[0] == other[0] != pytest.approx(loss, rel=1e-3)
    assert line.startswith(
        "batch norms: 3, each over the micro-batch of one process, so losses and gradients depend"
    )
    assert line.endswith("sync_batchnorm: true shares their statistics")


def test_on_gpus_they_become_torchs_own_and_without_any_nothing_happens():
    model = small_network()
    assert share_batch_norms(model, torch.device("cuda"), shared=True) == 3
    assert [type(module).__name__ for module in model.modules()].count(
        "SyncBatchNorm"
    ) == 3
    plain = nn.Linear(2, 2)
    assert share_batch_norms(plain, torch.device("cpu"), shared=True) == 0
