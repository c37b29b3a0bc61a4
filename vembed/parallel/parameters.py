"""Operations on a model under any strategy (single, DDP, FSDP1, FSDP2): dtypes, counts, gradients, full weights, batch norms."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from vembed.models.families.backbones import StateDict, unwrapped_name
from vembed.parallel import collectives

log = logging.getLogger("vembed")


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def unify_model_dtype_for_fsdp(model: nn.Module, fsdp_version: int = 2) -> int:
    """Convert parameters to one dtype where FSDP requires it, and return the number of converted parameters.

    FSDP2 requires one dtype among the trainable parameters. FSDP1 requires one dtype for all parameters of a unit. The
    target is the widest dtype, so float32 master weights are never downcast.
    """
    floating = []
    together = []  # those that must have one dtype
    for parameter in model.parameters():
        if parameter.is_floating_point():
            floating.append(parameter)
            if parameter.requires_grad or fsdp_version == 1:
                together.append(parameter)
    if len({parameter.dtype for parameter in floating}) <= 1:
        log.info(f"FSDP dtype check: all parameters already in {_dtypes(floating)}")
        return 0
    dtypes = {parameter.dtype for parameter in together}
    # float32 also for bfloat16 beside float16: neither can represent the other's values.
    widest = torch.float64 if torch.float64 in dtypes else torch.float32
    narrow = []
    if len(dtypes) > 1:
        narrow += [tensor for tensor in together if tensor.dtype != widest]
        num_values = sum(tensor.numel() for tensor in narrow)
        log.info(
            f"FSDP dtype check: converted {len(narrow):,d} parameters ({num_values:,d} values) from {_dtypes(narrow)} to "
            f"{widest}"
        )
    for tensor in narrow:
        tensor.data = tensor.data.to(widest)
    frozen = [tensor for tensor in floating if not tensor.requires_grad]
    if frozen:
        log.info(
            f"FSDP dtype check: trainable parameters in {_dtypes(together)}, frozen ones in {_dtypes(frozen)}"
        )
    return len(narrow)


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return " and ".join(sorted({str(tensor.dtype) for tensor in tensors}))


# ---- counts ----------------------------------------------------------------------------------------------------------


def log_parameter_summary(model: nn.Module) -> None:
    """Log the number of parameters: total, trainable, and per rank. Collective."""
    total = num_parameters(model)
    trainable = num_parameters(model, trainable_only=True)
    log.info("FSDP parameter summary:")
    counts = {"Total": total, "Trainable": trainable, "Frozen": total - trainable}
    for name, count in counts.items():
        log.info(f"  {name}: {count:,d} ({count / 1e9:.2f}B)")
    if collectives.world_size() > 1:
        local = sum(local_tensor(parameter).numel() for parameter in model.parameters())
        held = [f"{count:,d}" for count in collectives.all_gather_int(local)]
        log.info(f"  Held by each rank: {', '.join(held)}")


def num_parameters(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Return the number of parameters of the whole model, also if it is sharded. Shared parameters count once."""
    count = 0
    pieces = list(flat_pieces(model))
    for parameter in model.parameters():
        if trainable_only and not parameter.requires_grad:
            continue
        if pieces and parameter.dim() > 0:  # FSDP1 flattens all but scalars: see below
            continue
        # bitsandbytes packs two 4-bit values into a byte and keeps the true shape aside.
        packed = getattr(parameter, "quant_state", None)
        count += parameter.numel() if packed is None else packed.shape.numel()
    for piece, shape in pieces:
        if piece.requires_grad or not trainable_only:
            count += shape.numel()
    return count


def flat_pieces(model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Size]]:
    """Yield FSDP1's piece of each parameter on this rank, and the shape of the whole parameter. None for other models."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        flat = unit._flat_param
        if flat is not None and flat._params is not None:
            yield from zip(flat._params, flat._shapes, strict=True)


def local_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters on this rank."""
    reshard(model)
    return sum(local_tensor(parameter).nbytes for parameter in model.parameters())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its shard of a DTensor, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- gradients -------------------------------------------------------------------------------------------------------


