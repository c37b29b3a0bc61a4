"""Diagnostics: per-rank counts between two log lines, combined for metrics.jsonl and for the log line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vembed.data.batching.rank_batch import RankBatch
from vembed.parallel import collectives
from vembed.parallel.memory import memory_snapshot
from vembed.progress import duration
from vembed.training.hooks import Hook, Run, StepReport
from vembed.training.step import BatchResult

MAX_COLUMNS = 100
"""Length of a step's log line."""
SLOW_RANK = 1.2
"""Ratio of a rank's own working time to the median's from which the log line names it as slow."""


@dataclass
class Window:
    """Counts of this rank since the last log line."""

    num_examples: int = 0
    num_inputs: int = 0
    num_distinct: int = 0
    useful_tokens: int = 0
    padded_tokens: int = 0
    num_forwards: int = 0
    num_steps: int = 0
    seconds: float = 0.0

    def add(self, rank_batch: RankBatch, result: BatchResult) -> None:
        """Count one global batch."""
        self.num_examples += rank_batch.num_examples
        self.num_inputs += rank_batch.num_inputs
        self.num_distinct += len(rank_batch.features)
        self.useful_tokens += rank_batch.useful_tokens
        self.padded_tokens += result.padded_tokens
        self.num_forwards += result.num_forwards


class Diagnostics(Hook):
    """Speed, padding, time per phase and memory of every rank. Time between two steps (evaluation, saving) is not
    counted."""

    def __init__(self) -> None:
        self.window = Window()
        self._began = 0.0

    def on_start(self, run: Run) -> None:
        """Take the device and the timer of the run."""
        self._device, self._timer = run.session.device, run.step.timer

    def before_step(self, step: int) -> None:
        """Start timing a step."""
        del step
        self._began = time.perf_counter()

    def on_step(self, report: StepReport) -> None:
        """Count a step."""
        for rank_batch, result in report.batches:
            self.window.add(rank_batch, result)
        self.window.num_steps += 1
        self.window.seconds += time.perf_counter() - self._began

    def figures(self, report: StepReport) -> dict[str, Any]:
        """Return the figures of all ranks since the last call. Collective; the same on every rank."""
        del report
        window, self.window = self.window, Window()
        seconds = max(window.seconds, 1e-9)
        phases = self._timer.take()
        mine = {
            "seconds": {name: round(value, 6) for name, value in phases.items()},
            "counts": [
                window.num_examples,
                window.num_inputs,
                window.num_distinct,
                window.useful_tokens,
                window.padded_tokens,
            ],
            "forwards": window.num_forwards,
            "memory": memory_snapshot(self._device),
        }
        ranks = collectives.gather_objects_as_json(mine)
        examples, inputs, distinct, useful, padded = (
            sum(rank["counts"][i] for rank in ranks) for i in range(5)
        )
        # Time in collectives is excluded: it includes waiting for the slowest rank, so it would hide which one that is.
        work = [
            sum(rank["seconds"].values()) - rank["seconds"]["wait"] for rank in ranks
        ]
        slowest = max(range(len(work)), key=work.__getitem__)
        return {
            "samples_per_second": examples / seconds,
            "tokens_per_second": useful / seconds,
            "step_seconds": seconds / max(window.num_steps, 1),
            "padding_fraction": 1 - useful / padded if padded else 0.0,
            "duplicate_fraction": 1 - distinct / inputs if inputs else 0.0,
            "seconds": [rank["seconds"] for rank in ranks],
            "tokens": [rank["counts"][3] for rank in ranks],
            "padding": [
                1 - rank["counts"][3] / rank["counts"][4] if rank["counts"][4] else 0.0
                for rank in ranks
            ],
            "forwards": [rank["forwards"] for rank in ranks],
            "skew": max(work) / max(sorted(work)[len(work) // 2], 1e-9),
            "slowest_rank": slowest,
            "memory": [
                {"rank": rank, **entry["memory"]} for rank, entry in enumerate(ranks)
            ],
        }


def log_line(values: dict[str, Any], total_steps: int, seconds_left: float) -> str:
    """Return the log line of one step, of at most 100 columns. All figures are in metrics.jsonl."""
    rate = values["samples_per_second"]
    line = (
        f"step {values['step']:,d}/{total_steps:,d}  loss {values['loss']:.4f}  lr {values['learning_rate']:.1e}  "
        f"grad {values['grad_norm']:.3g}  {f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} samples/s  "
        f"left {duration(seconds_left)}"
    )
    for name, value in values.items():
        part = (
            f"  {name.removeprefix('loss/')} {value:.4f}"
            if name.startswith("loss/")
            else ""
        )
        line += part if len(line + part) <= MAX_COLUMNS else ""
    slow = f"  rank {values['slowest_rank']} slow"
    if (
        len(values["memory"]) > 1
        and values["skew"] > SLOW_RANK
        and len(line + slow) <= MAX_COLUMNS
    ):
        line += slow
    return line
