"""Hook: an addition to the training loop that needs no change of the loop. `Hooks`: all those of a run.

The order of calls in a run, each on every rank:

    on_build                            model, loss and optimizer exist; nothing is restored yet
    load_state                          only in a resumed run; the tensors of `tensors` are filled already
    on_start                            before the first evaluation and the first step
      on_epoch, before_step             before the batches of a step are read
      on_step                           after the optimizer step
      metrics, on_log                   with each logged step
      evaluation_weights, on_evaluation with each evaluation
      state, tensors                    with each checkpoint
    on_finish                           after the last evaluation, before the weights of final/ are chosen
    evaluation_weights                  again, while final/ is written
    close                               at the end, also after an error

A method that communicates (a collective, a forward pass of a sharded model) must do so on every rank. Reasons to end
the run may differ between the ranks: the loop collects them. A hook may read the public attributes of the trainer:
`config`, `output`, `session`, `data`, `components`, `state`, `intervals`, `hooks`; after `on_build` also
`training_step` and `stream`, whose `store` gives the examples of the batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vembed.data.batching.rank_batch import RankBatch
from vembed.errors import UserError
from vembed.evaluation.query_results import QueryResults
from vembed.training.optimizer import Outcome
from vembed.training.step import BatchResult

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")


@dataclass
class StepReport:
    """Result of one optimizer step, as the hooks see it."""

    step: int
    """Number of the step, counted from 1."""
    epoch: float
    """Epochs done after the step."""
    batches: list[tuple[RankBatch, BatchResult]] = field(default_factory=list)
    """This rank's part of each global batch of the step (several with gradient accumulation)."""
    outcome: Outcome = field(init=False)
    """Loss of the step, gradient norm, and whether the weights were updated. The same on every rank."""
    learning_rate: float = field(init=False)
    embeddings: Tensor = field(init=False)
    """This rank's embeddings of the last global batch."""

    def add(self, rank_batch: RankBatch, result: BatchResult) -> None:
        """Add one global batch. Of the embeddings, only those of the last one are kept in memory."""
        self.embeddings = result.embeddings
        no_rows = result.embeddings.new_empty(0)
        self.batches.append((rank_batch, replace(result, embeddings=no_rows)))

    @property
    def loss_share(self) -> float:
        """This rank's part of the loss of the step: the mean over its global batches."""
        total = 0.0
        for _, result in self.batches:
            total += float(result.loss_share_on_host.read() / len(self.batches))
        return total


@dataclass(frozen=True)
class Evaluation:
    """Scores of the weights after a step (0: before training). The same on every rank."""

    step: int
    epoch: float
    scores: dict[str, float]
    metric: str
    """Key of the score that decides which checkpoint is best."""
    queries: QueryResults | None = field(default=None, repr=False)
    """Results of each query of retrieval data."""


HookState = dict[str, Any]
"""State of a hook in a checkpoint, besides its tensors."""


class Hook:
    """Base class of hooks. Every method but `on_build` does nothing until it is overridden."""

    name = ""
    """Key of the hook's state in checkpoints. A hook with `state` or `tensors` needs one of its own."""
    run: Trainer
    """The run that it belongs to."""

    def on_build(self, run: Trainer) -> None:
        """Keep the run. A hook may allocate here what depends on the model: `run.components` and `run.data` exist."""
        self.run = run

    def on_start(self, run: Trainer) -> None:
        """Begin the run, new or resumed (`run.state.step` steps are done)."""

    def on_epoch(self, epoch: int) -> None:
        """Prepare an epoch (counted from 0), before its first batch is used. Not called for the rest of an epoch that a
        resumed run begins with. After a change of the examples call `run.restart_stream()`."""

    def before_step(self, step: int) -> None:
        """Prepare a step (counted from 1)."""

    def on_step(self, report: StepReport) -> str | None:
        """Take note of a step. Return a reason to end the run after it, or None."""
        del report
        return None

    def metrics(self, report: StepReport) -> Mapping[str, Any]:
        """Return metrics for the log line and metrics.jsonl."""
        del report
        return {}

    def on_log(self, values: Mapping[str, Any]) -> None:
        """Take note of the metrics of a logged step, those of all hooks together."""

    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        """Take note of an evaluation. Return a reason to end the run, or None."""
        del evaluation
        return None

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the weights to evaluate and to write to final/ (an average of the
        trained ones, for example). At its exit the trained weights are back."""
        return nullcontext()

    def state(self) -> HookState:
        """Return the state for checkpoints, as JSON values."""
        return {}

    def load_state(self, state: HookState) -> None:
        """Take over the state of a checkpoint."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return tensors for checkpoints by name: plain ones, equal on every rank, or DTensors. They are filled in
        place when a checkpoint that holds them is loaded."""
        return {}

    def on_finish(self, run: Trainer) -> None:
        """End the run's training. The weights in the model are those of the last step."""

    def close(self) -> None:
        """Release files and threads. Called once, also after an error."""


