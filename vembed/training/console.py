"""Lines of a run's console: five on its set-up, then steps, evaluations and checkpoints; all of them are in the log
file."""

from __future__ import annotations

import logging
from copy import copy
from pathlib import Path

from rich.console import Console

from vembed.config.schema import TrainConfig
from vembed.evaluation.report.record import scores_line
from vembed.parallel.parameters import num_parameters
from vembed.training.hooks import Hook, Run
from vembed.training.outlets import ResilientStream

log = logging.getLogger("vembed")

HEADLINE = {"is_headline": True}
"""Extra of records that the console shows during the set-up too."""
TRAINING = {"is_headline": True, "ends_setup": True}
"""Extra of the last record of the set-up."""
ALWAYS_SHOWN = frozenset({"checkpoint", "resume", "interrupts"})
"""Modules whose lines tell what happens to earlier results; shown during the set-up too."""
ALWAYS_DETAIL = frozenset({"memory", "parameters", "sharding"})
"""Modules whose lines only the log file and `console: verbose` have."""
SHORT = "short_form"
"""Attribute of records with a shorter text for the console."""
COLUMNS = 100
"""Length of the lines on steps and evaluations on the console."""
STYLES = {
    logging.WARNING: "yellow",
    logging.ERROR: "bold red",
    logging.CRITICAL: "bold red",
}


class ConsoleHandler(logging.Handler):
    """Handler that writes above the progress bar on a terminal, and plain lines into a file or pipe."""

    def __init__(
        self, console: Console, stream: ResilientStream, mode: str = "verbose"
    ) -> None:
        """`mode`: the option `console`."""
        super().__init__()
        self.console = console
        self.stream = stream
        self.mode = mode
        self._is_setup = True

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line, if it is shown."""
        if not self._is_shown(record):
            return
        was_closed = self.stream.is_closed
        if self.mode != "verbose" and SHORT in record.__dict__:
            record = copy(record)
            record.msg, record.args = record.__dict__[SHORT], ()
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        self.console.print(
            line,
            style=STYLES.get(record.levelno),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )  # rich leaves the colours out where the stream is no terminal
        if self.stream.is_closed and not was_closed:
            log.warning("the console is closed; the run continues and logs to its file")

    def _is_shown(self, record: logging.LogRecord) -> bool:
        if "ends_setup" in record.__dict__:
            self._is_setup = False
        if self.mode == "verbose" or record.levelno >= logging.WARNING:
            return True
        if self.mode == "quiet" or record.module in ALWAYS_DETAIL:
            return False
        return (
            not self._is_setup
            or "is_headline" in record.__dict__
            or record.module in ALWAYS_SHOWN
        )


class SetupLines(Hook):
    """The five lines: model, data, steps, device, and where the log is."""

    def on_start(self, run: Run) -> None:
        """Log the lines."""
        for line in setup_lines(run):
            log.info("%s", line, extra=HEADLINE)
        log.info(
            "log: %s",
            Path(run.config.run.output_dir, run.config.logging.log_file),
            extra=TRAINING,
        )


def log_scores(
    when: str,
    scores: dict[str, float],
    before: dict[str, float],
    metric: str,
    ending: str,
) -> None:
    """Log an evaluation: all main scores in the log file, and what fits into a line on the console."""
    short = (
        scores_line(when, scores, before, metric, columns=COLUMNS - len(ending))
        + ending
    )
    log.info(
        "%s%s", scores_line(when, scores, before, metric), ending, extra={SHORT: short}
    )


def setup_lines(run: Run) -> list[str]:
    """Return the lines but the last."""
    config, data, session = run.config, run.data, run.session
    description = run.parts.embedder.description
    total = num_parameters(run.parts.model)
    trained = num_parameters(run.parts.model, trainable_only=True)
    share = "all trained" if trained == total else f"{trained:,d} trained"
    sources = len(data.examples.names)
    evaluation = (
        data.evaluation.summary()
        if data.evaluation is not None
        else "no validation data (set val_split: 0.1)"
    )
    epochs = data.epoch_at(data.total_steps)
    asked = session.placement.run.strategy.value
    why = (
        ""
        if asked in ("auto", session.strategy)
        else f" ({session.placement.decisions['strategy'].reason})"
    )
    per_step = min(
        data.examples_per_step, len(data.examples)
    )  # data smaller than one batch are one batch
    return [
        f"model: {config.model.model_name}, {description.family}, {description.embedding_dim:,d} dimensions, {total:,d} "
        f"parameters ({share}), at most {description.max_length:,d} tokens",
        f"data: {len(data.examples):,d} examples of {sources:,d} source{'s' if sources > 1 else ''}; {evaluation}",
        f"steps: {data.total_steps:,d} of {per_step:,d} examples ({epochs:.3g} epochs), learning rate "
        f"{config.optimizer.learning_rate:g}, loss {config.objective.loss}",
        f"device: {session.device}, {session.world_size} process{'es' if session.world_size > 1 else ''}, strategy "
        f"{session.strategy}{why}, mixed precision {session.mixed_precision}",
    ]


def config_console(config: TrainConfig) -> str:
    """Return the console's mode: a run with `debug` shows everything."""
    return "verbose" if config.logging.debug else config.logging.console
