"""Collective operations. All ranks must call each one in the same order; with one rank they are no-ops.

The collectives inside FSDP are not included. Small tensors are sent over the CPU backend if the process
group has one, so that they do not wait for the GPU's queue.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors, _unflatten_dense_tensors

log = logging.getLogger("vembed")

BUCKET_BYTES = 64 * 2**20
"""Size in bytes of the buckets in which tensors are sent: large enough for the network, small beside the model."""

calls: Counter[str] = Counter()
"""Calls of each collective in this process, without no-ops."""
# torch 2.13 renamed these two functions, and warns of the old names.
_IS_RENAMED = torch.__version__ >= "2.13"
_all_gather = dist.all_gather_single if _IS_RENAMED else dist.all_gather_into_tensor
_reduce_scatter = (
    dist.reduce_scatter_single if _IS_RENAMED else dist.reduce_scatter_tensor
)


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def log_from(rank: int, line: str) -> None:
    """Log a line of a rank. Only rank 0 has a log on the console: the others write to standard error."""
    if rank == 0:
        log.warning(line)
        return
    with suppress(OSError, AttributeError, ValueError):  # it may be closed
        sys.stderr.write(f"vembed: {line}\n")
        sys.stderr.flush()


@contextmanager
def _collective(name: str) -> Iterator[None]:
    """Count a call, and add rank and collective to the traceback if it fails."""
    calls[name] += 1
    try:
        yield
    except Exception as error:
        error.add_note(
            f"rank {rank()} of {world_size()}, in the collective {name} (call {calls[name]:,d})"
        )
        raise


def number_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for numbers that are not part of the model: the CPU if the group has a CPU backend."""
    if world_size() == 1 or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def barrier() -> None:
    """Block until every rank has called it."""
    _reduced("barrier", [1], torch.int64, dist.ReduceOp.SUM)


def all_gather_ints(values: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, by rank. All ranks must pass equally many."""
    if world_size() == 1:
        return [list(values)]
    with _collective("all_gather_ints"):
        local_rows = torch.tensor(
            list(values), dtype=torch.int64, device=number_device()
        )
        # [world size * n], by rank.
        gathered = local_rows.new_empty(world_size() * local_rows.numel())
        _all_gather(gathered, local_rows)
        by_rank: list[list[int]] = gathered.view(world_size(), -1).tolist()
        return by_rank


def all_gather_int(value: int) -> list[int]:
    """Return one number of every rank, by rank."""
    return [numbers[0] for numbers in all_gather_ints([value])]


def max_ints(values: Sequence[int]) -> list[int]:
    """Return the maximum of each number over all ranks."""
    return _reduced("max_ints", values, torch.int64, dist.ReduceOp.MAX)


def sum_ints(values: Sequence[int]) -> list[int]:
    """Return the sum of each number over all ranks."""
    return _reduced("sum_ints", values, torch.int64, dist.ReduceOp.SUM)


def sum_scalars(values: Sequence[float]) -> list[float]:
    """Return the sum of each number over all ranks, in float64."""
    return _reduced("sum_scalars", values, torch.float64, dist.ReduceOp.SUM)


def _reduced(
    name: str,
    values: Sequence[Any],
    dtype: torch.dtype,
    op: Any,
) -> list[Any]:
    if world_size() == 1:
        return list(values)
    with _collective(name):
        total = torch.tensor(list(values), dtype=dtype, device=number_device())
        dist.all_reduce(total, op=op)
        result: list[Any] = total.tolist()  # on a GPU this waits for the result
        return result


def all_gather_parts(rows_ND: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Return the rows of all ranks concatenated by rank. Ranks may have different numbers of rows, also zero.

    `counts` (rows per rank) avoids the exchange of sizes if the caller knows them. The result carries no gradient;
    `reduce_scatter_parts` is the backward pass.
    """
    if world_size() == 1:
        return rows_ND.detach()
    if counts is None:
        counts = all_gather_int(rows_ND.shape[0])
    with _collective("all_gather_parts"):
        _check_rows(rows_ND.shape[0], counts[rank()])
        # NCCL gathers equal sizes only: pad to the longest rank, and remove the padding afterwards.
        longest = max(counts)
        local_rows = rows_ND.detach()
        if local_rows.shape[0] < longest:
            padding = longest - local_rows.shape[0]
            zeros = local_rows.new_zeros(padding, *local_rows.shape[1:])
            local_rows = torch.cat([local_rows, zeros])
        padded = local_rows.new_empty(world_size() * longest, *local_rows.shape[1:])
        _all_gather(padded, local_rows.contiguous())
        if min(counts) == longest:
            return padded
        parts = zip(torch.split(padded, longest), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])


