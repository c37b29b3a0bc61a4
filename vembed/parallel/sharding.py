"""Sharding of a model with Accelerate's FSDP code, also on CPUs: plugin, units, and weights distributed from rank 0."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import (
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vembed.errors import UserError
from vembed.models.custom.own_code import find
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.precision import is_quantized
from vembed.parallel import collectives
from vembed.parallel.parameters import unify_model_dtype_for_fsdp

if TYPE_CHECKING:
    from vembed.config.resolved import FsdpConfig

log = logging.getLogger("vembed")

HALF_DTYPES = (torch.bfloat16, torch.float16)
PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_plugin(
    fsdp: FsdpConfig, precision: str, device: torch.device
) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's FSDP plugin with every value set, so that none comes from the environment."""
    shared: dict[str, Any] = {
        "fsdp_version": fsdp.version,
        "state_dict_type": fsdp.state_dict_type,
        "auto_wrap_policy": "NO_WRAP",  # `shard` chooses the modules
        "activation_checkpointing": False,  # the model has its own
        "cpu_ram_efficient_loading": False,  # `shard` does it, also for buffers and several unit classes
        "mixed_precision_policy": _precision_policy(fsdp, precision),
    }
    if fsdp.version == 2:
        offload = (
            CPUOffloadPolicy(pin_memory=device.type == "cuda")
            if fsdp.offload
            else False
        )
        return FullyShardedDataParallelPlugin(
            **shared,
            cpu_offload=offload,
            reshard_after_forward=fsdp.reshard_after_forward,
        )
    plugin = FullyShardedDataParallelPlugin(
        **shared,
        # FSDP1 would pin the memory, which needs a GPU; on the CPU all tensors are in host memory anyway.
        cpu_offload=fsdp.offload and device.type == "cuda",
        reshard_after_forward=fsdp.sharding_strategy,
        backward_prefetch="BACKWARD_PRE",
        forward_prefetch=fsdp.forward_prefetch,
        limit_all_gathers=True,
        use_orig_params=True,
        # FSDP1 broadcasts weights on GPUs only; on the CPU `shard` has synchronised them from rank 0 before.
        sync_module_states=device.type == "cuda",
    )
    # Accelerate prefers `sharding_strategy`, which it takes from its own variable, by default FULL_SHARD.
    plugin.sharding_strategy = plugin.reshard_after_forward
    return plugin


def turn_on_fsdp(
    accelerator: Accelerator,
    plugin: FullyShardedDataParallelPlugin,
    device: torch.device,
) -> None:
    """Switch an existing Accelerator to its FSDP code paths.

    `Accelerator(cpu=True, fsdp_plugin=...)` silently becomes plain multi-CPU, because AcceleratorState enables FSDP
    only with several GPUs. The states are shared dictionaries, so a change also applies to existing Accelerators.
    On the CPU the device must have no index: FSDP1 treats cpu and cpu:0 as two devices.
    """
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
        state["device"] = device
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.distributed_type is DistributedType.FSDP


def use_hybrid_mesh(
    accelerator: Accelerator, num_machines: int, num_local: int
) -> None:
    """Set up FSDP2's HYBRID_SHARD: shard inside a machine, replicate between machines."""
    layout = ParallelismConfig(dp_replicate_size=num_machines, dp_shard_size=num_local)
    names = tuple(layout.fsdp_dim_names)
    AcceleratorState._shared_state["parallelism_config"] = layout
    world_group = dist.group.WORLD
    assert world_group is not None
    # New groups have torch's timeout by default, not dist_timeout_minutes.
    timeout = world_group._get_backend(accelerator.device).options._timeout
    ranks = torch.arange(num_machines * num_local).view(num_machines, num_local)
    # Groups made here: a mesh would split the world's group, and torch before 2.13 splits none that has a backend for
    # each kind of device.
    groups = []
    for members in (ranks.T, ranks):
        group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            members.tolist(), timeout=timeout
        )
        groups.append(group)
    # Accelerate's own mesh has more dimensions and would have to be sliced.
    mesh = DeviceMesh.from_group(
        groups, accelerator.device.type, mesh=ranks, mesh_dim_names=names
    )
    AcceleratorState._shared_state["device_mesh"] = mesh


