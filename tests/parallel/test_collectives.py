"""Every collective on 1, 2 and 3 ranks: uneven and empty parts, missing gradients, objects, counts."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import run_ranks
from vembed.parallel import collectives


def rows_of(rank, count, width=3):
    numbers = torch.arange(count * width, dtype=torch.float64)
    return numbers.view(count, width) + 100 * rank


def everything(counts):
    rank = collectives.rank()
    local_rows = rows_of(rank, counts[rank])
    everybody = torch.cat([rows_of(*entry) for entry in enumerate(counts)])
    leaf = local_rows.clone().requires_grad_()
    numbers = torch.full((counts[rank],), rank, dtype=torch.int64)
    values = [torch.full((2, 2), float(rank)), torch.tensor([rank]), torch.zeros(0)]
    collectives.broadcast_tensors(values)
    recorded = {
        "place": (rank, collectives.world_size()),
        "ints": collectives.all_gather_ints([rank, -rank]),
        "none": collectives.all_gather_ints([]),
        "max": collectives.max_ints([rank, -rank]),
        "sum": collectives.sum_ints([1, rank]),
        "scalars": collectives.sum_scalars([0.5, rank / 3]),
        "rows": collectives.all_gather_parts(leaf),
        "rows_by_counts": collectives.all_gather_parts(local_rows, counts),
        "numbers": collectives.all_gather_parts(numbers),
        "scattered": collectives.reduce_scatter_parts(everybody * (rank + 1), counts),
        "tensor": collectives.sum_tensor(torch.tensor(2.0)),
        "broadcast": values,
        "object": collectives.broadcast_object({"rank": rank, "names": ["a", None]}),
        "objects": collectives.gather_objects([rank, "x" * (10 * rank)]),
    }
    collectives.barrier()
    collectives.calls.clear()
    collectives.all_gather_parts(local_rows, counts)
    collectives.all_gather_parts(local_rows)
    return recorded, dict(collectives.calls)


def check_everything(counts, results):
    size = len(counts)
    ranks = range(size)
    everybody = torch.cat([rows_of(*entry) for entry in enumerate(counts)])
    for rank, (recorded, calls) in enumerate(results):
        expected = {
            "place": (rank, size),
            "ints": [[number, -number] for number in ranks],
            "none": [[] for _ in ranks],
            "max": [size - 1, 0],
            "sum": [size, sum(ranks)],
            "scalars": [size / 2, sum(ranks) / 3],
            "rows": everybody,
            "rows_by_counts": everybody,
            "numbers": torch.arange(size).repeat_interleave(torch.tensor(counts)),
            "scattered": rows_of(rank, counts[rank]) * sum(range(1, size + 1)),
            "tensor": torch.tensor(2.0 * size),
            "broadcast": [torch.zeros(2, 2), torch.tensor([0]), torch.zeros(0)],
        }
        assert recorded.pop("object") == {"rank": 0, "names": ["a", None]}
        assert recorded.pop("objects") == [
            [number, "x" * (10 * number)] for number in ranks
        ]
        torch.testing.assert_close(recorded, expected, rtol=1e-12, atol=0)
        assert not recorded["rows"].requires_grad
        assert calls == (
            {"all_gather_parts": 2, "all_gather_ints": 1} if size > 1 else {}
        )


@pytest.mark.parametrize("counts", [[4], [0, 2], [3, 0, 1], [0, 0], [2, 2, 2]])
@pytest.mark.promise("B14", "B15")
def test_each_collective(counts):
    check_everything(
        counts, run_ranks(everything, len(counts), counts, process_group=True)
    )


def everything_in_older_torch(counts):
    """The same with the functions that torch had before 2.13, which later versions warn of."""
    warnings.simplefilter("ignore")
    collectives._all_gather = dist.all_gather_into_tensor
    collectives._reduce_scatter = dist.reduce_scatter_tensor
    return everything(counts)


def test_older_torch_has_other_names_for_the_same():
    counts = [3, 0, 1]
    check_everything(
        counts, run_ranks(everything_in_older_torch, 3, counts, process_group=True)
    )


def averaged_gradients(average):
    rank = collectives.rank()
    collectives.BUCKET_BYTES = 64  # several messages
    parameters = [
        nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7,), (2,), (4,), ())
    ]
    parameters.append(nn.Parameter(torch.zeros(6, dtype=torch.bfloat16)))
    parameters.append(nn.Parameter(torch.zeros(2), requires_grad=False))
    parameters[0].grad = torch.full((3, 5), rank + 1.0)
    if rank == 1:
        parameters[1].grad = torch.arange(7.0)
    parameters[3].grad = torch.arange(4.0) * rank
    parameters[4].grad = torch.tensor(4.0)
    parameters[5].grad = torch.full(
        (6,), 1 / 256 if rank else 1.0, dtype=torch.bfloat16
    )
    collectives.calls.clear()
    sides = (parameters, ()) if average else ((), parameters)
    collectives.GradientSync(*sides).finish()
    return [parameter.grad for parameter in parameters], dict(collectives.calls)


@pytest.mark.parametrize("average", [True, False])
def test_gradients_of_copies_with_some_missing(average):
    share = 0.5 if average else 1.0
    # Rank 0 has none of the second one, which counts as zero, and nobody one of the third.
    # Those in bfloat16 are added up in float32, then rounded once.
    expected = [
        torch.full((3, 5), 3.0 * share),
        torch.arange(7.0) * share,
        None,
        torch.arange(4.0) * share,
        torch.tensor(8.0 * share),
        torch.full((6,), (1 + 1 / 256) * share).bfloat16(),
        None,
    ]
    for gradients, calls in run_ranks(
        averaged_gradients, 2, average, process_group=True
    ):
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
        assert calls == {"sum_scalars": 1, "all_reduce_gradients": 1}


def five_layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])


def summed_early(fails):
    """Gradients of two steps, of which the second leaves the last layer out. `fails`: on rank 0, in the first one."""
    rank = collectives.rank()
    layers = five_layers()
    collectives.BUCKET_BYTES = 64  # a matrix, or a few biases
    gradient_sync = collectives.GradientSync(layers.parameters())
    inputs = torch.full((2, 4), rank + 1.0)
    layers(inputs).sum().backward()
    gradient_sync.start_early()
    has_failed = fails and rank == 0
    if not has_failed:
        layers(inputs).sum().backward()
    num_started = sum(bucket.work is not None for bucket in gradient_sync._buckets)
    sums = gradient_sync.finish([rank + 0.5])
    layers.zero_grad(set_to_none=True)
    gradient_sync.start_early()
    layers[:-1](inputs).sum().backward()
    gradient_sync.finish()
    gradients = [weight.grad for weight in layers.parameters()]
    return gradients, sums, num_started


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_buckets_start_during_the_last_backward_pass(num_ranks, fails):
    layers = five_layers()
    for rank in range(num_ranks):
        layers[:-1](torch.full((2, 4), rank + 1.0)).sum().backward()
    expected = [weight.grad for weight in layers.parameters()]
    for rank, results in enumerate(
        run_ranks(summed_early, num_ranks, fails, process_group=True)
    ):
        gradients, sums, num_started = results
        assert (num_started > 5) == (not fails or rank > 0)
        assert sums == [num_ranks**2 / 2]
        assert gradients[-2:] == [None, None]
        for gradient, total in zip(gradients[:-2], expected[:-2], strict=True):
            torch.testing.assert_close(gradient, total / num_ranks)


def wrong_counts():
    with pytest.raises(ValueError, match="2 rows where its counts say 3") as caught:
        collectives.all_gather_parts(torch.ones(2, 2), [3, 3])
    return caught.value.__notes__


def test_wrong_counts_are_found_before_anything_is_sent():
    for rank, notes in enumerate(run_ranks(wrong_counts, 2, process_group=True)):
        place = "in the collective all_gather_parts (call 1)"
        assert notes == [f"rank {rank} of 2, {place}"]
