"""python -m benchmarks.counts: counts per step that do not depend on the machine's load; two processes on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import CASES, Case, rows_of, write_rows
from benchmarks.work import useful_work
from vembed.cli.commands.demo import demo_model
from vembed.config.schema import TrainConfig
from vembed.entrypoints.python_train import train
from vembed.losses.batch import LossBatch
from vembed.losses.build import build_loss
from vembed.models import embedding_model
from vembed.models.embedding_model import EmbeddingModel
from vembed.parallel import collectives
from vembed.training.optimizer import Update
from vembed.training.step import TrainingStep

NUM_RANKS = 2
STEPS = 3
SMALL = Case("small", 48, batch_size=16, steps=STEPS)
"""The case that is counted. Padding is counted at the sizes of a benchmark."""
MARK = "COUNTS "


class Reads(TorchDispatchMode):
    """Counter of values read from a device. On a GPU each read waits until the device has caught up."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0
        self.counting = True
        self.is_in_step = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self.counting:
            self.num_reads += 1
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Element count of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@contextmanager
def counting(
    reads: Reads, forwards: list[int], steps: list[Counter[str]]
) -> Iterator[None]:
    """Count reads and forward passes inside the with-block, and for each update the collectives since the last."""

    def around(original: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if first:
                collectives.calls.clear()
            reads.is_in_step = True
            with reads:
                result = original(*args, **options)
            reads.is_in_step = False
            if not first:
                steps.append(Counter(collectives.calls))
            return result

        return call

    def uncounted(inputs: embedding_model.Inputs) -> Tensor | None:
        reads.counting = (
            False  # only the CPU path looks at the mask, where reading costs no wait
        )
        try:
            return padding_mask(inputs)
        finally:
            reads.counting = True

    def forward(module: nn.Module, *_: Any) -> None:
        if (
            isinstance(module, EmbeddingModel) and reads.is_in_step
        ):  # a run also encodes to check what it saves
            forwards.append(1)

    padding_mask = embedding_model.padding_mask
    hook = nn.modules.module.register_module_forward_pre_hook(forward)
    try:
        with (
            mock.patch.object(
                TrainingStep,
                "accumulate",
                around(TrainingStep.accumulate, first=True),
            ),
            mock.patch.object(Update, "apply", around(Update.apply, first=False)),
            mock.patch.object(embedding_model, "padding_mask", uncounted),
        ):
            yield
    finally:
        hook.remove()


def count(
    case: Case,
    folder: Path,
    model: Path,
    micro_batch_tokens: int,
    use_gradient_cache: bool,
) -> dict[str, Any]:
    """Return counts per step of a run on this process and its group."""
    reads = Reads()
    forwards = list[int]()
    steps = list[Counter[str]]()
    name = f"{micro_batch_tokens}-{use_gradient_cache}"
    with counting(reads, forwards, steps):
        train(
            {
                "model_name": str(model),
                "data_path": str(folder / "data.jsonl"),
                "output_dir": str(folder / name),
                "global_batch_size": case.batch_size,
                "max_length": case.max_length,
                "micro_batch_tokens": micro_batch_tokens,
                "use_gradient_cache": use_gradient_cache,
                "logging_steps": 1000,
                "max_steps": STEPS,
                "report_to": [],
            }
        )
    lines = [
        json.loads(line)
        for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "padding": max(
            line["padding_fraction"] for line in lines if "padding_fraction" in line
        ),
        "micro_batch_tokens": micro_batch_tokens,
        "use_gradient_cache": use_gradient_cache,
        "forwards_per_step": len(forwards) / STEPS,
        "reads_per_step": reads.num_reads / STEPS,
        "collectives_per_step": dict(sorted(steps[-1].items())),
    }


def loss_elements(num_rows: int, dim: int = 64) -> int:
    """Return the element count of the largest tensor that the loss makes, forward and backward."""
    rows = torch.arange(num_rows)
    nothing = torch.empty(0, dtype=torch.int64)
    batch = LossBatch(
        embeddings=torch.randn(2 * num_rows, dim).requires_grad_(),
        content=torch.arange(2 * num_rows),
        query=rows,
        positive=rows + num_rows,
        example=rows,
        negative=nothing,
        negative_example=nothing,
        label_scores=None,
        rank_rows=slice(0, num_rows),
        rank_negatives=slice(0, 0),
    )
    with Largest() as largest:
        build_loss(TrainConfig(model_name="none", data_path="none"))(batch).backward()
    return largest.num_elements


def run_counts(folder: Path, model: Path) -> list[dict[str, Any]]:
    """Return the counts of three runs on this process and its group."""
    return [
        count(SMALL, folder, model, tokens, cache)
        for tokens, cache in ((4096, False), (128, False), (128, True))
    ]


def worker(folder: Path) -> None:
    """Run one rank."""
    runs = run_counts(folder, demo_model())
    if os.environ["RANK"] == "0":
        print("\n" + MARK + json.dumps(runs), flush=True)


def write_data(folder: Path) -> None:
    """Write the data of the runs."""
    write_rows(rows_of(SMALL, STEPS), SMALL.batch_size, folder / "data.jsonl")


def more_counts() -> dict[str, Any]:
    """Return the counts that need no run: padding of a benchmark's case, and the size of the loss's tensors."""
    _, _, (padding, padding_by_column) = useful_work(
        next(case for case in CASES if case.name == "natural-128")
    )
    return {
        "padding_if_padded": padding,
        "padding_by_column": padding_by_column,
        "loss_elements": {
            str(rows): loss_elements(rows) for rows in (2048, 4096, 8192)
        },
    }


def counts() -> dict[str, Any]:
    """Return all counts, from two processes."""
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={NUM_RANKS}",
            "-m",
            "benchmarks.counts",
            "--worker",
            name,
        ]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return {"runs": json.loads(lines[-1].removeprefix(MARK)), **more_counts()}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    counted = counts()
    print(
        f"tokens per useful token: {1 / (1 - counted['runs'][0]['padding']):.2f}; in models that need padding "
        f"{1 / (1 - counted['padding_if_padded']):.2f}, and padded column by column "
        f"{1 / (1 - counted['padding_by_column']):.2f}"
    )
    for run in counted["runs"]:
        sent = ", ".join(
            f"{name} {total}" for name, total in run["collectives_per_step"].items()
        )
        print(
            f"micro_batch_tokens {run['micro_batch_tokens']:,d}, use_gradient_cache {run['use_gradient_cache']}, per "
            f"step and rank: {run['forwards_per_step']:g} forwards, {run['reads_per_step']:g} reads of a number from "
            f"the device, collectives: {sent}"
        )
    for rows, elements in counted["loss_elements"].items():
        print(
            f"loss of {int(rows):,d} rows: the largest tensor has {elements:,d} elements"
        )


if __name__ == "__main__":
    main()
