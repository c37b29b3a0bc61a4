"""In a ring every loss gives the rank's part and gradient that it gives where all embeddings were gathered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ring import one_pass
from tests.harness import run_ranks
from tests.losses.batches import SIZES, config_of, gradients, make_batch
from tests.losses.test_contract import cases_of
from tests.losses.test_ranks import rank_batches
from tests.losses.test_teachers import TERMS, LiveMemory
from vembed.losses.batch import LossBatch, TeacherVectors
from vembed.losses.build import build_loss
from vembed.losses.exchange import Ring, RingParts, TravellingColumns, Visit
from vembed.losses.table import LOSSES, names_where
from vembed.losses.tiles import Tiling
from vembed.parallel.ring import NeighbourRing
from vembed.training.exchange import Counts, Gathered, InRing, LossExchange

MRL = {"use_mrl": True, "mrl_dims": [8, 3, 12], "mrl_weights": [0.5, 2.0, 1.0]}
BOTH = {
    "bidirectional": True,
    "query_query_negatives": True,
    "document_document_negatives": True,
}
CASES: dict[str, dict[str, Any]] = {
    **{
        name: cases_of(LOSSES[name])[0] for name in names_where(needs_whole_batch=False)
    },
    **{
        name: options
        for name, options in TERMS.items()
        if options.get("loss", "infonce") not in names_where(needs_whole_batch=True)
    },
    "everything": {
        **BOTH,
        **MRL,
        "false_negative_margin": 0.1,
        "learn_temperature": True,
    },
    "matryoshka-guide": {**MRL, "guide": "vectors", "bidirectional": True},
    "own-negatives": {"hard_negatives_scope": "own", **BOTH},
    "own-rank": {"negatives_from": "own_rank", "bidirectional": True},
    "kept-duplicates": {"mask_duplicates": False, **BOTH},
    "dot": {"similarity": "dot", "temperature": 1.0, **MRL},
    "sigmoid-matryoshka": {"loss": "sigmoid", **MRL},
    "triplet-matryoshka": {"loss": "triplet", **MRL},
    "sum": {
        "losses": [
            {"loss": "infonce"},
            {"loss": "kl", "teacher": "vectors", "weight": 0.5},
        ]
    },
}
CUTS = {1: [], 2: [4], 3: [1, 6], 4: [0, 4, 5]}
"""Examples of each rank: uneven, and of four ranks the first has none."""


def divided(world_size: int) -> tuple[LossBatch, list[LossBatch], list[list[int]]]:
    """Return a batch as it is after a gather, and as the ranks of a ring have it, less the ring; and the numbers of
    each rank's inputs, rows and hard negatives. A text that two ranks need has two embeddings."""
    batch = make_batch(9, max_positives=2, num_contents=40)
    parts = rank_batches(batch, CUTS[world_size])
    wanted, places, counts = [], [], []
    for part in parts:
        numbers = (
            batch.query[part.own()],
            batch.positive[part.own()],
            batch.negative[part.own_hard_negatives()],
        )
        used, place = torch.unique(torch.cat(numbers), return_inverse=True)
        places.append(
            torch.split(place + sum(map(len, wanted)), [len(one) for one in numbers])
        )
        wanted.append(used)
        counts.append([len(used), len(numbers[0]), len(numbers[2])])
    query, positive, negative = (torch.cat(one) for one in zip(*places, strict=True))
    inputs = torch.cat(wanted)
    teachers = {
        # The start model's vectors have a row for each embedding.
        name: TeacherVectors(one.vectors[inputs], query, positive, negative)
        if name == "none"
        else one
        for name, one in batch.teachers.items()
        if isinstance(one, TeacherVectors) or name != "none"
    }
    whole = replace(
        batch,
        embeddings=batch.embeddings.detach()[inputs].requires_grad_(),
        content=batch.content[inputs],
        query=query,
        positive=positive,
        negative=negative,
        teachers=teachers,
    )
    return (
        whole,
        [
            replace(
                whole,
                own_rows=one.own_rows,
                own_negatives=one.own_negatives,
                world_size=world_size,
            )
            for one in parts
        ],
        counts,
    )


def in_ring(columns_at_once: int) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return each case's part of the loss, and its gradients: of the own embeddings and of the parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _, parts, counts = divided(world_size)
    bounds = [
        [sum(one[k] for one in counts[:r]) for r in range(world_size + 1)]
        for k in range(3)
    ]
    spans = [[slice(a, b) for a, b in itertools.pairwise(one)] for one in bounds]
    ring = RingParts(
        ring=NeighbourRing(rank, world_size, columns_at_once),
        rank=rank,
        num_inputs=bounds[0][-1],
        first_input=bounds[0][rank],
        rows=tuple(spans[1]),
        negatives=tuple(torch.arange(one.start, one.stop) for one in spans[2]),
    )
    part = parts[rank]
    own = {}
    for name, one in part.teachers.items():
        if isinstance(one, TeacherVectors):
            numbers = [
                one.query[spans[1][rank]],
                one.positive[spans[1][rank]],
                one.negative[spans[2][rank]],
            ]
            some = torch.cat(numbers)
            # A rank holds the vectors of its own inputs; here a range of rows that has them all.
            first = int(some.min()) if some.numel() else 0
            last = int(some.max()) + 1 if some.numel() else 0
            own[name] = replace(one, vectors=one.vectors[first:last], first=first)
        else:
            own[name] = one
    leaf = part.embeddings.detach()[spans[0][rank]].clone().requires_grad_()
    part = replace(part, embeddings=leaf, ring=ring, teachers=own)
    found = {}
    for name, options in CASES.items():
        loss = build_loss(config_of(**options), **SIZES).double()
        value = loss(part)
        names = ["embeddings", *(one for one, _ in loss.named_parameters())]
        found[name] = (
            value.detach(),
            dict(zip(names, gradients(value, leaf, *loss.parameters()), strict=True)),
        )
    return found


