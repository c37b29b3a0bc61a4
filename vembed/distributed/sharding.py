"""Sharding of a model with Accelerate's FSDP code: plugin, units, and distribution of weights from rank 0."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from vembed.distributed import collectives
from vembed.distributed.fsdp import unify_model_dtype_for_fsdp
from vembed.distributed.units import choose_units, describe_units
from vembed.models.quantized import is_quantized

if TYPE_CHECKING:
    from vembed.config.fsdp import FsdpConfig

log = logging.getLogger("vembed")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_plugin(fsdp: FsdpConfig, precision: str, device: torch.device) -> FullyShardedDataParallelPlugin:
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
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if fsdp.offload else False
        return FullyShardedDataParallelPlugin(
            **shared, cpu_offload=offload, reshard_after_forward=fsdp.reshard_after_forward
        )
    return FullyShardedDataParallelPlugin(
        **shared,
        # FSDP1 would pin the memory, which needs a GPU; on the CPU all tensors are in host memory anyway.
        cpu_offload=fsdp.offload and device.type == "cuda",
        reshard_after_forward=fsdp.sharding_strategy,
        backward_prefetch=fsdp.backward_prefetch,
        forward_prefetch=fsdp.forward_prefetch,
        limit_all_gathers=fsdp.limit_all_gathers,
        use_orig_params=fsdp.use_orig_params,
        # FSDP1 broadcasts weights on GPUs only; on the CPU `shard` has synchronised them from rank 0 before.
        sync_module_states=(fsdp.sync_module_states or fsdp.ram_efficient_loading) and device.type == "cuda",
    )


def use_hybrid_mesh(accelerator: Accelerator, num_machines: int, num_local: int) -> None:
    """Set up FSDP2's HYBRID_SHARD: shard inside a machine, replicate between machines."""
    layout = ParallelismConfig(dp_replicate_size=num_machines, dp_shard_size=num_local)
    names = tuple(layout.fsdp_dim_names)
    AcceleratorState._shared_state["parallelism_config"] = layout
    # Accelerate's own mesh has more dimensions and would have to be sliced.
    mesh = init_device_mesh(accelerator.device.type, (num_machines, num_local), mesh_dim_names=names)
    AcceleratorState._shared_state["device_mesh"] = mesh
    # The mesh creates new process groups with torch's default timeout: set dist_timeout_minutes for them too.
    everybody = dist.group.WORLD
    assert everybody is not None
    patience = everybody._get_backend(accelerator.device).options._timeout
    for name in names:
        _set_pg_timeout(patience, mesh.get_group(name))


def shard(
    model: nn.Module, accelerator: Accelerator, fsdp: FsdpConfig, layer_classes: Sequence[str], *, one_reads: bool
) -> nn.Module:
    """Wrap the model's units and the model with Accelerate's FSDP code. All ranks must call it.

    Required ordering: unify dtypes (FSDP1 flattens parameters of one dtype), choose units by unwrapped module names,
    synchronise the weights, then wrap. `one_reads`: only rank 0 holds the weights and sends the others their shards.
    """
    unify_model_dtype_for_fsdp(model, fsdp.version)
    units = choose_units(model, fsdp, layer_classes)
    described = describe_units(units)
    names = {module: name for name, module in model.named_modules()}
    log.debug("units: %s", ", ".join(f"{names[unit]} ({type(unit).__name__})" for unit in units))
    if not one_reads:
        collectives.sync_from_rank0(dict(model.named_parameters()))
    if fsdp.version == 1:
        wrapped = _shard_by_fsdp1(model, accelerator, units)
    else:
        wrapped = _shard_by_fsdp2(model, accelerator, fsdp, units, one_reads=one_reads)
    log.info("FSDP%d: %s", fsdp.version, described)
    return wrapped


def _shard_by_fsdp1(model: nn.Module, accelerator: Accelerator, units: Sequence[nn.Module]) -> nn.Module:
    plugin: FullyShardedDataParallelPlugin = accelerator.state.fsdp_plugin
    if not plugin.use_orig_params and any(not parameter.requires_grad for parameter in model.parameters()):
        log.info("FSDP1: use_orig_params is on, since frozen and trainable parameters share units")
        plugin.use_orig_params = True
    plugin.ignored_modules = _unsharded(model)
    chosen = set(units)
    plugin.auto_wrap_policy = partial(lambda_auto_wrap_policy, lambda_fn=chosen.__contains__)
    wrapped: nn.Module = accelerator.prepare_model(model)
    return wrapped


