"""An imitation of `cuda:0`: tensors that say they are on a GPU, and whose operators run on the CPU.

Autograd, autocast and checkpointing take their CUDA paths, because they go by the device of a tensor. Below them each
operator arrives here. It is checked as CUDA would (no mixed devices), counted, and computed on host tensors.

It cannot see what needs a GPU: NCCL, streams and what overlaps in them, memory, compiled kernels (inductor, Triton,
bitsandbytes), and the rounding of real kernels. An operator counts as one kernel, also where CUDA launches several.
`scaled_dot_product_attention` runs as its formula, so it counts as more kernels than the fused one.
"""

from functools import cache

import torch
from torch import Tensor
from torch._decomp.decompositions import _fused_rms_norm_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.imitation import attention
from tests.imitation.recording import Recording

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
RECORDING = Recording()

VIEWS = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "diagonal",
    "expand",
    "lift_fresh",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
    "view_as_real",
}
"""Operators that return another view of the same memory."""
ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
FUSED_ON_GPUS = ("_fused_rms_norm", "silu_backward")
"""Operators that CUDA computes in a kernel of their own, and the CPU by several others."""
KERNELS = {
    **attention.KERNELS,
    "_fused_rms_norm_backward": _fused_rms_norm_backward,
}
"""What computes an operator that the CPU does not have, by the operator's name."""
READS = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operators whose result is a number on the host."""
SIZED_BY_VALUES = {
    "_unique",
    "_unique2",
    "bincount",
    "masked_scatter_backward",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operators whose result's shape is known only to the device, so the host waits for it."""


class DeviceTensor(torch.Tensor):
    """A tensor that says `cuda:0`. Its values are in `values`, a tensor of the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CUDA,
        )
        tensor.values = values
        return tensor

    def __repr__(self):
        return f"DeviceTensor({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return dispatch(operator, args, dict(kwargs or {}))


class Operators(TorchDispatchMode):
    """Sees operators without a tensor of the device too, such as `zeros(device="cuda")`."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return dispatch(operator, args, dict(kwargs or {}))


def dispatch(operator, args, kwargs):
    """Check, count and compute one operator."""
    name = operator._schema.name.rpartition("::")[2]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    to_device = target is not None and target.type == "cuda"
    if not on_device and not to_device:
        return operator(*args, **kwargs)
    if name == "record_stream":
        return None
    require_one_device(operator, name, args, tensors)
    count(name, args, kwargs, target)
    result = compute(operator, name, args, kwargs)
    to_host = name == "_to_copy" and target is not None and not to_device
    if to_host or name in READS:
        return result
    return returned(operator, args, kwargs, result)


def require_one_device(operator, name, args, tensors):
    """Raise where CUDA would: host tensors beside those of the device, unless they are single numbers."""
    if name in COPIES:
        return
    if name in INDEXING:  # the indices may be on the host
        tensors = [leaf for leaf in (args[0], *args[2:]) if isinstance(leaf, Tensor)]
    strangers = [
        tuple(tensor.shape)
        for tensor in tensors
        if not isinstance(tensor, DeviceTensor) and tensor.dim()
    ]
    if strangers:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but "
            f"{operator} got tensors of cuda:0 and of the CPU, of shapes {strangers}"
        )


def count(name, args, kwargs, target):
    """Record the kernel of an operator, or the copy, and what the host waits for."""
    if name in COPIES:
        is_within_device = count_copy(name, args, kwargs, target)
        if not is_within_device:
            return
    if name in READS | SIZED_BY_VALUES:
        RECORDING.wait(name)
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        RECORDING.wait("repeat_interleave without output_size")
    if name in INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            RECORDING.wait(f"{name} by a mask")
        if not all(isinstance(index, DeviceTensor) for index in indices):
            RECORDING.wait(f"{name} by an index on the host")
    if name not in VIEWS | ALLOCATIONS and name not in READS - {"equal"}:
        RECORDING.kernel(name)


