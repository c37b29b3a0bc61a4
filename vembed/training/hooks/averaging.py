"""WeightAverage: an exponential moving average of the trained weights, which evaluations and final/ use (`ema`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from vembed.errors import UserError
from vembed.models.families.backbones import unwrapped_name
from vembed.parallel.parameters import local_tensor, reshard
from vembed.training.hooks.base import Hook, StepReport

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer


class WeightAverage(Hook):
    """The average of the trained weights. Each rank averages what it holds: its copy or its shards."""

    name = "ema"

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self._trained: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}

    @override
    def on_build(self, run: Trainer) -> None:
        model = run.components.model
        if FullyShardedDataParallel.fsdp_modules(model):
            raise UserError(
                f"ema: {self.decay} cannot average the flat parameters of FSDP1: use fsdp_version: 2, or leave ema out"
            )
        self._model = model
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                key = unwrapped_name(name)
                self._trained[key] = weight
                # float32, since small changes of a 16-bit average would be rounded away.
                self._averages[key] = weight.detach().clone().float()

    @override
    def on_step(self, report: StepReport) -> None:
        if not report.outcome.applied:
            return
        self.num_updates += 1
        # A short run must not keep its start for ever: the decay grows with the number of updates.
        short_decay = (1 + self.num_updates) / (10 + self.num_updates)
        decay = min(self.decay, short_decay)
        with torch.no_grad():
            for name, average in self._averages.items():
                local = local_tensor(average)
                # On shards or copies alike: the average of a shard is the shard of the average.
                local.lerp_(
                    local_tensor(self._trained[name]).to(local.dtype), 1 - decay
                )

    @override
    def state(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        self.num_updates = int(state["num_updates"])

    @override
    def tensors(self) -> Mapping[str, Tensor]:
        return self._averages

    @override
    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        reshard(self._model)  # what is still gathered would keep the trained weights
        trained = {}
        with torch.no_grad():
            for name, weight in self._trained.items():
                local = local_tensor(weight)
                trained[name] = local.clone()
                local.copy_(local_tensor(self._averages[name]))
        try:
            yield
        finally:
            reshard(self._model)
            with torch.no_grad():
                for name, weight in self._trained.items():
                    local_tensor(weight).copy_(trained[name])


def averages_of(model: nn.Module) -> dict[str, Tensor]:
    """Return room for the averages of a model's trained weights, by the names that they have in a checkpoint."""
    averages = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            key = f"{WeightAverage.name}.{unwrapped_name(name)}"
            averages[key] = torch.zeros_like(weight, dtype=torch.float32)
    return averages


def put_averages(model: nn.Module, averages: Mapping[str, Tensor]) -> None:
    """Put the averages of a checkpoint into a model, as evaluations of the run and `final/` had them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(
                    averages[f"{WeightAverage.name}.{unwrapped_name(name)}"]
                )
