"""The optimizer: who decays, who learns how fast, and which implementation takes whole and sharded parameters."""

import copy
import sys

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert
from tests.training.tiny_run import (
    TinyLoss,
    TinyModel,
    config_for,
    step,
    whole_state,
)
from vembed.errors import UserError
from vembed.models.families.backbones import unwrapped_name
from vembed.parallel.session import start_session
from vembed.training.optimizer import build_optimizer


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_weight_decay_reaches_those_parameters_and_no_other(tmp_path, optim):
    model = TinyModel(frozen_embeddings=False)
    loss = TinyLoss()
    options = config_for(tmp_path, weight_decay=0.5, optim=optim).optimizer
    optimizer = build_optimizer(model, loss, options)
    before = copy.deepcopy(model.state_dict())
    for parameter in [*model.parameters(), *loss.parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)
    assert loss.scale.item() == 2.0


def test_missing_bitsandbytes_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    options = config_for(tmp_path, optim="adamw_8bit").optimizer
    with pytest.raises(UserError, match=r"pip install 'vembed\[gpu\]'"):
        build_optimizer(TinyModel(), TinyLoss(), options)


# ---- sharded parameters ----------------------------------------------------------------------------------------

OPTIONS = {
    "weight_decay": 0.5,
    "head_learning_rate": 0.3,
    "learning_rate": 0.01,
}


def train_two_steps(config, model, loss):
    """Return learning rate and decay of each parameter by name, the state, and the optimizer."""
    optimizer = build_optimizer(model, loss, config.optimizer)
    names = {}
    for prefix, module in (("", model), ("loss", loss)):
        for name, parameter in module.named_parameters(prefix=prefix):
            names[id(parameter)] = unwrapped_name(name)
    groups = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rates = (group["initial_lr"], group["weight_decay"])
            groups[names[id(parameter)]] = rates
    for _ in range(2):
        step(model, loss, optimizer)
    return groups, whole_state(model, loss, optimizer), optimizer


def num_moments(optimizer):
    """First moments that this rank holds."""
    count = 0
    for state in optimizer.state.values():
        moment = state["exp_avg"]
        count += (moment.to_local() if isinstance(moment, DTensor) else moment).numel()
    return count


def sharded(tmp_path, model_name, version):
    config = config_for(
        tmp_path,
        model_name=model_name,
        strategy="fsdp",
        fsdp_version=version,
        **OPTIONS,
    )
    with start_session(config) as session:
        model = session.prepare(TinyModel(dim=8, frozen_embeddings=False), ("Layer",))
        loss = TinyLoss()
        groups, state, optimizer = train_two_steps(config, model, loss)
        refused = {}
        sys.modules["torchao"] = sys.modules["torchao.optim"] = None
        for optim in ("adafactor", "adamw_8bit"):
            with pytest.raises(UserError) as error:
                build_optimizer(model, loss, config.changed(optim=optim).optimizer)
            refused[optim] = str(error.value)
    return groups, state, num_moments(optimizer), refused


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.promise("E41")
def test_shards_step_as_the_whole_does(tmp_path, version):
    config = config_for(tmp_path, **OPTIONS)
    groups, expected, optimizer = train_two_steps(
        config, TinyModel(dim=8, frozen_embeddings=False), TinyLoss()
    )
    results = run_ranks(sharded, 2, tmp_path, str(shared(tiny_bert)), version)
    for rank_groups, result, _, refused in results:
        assert rank_groups == groups
        assert set(result) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(
                result[name], value, rtol=1e-5, atol=1e-7, err_msg=name
            )
        assert "use optim: adamw_8bit with fsdp_version: 2" in refused["adafactor"]
        way_out = "vembed[fsdp]" if version == 2 else "use fsdp_version: 2"
        assert way_out in refused["adamw_8bit"]
    # The optimizer's state is sharded with the parameters; the loss's scale is on both.
    num_values = num_moments(optimizer)
    assert num_values <= sum(held for _, _, held, _ in results) <= num_values + 10
