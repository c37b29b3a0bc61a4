"""Python objects in a config: classes and modules as models, and torch's own FSDP objects, as options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from vembed.errors import UserError
from vembed.models.custom.classes import check_class, name_of
from vembed.models.custom.folder import store_weights

MODEL = ("model_class", "model", "model_name")
"""Options that a class or a module may be given as."""
BLOCKS = ("fsdp", "fsdp_config", "distributed")
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def as_options(
    config: Mapping[str, Any], model: nn.Module | type[nn.Module] | None = None
) -> dict[str, Any]:
    """Return a config of plain values. `model`: a class or a module to train."""
    values: dict[str, Any] = {}
    given = model
    for key, value in config.items():
        if key in MODEL and isinstance(value, nn.Module | type):
            if given is not None:
                raise UserError(f"{key}: a second model is given; keep one of them")
            given = value
        elif key in BLOCKS and isinstance(value, Mapping):
            values[key] = _without_objects(value)
        else:
            values |= _without_objects({key: value})
    return values if given is None else values | _model_options(given)


def _model_options(given: nn.Module | type[nn.Module]) -> dict[str, Any]:
    kind = given if isinstance(given, type) else type(given)
    check_class(kind, kind.__qualname__)
    options = {"model_class": name_of(kind)}
    if isinstance(given, nn.Module):
        options["model_name"] = store_weights(given)
    return options


def _without_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with torch's FSDP objects as the options that they stand for."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        match value:
            case ModuleWrapPolicy():
                found[key] = "TRANSFORMER_BASED_WRAP"
                found["fsdp_transformer_layer_cls_to_wrap"] = sorted(
                    one.__name__ for one in value._module_classes
                )
            case CPUOffload():
                found["fsdp_offload_params"] = bool(value.offload_params)
            case ShardingStrategy() | BackwardPrefetch():
                found[key] = value.name
            case MixedPrecision():
                dtypes = {
                    "param": value.param_dtype,
                    "reduce": value.reduce_dtype,
                    "buffer": value.buffer_dtype,
                }
                found |= {
                    f"fsdp_{name}_dtype": _DTYPES[one]
                    for name, one in dtypes.items()
                    if one is not None
                }
            case _ if key == "device_id":
                pass  # each process takes the device of its LOCAL_RANK
            case _:
                found[key] = value
    return found
