"""Contract of all declared optimizers and trackers: what the config, the docs and the run take from the declarations."""

import pydoc
from pathlib import Path

import pytest
import torch

import vembed.training.trackers
from tests.parts import unlisted_classes
from tests.training.tiny_run import TinyLoss, TinyModel, config_for, step
from vembed.config.loading import load_config
from vembed.config.options import all_options
from vembed.config.schema import option_fields
from vembed.declarations import check_parts
from vembed.training import optimizer_kinds
from vembed.training.optimizer import build_optimizer
from vembed.training.optimizer_kinds import OPTIMIZERS, OptimizerKind
from vembed.training.trackers.accelerate_trackers import TensorBoard
from vembed.training.trackers.base import TrackedRun, Tracker
from vembed.training.trackers.table import TRACKERS

DECLARED = [
    *(("optim", kind) for kind in OPTIMIZERS.values()),
    *(("report_to", kind) for kind in TRACKERS.values()),
]
IN_THE_FOLDER = [
    name
    for name, tracker in TRACKERS.items()
    if tracker.package in (None, "tensorboard")
]
"""Trackers that need no service."""


@pytest.mark.parametrize(
    ("option", "kind"), DECLARED, ids=lambda value: getattr(value, "name", value)
)
def test_a_declaration_is_complete_and_accepted(option, kind):
    assert kind.summary.endswith(".")
    unknown = kind.options - set(option_fields())
    assert not unknown, f"{kind.name} has `options` that the config lacks: {unknown}"
    for name in (kind.name, *kind.spellings.split()):
        config = load_config(
            {
                "model_name": "m",
                "data_path": "d",
                option: name,
            }
        )
        value = config.option_values()[option]
        assert value in (kind.name, [kind.name])
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert kind.name in page.read_text()
    if option == "optim":
        assert kind.name in all_options()[option].choices


def test_every_tracker_is_in_the_table():
    listed = [*TRACKERS.values()]
    named = unlisted_classes(vembed.training.trackers, Tracker, listed)
    missing = [name for name in named if hasattr(pydoc.locate(name), "name")]
    assert not missing, f"list these in vembed/training/trackers/table.py: {missing}"


def test_every_optimizer_is_in_the_list():
    for kind in vars(optimizer_kinds).values():
        if isinstance(kind, type) and issubclass(kind, OptimizerKind):
            name = getattr(kind, "name", None)
            assert name is None or name in OPTIMIZERS, f"list {kind.__name__}"


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("name", IN_THE_FOLDER)
def test_a_tracker_follows_a_run(name, first_step, tmp_path):
    """A new one or a resumed one. Something is in the folder of the run at its end."""
    tracker = TRACKERS[name]()
    settings = {"loss": "infonce"}
    tracker.start(TrackedRun(tmp_path, None, "p", [], settings, first_step))
    tracker.log({"train/loss": 0.5, "train/lr": 1e-5}, first_step + 1)
    tracker.log({"eval/ndcg@10": 0.25}, first_step + 2)
    tracker.finish()
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) > 0, f"{name} has written nothing"


def test_a_tracker_without_an_end_is_refused():
    body = {"name": "endless", "summary": "It never ends.", "log": Tracker.log}
    kind = type("Endless", (TensorBoard,), {**body, "finish": Tracker.finish})
    with pytest.raises(TypeError, match=r"Endless .*`finish`, `log`"):
        check_parts("tracker", Tracker, (kind,), lambda tracker: (tracker.name,))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_descends_and_decays_as_declared(name, tmp_path):
    """The loss falls, weights without gradient shrink by lr * weight_decay, and the state takes the declared bytes."""
    torch.manual_seed(1)
    model = TinyModel(dim=72, frozen_embeddings=False)
    loss = TinyLoss()
    loss.requires_grad_(False)
    options = config_for(
        tmp_path,
        optim=name,
        learning_rate=1e-3,
        weight_decay=0.5,
        adam_betas=[0.7, 0.8],
    )
    optimizer = build_optimizer(model, loss, options.optimizer)
    reads_betas = tuple(optimizer.defaults.get("betas", ())) == (0.7, 0.8)
    declares_betas = "adam_betas" in OPTIMIZERS[name].options
    assert reads_betas == declares_betas, "`options` are those that `build` reads"

    # A first step without gradients is the decay alone.
    expected = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
            rest = 1 - group["lr"] * group["weight_decay"]
            expected[weight] = weight.detach() * rest
    assert any(group["weight_decay"] for group in optimizer.param_groups)
    optimizer.step()
    for weight, shrunk in expected.items():
        torch.testing.assert_close(weight.detach(), shrunk)
    optimizer.zero_grad()

    def value():
        with torch.no_grad():
            return float(model(torch.arange(11)).pow(2).sum())

    before = value()
    for _ in range(3):
        step(model, loss, optimizer)
    assert value() < before, f"{name} does not descend"
    state_bytes = 0
    for state in optimizer.state.values():
        for entry in state.values():
            if isinstance(entry, torch.Tensor) and entry.ndim:
                state_bytes += entry.nbytes
    num_large = 2 * 72 * 72  # smaller tensors of the 8-bit kinds have float32 state
    num_trained = sum(weight.numel() for weight in model.parameters())
    declared = OPTIMIZERS[name].state_bytes
    # The values of 8-bit kinds come with a code book for each tensor.
    assert state_bytes <= declared * num_large + 8.5 * (num_trained - num_large) + 2**14
