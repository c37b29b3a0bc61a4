"""Choice of FSDP units: transformer layers or large modules, and input embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from vembed.errors import UserError

if TYPE_CHECKING:
    from vembed.config.fsdp import FsdpConfig


def layer_units(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of the named classes (`BertLayer`, or a dotted path). Raise UserError if a name has none."""
    found: dict[nn.Module, None] = {}
    for name in names:
        fitting = [module for module in model.modules() if _fits(module, name)]
        if not fitting:
            candidates = ", ".join(layer_candidates(model)) or "none found: use SIZE_BASED_WRAP"
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap: the model has no {name}; its layer classes: {candidates}."
            )
        found.update(dict.fromkeys(fitting))
    return list(found)


def layer_candidates(model: nn.Module) -> list[str]:
    """Return likely layer classes: those that the model declares, then those in module lists."""
    names: dict[str, None] = {}
    present = {type(module).__name__ for module in model.modules()}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            names.update(dict.fromkeys(sorted(present.intersection(module._no_split_modules or ()))))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            names.update(dict.fromkeys(type(child).__name__ for child in module if any(True for _ in child.children())))
    return list(names)


def size_units(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return modules with at least `min_num_params` parameters outside smaller units, as FSDP1's own policy does."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return the number of the module's parameters in units."""
        total = sum(parameter.numel() for parameter in module.parameters())
        if total < min_num_params:
            return 0
        wrapped = 0
        if not isinstance(module, nn.MultiheadAttention):
            wrapped = sum(visit(child) for child in module.children())
        if module is model or isinstance(module, nn.ModuleList | nn.ModuleDict) or total - wrapped < min_num_params:
            return wrapped
        units.append(module)
        return total

    visit(model)
    return units


def embedding_units(model: nn.Module) -> list[nn.Module]:
    """Return the token embeddings of every tower."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            try:
                embedding = module.get_input_embeddings()
            except NotImplementedError:  # raised for a model of several towers, or without token embeddings
                continue
            if isinstance(embedding, nn.Embedding):
                found[embedding] = None
    return list(found)


def choose_units(model: nn.Module, fsdp: FsdpConfig, layer_classes: Sequence[str]) -> list[nn.Module]:
    """Return all units except the root, inner modules first."""
    if fsdp.wrap_policy == "NO_WRAP":
        units = []
    elif fsdp.wrap_policy == "SIZE_BASED_WRAP":
        units = size_units(model, fsdp.min_num_params)
    else:
        units = layer_units(model, fsdp.layer_classes or layer_classes or layer_candidates(model))
        taken = {inner for unit in units for inner in unit.modules()}
        if fsdp.wrap_embeddings:
            units += [embedding for embedding in embedding_units(model) if embedding not in taken]
    chosen = set(units)
    # modules() lists outer modules first.
    return [module for module in reversed(list(model.modules())) if module in chosen]


def describe_units(units: Sequence[nn.Module]) -> str:
    """Return `13 units (12 BertLayer, 1 Embedding) and the rest of the model`."""
    if not units:
        return "the whole model as one unit"
    kinds = Counter(type(unit).__name__ for unit in units)
    listed = ", ".join(f"{count:,d} {name}" for name, count in kinds.most_common())
    return f"{len(units):,d} units ({listed}) and the rest of the model"


def _fits(module: nn.Module, name: str) -> bool:
    kind = type(module)
    return name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