def all_gather_dealt(rows_ND: Tensor, num_rows: int) -> Tensor:
    """Return `num_rows` rows in their order, of which rank r passes rows r, r + W, r + 2W and so on."""
    num_ranks = world_size()
    counts = [len(range(rank, num_rows, num_ranks)) for rank in range(num_ranks)]
    # [num_rows, D] in the order of the ranks: all rows of rank 0, then all of rank 1.
    gathered = all_gather_parts(rows_ND, counts)
    ordered = torch.empty_like(gathered)
    for rank, part in enumerate(torch.split(gathered, counts)):
        ordered[rank::num_ranks] = part
    return ordered


def reduce_scatter_parts(rows_ND: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum [sum of counts, D] over ranks and return this rank's own rows: the backward pass of `all_gather_parts`."""
    if world_size() == 1:
        return rows_ND
    with _collective("reduce_scatter_parts"):
        _check_rows(rows_ND.shape[0], sum(counts))
        longest = max(counts)
        # NCCL scatters equal sizes only, as above: each rank's rows begin at a multiple of the longest.
        full = rows_ND
        if min(counts) < longest:
            full = rows_ND.new_zeros(world_size() * longest, *rows_ND.shape[1:])
            for padded, part in zip(
                torch.split(full, longest),
                torch.split(rows_ND, list(counts)),
                strict=True,
            ):
                padded[: len(part)] = part
        local_rows = full.new_empty(longest, *full.shape[1:])
        _reduce_scatter(local_rows, full.contiguous())
        return local_rows[: counts[rank()]]


class GradientSync:
    """All-reduce of the gradients of replicated parameters, in a few large buckets.

    A missing gradient counts as zero if any other rank has one. A gradient that is missing on all ranks stays None.
    16-bit gradients are summed in float32.
    """

    def __init__(
        self,
        averaged: Iterable[nn.Parameter],
        summed: Iterable[nn.Parameter] = (),
    ) -> None:
        """`averaged`: the parameters whose gradients are averaged over the ranks; those of `summed` are added up."""
        self._buckets: list[_Bucket] = []
        self._next: int | None = None
        """The bucket that starts next, during the backward pass that `start_early` was called for."""
        if world_size() == 1:
            return
        # A backward pass reaches the last layers first.
        last_first = reversed([weight for weight in averaged if weight.requires_grad])
        for parameters in _buckets(last_first):
            bucket = _Bucket(parameters, averages=True)
            self._buckets.append(bucket)
            for parameter in parameters:
                hook = partial(self._on_gradient, bucket)
                parameter.register_post_accumulate_grad_hook(hook)
        for parameters in _buckets(weight for weight in summed if weight.requires_grad):
            self._buckets.append(_Bucket(parameters, averages=False))

    def start_early(self) -> None:
        """Let buckets start during the next backward pass, each once it has all its gradients. It is the last pass
        before `finish`."""
        self._next = 0
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)

    def finish(self, numbers: Sequence[float] = ()) -> list[float]:
        """Complete all gradients, and return the sum of each number over the ranks. Collective."""
        # Every rank starts every bucket, also one without gradients and after a failed backward pass: with gloo alone,
        # all ranks must call buckets and numbers in one order.
        for bucket in self._buckets:
            if bucket.work is None:
                bucket.start()
        self._next = None
        # Ranks may have used different towers. They agree on the gradients together with the numbers.
        is_present = []
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                is_present.append(float(parameter.grad is not None))
        sums = sum_scalars([*numbers, *is_present])
        flags = iter(sums[len(numbers) :])
        if self._buckets:
            with _collective("all_reduce_gradients"):
                for bucket in self._buckets:
                    bucket.finish([next(flags) > 0 for _ in bucket.parameters])
        return sums[: len(numbers)]

    def _on_gradient(self, bucket: "_Bucket", _: Tensor) -> None:
        if self._next is None:
            return
        bucket.num_missing -= 1
        # In the order of the list, which is the same on every rank, whichever bucket is complete first.
        while self._next < len(self._buckets):
            following = self._buckets[self._next]
            if following.num_missing > 0:
                return
            following.start()
            self._next += 1