def _shard_by_fsdp2(
    model: nn.Module, accelerator: Accelerator, fsdp: FsdpConfig, units: Sequence[nn.Module], *, one_reads: bool
) -> nn.Module:
    plugin: FullyShardedDataParallelPlugin = accelerator.state.fsdp_plugin
    if one_reads and any(is_quantized(module) for module in model.modules()):
        log.info("4-bit weights cannot be distributed from rank 0: every process has read its own copy")
        one_reads = False
    weights = _set_aside(model) if one_reads else None
    plugin.ignored_modules = _unsharded(model)
    if fsdp.wrap_policy == "TRANSFORMER_BASED_WRAP":
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = sorted(
            {type(unit).__name__ for unit in units if not isinstance(unit, nn.Embedding)}
        )
    # Accelerate chooses modules by class only, so embeddings and large modules are wrapped before, by the same call.
    # `units` lists inner modules first: fully_shard must see a child before its parent.
    for unit in units:
        if type(unit).__name__ not in (plugin.transformer_cls_names_to_wrap or ()):
            fully_shard(
                unit,
                mesh=_mesh(accelerator),
                reshard_after_forward=plugin.reshard_after_forward,
                mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
                offload_policy=plugin.cpu_offload,
            )
    # Accelerate prepares an FSDP2 model only together with an optimizer, whose parameters it replaces by DTensors. The
    # real optimizer is created afterwards.
    stand_in = torch.optim.SGD([next(model.parameters())], lr=0.0)
    accelerator.prepare(model, stand_in)
    accelerator._optimizers.clear()
    assert all(isinstance(unit, FSDPModule) for unit in units)
    if weights is not None:
        _hand_out(model, weights, torch.device("cpu") if fsdp.offload else accelerator.device)
    for holder in _unsharded(model):
        for parameter in holder.parameters():
            parameter.data = parameter.data.to(accelerator.device)
    if fsdp.forward_prefetch:
        wrapped = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        for unit, following in itertools.pairwise(wrapped):
            unit.set_modules_to_forward_prefetch([following])
    return model


def _unsharded(model: nn.Module) -> list[nn.Module]:
    """Return modules that hold the parameters that FSDP must ignore: those without dimensions."""
    scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]
    if any(parameter.requires_grad for parameter in scalars):
        raise ValueError("FSDP does not shard a parameter without dimensions, so it must not be trained in the model")
    return [nn.ParameterList(scalars)] if scalars else []


def _mesh(accelerator: Accelerator) -> DeviceMesh | None:
    mesh: DeviceMesh | None = accelerator.torch_device_mesh
    return None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]


def _precision_policy(fsdp: FsdpConfig, precision: str) -> MixedPrecision | MixedPrecisionPolicy | None:
    """Return the mixed-precision policy. Master weights keep their dtype; gathered copies and computation use
    `param_dtype`.

    float32 for the reduce and buffer dtypes is set only if computation is in 16 bits; it is the default otherwise.
    float32 is not set as output dtype: the model converts its embeddings itself, and converting every unit's output
    would only enlarge the activations.
    """
    param_dtype = DTYPES[fsdp.param_dtype] if fsdp.param_dtype else PRECISIONS[precision]
    is_small = param_dtype in (torch.bfloat16, torch.float16)
    reduce_dtype = DTYPES[fsdp.reduce_dtype] if is_small or fsdp.reduce_dtype != "float32" else None
    if fsdp.version == 1:
        buffer_dtype = DTYPES[fsdp.buffer_dtype] if is_small or fsdp.buffer_dtype != "float32" else None
        if param_dtype is reduce_dtype is buffer_dtype is None:
            return None
        return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)
    output_dtype = DTYPES[fsdp.output_dtype] if fsdp.output_dtype != "float32" else None
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=output_dtype)


# ---- weights that only rank 0 has read -------------------------------------------------------------------------------


def _set_aside(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters (rank 0 only) and buffers, and move the model to the meta device (sharding is free)."""
    parameters = {name: one.detach() for name, one in model.named_parameters()} if collectives.rank() == 0 else {}
    buffers = dict(model.named_buffers())
    model.to(torch.device("meta"))
    return parameters, buffers


def _hand_out(model: nn.Module, weights: tuple[dict[str, Tensor], dict[str, Tensor]], device: torch.device) -> None:
    """Allocate each rank's shards and fill them from the weights of rank 0. All ranks must call it."""
    parameters, buffers = weights
    model.to_empty(device=device)
    sharded = {name: one for name, one in model.named_parameters() if isinstance(one, DTensor)}
    set_model_state_dict(
        model,
        {name: one for name, one in parameters.items() if name in sharded},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
    # FSDP leaves scalars and buffers unsharded, and set_model_state_dict was given the sharded parameters only.
    whole = {name: one for name, one in model.named_parameters() if name not in sharded} | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in whole.items() if collectives.rank() == 0 else ():
            tensor.copy_(parameters[name] if name in parameters else buffers[name])
    collectives.broadcast_tensors(whole.values())
