"""python -m benchmarks.loss: time and memory of InfoNCE and its gradient, tiled against the plain score matrix."""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vembed.config.schema import LossEntry, TrainConfig
from vembed.losses.batch import LossBatch, TeacherVectors
from vembed.losses.build import build_loss

GIBIBYTE = 2**30
TEACHER = "teacher"
TAUGHT = [
    LossEntry(loss="infonce", guide=TEACHER),
    LossEntry(loss="kl", teacher=TEACHER, distill_candidates="batch"),
    LossEntry(loss="spread_out"),
]


def make_batch(num_rows: int, dim: int) -> LossBatch:
    """Return queries, positives and one hard negative per row, all distinct except for a few shared documents."""
    draw = torch.Generator().manual_seed(0)
    embeddings = torch.randn(3 * num_rows, dim, generator=draw)
    order = torch.randperm(3 * num_rows, generator=draw)
    content = torch.arange(3 * num_rows)
    content[order[num_rows : num_rows + num_rows // 50]] = 0
    rows = torch.arange(num_rows)
    return LossBatch(
        embeddings=embeddings.requires_grad_(),
        content=content,
        query=order[:num_rows],
        positive=order[num_rows : 2 * num_rows],
        example=rows,
        negative=order[2 * num_rows :],
        negative_example=rows,
        label_scores=None,
        rank_rows=slice(0, num_rows),
        rank_negatives=slice(0, num_rows),
    )


def plain_loss(batch: LossBatch, config: TrainConfig) -> Tensor:
    """Return the same loss from score matrices [R, 2 R], one per Matryoshka size. The mask is computed once."""
    documents = torch.cat((batch.positive, batch.negative))
    content = batch.content[documents]
    mask = content[None, :] == batch.content[batch.positive][:, None]
    mask |= content[None, :] == batch.content[batch.query][:, None]
    labels = torch.arange(batch.num_rows, device=mask.device)
    mask[labels, labels] = False
    dims = (
        config.matryoshka.mrl_dims
        if isinstance(config.matryoshka.mrl_dims, list)
        else [batch.embeddings.shape[1]]
    )
    loss = batch.embeddings.new_zeros(())
    for dim in dims:
        unit = F.normalize(batch.embeddings[:, :dim], dim=1)
        scores = unit[batch.query] @ unit[documents].T / config.objective.temperature
        loss = loss + F.cross_entropy(scores.masked_fill(mask, float("-inf")), labels)
    return loss


class Seconds(NamedTuple):
    """Wall-clock and processor time of one loss and gradient. Processor time is more reliable on a shared machine."""

    clock: float
    processor: float


def timed(
    batch: LossBatch, make: Callable[[], Tensor]
) -> tuple[Seconds, float, Tensor]:
    """Return the time of loss and gradient, the loss and the gradient."""
    clock = time.perf_counter()
    processor = time.process_time()
    loss = make()
    (gradient,) = torch.autograd.grad(loss, batch.embeddings)
    return (
        Seconds(time.perf_counter() - clock, time.process_time() - processor),
        float(loss.detach()),
        gradient,
    )


def compare_times(num_rows: int, dim: int, dims: list[int], repeats: int) -> None:
    """Alternate the two and print medians; for the ratio of neighbouring runs the median and the extremes."""
    config = TrainConfig(
        model_name="", data_path="", mrl_dims=dims if len(dims) > 1 else None
    )
    batch = make_batch(num_rows, dim)
    loss = build_loss(config)
    tiled_times: list[Seconds] = []
    plain_times: list[Seconds] = []
    for repeat in range(repeats + 1):
        tiled_seconds, tiled_loss, tiled_gradient = timed(batch, lambda: loss(batch))
        plain_seconds, plain_value, plain_gradient = timed(
            batch, lambda: plain_loss(batch, config)
        )
        off = float((tiled_gradient - plain_gradient).norm() / plain_gradient.norm())
        if abs(tiled_loss - plain_value) > 1e-4 * abs(plain_value) or off > 1e-4:
            raise SystemExit(
                f"losses {tiled_loss} and {plain_value}, gradients off by {off:.1e}: not the same thing"
            )
        del tiled_gradient, plain_gradient
        if repeat:
            tiled_times.append(tiled_seconds)
            plain_times.append(plain_seconds)
    for what in Seconds._fields:
        tiled = [getattr(seconds, what) for seconds in tiled_times]
        plain = [getattr(seconds, what) for seconds in plain_times]
        ratios = [ours / theirs for ours, theirs in zip(tiled, plain, strict=True)]
        print(
            f"{num_rows:,d} rows, {dim:,d} dims, sizes {dims}, {what} time: tiled {statistics.median(tiled):.2f} s, "
            f"plain {statistics.median(plain):.2f} s, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


class Size(NamedTuple):
    """Time and memory of a loss and its gradient."""

    seconds: float
    beyond_gib: float
    """Peak memory beyond the embeddings and their gradient."""
    gradient_gib: float


def with_teacher(batch: LossBatch) -> LossBatch:
    """Return the batch with a teacher's vectors of the same size."""
    vectors = F.normalize(
        torch.randn(batch.embeddings.shape, generator=torch.Generator().manual_seed(1)),
        dim=1,
    )
    return replace(
        batch,
        teachers={
            TEACHER: TeacherVectors(
                vectors, batch.query, batch.positive, batch.negative
            )
        },
    )


def measure(
    num_rows: int, num_own_rows: int, dim: int, dims: list[int], *, taught: bool = False
) -> Size:
    """Return the process's peak memory beyond the embeddings and their gradient. Run it in a process of its own.
    `taught`: with a guide, kl over the whole batch and spread_out beside InfoNCE."""
    config = TrainConfig(
        model_name="",
        data_path="",
        mrl_dims=dims if len(dims) > 1 else None,
        losses=TAUGHT if taught else None,
    )
    warm = with_teacher(make_batch(64, dim))
    build_loss(config)(warm).backward()
    batch = replace(
        with_teacher(make_batch(num_rows, dim)), rank_rows=slice(0, num_own_rows)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    build_loss(config)(batch).backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gradient = batch.embeddings.numel() * batch.embeddings.itemsize
    return Size(seconds, (peak - before - gradient) / GIBIBYTE, gradient / GIBIBYTE)


def print_memory(
    num_rows: int, num_own_rows: int, dim: int, dims: list[int], *, taught: bool
) -> None:
    """Print one line about a loss of this size."""
    size = measure(num_rows, num_own_rows, dim, dims, taught=taught)
    what = "infonce with guide, kl over the batch and spread_out: " if taught else ""
    print(
        f"{what}{num_own_rows:,d} of {num_rows:,d} rows, {dim:,d} dims, sizes {dims}, {size.seconds:.1f} s: "
        f"{size.beyond_gib:.2f} GiB beyond the embeddings and their gradient ({size.gradient_gib:.2f} GiB each)"
    )


def main() -> None:
    """Parse the sizes and run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument(
        "--memory-rows", type=int, default=65536, help="0 leaves the memory part out"
    )
    parser.add_argument(
        "--memory-own-rows",
        type=int,
        help="measure one rank's share of so many rows; default: all",
    )
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument(
        "--repeats", type=int, default=5, help="0 leaves the timing part out"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        default=3,
        help="Matryoshka sizes, each half of the one before",
    )
    parser.add_argument(
        "--taught",
        action="store_true",
        help="memory with a guide, kl and spread_out too",
    )
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [options.dim >> number for number in range(options.sizes)]
    if options.only_memory:
        num_own_rows = options.memory_own_rows or options.memory_rows
        print_memory(
            options.memory_rows, num_own_rows, options.dim, sizes, taught=options.taught
        )
        return
    if options.repeats:
        for dims in ([options.dim], sizes):
            compare_times(options.rows, options.dim, dims, options.repeats)
    if options.memory_rows:
        # The peak memory of a process never falls, so the measured process must not have timed anything before.
        words = [
            sys.executable,
            "-m",
            "benchmarks.loss",
            "--only-memory",
            *sys.argv[1:],
        ]
        if options.taught:
            subprocess.run([word for word in words if word != "--taught"], check=True)
        subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