def shard(
    model: nn.Module,
    accelerator: Accelerator,
    fsdp: FsdpConfig,
    layer_classes: Sequence[str],
    *,
    only_rank0_reads: bool,
) -> nn.Module:
    """Wrap the model's units and the model with Accelerate's FSDP code. All ranks must call it.

    Required ordering: unify dtypes (FSDP1 flattens parameters of one dtype), choose units by unwrapped module names,
    synchronise the weights, then wrap. `only_rank0_reads`: only rank 0 holds the weights and sends the others their shards.
    """
    unify_model_dtype_for_fsdp(model, fsdp.version)
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    wide: list[nn.Module] = []
    is_narrow = policy is not None and policy.param_dtype in HALF_DTYPES
    if is_narrow and isinstance(model, EmbeddingModel):
        # Units of their own: a unit that computes in 16 bits would gather their weights in 16 bits, and without sharding
        # they compute in float32.
        wide = model.heads()
    units = [
        unit for unit in choose_units(model, fsdp, layer_classes) if unit not in wide
    ]
    described = describe_units(units)
    if wide:
        described += "; projections and head compute in float32"
    for name, module in model.named_modules():
        if module in units:
            log.debug(f"unit: {name} ({type(module).__name__})")
    if not only_rank0_reads:
        collectives.broadcast_tensors(model.parameters())
    if fsdp.version == 1:
        plugin: FullyShardedDataParallelPlugin = accelerator.state.fsdp_plugin
        plugin.ignored_modules = _unsharded(model)
        for unit in wide:
            unit._wrap_overrides = {"mixed_precision": None}  # type: ignore[assignment]  # read by FSDP1's wrapping
        chosen = {*units, *wide}
        plugin.auto_wrap_policy = partial(
            lambda_auto_wrap_policy, lambda_fn=chosen.__contains__
        )
        wrapped: nn.Module = accelerator.prepare_model(model)
    else:
        wrapped = _shard_by_fsdp2(
            model, accelerator, fsdp, units, wide, only_rank0_reads=only_rank0_reads
        )
    log.info(f"FSDP{fsdp.version}: {described}")
    return wrapped


def _shard_by_fsdp2(
    model: nn.Module,
    accelerator: Accelerator,
    fsdp: FsdpConfig,
    units: Sequence[nn.Module],
    wide: Sequence[nn.Module],
    *,
    only_rank0_reads: bool,
) -> nn.Module:
    plugin: FullyShardedDataParallelPlugin = accelerator.state.fsdp_plugin
    if only_rank0_reads and any(is_quantized(module) for module in model.modules()):
        log.info(
            "4-bit weights cannot be distributed from rank 0: every process has read its own copy"
        )
        only_rank0_reads = False
    weights = _set_aside(model) if only_rank0_reads else None
    plugin.ignored_modules = _unsharded(model)
    by_class: set[str] = set()
    if fsdp.wrap_policy == "TRANSFORMER_BASED_WRAP":
        layers = [unit for unit in units if not isinstance(unit, nn.Embedding)]
        by_class = {type(layer).__name__ for layer in layers}
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = sorted(by_class)
    mesh: DeviceMesh | None = accelerator.torch_device_mesh
    if mesh is not None:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    # Accelerate chooses modules by class only, so embeddings and large modules are wrapped before, by the same call.
    # `units` lists inner modules first: fully_shard must see a child before its parent.
    for unit in [*wide, *units]:
        # Before FSDP's own hook, which warns about views.
        unit.register_forward_hook(_without_views)
        if unit in wide or type(unit).__name__ not in by_class:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=plugin.reshard_after_forward,
                mp_policy=replace(policy, param_dtype=None) if unit in wide else policy,
                offload_policy=plugin.cpu_offload,
            )
    # Accelerate prepares an FSDP2 model only together with an optimizer, whose parameters it replaces by DTensors. The
    # real optimizer is created afterwards.
    stand_in = torch.optim.SGD([next(model.parameters())], lr=0.0)
    accelerator.prepare(model, stand_in)
    accelerator._optimizers.clear()
    assert isinstance(model, FSDPModule)
    assert all(isinstance(unit, FSDPModule) for unit in [*wide, *units])
    if weights is not None:
        device = torch.device("cpu") if fsdp.offload else accelerator.device
        _hand_out(model, weights, device)
    for holder in _unsharded(model):  # anew: `_hand_out` replaces the parameters
        for parameter in holder.parameters():
            parameter.data = parameter.data.to(accelerator.device)
    if fsdp.forward_prefetch:
        inner = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit, following in itertools.pairwise(inner[1:]):  # the first is the model
            unit.set_modules_to_forward_prefetch([following])
    return model


