"""python -m benchmarks.ring: memory and time of a loss and its gradient over several ranks, in a ring and gathered."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.train import machine
from vembed.config.entries import LossName
from vembed.config.schema import TrainConfig
from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.losses.build import build_loss
from vembed.losses.tiles import Tiling
from vembed.parallel import collectives
from vembed.parallel.launch import free_port
from vembed.training.exchange import Counts, Gathered, InRing, LossExchange

MEBIBYTE = 2**20


def peak_memory() -> int:
    """Return the bytes that this process has had at most since `forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux alone counts this"
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Let `peak_memory` begin with what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")


def one_pass(
    exchange: LossExchange,
    own: torch.Tensor,
    counts: Counts,
    loss: EmbeddingLoss,
    rank: int,
    anchors: int,
) -> tuple[float, torch.Tensor]:
    """Return this rank's part of the loss, and the gradient of the whole with respect to its own embeddings."""
    num = counts.rows[0]
    total = num * len(counts.rows)
    offsets = torch.arange(len(counts.rows)).repeat_interleave(num) * 2 * num
    within = torch.arange(num).repeat(len(counts.rows))
    content = torch.arange(2 * total)
    content[torch.arange(0, 2 * total, 97)] = 7  # a few texts are everywhere
    leaf = exchange.leaf(own, counts)
    batch = LossBatch(
        embeddings=leaf,
        content=content,
        query=offsets + within,
        positive=offsets + num + within,
        example=torch.arange(total),
        negative=torch.empty(0, dtype=torch.int64),
        negative_example=torch.empty(0, dtype=torch.int64),
        scores=None,
        own_rows=slice(rank * num, rank * num + min(num, anchors)),
        own_negatives=slice(0, 0),
        world_size=len(counts.rows),
        ring=exchange.parts(counts, torch.device("cpu")),
    )
    value = loss(batch)
    value.backward()
    return float(value.detach()), exchange.local_gradient(leaf, counts)


def compare(
    rank: int,
    world_size: int,
    port: int,
    rows: int,
    dim: int,
    repeats: int,
    anchors: int,
    name_of_loss: LossName,
    tile: list[int],
    out: str,
) -> None:
    """Run one rank: both ways in turns. Rank 0 writes what all have measured."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss = build_loss(
        TrainConfig(model_name="none", data_path="none", loss=name_of_loss)
    )
    ways: dict[str, LossExchange] = {
        "gather": Gathered(),
        "ring": InRing(rank, world_size),
    }

    def run(num: int, exchange: LossExchange) -> tuple[float, torch.Tensor]:
        own = torch.randn(2 * num, dim, generator=torch.Generator().manual_seed(rank))
        counts = Counts([2 * num] * world_size, [num] * world_size, [0] * world_size)
        return one_pass(exchange, own, counts, loss, rank, anchors)

    if tile:
        Tiling.for_ring = classmethod(lambda kind, *_: kind(*tile))  # type: ignore[method-assign, assignment]
    for exchange in ways.values():
        run(64, exchange)  # what the first use of a library or a connection takes
    own = torch.randn(
        2 * rows // world_size, dim, generator=torch.Generator().manual_seed(rank)
    )
    num = rows // world_size
    counts = Counts([2 * num] * world_size, [num] * world_size, [0] * world_size)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, int] = {}
    results: dict[str, tuple[float, torch.Tensor]] = {}
    for repeat in range(repeats):
        order = list(ways.items())
        for name, exchange in order if repeat % 2 == 0 else reversed(order):
            collectives.barrier()
            forget_peak()
            before, start, worked = (
                peak_memory(),
                time.perf_counter(),
                time.process_time(),
            )
            results[name] = one_pass(exchange, own, counts, loss, rank, anchors)
            collectives.barrier()
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - worked)
            memory[name] = max(memory.get(name, 0), peak_memory() - before)
    (one, gradient), (other, expected) = results["ring"], results["gather"]
    off = float((gradient - expected).norm() / expected.norm())
    if abs(one - other) > 1e-4 * abs(other) or off > 1e-4:
        raise SystemExit(
            f"losses {one} and {other}, gradients off by {off:.1e}: not the same thing"
        )
    told = collectives.gather_objects_as_json(
        {"seconds": seconds, "cpu_seconds": cpu_seconds, "memory": memory}
    )
    if rank == 0:
        Path(out).write_text(json.dumps(told))
    dist.destroy_process_group()


def measure(
    world_size: int,
    rows: int,
    dim: int,
    repeats: int,
    anchors: int,
    name_of_loss: LossName,
    tile: list[int],
    folder: Path,
) -> dict[str, Any]:
    """Return the largest peak of the ranks, and the seconds and CPU seconds of each pass, for both ways."""
    port = free_port()
    out = folder / "ring.json"
    words = (
        world_size,
        port,
        rows,
        dim,
        repeats,
        anchors,
        name_of_loss,
        tile,
        str(out),
    )
    multiprocessing.spawn(compare, words, world_size)
    by_rank = json.loads(out.read_text())
    names = list(by_rank[0]["memory"])
    return {
        "memory": {name: max(one["memory"][name] for one in by_rank) for name in names},
        "seconds": by_rank[0]["seconds"],
        "cpu_seconds": {
            name: [
                sum(one)
                for one in zip(
                    *(rank["cpu_seconds"][name] for rank in by_rank), strict=True
                )
            ]
            for name in names
        },
    }


def quotients(by_way: dict[str, list[float]]) -> list[float]:
    """Return the ring's part of the gathered way, pass by pass."""
    return [
        one / other for one, other in zip(by_way["ring"], by_way["gather"], strict=True)
    ]


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[131_072])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--own-rows",
        type=int,
        default=2**31,
        help="rows of each rank whose loss is computed, at most",
    )
    parser.add_argument("--loss", choices=["infonce", "sigmoid"], default="infonce")
    parser.add_argument(
        "--tile",
        type=int,
        nargs=2,
        default=[],
        help="rows and columns of a tile of the ring",
    )
    arguments = parser.parse_args()
    print(machine(), flush=True)
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as name:
            found = measure(
                arguments.ranks,
                rows,
                arguments.dim,
                arguments.repeats,
                arguments.own_rows,
                arguments.loss,
                arguments.tile,
                Path(name),
            )
        own = min(arguments.own_rows, rows // arguments.ranks)
        memory, seconds = found["memory"], found["seconds"]
        ratios = quotients(seconds)
        cpu_ratios = quotients(found["cpu_seconds"])
        print(
            f"{arguments.loss}, {rows:,d} rows, {arguments.dim:,d} dims, {arguments.ranks} ranks, "
            f"{own:,d} rows of each: peak beyond the own embeddings, "
            f"gathered {memory['gather'] / MEBIBYTE:,.0f} MiB, ring {memory['ring'] / MEBIBYTE:,.0f} MiB, ratio "
            f"{memory['ring'] / memory['gather']:.2f}; loss and gradient, gathered "
            f"{statistics.median(seconds['gather']):.1f} s, ring {statistics.median(seconds['ring']):.1f} s, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), of CPU time "
            f"{statistics.median(cpu_ratios):.2f} ({min(cpu_ratios):.2f} to {max(cpu_ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
