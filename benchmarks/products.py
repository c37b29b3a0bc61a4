"""python -m benchmarks.products: a step's time in matrix products and in everything else, by operator.

Products are what AMX makes faster, so the rest decides a step's time there. The rest can be judged on any processor:
`--precision bf16` computes in bfloat16 also where that is slow.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import Case, rows_of
from benchmarks.sides import run_vembed
from vembed.cli.commands.demo import demo_model
from vembed.training.optimizer import Update
from vembed.training.step import TrainingStep

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu"}
)
SHOWN = 12
WARM_UP = 1


@contextmanager
def profiled_step(number: int) -> Iterator[profile]:
    """Profile the step of that number, from 0, with its update, of the training inside the with-block."""
    accumulate = TrainingStep.accumulate
    apply = Update.apply
    profiler = profile(activities=[ProfilerActivity.CPU])
    num_begun = 0

    def begin(*args: Any, **options: Any) -> Any:
        nonlocal num_begun
        if num_begun == number:
            profiler.start()
        num_begun += 1
        return accumulate(*args, **options)

    def end(*args: Any, **options: Any) -> Any:
        outcome = apply(*args, **options)
        if num_begun == number + 1:
            profiler.stop()
        return outcome

    TrainingStep.accumulate = begin  # type: ignore[method-assign]
    Update.apply = end  # type: ignore[method-assign]
    try:
        yield profiler
    finally:
        TrainingStep.accumulate = accumulate  # type: ignore[method-assign]
        Update.apply = apply  # type: ignore[method-assign]


def seconds_by_operator(case: Case, precision: str) -> dict[str, float]:
    """Return the seconds that a step of vembed spends in each operator itself, not in those that it calls."""
    steps = WARM_UP + 1
    with tempfile.TemporaryDirectory() as name, profiled_step(WARM_UP) as profiled:
        run_vembed(
            case, demo_model(), Path(name), rows_of(case, steps), steps, precision
        )
    return {
        operator.key.removeprefix("aten::"): operator.self_cpu_time_total / 1e6
        for operator in profiled.key_averages()
    }


def shares(seconds: Mapping[str, float]) -> str:
    """Return a sentence: the time of products and of the rest, and the operators that take the most of the rest."""
    products = sum(value for name, value in seconds.items() if name in PRODUCTS)
    others = {name: value for name, value in seconds.items() if name not in PRODUCTS}
    others_time = sum(others.values())
    most = sorted(others, key=lambda name: -others[name])[:SHOWN]
    largest = ", ".join(f"{name} {others[name]:.3f}" for name in most)
    return (
        f"products {products:.2f} s, the rest {others_time:.2f} s ({others_time / (products + others_time):.0%}, with the profiler's own "
        f"time); most of the rest: {largest}"
    )


def main() -> None:
    """Print the sentence for the case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["auto", "no", "bf16"], default="auto")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    case = Case("products", 192, batch_size=arguments.batch_size, uniform=True)
    seconds = seconds_by_operator(case, arguments.precision)
    print(
        f"A step of {case.batch_size} pairs of {case.max_length} tokens, {arguments.threads} threads: {shares(seconds)}"
    )


if __name__ == "__main__":
    main()
