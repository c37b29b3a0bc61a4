"""Low-rank adapters: target layers, injection, merging into the weights, saving and loading."""

from __future__ import annotations

import logging
import math
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from vembed.config.schema import AdapterSection, ModelSection
from vembed.errors import UserError
from vembed.models.bf16 import Bf16Linear, joint_linear
from vembed.models.families.backbones import linear_names, linear_names_inside_layers
from vembed.models.families.family import Family
from vembed.models.families.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    read_header,
    read_object,
)
from vembed.models.quantized import dequantized, is_quantized, quieten_bitsandbytes
from vembed.models.towers import TwoTowers, names_frozen_by

log = logging.getLogger(__name__)

_NAME = "default"
_DOWN = f".lora_A.{_NAME}.weight"
"""Suffix of the parameter name of each adapter's first matrix (A)."""
_PREFIX = "base_model.model."
"""Prefix that peft's files put before the backbone's parameter names."""
_SAVED_DOWN = ".lora_A.weight"
"""Suffix of the first matrix of a layer in peft's files, which leave out the adapter's name."""
_MERGE_WITH_PEFT = (
    "merge it with peft (merge_and_unload), and give the folder of the whole model"
)


def wants_adapters(options: AdapterSection) -> bool:
    """Return True if the run trains adapters instead of the weights."""
    return options.use_lora or options.use_qlora


def add_adapters(
    backbone: nn.Module, family: Family, options: AdapterSection, model: ModelSection
) -> None:
    """Inject adapters into the backbone and freeze all its other parameters."""
    quieten_bitsandbytes()  # before peft, which imports bitsandbytes
    from peft import (  # a slow import, which only runs with adapters pay for
        LoraConfig,
        inject_adapter_in_model,
    )

    # Frozen layers get no adapter: it would train what `freeze` keeps.
    frozen = names_frozen_by(backbone, family, options.freeze)
    names = [
        name
        for name in target_names(backbone, family, options)
        if f"{name}.weight" not in frozen
    ]
    if not names:
        raise UserError(
            f"lora_target_modules: {options.lora_target_modules} with freeze: {options.freeze} leaves no layer of "
            f"{model.model_name} to adapt; freeze less of it"
        )
    settings = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=name_pattern(
            names, [name for name, _ in backbone.named_modules()]
        ),
        use_rslora=options.lora_variant == "rslora",
        use_dora=options.lora_variant == "dora",
        fan_in_fan_out=any(
            isinstance(backbone.get_submodule(name), Conv1D) for name in names
        ),
        base_model_name_or_path=_lasting_name(model.model_name),
        revision=model.model_revision,
        task_type="FEATURE_EXTRACTION",
    )
    inject_adapter_in_model(settings, backbone, adapter_name=_NAME)
    if isinstance(
        backbone, TwoTowers
    ):  # its projections are newly initialised, so train them in full
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad |= "_projection." in name and name not in frozen
    # Trained weights are float32 masters even if the base model is loaded in 16 bits.
    for parameter in backbone.parameters():
        if parameter.requires_grad and model.torch_dtype != "pure_bfloat16":
            parameter.data = parameter.data.float()
    if options.lora_variant != "dora" and options.lora_dropout == 0.0:
        join_adapters(backbone, _NAME)
    kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
    log.info(
        "LoRA: rank %d, alpha %d on %d layers (%s)",
        options.lora_r,
        options.lora_alpha,
        len(names),
        ", ".join(kinds),
    )


def leave_casts_to_autocast(model: nn.Module) -> None:
    """Hand adapted layers' inputs to the adapters as they are, for a model whose forward runs under autocast.

    Otherwise peft widens the input of each adapted layer to float32, for dropout, and autocast narrows it again.
    """
    for module in model.modules():
        if "cast_input_dtype_enabled" in vars(module):
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


def _lasting_name(model_name: str) -> str:
    """Return the base model's name for the adapter's files. A folder's path is made absolute."""
    path = Path(model_name).expanduser()
    return str(path.resolve()) if path.is_dir() else model_name


# ---- which layers ----------------------------------------------------------------------------------------------


def target_names(
    backbone: nn.Module, family: Family, options: AdapterSection
) -> list[str]:
    """Return the names of the layers that get an adapter."""
    prefixes = tuple(family.towers.values())
    linear = [name for name in linear_names(backbone) if name.startswith(prefixes)]
    inside = set(linear_names_inside_layers(backbone))
    behind: list[str] = []
    for tower in family.adapter_targets:
        behind += family.adapter_targets[tower]
    wanted = options.lora_target_modules
    if wanted == "auto":
        # A module without layers, such as a bag of embeddings, has its linear layers anywhere.
        return [name for name in linear if name in inside or not inside] + behind
    every = linear + [name for name in behind if name not in linear]
    return every if wanted == "all-linear" else _named(wanted, every)


