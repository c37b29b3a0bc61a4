"""What a run shows, records and checks: metrics of the steps, metrics.jsonl, trackers, set-up lines, progress bar, profile,
and warnings about the loss and the embeddings."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from vembed.config.terms import loss_terms, source_group_names
from vembed.errors import RunError
from vembed.parallel import collectives
from vembed.parallel.devices import memory_snapshot
from vembed.parallel.parameters import num_parameters
from vembed.progress import ProgressReport, duration, rate_text
from vembed.training.checkpoint.folders import METRICS_FILE, newest_checkpoint
from vembed.training.hooks.base import Evaluation, Hook, HookState, StepReport
from vembed.training.run_log import END_OF_SETUP, HEADLINE, LineFile
from vembed.training.trackers.base import TrackedRun, Tracker
from vembed.training.trackers.table import TRACKERS

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

LOG_LINE_COLUMNS = 160


@dataclass
class StepMetrics(Hook):
    """Metrics of the steps since the last logged one: speed, padding, time per activity and memory of every rank; the means of
    the losses; and [step, loss, learning rate, gradient norm] of each step, for the report.

    Means are those of each task, of each term of `losses` without its weight, and of the model's auxiliary losses. Tasks: of
    runs with several sources and homogeneous batches. A source is a task, unless `homogeneous_batches: task` joins it with
    others. There, each batch is of one task, and the terms are those of a task.

    Time between two steps (evaluation, saving) is not counted.
    """

    name = "step_curves"
    _counts: Counter[str] = field(default_factory=Counter)
    _seconds: float = 0.0
    _shares: dict[str, list[Tensor]] = field(default_factory=partial(defaultdict, list))
    """Name in the log -> this rank's shares of the losses."""
    _steps: list[list[float]] = field(default_factory=list)

    def on_start(self, run: Trainer) -> None:
        """See Hook."""
        self._device = run.session.device
        self._timer = run.training_step.timer
        self._tasks: list[str] = []
        """Name of the task of each source; empty if batches are not of one task each."""
        names = run.data.examples.names
        if run.config.data.homogeneous_batches and len(names) > 1:
            self._tasks = source_group_names(run.config.data, names)

    def before_step(self, step: int) -> None:
        """See Hook."""
        del step
        self._start = time.perf_counter()

    def on_step(self, report: StepReport) -> None:
        """See Hook."""
        for rank_batch, result in report.batches:
            self._counts.update(
                examples=len(rank_batch.where),
                inputs=rank_batch.num_inputs,
                distinct=len(rank_batch.features),
                useful=rank_batch.useful_tokens,
                padded=result.computed_tokens,
                forwards=result.num_forwards,
            )
            prefix = "loss/"
            if self._tasks:
                task = self._tasks[rank_batch.source_index]
                self._shares[f"loss/{task}"].append(result.loss_share)
                prefix = f"loss/{task}/"
            for term, share in result.terms.items():
                self._shares[prefix + term].append(share.detach())
            for name, value in result.auxiliary_means.items():
                # The same on every rank.
                part = value / collectives.world_size()
                self._shares[f"loss/{name}"].append(
                    torch.tensor(part, dtype=torch.float64)
                )
        outcome = report.outcome
        self._steps.append(
            [report.step, outcome.loss, report.learning_rate, outcome.grad_norm]
        )
        self._counts["steps"] += 1
        self._seconds += time.perf_counter() - self._start

    def metrics(self, report: StepReport) -> dict[str, Any]:
        """Return the metrics of all ranks since the last call. Collective; the same on every rank."""
        del report
        spent = {name: round(value, 6) for name, value in self._timer.take().items()}
        of_rank = {
            **self._counts,
            "seconds": spent,
            # Without the time in collectives: it includes waiting for the slowest rank, so it would hide which one that is.
            "work": sum(spent.values()) - spent["wait"],
            "padding": 1 - self._counts["useful"] / max(self._counts["padded"], 1),
            "memory": memory_snapshot(self._device),
        }
        ranks = collectives.gather_objects(of_rank)

        def column(name: str) -> list[Any]:
            return [entry[name] for entry in ranks]

        useful = column("useful")
        work = column("work")
        seconds = max(self._seconds, 1e-9)
        # The lower one of an even number: of two ranks, the slower one is compared with the other.
        median_work = sorted(work)[(len(work) - 1) // 2]
        values = {
            "samples_per_second": sum(column("examples")) / seconds,
            "tokens_per_second": sum(useful) / seconds,
            "step_seconds": seconds / max(self._counts["steps"], 1),
            "padding_fraction": 1 - sum(useful) / max(sum(column("padded")), 1),
            "duplicate_fraction": 1
            - sum(column("distinct")) / max(sum(column("inputs")), 1),
            "seconds": column("seconds"),
            "tokens": useful,
            "padding": column("padding"),
            "forwards": column("forwards"),
            "skew": max(work) / max(median_work, 1e-9),
            "slowest_rank": work.index(max(work)),
            "memory": [
                {"rank": rank, **entry["memory"]} for rank, entry in enumerate(ranks)
            ],
        }
        # All ranks have had the same tasks in the same steps, and so the same names in the same order.
        sums = []
        for shares in self._shares.values():
            share_sum = torch.stack(shares).to(torch.float64).sum()
            sums.append(float(share_sum))
        totals = collectives.sum_scalars(sums) if sums else []
        for (name, shares), loss_sum in zip(self._shares.items(), totals, strict=True):
            values[name] = loss_sum / len(shares)
        values["steps"] = self._steps
        self._counts.clear()
        self._seconds = 0.0
        self._shares.clear()
        self._steps = []
        return values

    def state(self) -> HookState:
        """See Hook."""
        return {"steps": self._steps} if self._steps else {}

    def load_state(self, state: HookState) -> None:
        """See Hook."""
        self._steps = [list(step) for step in state["steps"]]


def log_line(
    values: dict[str, Any],
    total_steps: int,
    seconds_left: float,
    head_rate: float,
) -> str:
    """Return the log line of one step, with as many losses as fit. All metrics are in metrics.jsonl. `head_rate`: the
    learning rate of heads."""
    head = ""
    if head_rate != values["learning_rate"]:
        head = f" (head {head_rate:.1e})"
    line = (
        f"step {values['step']:,d}/{total_steps:,d}  loss {values['loss']:.4f}  lr {values['learning_rate']:.1e}{head}  "
        f"grad {values['grad_norm']:.3g}  {rate_text(values['samples_per_second'])} samples/s  left {duration(seconds_left)}"
    )
    for name, value in values.items():
        if name.startswith("loss/"):
            addition = f"  {name.removeprefix('loss/')} {value:.4f}"
            if len(line + addition) <= LOG_LINE_COLUMNS:
                line += addition
    return line


@dataclass
class MetricsLog(Hook):
    """metrics.jsonl and the trackers, of rank 0 alone."""

    name = "metrics"
    trackers: list[Tracker] = field(default_factory=list)
    _closing: ExitStack = field(default_factory=ExitStack)
    """Closes the file, once it is open."""

    def on_start(self, run: Trainer) -> None:
        """Open the file and start the trackers."""
        options = run.config.logging
        settings = run.config.to_dict()
        tracked = TrackedRun(
            run.output,
            options.run_name,
            options.wandb_project,
            options.wandb_tags,
            {name: value for name, value in settings.items() if value is not None},
            run.state.step,
        )
        for name in options.report_to:
            tracker = TRACKERS[name]()
            tracker.start(tracked)
            self.trackers.append(tracker)
        self.file = LineFile(run.output / METRICS_FILE)
        self._closing.callback(self.file.close)

    def on_log(self, values: Mapping[str, Any]) -> None:
        """Write one logged step to metrics.jsonl and its numbers to the trackers."""
        numbers = {f"train/{key}": value for key, value in _numbers(values).items()}
        self._write(values, numbers, int(values["step"]))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""
        numbers = {}
        for key, score in evaluation.scores.items():
            numbers[f"eval/{key.replace('@', '_at_')}"] = score
        line = {
            "step": evaluation.step,
            "epoch": evaluation.epoch,
            "eval": evaluation.scores,
        }
        self._write(line, numbers, evaluation.step)

    def state(self) -> HookState:
        """Flush the file to the disk: a checkpoint must not be newer than its lines. Return the file's length."""
        self.file.sync()
        return {"bytes": self.file.path.stat().st_size}

    def on_finish(self, run: Trainer) -> None:
        """Close the file: the report reads it."""
        del run
        self._closing.close()

    def close(self) -> None:
        """Close the file and end the trackers."""
        self._closing.close()
        for tracker in self.trackers:
            with suppress(OSError):
                tracker.finish()

    def _write(
        self,
        line: Mapping[str, Any],
        numbers: dict[str, float],
        step: int,
    ) -> None:
        # A line without a newline was cut by a crash; resuming drops it.
        text = json.dumps({**line, "time": round(time.time(), 3)})
        # JSON has no NaN and no infinity: they become null.
        values = json.loads(text, parse_constant=lambda _: None)
        self.file.write(json.dumps(values))
        for tracker in list(self.trackers):
            try:
                tracker.log(numbers, step)
            except OSError as error:
                self.trackers.remove(tracker)
                log.warning(
                    f"report_to: {tracker.name} failed and is disabled ({error}); metrics.jsonl continues"
                )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in values, with one name each. A list of mappings has one entry per rank."""
    numbers = {}
    for key, value in values.items():
        if isinstance(value, int | float) and key not in ("step", "rank"):
            numbers[key] = float(value)
        elif isinstance(value, list):
            for rank, entry in enumerate(value):
                if isinstance(entry, Mapping):
                    for name, number in _numbers(entry).items():
                        numbers[f"{key}/rank{rank}/{name}"] = number
    return numbers


# ---- what a terminal shows ----------------------------------------------------


def log_setup(run: Trainer) -> None:
    """Log the five lines on the set-up: model, data, steps, device, and where the log is."""
    config = run.config
    data = run.data
    session = run.session
    description = run.components.embedding_model.description
    total = num_parameters(run.components.model)
    trained = num_parameters(run.components.model, trainable_only=True)
    share = "all trained" if trained == total else f"{trained:,d} trained"
    evaluation = "no validation data (set val_split: 0.1)"
    if data.evaluation is not None:
        evaluation = data.evaluation.summary()
    per_step = round(data.mean_examples_per_step)
    strategy: str = session.strategy
    if session.placement.run.strategy.value not in ("auto", strategy):
        strategy += f" ({session.placement.decisions['strategy'].reason})"
    output = f"{description.output_dim:,d} dimensions"
    if description.adds_projection:
        output += f" ({description.reasons['embedding_dim']})"
    output += f", pooling {description.pooling}"
    if description.is_reranker:
        output = "reranker"
    if description.modalities != ("image",):
        output += f", at most {description.max_length:,d} tokens"
    terms = loss_terms(config.objective, config.model.model_name)
    losses = [term.loss.name for term in terms]
    lines = [
        f"model: {config.model.model_name}, {description.family}, {output}, "
        f"{total:,d} parameters ({share})",
        f"data: {len(data.examples):,d} examples (sources: {len(data.examples.names):,d}); {evaluation}",
        f"steps: {data.total_steps:,d} of {per_step:,d} examples (epochs: {data.epoch_at(data.total_steps):.3g}), "
        f"learning rate {config.optimizer.learning_rate:g}, loss {', '.join(losses)}",
        f"device: {session.device}, processes: {session.world_size}, strategy {strategy}, mixed precision "
        f"{session.mixed_precision}",
    ]
    for line in lines:
        log.info(line, extra=HEADLINE)
    path = run.output / config.logging.log_file
    log.info(f"log: {path}", extra=END_OF_SETUP)


class ProgressBar(Hook):
    """Progress bar with rate and remaining time on a terminal. Files and pipes get log lines only."""

    def __init__(self, console: Console) -> None:
        is_shown = console.is_terminal and not console.quiet
        self.progress = ProgressReport("training", active=is_shown, console=console)

    def on_start(self, run: Trainer) -> None:
        """See Hook."""
        self.total_steps = run.data.total_steps
        self.progress.start()

    def on_step(self, report: StepReport) -> None:
        """See Hook."""
        self.progress(report.step, self.total_steps)

    def on_finish(self, run: Trainer) -> None:
        """See Hook."""
        del run
        self.close()  # what follows is not training

    def close(self) -> None:
        """See Hook."""
        self.progress.stop()


@dataclass
class Profile(Hook):
    """Profiler that writes the steps from `first` to `last` of each rank (`profile_steps`).

    The file trace-rank<r>.json is for Perfetto and chrome://tracing.
    """

    first: int
    last: int
    profiler: torch.profiler.profile | None = field(default=None, init=False)

    def on_start(self, run: Trainer) -> None:
        """See Hook."""
        self.path = run.output / f"trace-rank{run.session.rank}.json"
        if self.first > run.data.total_steps:
            log.warning(
                f"profile_steps: step {self.first} is after the run's last step, {run.data.total_steps}"
            )

    def before_step(self, step: int) -> None:
        """Start recording before the first chosen step, or before the first one left in a resumed run."""
        if self.profiler is None and self.first <= step <= self.last:
            self.profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
            self.profiler.start()

    def on_step(self, report: StepReport) -> None:
        """See Hook."""
        if report.step == self.last:
            self.close()

    def on_finish(self, run: Trainer) -> None:
        """See Hook."""
        del run
        self.close()  # a run may end before the last chosen step

    def close(self) -> None:
        """Stop recording and write the steps that there are."""
        profiler = self.profiler
        self.profiler = None
        if profiler is not None:
            profiler.stop()
            profiler.export_chrome_trace(str(self.path))
            log.info(f"profile_steps: the steps are in {self.path}")


# ---- checks ------------------------------------------------------------

COLLAPSED_COSINE = 0.99
"""Mean cosine between inputs above which embeddings no longer distinguish them."""
SMALLEST_LOSS = 1e-6
"""Below it a gradient of 0 is that of a loss that has nothing left to separate, in float32."""
MAX_SKIPPED_STEPS = 10
"""Steps in a row that `on_nonfinite: skip` skips before the run ends."""
MAX_NAMED_EXAMPLES = 5


@dataclass
class Watch(Hook):
    """Checks of each step's metrics. Each warning is given once."""

    _warned: set[str] = field(default_factory=set)

    def on_start(self, run: Trainer) -> None:
        """See Hook."""
        terms = loss_terms(run.config.objective, run.config.model.model_name)
        self._trains_embeddings = any(not term.loss.is_of_model for term in terms)
        self._is_cross_entropy = all(term.loss.is_cross_entropy for term in terms)

    def on_step(self, report: StepReport) -> None:
        """Stop the run at a non-finite step, or log it. The same on every rank."""
        step = report.step
        outcome = report.outcome
        if outcome.is_overflow:
            log.info(
                f"step {step}: float16 overflow, gradient scale halved, step skipped"
            )
        elif not outcome.applied:
            self._on_nonfinite(report)
        elif outcome.grad_norm == 0.0 and abs(outcome.loss) > SMALLEST_LOSS:
            # The run would go on and change nothing.
            raise RunError(
                f"step {step}: the loss is {outcome.loss:g} and the gradient norm exactly 0, so nothing is "
                "trained: either all embeddings are the same, or no gradient reaches the weights; check pooling, "
                f"freeze and learning_rate (mean cosines are in metrics.jsonl); {self._checkpoint_note()}"
            )

    def _on_nonfinite(self, report: StepReport) -> None:
        """Raise RunError with the cause, or log it with `on_nonfinite: skip`. Collective."""
        optimizer = self.run.config.optimizer
        step = report.step
        finite_rows = torch.isfinite(report.embeddings).all(dim=1)
        has_broken_weights = step > 1 and not bool(finite_rows.any())
        examples = []
        for rank_batch, result in report.batches:
            if not math.isfinite(float(result.embeddings_sum)):
                examples += rank_batch.where
        ranks = []
        named = collectives.gather_objects(examples[:MAX_NAMED_EXAMPLES])
        for rank, places in enumerate(named):
            if places:
                ranks.append(f"rank {rank}: {', '.join(places)}")
        if has_broken_weights:
            cause = (
                "all embeddings are non-finite, so the weights are: an earlier update with learning_rate: "
                f"{optimizer.learning_rate:g} broke them"
            )
        elif ranks:
            cause = f"non-finite embeddings on {'; '.join(ranks)}"
        else:
            cause = "the embeddings are finite on all ranks, so the gradient overflowed"
        outcome = report.outcome
        message = f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; {cause}"
        if optimizer.on_nonfinite == "stop":
            advice = "Lower learning_rate or max_grad_norm, use mixed_precision: bf16 in place of fp16"
            if not has_broken_weights:
                advice += ", or set on_nonfinite: skip to skip such steps"
            raise RunError(f"{message}. {advice}; {self._checkpoint_note()}")
        log.warning(f"{message}; step skipped (on_nonfinite: skip)")
        num_skipped = self.run.state.skipped_in_a_row
        if num_skipped >= MAX_SKIPPED_STEPS:
            raise RunError(
                f"{num_skipped} steps in a row were skipped (on_nonfinite: skip), the last one {step}, so the weights "
                "no longer change: lower learning_rate or max_grad_norm, or fix the examples that the log names; "
                f"{self._checkpoint_note()}"
            )

    def metrics(self, report: StepReport) -> dict[str, float]:
        """Return the mean cosine between this rank's inputs, and log warnings."""
        step = report.step
        loss = report.outcome.loss
        embeddings = report.embeddings
        cosine = mean_cosine(embeddings)
        # Of scores, which have one dimension, every cosine is 1 or -1.
        is_vector = embeddings.shape[1] > 1
        if cosine > COLLAPSED_COSINE and self._trains_embeddings and is_vector:
            self._warn_once(
                "collapse",
                f"embeddings collapse: the mean cosine between inputs is {cosine:.3f}; lower learning_rate, check that "
                "pooling fits the model, and that positives are not the same text in every row",
            )
        if loss == 0.0 and self._is_cross_entropy:
            self._warn_once(
                "zero",
                f"the loss of step {step:,d} is exactly 0, so there is no gradient: positives had no negatives to be "
                "compared with, or are separated already; check that positives differ (copies in a batch do not "
                "count as negatives), or add negatives",
            )
        return {"mean_cosine": cosine}

    def _checkpoint_note(self) -> str:
        newest = newest_checkpoint(self.run.output)
        if not newest:
            return "no checkpoint was saved before (save_steps keeps some)"
        return f"{newest} is untouched"

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(message)


def mean_cosine(embeddings: Tensor) -> float:
    """Return the mean cosine over all pairs of different rows of `embeddings` [n, D], without a matrix of pairs."""
    num = embeddings.shape[0]
    if num < 2:
        return 0.0
    unit = torch.nn.functional.normalize(embeddings.detach().float(), dim=1)
    # |sum of unit vectors|^2 is the sum of all cosines, the n of each row with itself included.
    total = float(unit.sum(dim=0).square().sum())
    return (total - num) / (num * (num - 1))