class Hooks(list[Hook]):
    """All hooks of a run, in the order in which they are called."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        super().__init__(hooks)
        names = [hook.name for hook in self if hook.name]
        assert len(names) == len(set(names)), f"two hooks have the same name: {names}"

    def on_step(self, report: StepReport) -> bool:
        """Call `on_step` of each. Return true if one of this rank's hooks gives a reason to end the run, which is logged."""
        # All are called, also after one has given a reason: some communicate.
        return _log_reasons([(hook, hook.on_step(report)) for hook in self])

    def on_evaluation(self, evaluation: Evaluation) -> bool:
        """Call `on_evaluation` of each. Return true if one of this rank's hooks gives a reason to end the run."""
        return _log_reasons([(hook, hook.on_evaluation(evaluation)) for hook in self])

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Hold the contexts of all hooks open."""
        with ExitStack() as stack:
            for hook in self:
                stack.enter_context(hook.evaluation_weights())
            yield

    def states(self) -> dict[str, HookState]:
        """Return the state of each hook that has one, by its name."""
        states = {}
        for hook in self:
            state = hook.state()
            if state:
                assert hook.name, f"{type(hook).__name__} has a state and needs a name"
                states[hook.name] = state
        return states

    def load_states(self, states: Mapping[str, HookState]) -> None:
        """Give each hook the state that a checkpoint holds for it."""
        for hook in self:
            if hook.name in states:
                hook.load_state(states[hook.name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all hooks for a checkpoint."""
        tensors = {}
        for hook in self:
            for name, tensor in hook.tensors().items():
                tensors[f"{hook.name}.{name}"] = tensor
        return tensors

    def close(self) -> None:
        """Call `close` of each in reverse order, all of them even if one fails."""
        with ExitStack() as stack:
            for hook in self:
                stack.callback(hook.close)


def _log_reasons(answers: Sequence[tuple[Hook, str | None]]) -> bool:
    """Log each reason to end the run. Return whether there is one."""
    has_reason = False
    for hook, reason in answers:
        if reason is not None:
            log.info(f"{type(hook).__name__} ends the run: {reason}")
            has_reason = True
    return has_reason


# ---- functions of the caller as a hook ---------------------------------------

STOP = "stop"
"""Return value of a callback that ends the run after this step, with its model and its report."""


@dataclass(frozen=True)
class StepInfo:
    """Result of one optimizer step, as callbacks see it. The same on every rank."""

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float


OnStep = Callable[[StepInfo], str | None]
OnEvaluation = Callable[[Evaluation], str | None]


@dataclass
class Callbacks(Hook):
    """The hook that calls a caller's functions."""

    _on_step: OnStep | None
    _on_evaluation: OnEvaluation | None

    def on_step(self, report: StepReport) -> str | None:
        """Call the function for steps."""
        if self._on_step is None:
            return None
        outcome = report.outcome
        info = StepInfo(
            report.step,
            report.epoch,
            outcome.loss,
            report.learning_rate,
            outcome.grad_norm,
        )
        return _reason("on_step", self._on_step(info))

    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        """Call the function for evaluations."""
        if self._on_evaluation is None:
            return None
        return _reason("on_evaluation", self._on_evaluation(evaluation))


def _reason(name: str, answer: str | None) -> str | None:
    if answer not in (None, STOP):
        raise UserError(
            f"{name} returned {answer!r}: return {STOP!r} to end the run, or nothing"
        )
    return f"{name} returned {STOP!r}" if answer == STOP else None