def _named(wanted: Sequence[str], linear: Sequence[str]) -> list[str]:
    """Return the layers whose name equals a wanted name or ends with it."""
    for name_end in wanted:
        if not any(
            name == name_end or name.endswith("." + name_end) for name in linear
        ):
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise UserError(
                f"lora_target_modules: {name_end} is not a linear layer of this model; it has {', '.join(known)}"
            )
    return [
        name
        for name in linear
        if any(name == name_end or name.endswith("." + name_end) for name_end in wanted)
    ]


def name_pattern(names: Sequence[str], every: Sequence[str]) -> str:
    """Return a regular expression that matches exactly these names: by layer pattern if possible, else one by one."""
    general = sorted({re.sub(r"\.\d+\.", lambda _: r"\.\d+\.", name) for name in names})
    escaped = [re.sub(r"(?<!\\)\.", r"\.", layer) for layer in general]
    pattern = "(?:" + "|".join(escaped) + ")"
    if {name for name in every if re.fullmatch(pattern, name)} != set(names):
        pattern = "(?:" + "|".join(re.escape(name) for name in names) + ")"
    return pattern


# ---- weights in and out ----------------------------------------------------------------------------------------


def has_adapters(backbone: nn.Module) -> bool:
    """Return True if the backbone has adapters."""
    return any(name.endswith(_DOWN) for name, _ in backbone.named_parameters())


def merged_state(backbone: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full state dict under the names of a backbone without adapters, with each adapter merged.

    `state` holds full (gathered) tensors under the backbone's names; the modules may be sharded, so only their settings
    are read. 4-bit weights are dequantised to float32.
    """
    merged = dict(state)
    for name, module in backbone.named_modules():
        if is_quantized(module):
            merged[f"{name}.weight"] = dequantized(module, merged[f"{name}.weight"])
            for key in [key for key in merged if key.startswith(f"{name}.weight.")]:
                del merged[key]
    for name in [key.removesuffix(_DOWN) for key in state if key.endswith(_DOWN)]:
        layer: Any = backbone.get_submodule(name)
        weight = merged.pop(f"{name}.base_layer.weight")
        down, up = (
            merged.pop(f"{name}.lora_{part}.{_NAME}.weight").float() for part in "AB"
        )
        magnitude = merged.pop(f"{name}.lora_magnitude_vector.{_NAME}.weight", None)
        # W' = W + scaling * B A, in float32. up: [out, rank], down: [rank, in].
        change = up @ down * layer.scaling[_NAME]
        merged[f"{name}.weight"] = _merged(
            weight, change, magnitude, transposed=layer.fan_in_fan_out
        )
        if f"{name}.base_layer.bias" in merged:
            merged[f"{name}.bias"] = merged.pop(f"{name}.base_layer.bias")
    left = [name for name in merged if ".lora_" in name]
    if left:
        raise RuntimeError(f"adapters that cannot be merged: {', '.join(left)}")
    return merged


def _merged(
    weight: Tensor, change: Tensor, magnitude: Tensor | None, *, transposed: bool
) -> Tensor:
    whole = (weight.T if transposed else weight).float() + change.to(weight.device)
    if (
        magnitude is not None
    ):  # DoRA: the sum gives the direction, a learned vector [out] the length of each row
        whole = whole * (
            magnitude.float().to(weight.device) / whole.norm(dim=1)
        ).unsqueeze(1)
    return (whole.T.contiguous() if transposed else whole).to(weight.dtype)


def save_adapter(
    folder: str | Path, backbone: Any, state: Mapping[str, Tensor]
) -> Path:
    """Save the adapter alone, in peft's layout. `state`: the backbone's full state dict under its own names."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        _name_in_file(key): tensor.contiguous()
        for key, tensor in state.items()
        if ".lora_" in key
    }
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    backbone.peft_config[_NAME].save_pretrained(folder)
    return folder


def _name_in_file(key: str) -> str:
    """Return peft's file key: without the adapter's name, and without `.weight` after DoRA's magnitude vector."""
    bare = key.replace(f".{_NAME}.", ".")
    return _PREFIX + bare.replace(
        "lora_magnitude_vector.weight", "lora_magnitude_vector"
    )


