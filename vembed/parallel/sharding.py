"""Sharding of a model by torch's FSDP1 and FSDP2, on GPUs and CPUs alike: units, and weights distributed from rank 0."""

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vembed.config.decisions import FsdpConfig
from vembed.errors import UserError
from vembed.models.custom.own_code import find
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import StateDict, layer_classes_of
from vembed.models.precision import is_quantized
from vembed.parallel import collectives
from vembed.parallel.parameters import unify_model_dtype_for_fsdp
from vembed.parallel.placement import PRECISION_DTYPES, Layout

log = logging.getLogger("vembed")


def hybrid_mesh(layout: Layout) -> DeviceMesh | None:
    """Return the mesh of HYBRID_SHARD under FSDP2: shards inside a machine, copies between machines. Collective.

    None: another strategy, or FSDP1, which makes its groups itself.
    """
    fsdp = layout.fsdp
    assert fsdp is not None
    if fsdp.sharding_strategy != "HYBRID_SHARD":
        return None
    if fsdp.version == 1 and layout.device.type == "cpu":
        raise UserError(
            "HYBRID_SHARD under fsdp_version: 1 needs GPUs; use fsdp_version: 2."
        )
    num_local = layout.ranks.local_world_size
    if layout.ranks.world_size % num_local:
        raise UserError(
            f"HYBRID_SHARD needs equally many processes on every machine, but {num_local} of "
            f"{layout.ranks.world_size} are on this one: start as many on each, or use FULL_SHARD."
        )
    if not layout.is_hybrid:
        log.info(
            f"HYBRID_SHARD: with {layout.num_machines} machine(s) of {num_local} process(es) it is the same as FULL_SHARD"
        )
        return None
    if fsdp.version == 1:
        return None
    names = ("replicate", "shard")
    world_group = dist.group.WORLD
    assert world_group is not None
    # New groups have torch's timeout by default, not dist_timeout_minutes.
    timeout = world_group._get_backend(layout.device).options._timeout
    ranks = torch.arange(layout.ranks.world_size).view(layout.num_machines, num_local)
    # Groups made here: a mesh would split the world's group, and torch before 2.13 splits none that has a backend for
    # each kind of device.
    groups = []
    for members in (ranks.T, ranks):
        group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            members.tolist(), timeout=timeout
        )
        groups.append(group)
    return DeviceMesh.from_group(
        groups, layout.device.type, mesh=ranks, mesh_dim_names=names
    )


def shard(
    model: nn.Module,
    layout: Layout,
    layer_classes: Sequence[str],
    *,
    mesh: DeviceMesh | None,
    only_rank0_reads: bool,
) -> nn.Module:
    """Shard the model's units and the model. All ranks must call it.

    Required ordering: unify dtypes (FSDP1 flattens parameters of one dtype), choose units by unwrapped module names,
    synchronise the weights, then wrap. `only_rank0_reads`: only rank 0 holds the weights and sends the others their shards.
    """
    fsdp = layout.fsdp
    assert fsdp is not None
    unify_model_dtype_for_fsdp(model, fsdp.version)
    wide = []
    is_half = layout.precision.value != "no"
    if is_half and isinstance(model, EmbeddingModel):
        # Units of their own: a unit that computes in 16 bits would gather their weights in 16 bits, and without sharding
        # they compute in float32.
        wide = list(model.modules_behind_towers().values())
    units = [
        unit for unit in choose_units(model, fsdp, layer_classes) if unit not in wide
    ]
    described = describe_units(units)
    if wide:
        described += "; projections and head compute in float32"
    for name, module in model.named_modules():
        if module in units:
            log.debug(f"unit: {name} ({type(module).__name__})")
    if only_rank0_reads and any(is_quantized(module) for module in model.modules()):
        log.info(
            "4-bit weights cannot be distributed from rank 0: every process has read its own copy"
        )
        only_rank0_reads = False
    if not only_rank0_reads:
        collectives.broadcast_tensors(model.parameters())
    # Master weights keep their dtype. Gathered copies and computation use that of the arithmetic. The output dtype is
    # not the units' but the whole model's, and set there.
    param_dtype = PRECISION_DTYPES[layout.precision.value] if is_half else None
    reduce_dtype = None
    if is_half or fsdp.reduce_dtype != "float32":
        reduce_dtype = getattr(torch, fsdp.reduce_dtype)
    sharded: nn.Module
    if fsdp.version == 1:
        precision = None
        if reduce_dtype is not None:
            buffer_dtype = torch.float32 if is_half else None
            precision = MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)
        for unit in wide:
            unit._wrap_overrides = {"mixed_precision": None}  # type: ignore[assignment]  # read by FSDP1's wrapping
        chosen = {*units, *wide}
        # FSDP1 broadcasts weights, and pins memory, on GPUs only.
        on_gpu = layout.device.type == "cuda"
        sharded = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[fsdp.sharding_strategy],
            cpu_offload=CPUOffload(fsdp.offload and on_gpu),
            auto_wrap_policy=partial(
                lambda_auto_wrap_policy, lambda_fn=chosen.__contains__
            ),
            mixed_precision=precision,
            sync_module_states=on_gpu,
            # On ranks that have built the model without weights, which rank 0 sends.
            param_init_fn=partial(
                nn.Module.to_empty, device=layout.device, recurse=False
            ),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=fsdp.forward_prefetch,
            limit_all_gathers=True,
            use_orig_params=True,
            ignored_states=_scalars(model),
            device_id=layout.device,
        )
    else:
        # An operation in place on a view would drop FSDP2's own hook, so this one comes first.
        for unit in [*wide, *units]:
            unit.register_forward_hook(_without_views)
        sharded = shard_by_fsdp2(
            model,
            fsdp,
            layout.device,
            units,
            wide,
            policy=MixedPrecisionPolicy(param_dtype, reduce_dtype),
            mesh=mesh,
            only_rank0_reads=only_rank0_reads,
        )
    log.info(f"FSDP{fsdp.version}: {described}")
    return sharded