@cache
def on_ranks(world_size: int) -> list[dict[str, tuple[Tensor, dict[str, Tensor]]]]:
    """All cases in one start of the ranks."""
    return run_ranks(in_ring, world_size, 5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ring_is_the_gathered_loss(world_size: int, name: str) -> None:
    whole, parts, _ = divided(world_size)
    loss = build_loss(config_of(**CASES[name]), **SIZES).double()
    value = torch.stack([loss(part) for part in parts]).sum()
    found = on_ranks(world_size)
    assert float(sum(one[name][0] for one in found)) == pytest.approx(
        value.item(), rel=1e-10
    )
    names = ["embeddings", *(one for one, _ in loss.named_parameters())]
    for key, want in zip(
        names, gradients(value, whole.embeddings, *loss.parameters()), strict=True
    ):
        shares = [one[name][1][key] for one in found]
        got = torch.cat(shares) if key == "embeddings" else torch.stack(shares).sum(0)
        # The rounding is that of the summed terms: relative to the largest gradient, or to one row's share.
        assert float((got - want).abs().max()) <= 1e-9 * max(
            float(want.abs().max()), 1e-3
        ), key


class CountedRing(Ring):
    """A ring of one rank that counts its rounds."""

    def __init__(self) -> None:
        self.with_gradient: list[bool] = []

    def visits(
        self, own: TravellingColumns, *, with_gradient: bool, held: Tensor | None = None
    ) -> Iterator[Visit]:
        """See Ring."""
        self.with_gradient.append(with_gradient)
        yield from ()


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({}, [False, True]),
        ({"loss": "circle"}, [False, True]),
        ({"loss": "sigmoid"}, [True]),
    ],
)
def test_rounds_of_the_ring(options: dict[str, Any], rounds: list[bool]) -> None:
    whole, [part], [[num_inputs, num_rows, num_negatives]] = divided(1)
    ring = CountedRing()
    batch = replace(
        part,
        ring=RingParts(
            ring,
            0,
            num_inputs,
            0,
            (slice(0, num_rows),),
            (torch.arange(num_negatives),),
        ),
    )
    loss = build_loss(config_of(**options), **SIZES).double()
    loss(batch).backward()
    assert ring.with_gradient == rounds, (
        "a score is computed again only where its row's sum is missing"
    )
    assert whole.num_rows == num_rows


class Watch(LiveMemory):
    """The bytes of all tensors, and the number of scores: only they are products that start from nothing."""

    num_scores = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.mm.out:
            self.num_scores += result.numel()
        return result


NUM_ROWS, DIM, BLOCK = 512, 128, 64


def watched() -> dict[str, tuple[int, int]]:
    """Return a loss and gradient's peak of all tensors beyond the rank's own embeddings, and its number of scores:
    gathered, in a ring of small blocks, and in one of a single block of each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = Counts(
        [2 * NUM_ROWS] * world_size, [NUM_ROWS] * world_size, [0] * world_size
    )
    own = torch.randn(2 * NUM_ROWS, DIM, generator=torch.Generator().manual_seed(rank))
    ways: dict[str, LossExchange] = {"gather": Gathered()}
    for name, size in (("ring", BLOCK), ("whole", NUM_ROWS)):
        ways[name] = ring = InRing(rank, world_size)
        ring.ring = NeighbourRing(rank, world_size, size)
    loss = build_loss(config_of())
    loss.tiling = Tiling(64, 256)  # in proportion to the batch, for all
    found, results = {}, {}
    for name, exchange in ways.items():
        with Watch() as watch:
            results[name] = one_pass(exchange, own, counts, loss, rank, NUM_ROWS)
        found[name] = (
            watch.peak - own.nbytes,
            watch.num_scores,
        )  # all begin with a view of `own`
    value, gradient = results.pop("gather")
    for one, other in results.values():
        assert one == pytest.approx(value, rel=1e-5)
        assert float((other - gradient).norm() / gradient.norm()) < 1e-5
    return found


def test_memory_and_scores_of_the_ring_on_four_ranks() -> None:
    for found in run_ranks(watched, 4):
        (gathered, num), (small, num_small), (whole, num_whole) = (
            found["gather"],
            found["ring"],
            found["whole"],
        )
        assert small <= 0.35 * gathered, found
        # The second round needs two blocks of columns and four of gradients; with small ones the peak is elsewhere.
        assert whole - small >= 2 * (NUM_ROWS - BLOCK) * DIM * 4, found
        assert num == NUM_ROWS * 4 * NUM_ROWS
        # All scores twice, except those against the own columns and against the block that comes last.
        assert num_small == 2 * num - NUM_ROWS * (NUM_ROWS + BLOCK)
        assert num_whole == 2 * num - NUM_ROWS * 2 * NUM_ROWS
