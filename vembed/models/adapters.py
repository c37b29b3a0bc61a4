"""Low-rank adapters: target layers, injection, merging into the weights, saving and loading."""

import logging
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from vembed.config.schema import AdapterSection, ModelSection
from vembed.errors import UserError
from vembed.files import check_weights
from vembed.models.embedding_model import ComposedModel, names_frozen_by
from vembed.models.families.backbones import (
    StateDict,
    linear_names,
    linear_names_inside_layers,
)
from vembed.models.families.description import ModelDescription
from vembed.models.families.family import Family
from vembed.models.families.model_files import (
    ADAPTER_WEIGHTS,
    LIBRARY_ERRORS,
    error_sentence,
    read_header,
)
from vembed.models.precision import dequantized, is_quantized, weight_in_use
from vembed.parallel.devices import quieten_bitsandbytes

log = logging.getLogger(__name__)

_NAME = "default"
_DOWN = f".lora_A.{_NAME}.weight"
"""Suffix of the parameter name of each adapter's first matrix (A)."""
_PREFIX = "base_model.model."
"""Prefix that peft's files put before the backbone's parameter names."""


def add_adapters(
    backbone: nn.Module,
    description: ModelDescription,
    options: AdapterSection,
    model: ModelSection,
) -> None:
    """Inject adapters into the backbone and freeze all its other parameters."""
    quieten_bitsandbytes()  # before peft, which imports bitsandbytes
    from peft import (  # a slow import, which only runs with adapters pay for
        LoraConfig,
        inject_adapter_in_model,
    )

    family = description.family_traits
    # Frozen layers get no adapter: it would train what `freeze` keeps.
    frozen = names_frozen_by(backbone, family, options.freeze)
    targets = target_names(backbone, family, options)
    names = [name for name in targets if f"{name}.weight" not in frozen]
    if not names:
        raise UserError(
            f"lora_target_modules: {options.lora_target_modules} with freeze: {options.freeze} leaves no layer of "
            f"{model.model_name} to adapt; freeze less of it"
        )
    # Of a folder, the one with config.json, which other programs look for. Its path is made absolute: the adapter's files
    # name the base model from any place.
    is_folder = Path(model.model_name).expanduser().is_dir()
    source = description.folder.resolve()
    settings = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        # A pattern, because peft would take a list of names for endings of names.
        target_modules="|".join(map(re.escape, names)),
        use_rslora=options.lora_variant == "rslora",
        use_dora=options.lora_variant == "dora",
        fan_in_fan_out=any(
            isinstance(backbone.get_submodule(name), Conv1D) for name in names
        ),
        base_model_name_or_path=str(source) if is_folder else model.model_name,
        revision=model.model_revision,
        task_type="FEATURE_EXTRACTION",
    )
    inject_adapter_in_model(settings, backbone, adapter_name=_NAME)
    # New projections are trained in full.
    if isinstance(backbone, ComposedModel):
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad |= "_projection." in name and name not in frozen
    # Trained weights are float32 masters even if the base model is loaded in 16 bits.
    for parameter in backbone.parameters():
        if parameter.requires_grad and model.torch_dtype != "pure_bfloat16":
            parameter.data = parameter.data.float()
    log.info(
        "LoRA: rank %d, alpha %d on %d layers",
        options.lora_r,
        options.lora_alpha,
        len(names),
    )


# ---- which layers ----------------------------------------------------------------------------------------------


def target_names(
    backbone: nn.Module,
    family: Family,
    options: AdapterSection,
) -> list[str]:
    """Return the names of the layers that get an adapter."""
    prefixes = tuple(family.towers.values())
    linear = [name for name in linear_names(backbone) if name.startswith(prefixes)]
    behind = [*chain(*family.adapter_targets.values())]
    targets = options.lora_target_modules
    if targets == "auto":
        inside = set(linear_names_inside_layers(backbone))
        # A module without layers, such as a bag of embeddings, has its linear layers anywhere.
        return [name for name in linear if name in inside or not inside] + behind
    linear_layers = list(dict.fromkeys(linear + behind))
    if targets == "all-linear":
        return linear_layers
    for name_end in targets:
        if not any(f".{name}".endswith(f".{name_end}") for name in linear_layers):
            known = sorted({name.rsplit(".", 1)[-1] for name in linear_layers})
            raise UserError(
                f"lora_target_modules: {name_end} is not a linear layer of this model; it has {', '.join(known)}"
            )
    endings = tuple(f".{name_end}" for name_end in targets)
    return [name for name in linear_layers if f".{name}".endswith(endings)]


