"""python -m benchmarks.ranks: what one rank of many does in a step besides computing, with the tables of W ranks.

Other ranks do not exist: the collectives return what they would, with this rank's numbers in place of theirs. Measured
are the stages whose work grows with W: drawing the global batch, splitting, gathering the rows' integers, and laying out
the candidates. Forward, backward and the scores are computing, and are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scale import write_data
from vembed.cli.commands.demo import demo_model
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig
from vembed.data.batching.rank_batch import Feeder
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.batching.stream import RankBatchStream
from vembed.data.example_store import open_examples
from vembed.data.features import Featuriser
from vembed.losses import candidates
from vembed.losses.build import build_loss
from vembed.models.building import build_model
from vembed.models.families.description import describe
from vembed.parallel import collectives
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import Budget
from vembed.training import step
from vembed.training.frozen import InputBuilder
from vembed.training.step import FieldPart, TrainingStep, gather_fields

T = TypeVar("T")
WORLD_SIZES = (8, 64, 1024)
ROWS = 16
"""Rows of each rank."""
REPEATS = 3


class Integers(TorchDispatchMode):
    """Largest number of bytes in one tensor of integers: the tables that grow with the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype in (
                torch.int64,
                torch.int32,
            ):
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return result


@contextmanager
def as_one_of(world_size: int, seconds: dict[str, float]) -> Iterator[None]:
    """Let this process be the middle one of so many, and add up the seconds of each stage."""

    def timed(name: str, original: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **options: Any) -> T:
            start = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                seconds[name] += time.perf_counter() - start

        return call

    def gathered_ints(values: Sequence[int]) -> list[list[int]]:
        return [list(values) for _ in range(world_size)]

    def gathered_rows(rows: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return rows.detach().repeat(world_size, *(1 for _ in rows.shape[1:]))

    def own_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
        return rows[: counts[0]] * world_size

    def distinct(columns: dict[str, FieldPart]) -> dict[str, Tensor]:
        """Let other ranks' rows be other examples, with inputs and contents of their own."""
        gathered = gather_fields(columns)
        sampled_rank = world_size // 2
        for name, column in list(gathered.items()):
            if name == "failed":
                continue
            rank = torch.arange(world_size).repeat_interleave(
                torch.tensor(columns[name].counts)
            )
            if name in ("query", "positive", "negative"):
                gathered[name] = (
                    column + (rank - sampled_rank) * columns["content"].counts[0]
                )
            else:
                gathered[name] = column + rank * (
                    1_000_003 if name == "content" else ROWS * world_size
                )
        return gathered

    fakes: dict[str, Any] = {
        "world_size": lambda: world_size,
        "rank": lambda: world_size // 2,
        "all_gather_ints": gathered_ints,
        "number_device": lambda: torch.device("cpu"),
        "all_gather_parts": gathered_rows,
        "reduce_scatter_parts": own_rows,
        "max_ints": list,
        "sum_ints": list,
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(collectives, name, fake))
        for name in ("split", "gather"):
            stack.enter_context(
                mock.patch.object(
                    TrainingStep, name, timed(name, getattr(TrainingStep, name))
                )
            )
        stack.enter_context(mock.patch.object(step, "gather_fields", distinct))
        stack.enter_context(
            mock.patch.object(
                candidates,
                "plan_scores",
                timed("candidates", candidates.plan_scores),
            )
        )
        yield


def measure(
    world_size: int, folder: Path, rows: int = ROWS, repeats: int = REPEATS
) -> dict[str, float]:
    """Return the median seconds of each stage, and the bytes of the largest table of integers."""
    config = TrainConfig(
        model_name=str(demo_model()),
        data_path=str(folder / "data.jsonl"),
        max_length=16,
        batch_size=rows,
    )
    store = open_examples(config.data, str(config.data.data_path))
    schedule = BatchSchedule([len(store)], rows * world_size, 0)
    times: dict[str, list[float]] = defaultdict(list)
    with start_session(resolve_run(config, env={})) as session:
        description = describe(config.model)
        model = session.prepare(
            build_model(description, config.model, config.adapters),
            description.layer_classes,
        )
        featuriser = Featuriser(description)
        stream = RankBatchStream(
            store, schedule, featuriser, world_size // 2, world_size, 0
        )
        session.world_size = world_size
        session.rank = world_size // 2
        builder = InputBuilder(model, Feeder(featuriser, session.device), session)
        budget = Budget(4096, 10**9, use_gradient_cache=False)
        stages = TrainingStep(model, build_loss(config), builder, session, budget, 0)
        schedule.batch(0, 0)  # an epoch's permutation is drawn once
        integers = Integers()
        for repeat in range(repeats + 1):
            seconds: dict[str, float] = defaultdict(float)
            with as_one_of(world_size, seconds):
                start = time.perf_counter()
                batch = stream.rank_batch(repeat % schedule.batches_per_epoch)
                seconds["batch"] = time.perf_counter() - start
                if repeat == 0:  # the first one is a warm-up, and counts bytes
                    with integers:
                        stages.accumulate(batch, repeat, weight=1.0, is_last_batch=True)
                    continue
                stages.accumulate(batch, repeat, weight=1.0, is_last_batch=True)
            for name, value in seconds.items():
                times[name].append(value)
        session.world_size = 1
        session.rank = 0
    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "bytes": float(integers.largest),
    }


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLD_SIZES)
    arguments = parser.parse_args()
    stages = {
        "batch": "drawing and reading",
        "split": "splitting",
        "gather": "gathering",
        "candidates": "candidates",
    }
    print(
        f"| ranks | rows | {' | '.join(f'{stage}, ms' for stage in stages.values())} | together, ms | largest table |"
    )
    print("|---|---|" + "---|" * (len(stages) + 2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(max(arguments.ranks) * arguments.rows, folder / "data.jsonl")
        for world_size in arguments.ranks:
            times = measure(world_size, folder, arguments.rows)
            cells = " | ".join(f"{1000 * times[stage]:.1f}" for stage in stages)
            total = 1000 * sum(times[stage] for stage in stages)
            table = f"{times['bytes'] / 2**20:.2f} MiB"
            print(
                f"| {world_size:,d} | {world_size * arguments.rows:,d} | {cells} | {total:.1f} | {table} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
