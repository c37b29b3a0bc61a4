"""Every collective on 1, 2 and 3 ranks: uneven and empty parts, missing gradients, objects, counts."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import run_ranks
from vembed.parallel import collectives


def rows_of(rank, count, width=3):
    return (
        torch.arange(count * width, dtype=torch.float64).view(count, width) + 100 * rank
    )


def everything(counts):
    rank = collectives.rank()
    size = collectives.world_size()
    local_rows = rows_of(rank, counts[rank])
    recorded = {"place": (rank, size)}
    recorded["ints"] = collectives.all_gather_ints([rank, -rank])
    recorded["none"] = collectives.all_gather_ints([])
    recorded["max"] = collectives.max_ints([rank, -rank])
    recorded["sum"] = collectives.sum_ints([1, rank])
    recorded["scalars"] = collectives.sum_scalars([0.5, rank / 3])
    leaf = local_rows.clone().requires_grad_()
    recorded["rows"] = collectives.all_gather_rows(leaf)
    recorded["rows_by_counts"] = collectives.all_gather_rows(local_rows, counts)
    recorded["numbers"] = collectives.all_gather_rows(
        torch.full((counts[rank],), rank, dtype=torch.int64)
    )
    everybody = torch.cat(
        [rows_of(number, count) for number, count in enumerate(counts)]
    )
    recorded["scattered"] = collectives.reduce_scatter_rows(
        everybody * (rank + 1), counts
    )
    recorded["tensor"] = collectives.sum_tensor(torch.tensor(2.0))
    values = [
        torch.full((2, 2), float(rank)),
        torch.tensor([rank], dtype=torch.int64),
        torch.zeros(0),
    ]
    collectives.broadcast_tensors(values)
    recorded["broadcast"] = [value.tolist() for value in values]
    recorded["object"] = collectives.broadcast_object(
        {"rank": rank, "names": ["a", None]}
    )
    recorded["objects"] = collectives.gather_objects([rank, "x" * (10 * rank)])
    collectives.barrier()
    collectives.calls.clear()
    collectives.all_gather_rows(local_rows, counts)
    collectives.all_gather_rows(local_rows)
    recorded["counts"] = dict(collectives.calls)
    return recorded


@pytest.mark.parametrize("counts", [[4], [2, 3], [0, 2], [3, 0, 1], [0, 0], [2, 2, 2]])
@pytest.mark.promise("B14", "B15")
def test_each_collective(counts):
    size = len(counts)
    results = run_ranks(everything, size, counts)
    everybody = torch.cat([rows_of(rank, count) for rank, count in enumerate(counts)])
    for rank, result in enumerate(results):
        assert result["place"] == (rank, size)
        assert result["ints"] == [[number, -number] for number in range(size)]
        assert result["none"] == [[] for _ in range(size)]
        assert result["max"] == [size - 1, 0]
        assert result["sum"] == [size, sum(range(size))]
        assert result["scalars"] == pytest.approx([size / 2, sum(range(size)) / 3])
        for name in ("rows", "rows_by_counts"):
            assert torch.equal(result[name], everybody)
            assert not result[name].requires_grad
        assert result["numbers"].tolist() == [
            number for number, count in enumerate(counts) for _ in range(count)
        ]
        assert torch.equal(
            result["scattered"], rows_of(rank, counts[rank]) * sum(range(1, size + 1))
        )
        assert float(result["tensor"]) == 2.0 * size
        assert result["broadcast"] == [[[0.0, 0.0], [0.0, 0.0]], [0], []]
        assert result["object"] == {"rank": 0, "names": ["a", None]}
        assert result["objects"] == [
            [number, "x" * (10 * number)] for number in range(size)
        ]
        assert result["counts"] == (
            {"all_gather_rows": 2, "all_gather_ints": 1} if size > 1 else {}
        )


def everything_in_older_torch(counts):
    """The same with the functions that torch had before 2.13, which later versions warn of."""
    warnings.simplefilter("ignore")
    collectives._all_gather = dist.all_gather_into_tensor
    collectives._reduce_scatter = dist.reduce_scatter_tensor
    return everything(counts)


def test_older_torch_has_other_names_for_the_same():
    newer = run_ranks(everything, 3, [3, 0, 1])
    older = run_ranks(everything_in_older_torch, 3, [3, 0, 1])
    for of_rank, of_older in zip(newer, older, strict=True):
        assert of_rank.keys() == of_older.keys()
        for name, value in of_rank.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, of_older[name]), name
            else:
                assert value == of_older[name], name


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
    rank_batch = 0.5 if average else 1.0
    for gradients, counts in run_ranks(averaged_gradients, 2, average):
        assert torch.equal(gradients[0], torch.full((3, 5), 3.0 * rank_batch))
        assert torch.equal(
            gradients[1], torch.arange(7.0) * rank_batch
        )  # rank 0 has none: it counts as zero
        assert gradients[2] is None  # nobody has one
        assert torch.equal(gradients[3], torch.arange(4.0) * rank_batch)
        assert float(gradients[4]) == 8.0 * rank_batch
        # Added up in float32, then rounded once.
        assert torch.equal(
            gradients[5], torch.full((6,), (1 + 1 / 256) * rank_batch).bfloat16()
        )
        assert gradients[6] is None
        assert counts == {"sum_scalars": 1, "all_reduce_gradients": 1}


def summed_early(fails):
    """Gradients of two steps, of which the second leaves the last layer out. `fails`: on rank 0, in the first one."""
    torch.manual_seed(0)
    rank = collectives.rank()
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
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
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    for rank in range(num_ranks):
        layers[:-1](torch.full((2, 4), rank + 1.0)).sum().backward()
    expected = [weight.grad for weight in layers.parameters()]
    for rank, results in enumerate(run_ranks(summed_early, num_ranks, fails)):
        gradients, sums, num_started = results
        assert (num_started > 5) == (not fails or rank > 0)
        assert sums == [num_ranks**2 / 2]
        assert gradients[-2:] == [None, None]
        for gradient, total in zip(gradients[:-2], expected[:-2], strict=True):
            torch.testing.assert_close(gradient, total / num_ranks)


def gradients_without_group():
    dist.destroy_process_group()
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    collectives.GradientSync([parameter]).finish()
    collectives.barrier()
    return parameter.grad


def test_without_a_group_nothing_is_sent():
    (gradient,) = run_ranks(gradients_without_group, 1)
    assert torch.equal(gradient, torch.ones(2))


def wrong_counts():
    with pytest.raises(
        ValueError, match="gave 2 rows where its counts say 3"
    ) as caught:
        collectives.all_gather_rows(torch.ones(2, 2), [3, 3])
    return "\n".join(caught.value.__notes__)


def test_wrong_counts_are_found_before_anything_is_sent():
    notes = run_ranks(wrong_counts, 2)
    assert notes == [
        f"rank {rank} of 2, in the collective all_gather_rows (call 1)"
        for rank in range(2)
    ]