# ---- adapted layers on GPUs ------------------------------------------------------------------------------------


def fuse_adapters(backbone: nn.Module) -> None:
    """Let adapted linear layers take three matrix products forward and five backward, and little else, on GPUs.

    peft converts, scales and adds in kernels of their own. Without dropout inside the adapters, which has a mask.
    """
    from peft.tuners.lora.layer import Linear

    for module in backbone.modules():
        # Of exactly this class: layers of 4 bits have another one.
        if type(module) is not Linear:
            continue
        layer: Any = module
        # A variant (DoRA) has another formula.
        has_dropout = not isinstance(layer.lora_dropout[_NAME], nn.Identity)
        if not layer.lora_variant and not has_dropout:
            layer.forward = partial(_adapted, layer, layer.forward)


def _adapted(
    layer: Any,
    plain: Callable[[Tensor], Tensor],
    values: Tensor,
) -> Tensor:
    """Apply an adapted layer. `plain`: peft's forward, for what the products below cannot do."""
    base = layer.get_base_layer()
    down = layer.lora_A[_NAME]
    up = layer.lora_B[_NAME]
    is_linear = isinstance(base, nn.Linear) and not base.weight.requires_grad
    weight, down_weight, up_weight = map(weight_in_use, (base, down, up))
    dtype = weight.dtype
    has_one_dtype = dtype == down_weight.dtype == up_weight.dtype
    device = values.device.type
    if torch.is_autocast_enabled(device):
        # It would convert the products, and forward only.
        has_one_dtype &= dtype == torch.get_autocast_dtype(device)
    if not is_linear or not has_one_dtype:
        return plain(values)
    bias = None if base.bias is None else base.bias.to(dtype)
    output: Tensor = _LowRankLinear.apply(  # type: ignore[no-untyped-call]
        values.to(dtype),
        down.weight,
        up.weight,
        weight,
        bias,
        down_weight,
        up_weight,
        layer.scaling[_NAME],
    )
    return output


