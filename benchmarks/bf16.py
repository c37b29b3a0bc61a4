"""python -m benchmarks.bf16: vembed in bfloat16 against its own float32 and against a peer in both, in turns."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.cases import Case
from benchmarks.products import seconds_by_operator, shares
from benchmarks.train import machine
from benchmarks.work import precision
from benchmarks.worker import Worker, running, training_task

SIDES = (
    "vembed",
    "vembed-float32",
    "sentence-transformers",
    "sentence-transformers-bf16",
)


def cases(batch_size: int) -> list[Case]:
    """Return the cases: texts that fill 192 tokens, and natural lengths."""
    return [
        Case(
            "every text 192 tokens", 192, batch_size=batch_size, steps=3, uniform=True
        ),
        Case("natural lengths, up to 256 tokens", 256, batch_size=batch_size, steps=3),
    ]


def row(name: str, rates: dict[str, list[float]], more: str) -> str:
    """Return a line of the table: samples per second, and the ratios of vembed to the others."""
    medians = {side: statistics.median(speeds) for side, speeds in rates.items()}
    ratios = []
    for side, peer_rates in rates.items():
        if side != "vembed":
            pairs = zip(rates["vembed"], peer_rates, strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            ratios.append(f"{ratio:.2f}")
    return (
        f"| {name} | "
        + " | ".join([*(f"{median:.2f}" for median in medians.values()), *ratios])
        + f" | {more} |"
    )


def encode(
    workers: dict[str, Worker], num_texts: int, rates: dict[str, list[float]]
) -> float:
    """Encode texts on each side. Return the least cosine of vembed's embeddings to its own in float32."""
    with tempfile.TemporaryDirectory() as name:
        for side, worker in workers.items():
            folder = Path(name) / side
            folder.mkdir()
            result = worker.ask(
                {"num_texts": num_texts, "max_length": 256, "folder": str(folder)}
            )
            rates[side].append(result["samples_per_second"])
        ours, exact = (
            np.load(Path(name) / side / "embeddings.npy").astype(np.float64)
            for side in SIDES[:2]
        )
    return float(
        (
            (ours * exact).sum(1)
            / np.linalg.norm(ours, axis=1)
            / np.linalg.norm(exact, axis=1)
        ).min()
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if precision() != "bf16":
        sys.exit(
            "mixed_precision: auto keeps float32 on this processor, so there is nothing to compare"
        )
    print(
        f"{machine()}\n\n| case | " + " | ".join(f"{side} samples/s" for side in SIDES),
        end=" | ",
    )
    print(
        " | ".join(f"ratio to {side}" for side in SIDES[1:])
        + " | |\n"
        + "|---" * 9
        + "|",
        flush=True,
    )
    with ExitStack() as stack:
        workers = {side: stack.enter_context(running(side)) for side in SIDES}
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        cosines = [
            encode(workers, arguments.texts, rates) for _ in range(arguments.repeats)
        ]
        print(
            row(
                "encoding, up to 256 tokens", rates, f"least cosine {min(cosines):.5f}"
            ),
            flush=True,
        )
        for case in cases(arguments.batch_size):
            rates = {side: [] for side in SIDES}
            for _ in range(arguments.repeats):
                for side, worker in workers.items():
                    with training_task(case, 0) as task:
                        rates[side].append(worker.ask(task)["samples_per_second"])
            print(row(f"training, {case.name}", rates, ""), flush=True)
    for case in cases(arguments.batch_size):
        print(
            f"\nA step of vembed, {case.name}: {shares(seconds_by_operator(case, 'auto'))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