def set_fsdp_reduction(
    model: nn.Module,
    on: bool,
    *,
    all_reduce: bool = True,
    is_last_backward: bool = True,
) -> None:
    """Switch FSDP's gradient reduction on or off for the following micro-batches. Call it before the forward pass.

    `all_reduce`: HYBRID_SHARD of FSDP2 also sums between the copies of the model; otherwise only inside each copy,
    where the sums of several micro-batches add up to the next all-reduce. `is_last_backward`: the next backward pass
    is the last one before the optimizer step. FSDP2 waits for its reductions only then. No-op for a model that is not sharded:
    `collectives.GradientSync` averages its gradients.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
        model.set_requires_all_reduce(on and all_reduce)
        model.set_is_last_backward(is_last_backward)
        return
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        # The effect of FSDP1's no_sync, which is a context manager and would have to span forward and backward.
        unit._sync_gradients = on  # type: ignore[assignment]


def reshard(model: nn.Module) -> None:
    """FSDP2: free gathered parameters, for example of units without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def forget_forward(model: nn.Module) -> None:
    """Reset FSDP1's state after a forward pass with grad that gets no backward pass.

    FSDP1 registers its gradient hooks in the first forward pass of an iteration. In 16-bit computation the hooks belong
    to that forward pass; if it is discarded, the next backward pass would silently leave no gradients.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit._flat_param is not None:
            hook = vars(unit._flat_param).pop("_post_backward_hook_state", None)
            if hook is not None:
                hook[-1].remove()


def discard_passes(model: nn.Module) -> None:
    """Drop all gradients of passes that were not synchronised. Units of FSDP are sharded again.

    FSDP2 would add those of its unsharded parameters to the gradients of the next step.
    """
    reshard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # Several groups since torch 2.13, before one or none.
            groups = vars(state).get("_fsdp_param_groups")
            if groups is None:
                groups = filter(None, [state._fsdp_param_group])
            for group in groups:
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if "_unsharded_param" in vars(param):
                        param._unsharded_param.grad = None
    forget_forward(model)
    model.zero_grad(set_to_none=True)


def global_grad_norm(model: nn.Module) -> Tensor:
    """Return the float64 norm of all gradients of the whole model. Collective under FSDP.

    The result equals the norm in one process under every strategy.
    """
    return gradient_norm(model.parameters(), fsdp1_group(model), ())


def fsdp1_group(model: nn.Module) -> ProcessGroup | None:
    """Return the group of ranks that hold the shards of FSDP1; None for other models."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    return units[0].process_group if units else None


def gradient_norm(
    parameters: Iterable[nn.Parameter],
    fsdp1_group: ProcessGroup | None,
    replicated: Iterable[nn.Parameter],
) -> Tensor:
    """Return `global_grad_norm` of the parameters of a model, and of those in `replicated`, which each rank holds whole."""
    whole = [weight.grad for weight in replicated if weight.grad is not None]
    sharded: dict[ProcessGroup | None, list[Tensor]] = {}
    if fsdp1_group is not None:
        # Also where no shard of any gradient is on this rank: the collective needs all ranks.
        sharded[fsdp1_group] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            # The ranks that hold the other shards. The replicated dimension of a 2-D mesh is left out, or its copies would
            # be counted twice.
            group = None
            for dim, placement in enumerate(gradient.placements):
                if placement.is_shard():
                    group = gradient.device_mesh.get_group(dim)
            sharded.setdefault(group, []).append(gradient.to_local())
        elif fsdp1_group is not None:
            sharded[fsdp1_group].append(gradient)
        else:
            whole.append(gradient)
    # Replicated gradients are complete on each rank and count once. Shards are disjoint: sum their squares over the
    # ranks that hold the other shards.
    squares = _sum_of_squares(whole)
    for group, gradients in sharded.items():
        squares = squares + collectives.sum_tensor(_sum_of_squares(gradients), group)
    return squares.sqrt()