class _LowRankLinear(torch.autograd.Function):
    """x W^T + b + scaling * x A^T B^T. W [out, in] and b are frozen, A [rank, in] and B [out, rank] are trained."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        down: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down_copy: Tensor,
        up_copy: Tensor,
        scaling: float,
    ) -> Tensor:
        """`down`, `up`: A and B, for their gradients. `down_copy`, `up_copy`: the same in the dtype of `values`."""
        ctx.dtypes = down.dtype, up.dtype
        ctx.scaling = scaling
        rows = values.flatten(0, -2)  # [all tokens, in]
        inner = torch.mm(rows, down_copy.t())  # [all tokens, rank]
        output = functional.linear(rows, weight, bias)
        output.addmm_(inner, up_copy.t(), alpha=scaling)
        ctx.save_for_backward(rows, inner, weight, down_copy, up_copy)
        return output.view(*values.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, weight, down, up = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)  # [all tokens, out]
        # With beta=0 the first argument only gives the shape. So the product is scaled without a kernel of its own.
        of_inner = torch.addmm(inner, gradient, up, beta=0, alpha=ctx.scaling)
        of_values = None
        if ctx.needs_input_grad[0]:
            of_values = torch.mm(gradient, weight).addmm_(of_inner, down)
            of_values = of_values.view(*gradients[0].shape[:-1], -1)
        of_down = torch.mm(of_inner.t(), rows).to(ctx.dtypes[0])
        of_up = torch.addmm(up, gradient.t(), inner, beta=0, alpha=ctx.scaling)
        of_up = of_up.to(ctx.dtypes[1])
        return of_values, of_down, of_up, None, None, None, None, None


# ---- weights in and out ----------------------------------------------------------------------------------------


def has_adapters(backbone: nn.Module) -> bool:
    """Return True if the backbone has adapters."""
    return any(name.endswith(_DOWN) for name, _ in backbone.named_parameters())


def merged_state(backbone: nn.Module, state: StateDict) -> StateDict:
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
    adapted = [key.removesuffix(_DOWN) for key in state if key.endswith(_DOWN)]
    for name in adapted:
        layer: Any = backbone.get_submodule(name)
        weight = merged.pop(f"{name}.base_layer.weight")
        down, up = (
            merged.pop(f"{name}.lora_{part}.{_NAME}.weight").float() for part in "AB"
        )
        magnitude = merged.pop(f"{name}.lora_magnitude_vector.{_NAME}.weight", None)
        # W' = W + scaling * B A, in float32. up: [out, rank], down: [rank, in].
        change = up @ down * layer.scaling[_NAME]
        transposed = layer.fan_in_fan_out
        whole = (weight.T if transposed else weight).float() + change
        if magnitude is not None:
            # DoRA: the sum gives the direction, a learned vector [out] the length of each row.
            whole *= (magnitude.float() / whole.norm(dim=1)).unsqueeze(1)
        whole = whole.T.contiguous() if transposed else whole
        merged[f"{name}.weight"] = whole.to(weight.dtype)
        if f"{name}.base_layer.bias" in merged:
            merged[f"{name}.bias"] = merged.pop(f"{name}.base_layer.bias")
    left = [name for name in merged if ".lora_" in name]
    if left:
        raise RuntimeError(f"adapters that cannot be merged: {', '.join(left)}")
    return merged


def save_adapter(
    folder: Path,
    backbone: Any,
    state: StateDict,
) -> None:
    """Save the adapter alone, in peft's layout. `state`: the backbone's full state dict under its own names."""
    folder.mkdir(parents=True, exist_ok=True)
    from peft import get_peft_model_state_dict

    adapter = get_peft_model_state_dict(
        backbone, dict(state), adapter_name=_NAME, save_embedding_layers=False
    )
    weights = {_PREFIX + name: tensor.contiguous() for name, tensor in adapter.items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    backbone.peft_config[_NAME].save_pretrained(folder)


def merge_saved_adapter(backbone: nn.Module, folder: Path) -> None:
    """Merge a saved adapter into the weights of a backbone without adapters. Raise UserError where a part of it would be
    left out, which would make another model."""
    quieten_bitsandbytes()
    from peft import (
        PEFT_TYPE_TO_TUNER_MAPPING,
        LoraModel,
        PeftConfig,
        set_peft_model_state_dict,
    )

    read_header(folder / ADAPTER_WEIGHTS)  # says what is wrong with a damaged file
    check_weights(folder)
    weights = {}
    for key, tensor in load_file(folder / ADAPTER_WEIGHTS).items():
        weights[key.removeprefix(_PREFIX)] = tensor
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        tuner_class = PEFT_TYPE_TO_TUNER_MAPPING[settings.peft_type]
        # The first values of the adapter's matrices are overwritten: their draws must not move later ones.
        with torch.random.fork_rng(devices=[]):
            tuner = tuner_class(backbone, settings, _NAME)
        result = set_peft_model_state_dict(backbone, weights, adapter_name=_NAME)
    except LIBRARY_ERRORS as error:
        raise UserError(
            f"the adapter of {folder} does not fit {type(backbone).__name__}: {error_sentence(error)}"
        ) from error
    unused = sorted(result.unexpected_keys)
    if unused or not isinstance(tuner, LoraModel):
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} holds tensors that are no low-rank matrices of a linear layer of "
            f"{type(backbone).__name__} ({', '.join(unused[:3])}); merge it with peft (merge_and_unload), and give the "
            "folder of the whole model"
        )
    # With what the adapter trained in full: whole modules, or rows of the token embeddings.
    tuner.merge_and_unload()
    vars(backbone).pop("peft_config", None)  # older versions of peft leave it
    backbone.requires_grad_(True)  # peft has frozen all but the adapter
