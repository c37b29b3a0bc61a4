"""Batch norms over two processes against one: shared by sync_batchnorm, and a warning where they are not."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import vembed
from tests.data.files import write_jsonl
from tests.harness import run_ranks
from tests.imitation.cases import write_picture
from tests.measure import gradient_errors
from tests.models.families import gradients_of
from tests.parallel.steps import config_of, listen
from tests.tiny import shared, tiny_bert, tiny_resnet
from vembed.parallel import collectives
from vembed.parallel.parameters import share_batch_norms
from vembed.parallel.session import start_session

INPUTS = torch.randn(7, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 2),
        nn.BatchNorm1d(2, affine=False),
    ).double()


def step(model, inputs):
    """Return the inputs' share of the loss."""
    outputs = model(inputs.double())
    weights = torch.linspace(-1, 1, outputs.shape[1])
    loss = (outputs.sigmoid() * weights).sum() / len(INPUTS)
    loss.backward()
    return float(loss.detach())


def buffers_of(model):
    return {name: buffer.double() for name, buffer in model.named_buffers()}


def on_ranks(folder, sync):
    """One step on uneven parts of the inputs: 5 and 2 images."""
    lines = listen()
    config = config_of(folder, strategy="ddp", sync_batchnorm=sync)
    with start_session(config) as session:
        model = session.prepare(small_network())
        loss = step(model, INPUTS[:5] if session.rank == 0 else INPUTS[5:])
        collectives.GradientSync((), model.parameters()).finish()
        loss = collectives.sum_scalars([loss])[0]
        log = [line for line in lines if "batch norms" in line]
        return loss, gradients_of(model), buffers_of(model), log


@pytest.mark.promise("C05")
def test_shared_batch_norms_are_those_of_one_process():
    model = small_network().train()
    expected_loss = step(model, INPUTS)
    expected = gradients_of(model)
    folder = shared(tiny_bert)
    ranks = run_ranks(on_ranks, 2, folder, True)
    for loss, gradients, buffers, _ in ranks:
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert max(gradient_errors(gradients, expected).values()) < 1e-12
        torch.testing.assert_close(buffers, buffers_of(model), rtol=1e-12, atol=1e-14)
    assert "3 batch norms share" in ranks[0][3][0]


def run_options(tmp_path):
    """A training of a network with batch norms, in which the images 0 and 1 are on both of two ranks."""
    images = [{"image": write_picture(tmp_path, number)} for number in range(6)]
    rows = []
    for query, positive in ((0, 1), (0, 2), (3, 1), (4, 5), (4, 1), (0, 5)):
        rows.append({"query": images[query], "positive": images[positive]})
    data = write_jsonl(tmp_path / "train.jsonl", rows)
    return {
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


def test_measuring_memory_changes_no_statistics(tmp_path):
    options = run_options(tmp_path) | {"strategy": "single"}
    weights = []
    for cache in (False, "auto"):
        folder = tmp_path / str(cache)
        config = {**options, "output_dir": str(folder), "use_gradient_cache": cache}
        vembed.train(config)
        weights.append(load_file(folder / "final" / "model.safetensors"))
    torch.testing.assert_close(weights[1], weights[0])


def test_an_image_that_repeats_across_ranks_counts_as_often_as_it_occurs(tmp_path):
    options = run_options(tmp_path)
    weights = []
    for world_size, strategy in ((1, "single"), (2, "ddp")):
        folder = tmp_path / strategy
        config = {**options, "output_dir": str(folder), "strategy": strategy}
        run_ranks(vembed.train, world_size, config)
        weights.append(load_file(folder / "final" / "model.safetensors"))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)
    name = next(name for name in weights[0] if name.endswith("running_mean"))
    start = load_file(shared(tiny_resnet) / "model.safetensors")
    assert (weights[0][name] - start[name]).abs().max() > 1e-3


def test_batch_norms_that_are_not_shared_are_said_to_break_parity():
    model = small_network().train()
    loss = step(model, INPUTS)
    folder = shared(tiny_bert)
    first, other = run_ranks(on_ranks, 2, folder, False)
    assert first[0] == other[0] != pytest.approx(loss, rel=1e-3)
    (line,) = first[3]
    assert "sync_batchnorm" in line


def test_on_gpus_they_become_torchs_own():
    model = small_network()
    share_batch_norms(model, torch.device("cuda"), shared=True)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("SyncBatchNorm") == 3