def clip_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place by a factor, which is equal on all ranks."""
    gradients = [
        local_tensor(parameter.grad)
        for parameter in parameters
        if parameter.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # on GPUs one kernel for many tensors


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of squares of this rank's tensors, in float64 on the CPU."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64)
    for same_kind in by_kind.values():
        # On GPUs one kernel for many tensors.
        norms = torch.stack(torch._foreach_norm(same_kind))
        norm = torch.linalg.vector_norm(norms)
        total += norm.to("cpu", torch.float64).square()
    return total


# ---- the whole model -------------------------------------------------------------------------------------------------


def full_state_dict(model: nn.Module) -> StateDict:
    """Return all weights and persistent buffers on the CPU of rank 0, by their plain names. Collective.

    The other ranks get an empty dictionary. At most one parameter (FSDP1: the model) is gathered on a GPU at a time.
    """
    keeps = collectives.rank() == 0
    state = {}
    with _gathered_by_fsdp1(model):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # A collective: all ranks call it, in the same order.
            whole = _whole(parameter)
            if keeps:
                state[unwrapped_name(name)] = whole.detach().to("cpu", copy=True)
        for prefix, module in model.named_modules() if keeps else ():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    copied = buffer.detach().to("cpu", copy=True)
                    state[unwrapped_name(f"{prefix}.{name}")] = copied
    return state


def edit_weights(
    model: nn.Module, edits: Mapping[str, Callable[[Tensor], Tensor]]
) -> None:
    """Replace each named parameter by `edit(parameter)` under every strategy. Collective.

    At most one parameter (FSDP1: the model) is gathered at a time.
    """
    with torch.no_grad(), _gathered_by_fsdp1(model, write=True):
        by_name = {}
        for full_name, parameter in model.named_parameters(remove_duplicate=False):
            by_name[unwrapped_name(full_name)] = parameter
        for name, edit in edits.items():
            if name not in by_name:
                raise KeyError(f"the model has no parameter {name!r}")
            parameter = by_name[name]
            edited = edit(_whole(parameter))
            if isinstance(parameter, DTensor):
                edited = distribute_tensor(
                    edited, parameter.device_mesh, parameter.placements
                ).to_local()
            local_tensor(parameter).copy_(edited)


def copy_local_shards(model: nn.Module) -> StateDict:
    """Return a copy of what this rank holds of each parameter, for `restore_local_shards`."""
    return {
        name: local_tensor(parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def restore_local_shards(model: nn.Module, shards: StateDict) -> None:
    """Put copied shards back in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in shards:
                local_tensor(parameter).copy_(shards[name])


@contextmanager
def _gathered_by_fsdp1(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Gather FSDP1's parameters for a context. For reading from GPUs, only in the host memory of rank 0."""
    if not FullyShardedDataParallel.fsdp_modules(model):
        reshard(model)
        yield
        return
    aside = not write and next(model.parameters()).device.type == "cuda"
    with FullyShardedDataParallel.summon_full_params(
        model, writeback=write, rank0_only=aside, offload_to_cpu=aside
    ):
        yield


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    # Offloaded shards are on the CPU.
    on_mesh = parameter.detach().to(parameter.device_mesh.device_type)
    assert isinstance(on_mesh, DTensor)
    return on_mesh.full_tensor()


# ---- batch norms ---------------------------------------------------------------------------------------------------

_Base = nn.modules.batchnorm._BatchNorm


class _RowsOfAllRanks(torch.autograd.Function):
    """Gather the rows of all ranks. Each rank's loss depends on them, so the backward pass sums the gradients of all
    ranks for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        return collectives.all_gather_parts(values, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter_parts(gradients[0], ctx.counts), None


class GatheredBatchNorm(_Base):
    """Batch norm over the inputs of all ranks, for devices that torch's SyncBatchNorm does not support."""

    def forward(self, values_NC: Tensor) -> Tensor:
        """Normalise [n, channels, ...] by the mean and variance over all ranks; in evaluation, by the running ones."""
        if not self.training or collectives.world_size() == 1:
            return super().forward(values_NC)
        counts = collectives.all_gather_int(len(values_NC))
        gathered = _RowsOfAllRanks.apply(values_NC, counts)  # type: ignore[no-untyped-call]
        first = sum(counts[: collectives.rank()])
        return super().forward(gathered)[first : first + len(values_NC)]

    def _check_input_dim(self, input: Tensor) -> None:
        """torch's base class asks for it. Any number of dimensions will do."""


def share_batch_norms(
    model: nn.Module,
    device: torch.device,
    *,
    shared: bool,
) -> None:
    """Make batch norms share their statistics between ranks if `shared`, else warn."""
    norms = [module for module in model.modules() if isinstance(module, _Base)]
    if norms and not shared:
        log.warning(
            f"batch norms: {len(norms)}, each over the micro-batch of one process, so losses and gradients depend on "
            "the number of processes and on micro_batch_tokens; sync_batchnorm: true shares their statistics"
        )
    elif shared and not norms:
        log.info("sync_batchnorm: the model has no batch norms")
    elif norms:
        if device.type == "cpu":
            for module in norms:
                module.__class__ = GatheredBatchNorm
        else:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        log.info(
            f"sync_batchnorm: {len(norms)} batch norms share their statistics among processes"
        )
