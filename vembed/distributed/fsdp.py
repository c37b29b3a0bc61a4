"""What can be asked of a model whether it is whole, copied or sharded: dtypes, counts, gradients, its full weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from vembed.distributed import collectives

NAMES_SHOWN = 3

log = logging.getLogger("vembed")


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def unify_model_dtype_for_fsdp(model: nn.Module, fsdp_version: int = 2) -> int:
    """Give the parameters that FSDP must find in one dtype that dtype; returns how many were converted.

    FSDP2 wants one dtype among the trainable parameters; FSDP1 lays all parameters of a unit into one flat tensor and
    wants one dtype for all. Conversion is always to the widest dtype among them: float32 masters stay what they are.
    """
    floating = {name: one for name, one in model.named_parameters() if one.is_floating_point()}
    if len({one.dtype for one in floating.values()}) <= 1:
        log.info("FSDP dtype check: all parameters already in %s", _dtypes(floating.values()))
        return 0
    together = {name: one for name, one in floating.items() if one.requires_grad or fsdp_version == 1}
    dtypes = {one.dtype for one in together.values()}
    # bfloat16 beside float16: neither holds the other's numbers.
    widest = torch.float64 if torch.float64 in dtypes else torch.float32 if len(dtypes) > 1 else None
    converted = {name: one for name, one in together.items() if widest is not None and one.dtype != widest}
    for dtype in sorted({one.dtype for one in converted.values()}, key=str):
        names = [name for name, one in converted.items() if one.dtype == dtype]
        num_values = sum(converted[name].numel() for name in names)
        log.info(
            "FSDP dtype check: converted %s parameters (%s values) from %s to %s: %s",
            f"{len(names):,d}", f"{num_values:,d}", dtype, widest, _some(names),
        )  # fmt: skip
    if fsdp_version == 1 and any(not one.requires_grad for one in converted.values()):
        log.info("FSDP dtype check: FSDP1 needs one dtype for all; fsdp_version: 2 would leave frozen ones as they are")
    for one in converted.values():
        one.data = one.data.to(widest)
    frozen = [one for one in floating.values() if not one.requires_grad]
    if fsdp_version != 1 and together and frozen:
        trained = _dtypes(together.values())
        log.info("FSDP dtype check: trainable parameters in %s, frozen ones in %s", trained, _dtypes(frozen))
    return len(converted)


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return " and ".join(sorted({str(tensor.dtype) for tensor in tensors}))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN:,d} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


# ---- counts ----------------------------------------------------------------------------------------------------------


def log_parameter_summary(model: nn.Module) -> dict[str, int]:
    """Log how many parameters the whole model has, how many are trained, and how many each rank holds; collective."""
    total, trainable = num_parameters(model), num_parameters(model, trainable_only=True)
    local = sum(_local(parameter).numel() for parameter in model.parameters())
    log.info("FSDP parameter summary:")
    log.info("  Total: %s", _count(total))
    log.info("  Trainable: %s", _count(trainable))
    log.info("  Frozen: %s", _count(total - trainable))
    if collectives.world_size() > 1:
        held = ", ".join(f"{rank[0]:,d}" for rank in collectives.all_gather_ints([local]))
        log.info("  Held by each rank: %s", held)
    return {"total": total, "trainable": trainable, "local": local}


def num_parameters(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Parameters of the whole model, also where this rank holds only a shard; shared ones count once."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    if not units:
        return sum(
            _true_size(parameter) for parameter in model.parameters() if parameter.requires_grad or not trainable_only
        )
    count = sum(1 for one in model.parameters() if one.dim() == 0 and (one.requires_grad or not trainable_only))
    for unit in units:
        flat = unit._flat_param
        if flat is None:
            continue
        # With use_orig_params the flat tensor keeps the originals, each with its own requires_grad.
        originals = flat._params or [flat] * len(flat._shapes)
        for original, shape in zip(originals, flat._shapes, strict=True):
            count += shape.numel() if original.requires_grad or not trainable_only else 0
    return count


def local_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes that this rank holds: parameters, gradients, and the optimizer's state."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = optimizer.state.values() if optimizer is not None else []
    return {
        "parameters": sum(_bytes(parameter) for parameter in model.parameters()),
        "gradients": sum(_bytes(gradient) for gradient in gradients),
        "optimizer": sum(_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor)),
    }


def _true_size(parameter: Tensor) -> int:
    # bitsandbytes packs two 4-bit values into a byte and keeps the true shape aside.
    packed = type(parameter).__name__ == "Params4bit"
    return int(parameter.quant_state.shape.numel()) if packed else parameter.numel()  # type: ignore[attr-defined]


def _bytes(tensor: Tensor) -> int:
    local = _local(tensor)
    return local.numel() * local.element_size()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _count(number: int) -> str:
    return f"{number:,d} ({number / 1e9:.2f}B)"


# ---- gradients -------------------------------------------------------------------------------------------------------


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Whether the following backward passes average FSDP's gradients over the ranks; set it before the forward pass.

    A model that is not sharded has nothing to set: its gradients are averaged by `collectives.all_reduce_gradients`.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        # What FSDP1's no_sync does, which is a context and would have to span forward and backward.
        unit._sync_gradients = on  # type: ignore[assignment]


def set_keep_gathered(model: nn.Module, on: bool, reshard_after_forward: bool = True) -> None:
    """FSDP2: keep the gathered parameters between the micro-batches of a step: no repeated gathers, more memory.

    Turn it off before the last backward pass of a step; `reshard_after_forward` is what then holds again.
    """
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(reshard_after_forward and not on)
        model.set_reshard_after_backward(not on)


def reshard(model: nn.Module) -> None:
    """FSDP2: free what is still gathered, as units that had no part in a backward pass are."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def forget_forward(model: nn.Module) -> None:
    """Call it after a forward pass with grad whose backward pass will not come.

    FSDP1 hooks the gradients of an iteration to its first forward. In 16-bit arithmetic a forward that is dropped takes
    the hook with it, and the next backward pass would leave no gradient at all, without a word.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        hook = vars(unit._flat_param).pop("_post_backward_hook_state", None) if unit._flat_param is not None else None
        if hook is not None:
            hook[-1].remove()


def global_grad_norm(model: nn.Module, replicated: Iterable[nn.Parameter] = ()) -> Tensor:
    """The norm of all gradients of the whole model, plus those of parameters that every rank has alike; float64.

    It is the norm that one process would see, whatever is sharded, copied or plain.
    """
    whole: list[Tensor] = [one.grad for one in replicated if one.grad is not None]
    sharded: dict[ProcessGroup | None, list[Tensor]] = {}
    units = FullyShardedDataParallel.fsdp_modules(model)
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            sharded.setdefault(_shard_group(gradient), []).append(gradient.to_local())
        elif units:
            sharded.setdefault(units[0].process_group, []).append(gradient)
        else:
            whole.append(gradient)
    squares = _sum_of_squares(whole)
    if units and not sharded:
        sharded[units[0].process_group] = []  # this rank has no part of any gradient, and still takes part in the sum
    for group, gradients in sharded.items():
        squares = squares + collectives.sum_tensor(_sum_of_squares(gradients), group)
    return squares.sqrt()


def clip_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a factor, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(factor)


def _shard_group(gradient: DTensor) -> ProcessGroup | None:
    """The ranks that hold the other parts of it. A copied dimension of a 2-D mesh must not be counted twice."""
    dims = [dim for dim, placement in enumerate(gradient.placements) if placement.is_shard()]
    if not dims:
        return None
    if len(dims) > 1:
        raise ValueError(f"a gradient is sharded over {len(dims)} dimensions of its mesh; vembed shards over one")
    return gradient.device_mesh.get_group(dims[0])


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Of this rank's tensors; float64, on the CPU."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64)
    for same_kind in by_kind.values():
        total += torch.nn.utils.get_total_norm(same_kind).to("cpu", torch.float64).square()
    return total


# ---- the whole model -------------------------------------------------------------------------------------------------


def full_state_dict(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Tensor]:
    """All weights and persistent buffers of the whole model, on the CPU of rank 0, by their plain names; collective.

    The other ranks get an empty dictionary. At no time is more than one parameter (FSDP1: the model) whole on a GPU.
    """
    keeps = collectives.rank() == 0
    state: dict[str, Tensor] = {}
    with _gathered_by_fsdp1(model):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad or not trainable_only:
                whole = _whole(parameter)
                if keeps:
                    state[plain_name(name)] = whole.detach().to("cpu", copy=True)
        for prefix, module in model.named_modules() if keeps and not trainable_only else ():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    state[plain_name(f"{prefix}.{name}")] = buffer.detach().to("cpu", copy=True)
    return state


def edit_weight(model: nn.Module, name: str, edit: Callable[[Tensor], Tensor]) -> None:
    """Replace one parameter of the whole model by `edit` of it, on every rank, wherever its parts rest; collective."""
    with torch.no_grad(), _gathered_by_fsdp1(model, write=True):
        found = {plain_name(one): parameter for one, parameter in model.named_parameters(remove_duplicate=False)}
        if name not in found:
            raise KeyError(f"the model has no parameter {name!r}")
        parameter = found[name]
        edited = edit(_whole(parameter))
        if isinstance(parameter, DTensor):
            edited = distribute_tensor(edited, parameter.device_mesh, parameter.placements).to_local()
        _local(parameter).copy_(edited)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{wrapper}.", "")
    return name.removeprefix(".")


@contextmanager
def _gathered_by_fsdp1(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Let FSDP1 lay out whole parameters for a while; to read them from a GPU, in the host memory of rank 0 alone."""
    if not FullyShardedDataParallel.fsdp_modules(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        yield
        return
    aside = not write and next(model.parameters()).device.type == "cuda"
    with FullyShardedDataParallel.summon_full_params(model, writeback=write, rank0_only=aside, offload_to_cpu=aside):
        yield


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    on_mesh = parameter.detach().to(parameter.device_mesh.device_type)  # offloaded shards rest on the CPU
    assert isinstance(on_mesh, DTensor)
    return on_mesh.full_tensor()
