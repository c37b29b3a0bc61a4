"""A model small enough to be saved hundreds of times, with every kind of parameter that a checkpoint has to carry."""

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossModule

NUM_INPUTS = 11


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, hidden):
        return self.norm(self.linear(hidden))


class Backbone(nn.Module):
    def __init__(self, dim, num_layers):
        super().__init__()
        self.embeddings = nn.Embedding(NUM_INPUTS, dim)
        self.layer = nn.ModuleList([Layer(dim) for _ in range(num_layers)])

    def forward(self, ids):
        hidden = self.embeddings(ids)
        for layer in self.layer:
            hidden = layer(hidden)
        return hidden


class TinyModel(nn.Module):
    """7 does not divide by 2 or 3, and the head's single row leaves all ranks but one without a piece of it."""

    def __init__(
        self,
        dim=7,
        num_layers=2,
        *,
        num_outputs=1,
        frozen_embeddings=True,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = Backbone(dim, num_layers)
        self.head = nn.Linear(dim, num_outputs)
        self.register_buffer("num_seen", torch.zeros(3))
        self.backbone.embeddings.weight.requires_grad_(not frozen_embeddings)

    def forward(self, ids):
        return self.head(self.backbone(ids))


class TinyLoss(LossModule):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch):
        return batch.embeddings.sum()


def config_for(output_dir, **options):
    """Nobody reads the model's folder or the data, except that FSDP wants to know how large the model is: there,
    `model_name` must be the folder of a real one, made before the ranks start."""
    options = {
        "model_name": "tiny",
        "data_path": "none.jsonl",
        "learning_rate": 0.1,
        **options,
    }
    return TrainConfig(output_dir=str(output_dir), **options)


def backward(model, loss):
    """Every trainable parameter gets a gradient, the same on every rank."""
    (model(torch.arange(NUM_INPUTS)).pow(2).sum() * loss.scale).backward()


def step(model, loss, optimizer):
    backward(model, loss)
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model, loss, optimizer):
    """Weights and optimizer state, whole on every rank, read by torch's own functions and not by ours."""
    model_and_loss = nn.ModuleDict({"model": model, "loss": loss})
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    weights, state = get_state_dict(model_and_loss, optimizer, options=options)
    values = {
        name: value.detach().cpu().clone().numpy() for name, value in weights.items()
    }
    for name, entries in state["state"].items():
        for key, value in entries.items():
            nested = value if isinstance(value, dict) else {"": value}
            for part, entry in nested.items():
                values[f"{name}:{key}:{part}"] = (
                    torch.as_tensor(entry).detach().cpu().clone().numpy()
                )
    return values


def assert_same(actual, expected):
    """The same names, and not a bit of difference."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
