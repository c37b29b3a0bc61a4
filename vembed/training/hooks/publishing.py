"""Publishing: `push_to_hub` during a run. Each best model goes to the Hub in the background, final/ at the end."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from threading import Thread

from typing_extensions import override

from vembed.config.schema import TrainConfig
from vembed.errors import RunError, UserError
from vembed.models.precision import saved_dtype
from vembed.parallel.parameters import full_state_dict
from vembed.saving.files import save_model
from vembed.saving.hub import Hub
from vembed.saving.publication import model_files, publication
from vembed.training.final import card_of
from vembed.training.hooks.base import Evaluation, Hook, Run

log = logging.getLogger("vembed")
FOLDER = ".hub"
"""Folder inside output_dir with the model that is being pushed."""
SECONDS_TO_END = 5.0
"""Time that a run which is stopped gives a push under way. A finished run waits for its end."""


def open_hub(config: TrainConfig) -> None:
    """Make the repository of `push_to_hub` and check the right to write, before anything is trained. Only the main
    process calls it."""
    if config.logging.push_to_hub is not None:
        _hub(config).open()


def push_final(config: TrainConfig) -> None:
    """Push final/ with its card, the report and the description of the data. Only the main process calls it. Raise
    RunError if that fails: the model is complete on disk, and `vembed push` goes on."""
    if config.logging.push_to_hub is None:
        return
    hub = _hub(config)
    try:
        num_sent = hub.push(publication(config.run.output_dir), "Trained by vembed")
    except (RunError, UserError) as error:
        again = f"vembed push {config.run.output_dir} {config.logging.push_to_hub}"
        raise RunError(
            f"{error}; the model is in {config.run.output_dir}/final: `{again}`"
        ) from error
    log.info(
        "push_to_hub: %s has the model of final/ (%d files sent)",
        hub.repository,
        num_sent,
    )


def _hub(config: TrainConfig) -> Hub:
    assert config.logging.push_to_hub is not None
    return Hub(
        config.logging.push_to_hub, public=config.logging.push_public, log=log.debug
    )


class PushBest(Hook):
    """Pushes the model of each best evaluation. Training continues meanwhile, and after a push that fails."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.thread: Thread | None = None
        self.seconds: float | None = SECONDS_TO_END

    @override
    def on_start(self, run: Run) -> None:
        self._run = run

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not evaluation.is_best:
            return
        run, parts = self._run, self._run.parts
        with run.hooks.evaluation_weights():
            weights = full_state_dict(
                parts.model
            )  # collective, so it comes before the branch on rank 0
        if not run.session.is_main:
            return
        if self.thread is not None and self.thread.is_alive():
            log.info(
                "push_to_hub: step %s is left out: an earlier push is under way",
                f"{evaluation.step:,d}",
            )
            return
        learned = parts.loss.scale_and_bias()
        if learned is not None:
            parts.embedder.write_scale_and_bias(*learned, weights)
        embedder, config = parts.embedder, run.config
        folder = save_model(
            Path(config.run.output_dir) / FOLDER,
            embedder,
            weights,
            dtype=saved_dtype(config.run.save_dtype, embedder.description),
            merge_adapters=config.adapters.save_merged,
            card=card_of(config, run.data, run.state),
        )
        score = f"{evaluation.metric} {evaluation.scores[evaluation.metric]:.4f}"
        self.thread = Thread(
            target=self._push, args=(folder, evaluation.step, score), daemon=True
        )
        self.thread.start()

    @override
    def on_finish(self, run: Run) -> None:
        self.seconds = None

    @override
    def close(self) -> None:
        if self.thread is not None:
            self.thread.join(self.seconds)
            shutil.rmtree(Path(self.config.run.output_dir) / FOLDER, ignore_errors=True)

    def _push(self, folder: Path, step: int, score: str) -> None:
        try:
            hub = _hub(self.config)
            hub.push(model_files(folder), f"Step {step}: {score}", tag=f"step-{step}")
        except (RunError, UserError) as error:
            log.warning(
                "push_to_hub: step %s was not pushed (%s); training continues",
                f"{step:,d}",
                error,
            )
        else:
            log.info(
                "push_to_hub: step %s (%s) is on the Hub as the tag step-%d",
                f"{step:,d}",
                score,
                step,
            )