def count_copy(name, args, kwargs, target):
    """Record a copy between host and device. Return True for one within the device, which is a kernel."""
    if name == "copy_":
        destination = args[0]
        source = args[1]
        to_host = not isinstance(destination, DeviceTensor)
        does_not_block = (len(args) > 2 and args[2]) or kwargs.get("non_blocking")
    else:
        source = args[0]
        to_host = target is not None and target.type != "cuda"
        does_not_block = kwargs.get("non_blocking")
    from_host = not isinstance(source, DeviceTensor)
    if not from_host and not to_host:
        return True
    if not source.numel() or (from_host and not source.dim() and name == "copy_"):
        return name == "copy_" and not to_host  # a number travels with its kernel
    if to_host:
        # Without blocking, the new memory on the host is pinned. Who reads it waits for an event.
        is_pinned = name == "_to_copy" or args[0].is_pinned()
        if not (does_not_block and is_pinned):
            RECORDING.wait("copy to the host")
    elif not source.is_pinned():
        RECORDING.wait("copy of pageable memory to the device")
    elif not does_not_block:
        RECORDING.wait("blocking copy to the device")
    else:
        RECORDING.pinned_copies[RECORDING.stage] += 1
    return False


def compute(operator, name, args, kwargs):
    """Run an operator on the host's tensors."""
    args, kwargs = tree_map(on_host, (args, kwargs))
    if name == "_to_copy":
        kwargs = {**kwargs, "non_blocking": False}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    run = KERNELS.get(name, operator)
    return run(*args, **kwargs)


def on_host(leaf):
    """Replace a tensor of the device by its values, and the device by the CPU."""
    if isinstance(leaf, DeviceTensor):
        return leaf.values
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return HOST
    return leaf


def on_device(leaf):
    """Put a tensor of the CPU onto the device."""
    is_host_tensor = isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)
    return DeviceTensor(leaf) if is_host_tensor else leaf


def returned(operator, args, kwargs, result):
    """Return what the caller of an operator gets: the tensors that it wrote to, or new ones on the device."""
    written = []
    for place, name in written_arguments(operator):
        written.append(args[place] if place < len(args) else kwargs.get(name))
    if not written:
        return tree_map(on_device, result)
    for tensor in tree_leaves(written):
        if isinstance(tensor, DeviceTensor) and tensor.shape != tensor.values.shape:
            raise NotImplementedError(f"{operator} changed the shape of a tensor")
    if not operator._schema.returns:
        return None
    return written[0] if len(written) == 1 else tuple(written)


@cache
def written_arguments(operator):
    """Return place and name of each argument that an operator writes to."""
    return [
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


class Functions(TorchFunctionMode):
    """Functions of torch that reach the device without passing through the operators above."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            return made_from_data(function, args, kwargs)
        if function is torch.Tensor.tolist and isinstance(args[0], DeviceTensor):
            RECORDING.wait("tolist")
            return args[0].values.tolist()
        if function is torch.Tensor.cuda:
            return args[0].to(CUDA)
        return function(*args, **kwargs)


def made_from_data(function, args, kwargs):
    """Make a tensor from numbers on the host, and copy it to the device if it is meant for it."""
    target = kwargs.pop("device", None)
    if function is torch.Tensor.new_tensor:
        kwargs.setdefault("dtype", args[0].dtype)
        target = args[0].device if target is None else target
        args = args[1:]
        function = torch.tensor
    data = args[0]
    if target is None and function is torch.as_tensor and isinstance(data, Tensor):
        target = data.device
    if target is None or torch.device(target).type != "cuda":
        return function(*args, **kwargs, device=target)
    if isinstance(data, Tensor):
        return data.to(device=CUDA, dtype=kwargs.get("dtype"))
    needs_gradient = kwargs.pop("requires_grad", False)
    built = torch.tensor(*args, **kwargs).to(CUDA)
    return built.requires_grad_() if needs_gradient else built
