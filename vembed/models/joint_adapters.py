"""Adapters of layers that read the same input (queries, keys and values; gate and up): one product with their first
matrices together, so that the input is read once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vembed.models.bf16 import Bf16Linear, joint_linear

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
)
"""Names of layers of one module that have the same input in most models. Where they have not, nothing is shared."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """An input of a layer, which is not kept alive."""

    tensor: weakref.ref[Tensor] | None
    version: int
    """Counted up by torch with every change in place."""
    with_gradients: bool

    @classmethod
    def of(cls, values: Tensor) -> _Seen:
        # A weak reference: the group must not keep an activation alive. Tensors of inference have no version.
        return cls(
            weakref.ref(values),
            0 if values.is_inference() else values._version,
            torch.is_grad_enabled(),
        )

    def is_same(self, other: _Seen) -> bool:
        if self.tensor is None or other.tensor is None or self.tensor() is None:
            return False
        return (
            self.tensor() is other.tensor()
            and self.version == other.version
            # Recomputation runs the same input twice, without a graph and with one.
            and self.with_gradients == other.with_gradients
        )


_NOTHING = _Seen(None, 0, False)


class _Group:
    """First matrices of the adapters of some layers, and their products with the last input that was seen."""

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = members
        self.widths = [one.out_features for one in members]
        self.waiting: dict[int, Tensor] = {}
        """Products that their layers have not asked for yet, by the number of the layer."""
        self._given = self._multiplied = _NOTHING

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, which have seen no input."""
        return {
            **self.__dict__,
            "waiting": {},
            "_given": _NOTHING,
            "_multiplied": _NOTHING,
        }

    def see(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        """Note the input of a layer, before it runs. What its adapter gets may be a copy of it in another dtype."""
        del layer
        self._given = _Seen.of(given[0]) if given else _NOTHING

    def product(self, number: int, values: Tensor) -> Tensor:
        """Return the product of a member's weight with its input."""
        # The first layer computes for all. Each product is given out once: a second request is another pass.
        if number not in self.waiting or not self._given.is_same(self._multiplied):
            products = torch.split(self._together(values), self.widths, dim=-1)
            self.waiting, self._multiplied = dict(enumerate(products)), self._given
        return self.waiting.pop(number)

    def _together(self, values: Tensor) -> Tensor:
        # `compute_in_bf16` changes the layers' class after they were joined.
        narrow = [one for one in self.members if isinstance(one, Bf16Linear)]
        if len(narrow) == len(self.members):
            return joint_linear(values, narrow)
        return functional.linear(
            values, torch.cat([one.weight for one in self.members])
        )


def join_adapters(backbone: nn.Module, adapter: str) -> int:
    """Compute the first products of adapters that read the same input together, and return the number of groups.

    For adapters without dropout of their own; the weights stay apart.
    """
    count = 0
    for module in backbone.modules():
        children = dict(module.named_children())
        for names in TOGETHER:
            found = {
                name: one
                for name in names
                if (one := _first_matrix(children, name, adapter)) is not None
            }
            # One product needs one input size and one dtype.
            if (
                len(found) < 2
                or len({(one.in_features, one.weight.dtype) for one in found.values()})
                > 1
            ):
                continue
            group = _Group(list(found.values()))
            for number, (name, one) in enumerate(found.items()):
                children[name].register_forward_pre_hook(group.see)
                # On the instance: class, parameters and their names stay, for checkpoints, FSDP and peft.
                one.forward = partial(group.product, number)  # type: ignore[method-assign]
            count += 1
    return count


def separate_adapters(modules: Iterable[nn.Module]) -> None:
    """Undo `join_adapters` inside of some modules: the compiler cannot follow an input from layer to layer."""
    for module in (one for outer in modules for one in outer.modules()):
        seen = [
            key for key, hook in module._forward_pre_hooks.items() if _is_of_group(hook)
        ]
        for key in seen:
            del module._forward_pre_hooks[key]
        own = vars(module).get("forward")
        if isinstance(own, partial) and _is_of_group(own.func):
            del module.forward


def _is_of_group(function: Any) -> bool:
    return isinstance(function, MethodType) and isinstance(function.__self__, _Group)


def _first_matrix(
    children: Mapping[str, nn.Module], name: str, adapter: str
) -> nn.Linear | None:
    layer: Any = children.get(name)
    matrices = None if layer is None else layer._modules.get("lora_A")
    first = (
        matrices[adapter]
        if isinstance(matrices, nn.ModuleDict) and adapter in matrices
        else None
    )
    # Exactly nn.Linear: a subclass may compute something else.
    return first if type(first) is nn.Linear and first.bias is None else None