def shard_by_fsdp2(
    model: nn.Module,
    fsdp: FsdpConfig,
    device: torch.device,
    units: Sequence[nn.Module],
    wide: Sequence[nn.Module] = (),
    *,
    policy: MixedPrecisionPolicy,
    mesh: DeviceMesh | None = None,
    only_rank0_reads: bool,
) -> nn.Module:
    """Shard units, inner modules first, and the model. All ranks must call it. `wide`: units that compute in float32."""
    weights: StateDict = {}
    if only_rank0_reads:
        if collectives.rank() == 0:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                weights[name] = tensor.detach()
        model.to(torch.device("meta"))  # where sharding is free
    offload = OffloadPolicy()
    if fsdp.offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": mesh or init_device_mesh(device.type, (collectives.world_size(),)),
        "offload_policy": offload,
        "ignored_params": set(_scalars(model)),
    }
    reshards = fsdp.reshard_after_forward
    float32 = replace(policy, param_dtype=None)
    # fully_shard must see a child before its parent.
    for unit in (*wide, *units):
        unit_policy = float32 if unit in wide else policy
        fully_shard(
            unit, reshard_after_forward=reshards, mp_policy=unit_policy, **options
        )
    # By default the root stays gathered up to its backward pass, which follows at once.
    fully_shard(model, mp_policy=policy, **options)
    if only_rank0_reads:
        shard_device = torch.device("cpu") if fsdp.offload else device
        _hand_out(model, weights, shard_device)
    for scalar in _scalars(model):  # anew: `_hand_out` replaces the parameters
        scalar.data = scalar.data.to(device)
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
    """Shard a model that is not trained, whatever the run does with its own. All ranks must call it.

    `only_rank0_reads`: only rank 0 holds the weights.
    """
    # Layers alone: embeddings may be tied to a head, and shared weights must be in one unit.
    units = layer_units(model, layer_classes)
    return shard_by_fsdp2(
        model,
        FsdpConfig(),
        device,
        _inner_first(model, units),
        policy=MixedPrecisionPolicy(),
        only_rank0_reads=only_rank0_reads,
    )


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


def _without_views(
    _module: nn.Module,
    _inputs: Any,
    output: Any,
) -> Any:
    """Copy outputs that are views, as of a block that ends in a linear layer (T5's, for example).

    An operation in place on a view would drop FSDP2's hook, and with it the gathering of parameters for the backward.
    """
    if isinstance(output, tuple):
        return tuple(_without_views(_module, _inputs, part) for part in output)
    is_view = isinstance(output, Tensor) and output._base is not None
    return output.clone() if is_view else output


