"""python -m benchmarks.host: what a step costs the host besides the model, and what the thread that prepares batches
costs the thread that launches the step."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import vembed
from benchmarks.scale import write_data
from tests import tiny
from vembed.config.schema import TrainConfig
from vembed.data.batching.rank_batch import RankBatch
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.batching.stream import BatchProcess, RankBatchStream
from vembed.data.example_store import open_examples
from vembed.data.features import Featuriser
from vembed.models.families.description import describe
from vembed.training.optimizer import Update
from vembed.training.step import TrainingStep

ROWS = 256
STEPS = 30
NUM_BATCHES = 8
SECONDS = 3.0
"""Time for which calls are counted."""
MODEL_STAGES = {"encode": TrainingStep, "backward": TrainingStep}
HOST_STAGES = {
    "split": TrainingStep,
    "gather": TrainingStep,
    "differentiate": TrainingStep,
    "synchronise": TrainingStep,
    "apply": Update,
}


@contextmanager
def timed_stages(
    seconds: dict[str, list[float]], stages: dict[str, type]
) -> Iterator[None]:
    """Note the processor time of each call of a stage, which a busy machine does not change much."""

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            result = original(*arguments, **options)
            seconds[name].append(time.thread_time() - start)
            return result

        return call

    with ExitStack() as stack:
        for name, owner in stages.items():
            method = timed(name, vars(owner)[name])
            stack.enter_context(mock.patch.object(owner, name, method))
        yield


def train(folder: Path, on_step: Callable[[Any], None]) -> None:
    """Train the tiny model."""
    vembed.train(
        {
            "model_name": str(tiny.shared(tiny.tiny_bert)),
            "data_path": str(folder / "data.jsonl"),
            "output_dir": str(folder / "run"),
            "batch_size": ROWS,
            "max_steps": STEPS,
            "logging_steps": STEPS,
            "report_to": [],
            "overwrite": True,
        },
        on_step=on_step,
    )


def operation_seconds(folder: Path) -> float:
    """Return the seconds that one step spends inside torch's operations, without those of the model."""
    profiler = profile(activities=[ProfilerActivity.CPU])
    first = STEPS // 3
    num_done = 0

    def on_step(_: Any) -> None:
        nonlocal num_done
        num_done += 1
        if num_done == first:
            profiler.start()
        elif num_done == STEPS - 1:
            profiler.stop()

    def in_range(name: str) -> Callable[..., Any]:
        original = vars(TrainingStep)[name]

        def call(*arguments: Any, **options: Any) -> Any:
            with record_function(name):
                return original(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in MODEL_STAGES:
            patch = mock.patch.object(TrainingStep, name, in_range(name))
            stack.enter_context(patch)
        train(folder, on_step)
    events = profiler.events() or []
    stages = [event for event in events if event.name in MODEL_STAGES]
    thread = stages[0].thread
    # A step lasts from one `encode` to the next.
    starts = sorted(
        event.time_range.start for event in stages if event.name == "encode"
    )
    microseconds = [0.0] * len(starts)
    for event in events:
        # The time of an operation itself: that of the operations which it calls is theirs.
        is_operation = event.name.startswith("aten::") and event.thread == thread
        start = event.time_range.start
        in_model = any(
            stage.time_range.start <= start <= stage.time_range.end for stage in stages
        )
        step = bisect(starts, start) - 1
        if is_operation and not in_model and step >= 0:
            microseconds[step] += event.self_cpu_time_total
    # The last one ends with the profiler.
    return statistics.median(microseconds[:-1]) / 1e6


def host_seconds(folder: Path) -> dict[str, float]:
    """Return the median seconds of the stages of a step that are not the model's, and of the whole rest of a step."""
    # The first steps warm up, and the last one is logged.
    first = STEPS // 3
    in_model: dict[str, list[float]] = defaultdict(list)
    ends: list[float] = []
    with timed_stages(in_model, MODEL_STAGES):
        train(folder, lambda _: ends.append(time.thread_time()))
    others = []
    for step in range(first, STEPS - 1):
        model_seconds = sum(in_model[name][step] for name in MODEL_STAGES)
        others.append(ends[step] - ends[step - 1] - model_seconds)
    medians = {"together": statistics.median(others)}
    # In another run: reading the clock takes time too, which would count as that of the step.
    seconds: dict[str, list[float]] = defaultdict(list)
    with timed_stages(seconds, HOST_STAGES):
        train(folder, lambda _: None)
    for name in HOST_STAGES:
        medians[name] = statistics.median(seconds[name][first:-1])
    return medians


def calls_per_second() -> float:
    """Return how many small operations this thread starts in a second."""
    values = torch.zeros(8)
    count = 0
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for _ in range(100):
            values.add_(1.0)
        count += 100
    return count / SECONDS


def preparation(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a thread that gets a batch by itself or from a process, and the calls per second beside
    such threads."""
    config = TrainConfig(
        model_name=str(tiny.shared(tiny.tiny_bert)),
        data_path=str(folder / "data.jsonl"),
    )
    store = open_examples(config.data, str(config.data.data_path))
    schedule = BatchSchedule([len(store)], ROWS, 0)
    featuriser = Featuriser(describe(config.model))
    stream = RankBatchStream(store, schedule, featuriser, 0, 1, 0)
    start = time.thread_time()
    for number in range(NUM_BATCHES):
        stream.rank_batch(number)
    batch_seconds = (time.thread_time() - start) / NUM_BATCHES
    process = BatchProcess(stream)
    while not process.is_ready():
        time.sleep(0.1)
    start = time.thread_time()
    for number in range(NUM_BATCHES):
        process.rank_batch(number)
    received_seconds = (time.thread_time() - start) / NUM_BATCHES
    seconds = {"a thread": batch_seconds, "a process": received_seconds}
    rates = {"alone": calls_per_second()}
    for name, preparer in {"a thread": stream, "a process": process}.items():
        with repeating(preparer.rank_batch):
            rates[f"beside {name}"] = calls_per_second()
    process.close()
    return seconds, rates


@contextmanager
def repeating(prepare: Callable[[int], RankBatch]) -> Iterator[None]:
    """Prepare batches in a thread, all the time."""
    is_over = threading.Event()

    def run() -> None:
        for number in cycle(range(NUM_BATCHES)):
            if is_over.is_set():
                return
            prepare(number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(ROWS * STEPS, folder / "data.jsonl")
        medians = host_seconds(folder)
        in_operations = operation_seconds(folder)
        batch_seconds, rates = preparation(folder)
    cells = ", ".join(f"{name} {1000 * value:.2f}" for name, value in medians.items())
    print(f"milliseconds of a step of {ROWS} pairs besides the model: {cells}")
    in_python = 1000 * (medians["together"] - in_operations)
    print(
        f"of these in torch's operations {1000 * in_operations:.2f}, in Python {in_python:.2f}"
    )
    for name, seconds in batch_seconds.items():
        print(f"milliseconds of a thread for a batch, by {name}: {1000 * seconds:.1f}")
    for name, rate in rates.items():
        print(f"calls per second, {name}: {rate:,.0f}")


if __name__ == "__main__":
    main()