def merge_saved_adapter(backbone: nn.Module, folder: Path) -> None:
    """Merge a saved adapter into the weights of a backbone without adapters. Raise UserError unless all of it are
    low-rank matrices of linear layers: a part that is left out would make another model."""
    settings = read_object(folder / ADAPTER_CONFIG) or {}
    if settings.get("peft_type", "LORA") != "LORA":
        raise UserError(
            f"{folder}: adapters of the type {settings['peft_type']} are not supported; {_MERGE_WITH_PEFT}"
        )
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(
                f"{folder / ADAPTER_CONFIG}: {key} is {value!r}, and a positive number is needed"
            )
    read_header(folder / ADAPTER_WEIGHTS)  # says what is wrong with a damaged file
    weights = {
        key.removeprefix(_PREFIX): tensor
        for key, tensor in load_file(folder / ADAPTER_WEIGHTS).items()
    }
    layers = {
        name: cast(Any, backbone.get_submodule(name)) for name in linear_names(backbone)
    }
    with torch.no_grad():
        for name in [
            key.removesuffix(_SAVED_DOWN)
            for key in weights
            if key.endswith(_SAVED_DOWN)
        ]:
            if name not in layers or f"{name}.lora_B.weight" not in weights:
                continue
            down, up = (
                weights.pop(f"{name}.lora_{part}.weight").float() for part in "AB"
            )
            change = up @ down * _scaling(settings, name, rank=len(down))
            magnitude = weights.pop(f"{name}.lora_magnitude_vector", None)
            weight = layers[name].weight
            weight.copy_(
                _merged(
                    weight,
                    change,
                    magnitude,
                    transposed=isinstance(layers[name], Conv1D),
                )
            )
    if weights:
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} holds {len(weights):,d} tensors that are no low-rank matrices of a linear "
            f"layer of {type(backbone).__name__}, {min(weights)} among them; {_MERGE_WITH_PEFT}"
        )
    log.info("adapter of %s merged into its base model", folder)


def _scaling(settings: Mapping[str, Any], name: str, *, rank: int) -> float:
    """Return the factor of a layer's low-rank product, with peft's patterns for layers that have an alpha of their
    own."""
    patterns = (settings.get("alpha_pattern") or {}).items()
    alpha = next(
        (
            alpha_of_layer
            for pattern, alpha_of_layer in patterns
            if re.match(rf"(.*\.)?({pattern})$", name)
        ),
        settings["lora_alpha"],
    )
    return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))


# ---- adapters of layers with one input: one product ----------------------------------


SHARED_INPUT_LAYERS = (
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


_NO_INPUT = _Seen(None, 0, False)


class _Group:
    """First matrices of the adapters of some layers, and their products with the last input that was seen."""

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = members
        self.widths = [member.out_features for member in members]
        self.waiting: dict[int, Tensor] = {}
        """Products that their layers have not asked for yet, by the number of the layer."""
        self._given = self._multiplied = _NO_INPUT

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, which have seen no input."""
        return {
            **self.__dict__,
            "waiting": {},
            "_given": _NO_INPUT,
            "_multiplied": _NO_INPUT,
        }

    def see(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note the input of a layer, before it runs. What its adapter gets may be a copy of it in another dtype."""
        del layer
        self._given = _Seen.of(arguments[0]) if arguments else _NO_INPUT

    def product(self, number: int, values: Tensor) -> Tensor:
        """Return the product of a member's weight with its input."""
        # The first layer computes for all. Each product is given out once: a second request is another pass.
        if number not in self.waiting or not self._given.is_same(self._multiplied):
            products = torch.split(self._together(values), self.widths, dim=-1)
            self.waiting = dict(enumerate(products))
            self._multiplied = self._given
        return self.waiting.pop(number)

    def _together(self, values: Tensor) -> Tensor:
        # `compute_in_bf16` changes the layers' class after they were joined.
        narrow = [member for member in self.members if isinstance(member, Bf16Linear)]
        if len(narrow) == len(self.members):
            return joint_linear(values, narrow)
        return functional.linear(
            values, torch.cat([member.weight for member in self.members])
        )


def join_adapters(backbone: nn.Module, adapter: str) -> int:
    """Compute the first products of adapters that read the same input together, and return the number of groups.

    For adapters without dropout of their own; the weights stay apart.
    """
    count = 0
    for module in backbone.modules():
        children = dict(module.named_children())
        for names in SHARED_INPUT_LAYERS:
            matrices = {
                name: matrix
                for name in names
                if (matrix := _first_matrix(children, name, adapter)) is not None
            }
            # One product needs one input size and one dtype.
            if (
                len(matrices) < 2
                or len(
                    {
                        (matrix.in_features, matrix.weight.dtype)
                        for matrix in matrices.values()
                    }
                )
                > 1
            ):
                continue
            group = _Group(list(matrices.values()))
            for number, (name, matrix) in enumerate(matrices.items()):
                children[name].register_forward_pre_hook(group.see)
                # On the instance: class, parameters and their names stay, for checkpoints, FSDP and peft.
                matrix.forward = partial(group.product, number)  # type: ignore[method-assign]
            count += 1
    return count


def separate_adapters(modules: Iterable[nn.Module]) -> None:
    """Undo `join_adapters` inside of some modules: the compiler cannot follow an input from layer to layer."""
    for module in (inner for outer in modules for inner in outer.modules()):
        seen = [
            key for key, hook in module._forward_pre_hooks.items() if _is_of_group(hook)
        ]
        for key in seen:
            del module._forward_pre_hooks[key]
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and _is_of_group(forward.func):
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
