"""RoundedAdamW: AdamW for weights that are kept in bfloat16 alone, with stochastic rounding."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from vembed.parallel.parameters import local_tensor

_BITS = 16
"""Bits that float32 has after those of bfloat16."""


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, for weights in bfloat16 alone (`torch_dtype: pure_bfloat16`).

    bfloat16 has 8 bits of precision: an update of less than 1/512 of a weight is lost when it is rounded to the nearest
    value, and a usual one is of that size. Rounded up with the probability of its distance from below, the weight takes
    the right value on average. Everything is computed in float32, and weights and moments are rounded once per step.
    Weights in float32 among them (a loss's temperature) are kept as they are.

    The draws are a function of step, parameter and shard, so that copies of a weight stay equal on all processes and a
    resumed run rounds as the uninterrupted one.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step with the current gradients."""
        assert closure is None, "gradients are computed before the step"
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._update(parameter, group, number)

    def _update(
        self,
        parameter: Tensor,
        group: dict[str, Any],
        number: int,
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        learning_rate = float(group["lr"])
        weight = local_tensor(parameter)
        first = local_tensor(state["exp_avg"])
        second = local_tensor(state["exp_avg_sq"])
        if weight.numel() == 0:
            return
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad).float()
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2)
        square.addcmul_(gradient, gradient, value=1 - beta2)
        divisor = square.sqrt().div_(math.sqrt(1 - beta2**step))
        divisor.add_(group["eps"])
        new = weight.float().mul_(1 - learning_rate * group["weight_decay"])
        new.addcdiv_(mean, divisor, value=-learning_rate / (1 - beta1**step))
        pairs = ((weight, new), (first, mean), (second, square))
        if weight.dtype == torch.float32:
            for held, value in pairs:
                held.copy_(value)
            return
        seed = 0
        for part in (self._seed, step, number, _shard_of(parameter)):
            seed = ((seed ^ part) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**63
        draw = torch.Generator(weight.device).manual_seed(seed)
        # One draw of 63 bits gives the 16 that each of the three roundings takes.
        bits = torch.empty(weight.shape, dtype=torch.int64, device=weight.device)
        bits.random_(generator=draw)
        for place, (held, value) in enumerate(pairs):
            held.copy_(
                rounded_to_bfloat16(value, (bits >> (_BITS * place)).to(torch.int32))
            )


def rounded_to_bfloat16(value: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values in bfloat16, rounded up or down by `bits`, of which the lowest 16 are used."""
    whole = value.contiguous().view(torch.int32)
    mask = (1 << _BITS) - 1
    # Adding up to 65,535 to the bits below carries into the kept ones as often as their value says. Infinities and NaN
    # have no bits below, or keep one that says what they are.
    carried = torch.where(torch.isfinite(value), whole + (bits & mask), whole) & ~mask
    return carried.view(torch.float32).to(torch.bfloat16)


def _shard_of(parameter: Tensor) -> int:
    """Return a number of the shard that this process holds: the same on processes that hold the same."""
    number = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number