class _Bucket:
    """Parameters of one dtype and device whose gradients travel together: a small tensor costs the network's latency,
    however little it holds."""

    def __init__(self, parameters: list[nn.Parameter], *, averages: bool) -> None:
        self.parameters = parameters
        self.averages = averages
        self.num_missing = 0
        """Gradients that the backward pass has not reached yet."""
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    def start(self) -> None:
        """Start the all-reduce of the gradients, beside what else the device computes."""
        pieces = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            pieces.append(gradient.reshape(-1).to(dtype))
        self.flat = torch.cat(pieces)
        # NCCL divides in the same kernel. gloo cannot.
        divides = self.averages and self.flat.is_cuda
        op = dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM
        self.work = dist.all_reduce(self.flat, op=op, async_op=True)

    def finish(self, present: Sequence[bool]) -> None:
        """Wait for the all-reduce, and set the gradients that any rank has."""
        assert self.flat is not None and self.work is not None, "start comes first"
        self.work.wait()
        if self.averages and not self.flat.is_cuda:
            self.flat /= world_size()
        gradients = []
        for parameter, is_present in zip(self.parameters, present, strict=True):
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.empty_like(parameter)
                if is_present:
                    parameter.grad = gradient
            gradients.append(gradient)
        parts = _unflatten_dense_tensors(self.flat, gradients)  # type: ignore[no-untyped-call]
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part)
        self.flat = None
        self.work = None


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors of every rank with those of rank 0, in place."""
    tensors = list(tensors)
    if world_size() == 1 or not tensors:
        return
    with _collective("broadcast_tensors"), torch.no_grad():
        dist._broadcast_coalesced(dist.group.WORLD, tensors, BUCKET_BYTES, 0)  # type: ignore[attr-defined, arg-type]


def sum_tensor(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of a small tensor over all ranks, or over the ranks of a group."""
    if world_size() == 1:
        return tensor
    with _collective("sum_tensor"):
        total = tensor.to(number_device(group))
        dist.all_reduce(total, group=group)
        return total.to(tensor.device)


def broadcast_object(value: Any) -> Any:
    """Return the value of rank 0 on every rank. It is pickled."""
    values = [value]
    if world_size() > 1:
        with _collective("broadcast_object"):
            dist.broadcast_object_list(values)
    return values[0]


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. They are pickled."""
    values = [value] * world_size()
    if world_size() > 1:
        with _collective("gather_objects"):
            dist.all_gather_object(values, value)
    return values


def new_cpu_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a second process group on the CPU, for a thread beside the training (async saving); None with one rank.

    Two threads must not use one group: their collectives would interleave differently on each rank. `timeout` is
    required, because a new group does not inherit it.
    """
    if world_size() == 1:
        return None
    with _collective("new_cpu_group"):
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return group


def end_group(*, waits: bool) -> None:
    """End the process group, on this rank alone. `waits`: let kernels on a GPU finish first. Destroying a group waits
    for them, and those of a collective that another rank will never join do not end: they can only be aborted."""
    backends = dist.get_backend_config()
    if waits or "nccl" not in backends:
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()


def _check_rows(num_rows: int, expected: int) -> None:
    if num_rows != expected:
        raise ValueError(
            f"rank {rank()} gave {num_rows:,d} rows where its counts say {expected:,d}"
        )


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Any]]:
    """Yield buckets of tensors of one dtype and device, in order, of at most BUCKET_BYTES (or a single tensor). They are
    the same on every rank."""
    return _take_tensors(tensors, BUCKET_BYTES)  # type: ignore[no-any-return, no-untyped-call]