def _scalars(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without dimensions, which FSDP must ignore."""
    scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]
    if any(parameter.requires_grad for parameter in scalars):
        raise ValueError(
            "FSDP does not shard a parameter without dimensions, so it must not be trained in the model"
        )
    return scalars


# ---- weights that only rank 0 has read -------------------------------------------------------------------------------


def _hand_out(
    model: nn.Module,
    weights: StateDict,
    device: torch.device,
) -> None:
    """Allocate each rank's shards and fill them from `weights`, which rank 0 alone has: parameters and buffers. All
    ranks must call it."""
    model.to_empty(device=device)
    # FSDP leaves scalars and buffers unsharded, and set_model_state_dict is given the sharded parameters only.
    sharded: dict[str, Any] = {}
    whole: StateDict = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            whole[name] = parameter
        elif name in weights:
            sharded[name] = weights[name]
    whole |= dict(model.named_buffers())
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=False
    )
    set_model_state_dict(model, sharded, options=options)
    if weights:
        with torch.no_grad():
            for name, tensor in whole.items():
                tensor.copy_(weights[name])
    collectives.broadcast_tensors(whole.values())


# ---- units ---------------------------------------------------------------------------------------------------------


def layer_units(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """Return the modules of the named classes (`BertLayer`, or a dotted path). Raise UserError if a name has none."""
    units: set[nn.Module] = set()
    for name in names:
        fitting = []
        for module in model.modules():
            kind = type(module)
            if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
                fitting.append(module)
        if not fitting:
            candidates = ", ".join(layer_classes_of(model))
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap: the model has no {name}; its layer classes: "
                f"{candidates or 'none found: use SIZE_BASED_WRAP'}."
            )
        units.update(fitting)
    return units


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def size_units(
    model: nn.Module,
    min_num_params: int,
    *,
    leaves: bool = True,
) -> set[nn.Module]:
    """Return modules with at least `min_num_params` parameters outside smaller units, as FSDP1's own policy does.

    `leaves`: modules without children may be units. A single linear layer is a bad unit: little to overlap, and FSDP2
    warns about its output, which is a view.
    """
    units = set()

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
        if not leaves and not list(module.children()):
            return 0
        units.add(module)
        return total

    visit(model)
    return units


def embedding_units(model: nn.Module) -> set[nn.Module]:
    """Return the token embeddings of every tower."""
    units: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Raised for a model of several towers, or without token embeddings.
            with suppress(NotImplementedError):
                embedding = module.get_input_embeddings()
                if isinstance(embedding, nn.Embedding):
                    units.add(embedding)
    return units


def choose_units(
    model: nn.Module,
    fsdp: FsdpConfig,
    layer_classes: Sequence[str],
) -> list[nn.Module]:
    """Return all units except the root, inner modules first."""
    units: set[nn.Module] = set()
    if fsdp.wrap_function is not None:
        chooses = find(fsdp.wrap_function, "fsdp_auto_wrap_policy")
        for module in model.modules():
            if module is not model and chooses(module):
                units.add(module)
    elif fsdp.wrap_policy == "SIZE_BASED_WRAP":
        units = size_units(model, fsdp.min_num_params, leaves=fsdp.version == 1)
    elif fsdp.wrap_policy == "TRANSFORMER_BASED_WRAP":
        names = fsdp.layer_classes or layer_classes or layer_classes_of(model)
        layers = layer_units(model, names)
        units = {
            layer for layer in layers if _num_values(layer) >= fsdp.min_layer_params
        }
        if len(units) < len(layers):
            log.info(
                f"fsdp_min_num_params: {len(layers) - len(units):,d} layers have less than {fsdp.min_layer_params:,d} "
                "parameters and are no units of their own"
            )
        inside = itertools.chain.from_iterable(unit.modules() for unit in units)
        units |= embedding_units(model).difference(inside)
    if isinstance(model, EmbeddingModel) and model.language_head is not None:
        # A weight that the language-model head uses too stays in the root unit, which is gathered while the head runs.
        head = model.language_head
        units = {unit for unit in units if not head.lends(unit, model.backbone)}
    return _inner_first(model, units)


def _inner_first(model: nn.Module, chosen: set[nn.Module]) -> list[nn.Module]:
    # modules() lists outer modules first.
    modules = reversed(list(model.modules()))
    return [module for module in modules if module in chosen]


def describe_units(units: Sequence[nn.Module]) -> str:
    """Return `13 units (12 BertLayer, 1 Embedding) and the rest of the model`."""
    if not units:
        return "the whole model as one unit"
    kinds = Counter(type(unit).__name__ for unit in units)
    listed = ", ".join(f"{count:,d} {name}" for name, count in kinds.most_common())
    return f"{len(units):,d} units ({listed}) and the rest of the model"