def shard_for_use(
    model: nn.Module,
    layer_classes: Sequence[str],
    device: torch.device,
    *,
    only_rank0_reads: bool,
) -> nn.Module:
    """Shard a model that is not trained, in a run whose own model is not sharded: by FSDP2 itself, since Accelerate's
    settings are those of the run. All ranks must call it. `only_rank0_reads`: only rank 0 holds the weights."""
    weights = _set_aside(model) if only_rank0_reads else None
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    mesh = init_device_mesh(device.type, (collectives.world_size(),))
    chosen = set(layer_units(model, layer_classes or layer_candidates(model)))
    units = [module for module in reversed(list(model.modules())) if module in chosen]
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, ignored_params=scalars)
    if weights is not None:
        _hand_out(model, weights, device)
    return model


def all_reduces_once(model: nn.Module, fsdp: FsdpConfig) -> bool:
    """Prepare HYBRID_SHARD for one all-reduce per step where gradients are reduced after every micro-batch; return
    whether it is possible.

    FSDP2 adds a unit's reduced gradients of several micro-batches up as one flat tensor, so all micro-batches must
    reduce the same parameters. The root unit, and units by size, may hold parameters of several towers, of which a
    micro-batch uses one: those it leaves out count as zero.
    """
    if not isinstance(model, FSDPModule) or torch.__version__ < "2.13":
        return False
    model.set_reduce_scatter_unused_params(
        True, recurse=fsdp.wrap_policy == "SIZE_BASED_WRAP"
    )
    return True


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Copy outputs that are views, as of a block that ends in a linear layer (T5's, for example).

    An operation in place on a view would drop FSDP2's hook, and with it the gathering of parameters for the backward.
    """
    if isinstance(output, tuple):
        return tuple(_without_views(_module, _inputs, part) for part in output)
    is_view = isinstance(output, Tensor) and output._base is not None
    return output.clone() if is_view else output


def _unsharded(model: nn.Module) -> list[nn.Module]:
    """Return modules that hold the parameters that FSDP must ignore: those without dimensions."""
    scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]
    if any(parameter.requires_grad for parameter in scalars):
        raise ValueError(
            "FSDP does not shard a parameter without dimensions, so it must not be trained in the model"
        )
    return [nn.ParameterList(scalars)] if scalars else []


def _precision_policy(
    fsdp: FsdpConfig, precision: str
) -> MixedPrecision | MixedPrecisionPolicy | None:
    """Return the mixed-precision policy. Master weights keep their dtype; gathered copies and computation use
    `param_dtype`.

    float32 for the reduce dtype and for buffers is set only if computation is in 16 bits; it is the default otherwise.
    The output dtype is not the units' but the whole model's, and set there.
    """
    param_dtype = PRECISIONS[precision]
    is_half = param_dtype in HALF_DTYPES
    reduce_dtype = None
    if is_half or fsdp.reduce_dtype != "float32":
        reduce_dtype = getattr(torch, fsdp.reduce_dtype)
    if fsdp.version == 2:
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if not is_half and reduce_dtype is None:
        return None
    buffer_dtype = torch.float32 if is_half else None
    return MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)


# ---- weights that only rank 0 has read -------------------------------------------------------------------------------


def _set_aside(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters (rank 0 only) and buffers, and move the model to the meta device (sharding is free)."""
    parameters: dict[str, Tensor] = {}
    if collectives.rank() == 0:
        for name, parameter in model.named_parameters():
            parameters[name] = parameter.detach()
    buffers = dict(model.named_buffers())
    model.to(torch.device("meta"))
    return parameters, buffers


def _hand_out(
    model: nn.Module,
    weights: tuple[dict[str, Tensor], dict[str, Tensor]],
    device: torch.device,
) -> None:
    """Allocate each rank's shards and fill them from the weights of rank 0. All ranks must call it."""
    parameters, buffers = weights
    model.to_empty(device=device)
    # FSDP leaves scalars and buffers unsharded, and set_model_state_dict is given the sharded parameters only.
    sharded: dict[str, Any] = {}
    whole: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            whole[name] = parameter
        elif name in parameters:
            sharded[name] = parameters[name]
    whole |= dict(model.named_buffers())
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=False
    )
    set_model_state_dict(model, sharded, options=options)
    if collectives.rank() == 0:
        with torch.no_grad():
            for name, tensor in whole.items():
                tensor.copy_(parameters[name] if name in parameters else buffers[name])
    collectives.broadcast_tensors(whole.values())


