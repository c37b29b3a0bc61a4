"""Publishing: `push_to_hub` during a run. Each best model goes to the Hub in the background, final/ at the end."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from typing_extensions import override

from vembed.errors import RunError, UserError
from vembed.parallel.parameters import full_state_dict
from vembed.saving.publication import Hub, model_files, publication
from vembed.training.hooks.base import Evaluation, Hook

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

HUB_FOLDER = ".hub"
"""Folder inside output_dir with the model that is being pushed."""
MAX_SECONDS_AT_STOP = 5.0
"""Time that a run which is stopped gives a push under way. A finished run waits for its end."""


def push_final(hub: Hub, output: Path) -> None:
    """Push final/ with its card, the report and the description of the data. Only the main process calls it.

    Raise RunError if that fails: the model is complete on disk, and `vembed push` goes on.
    """
    try:
        hub.push(publication(str(output)), "Trained by vembed")
    except (RunError, UserError) as error:
        command = f"vembed push {output} {hub.repository}"
        raise RunError(
            f"{error}; the model is in {output}/final: `{command}`"
        ) from error
    log.info(f"push_to_hub: {hub.repository} has the model of final/")


class PushBest(Hook):
    """Pushes the model of each best evaluation. Training continues meanwhile, and after a push that fails."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._max_seconds: float | None = MAX_SECONDS_AT_STOP

    @override
    def on_start(self, run: Trainer) -> None:
        self._run = run

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not evaluation.is_best:
            return
        run = self._run
        with run.hooks.evaluation_weights():
            # Collective, so it comes before the branch on rank 0.
            weights = full_state_dict(run.components.model)
        if not run.session.is_main:
            return
        if self._thread is not None and self._thread.is_alive():
            log.info(
                f"push_to_hub: step {evaluation.step:,d} is left out: an earlier push is under way"
            )
            return
        writer = run.model_writer
        folder = run.output / HUB_FOLDER
        writer.store(folder, weights, writer.card(run.data, run.state))
        score = f"{evaluation.metric} {evaluation.scores[evaluation.metric]:.4f}"
        self._thread = Thread(
            target=self._push, args=(folder, evaluation.step, score), daemon=True
        )
        self._thread.start()

    @override
    def on_finish(self, run: Trainer) -> None:
        self._max_seconds = None

    @override
    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(self._max_seconds)
            shutil.rmtree(self._run.output / HUB_FOLDER, ignore_errors=True)

    def _push(
        self,
        folder: Path,
        step: int,
        score: str,
    ) -> None:
        repository = self._run.config.logging.push_to_hub
        assert repository is not None
        hub = Hub(repository)
        try:
            hub.push(model_files(folder), f"Step {step}: {score}", tag=f"step-{step}")
        except (RunError, UserError) as error:
            log.warning(
                f"push_to_hub: step {step:,d} was not pushed ({error}); training continues"
            )
        else:
            log.info(
                f"push_to_hub: step {step:,d} ({score}) is on the Hub as the tag step-{step}"
            )