# ---- units ---------------------------------------------------------------------------------------------------------


def layer_units(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of the named classes (`BertLayer`, or a dotted path). Raise UserError if a name has none."""
    units: dict[nn.Module, None] = {}
    for name in names:
        fitting = []
        for module in model.modules():
            kind = type(module)
            if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
                fitting.append(module)
        if not fitting:
            candidates = ", ".join(layer_candidates(model))
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap: the model has no {name}; its layer classes: "
                f"{candidates or 'none found: use SIZE_BASED_WRAP'}."
            )
        units.update(dict.fromkeys(fitting))
    return list(units)


def layer_candidates(model: nn.Module) -> list[str]:
    """Return likely layer classes: those that the model declares, then those in module lists."""
    declared: set[str] = set()
    in_lists: dict[str, None] = {}
    present = {type(module).__name__ for module in model.modules()}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            declared |= present.intersection(module._no_split_modules or ())
        if isinstance(module, nn.ModuleList):
            for child in module:
                if _has_children(child):
                    in_lists[type(child).__name__] = None
    return list(dict.fromkeys([*sorted(declared), *in_lists]))


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def size_units(
    model: nn.Module, min_num_params: int, *, leaves: bool = True
) -> list[nn.Module]:
    """Return modules with at least `min_num_params` parameters outside smaller units, as FSDP1's own policy does.

    `leaves`: modules without children may be units. A single linear layer is a bad unit: little to overlap, and FSDP2
    warns about its output, which is a view.
    """
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return the number of the module's parameters in units."""
        total = _num_values(module)
        if total < min_num_params:
            return 0
        wrapped = 0
        if not isinstance(module, nn.MultiheadAttention):
            wrapped = sum(visit(child) for child in module.children())
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if module is model or is_list or total - wrapped < min_num_params:
            return wrapped
        if not leaves and not _has_children(module):
            return 0
        units.append(module)
        return total

    visit(model)
    return units


def embedding_units(model: nn.Module) -> list[nn.Module]:
    """Return the token embeddings of every tower."""
    units: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Raised for a model of several towers, or without token embeddings.
            with suppress(NotImplementedError):
                embedding = module.get_input_embeddings()
                if isinstance(embedding, nn.Embedding):
                    units[embedding] = None
    return list(units)


def choose_units(
    model: nn.Module, fsdp: FsdpConfig, layer_classes: Sequence[str]
) -> list[nn.Module]:
    """Return all units except the root, inner modules first."""
    units: list[nn.Module] = []
    if fsdp.wrap_function is not None:
        chooses = find(fsdp.wrap_function, "fsdp_auto_wrap_policy")
        for module in model.modules():
            if module is not model and chooses(module):
                units.append(module)
    elif fsdp.wrap_policy == "SIZE_BASED_WRAP":
        units = size_units(model, fsdp.min_num_params, leaves=fsdp.version == 1)
    elif fsdp.wrap_policy == "TRANSFORMER_BASED_WRAP":
        names = fsdp.layer_classes or layer_classes or layer_candidates(model)
        layers = layer_units(model, names)
        units = [
            layer for layer in layers if _num_values(layer) >= fsdp.min_layer_params
        ]
        if len(units) < len(layers):
            log.info(
                f"fsdp_min_num_params: {len(layers) - len(units):,d} layers have less than {fsdp.min_layer_params:,d} "
                "parameters and are no units of their own"
            )
        inside = {inner for unit in units for inner in unit.modules()}
        for embedding in embedding_units(model):
            if embedding not in inside:
                units.append(embedding)
    chosen = set(units)
    if isinstance(model, EmbeddingModel) and model.language_head is not None:
        # A weight that the language-model head uses too stays in the root unit, which is gathered while the head runs.
        for unit in units:
            if model.language_head.lends(unit, model.backbone):
                chosen.discard(unit)
    # modules() lists outer modules first.
    return [module for module in reversed(list(model.modules())) if module in chosen]


def describe_units(units: Sequence[nn.Module]) -> str:
    """Return `13 units (12 BertLayer, 1 Embedding) and the rest of the model`."""
    if not units:
        return "the whole model as one unit"
    kinds = Counter(type(unit).__name__ for unit in units)
    listed = ", ".join(f"{count:,d} {name}" for name, count in kinds.most_common())
    return f"{len(units):,d} units ({listed}) and the rest of the model"
