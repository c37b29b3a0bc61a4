"""QueryRecord: writes the results of every query of an evaluation, which the report compares before and after."""

from __future__ import annotations

import logging
from pathlib import Path

from vembed.evaluation.dataset import RetrievalData
from vembed.report.query_changes import FOLDER, path_of
from vembed.report.record import TABLE
from vembed.training.hooks import Evaluation, Hook, Run

log = logging.getLogger("vembed")


class QueryRecord(Hook):
    """Files of the evaluations before training, of the best step and of the newest one. Other steps' are removed."""

    def on_start(self, run: Run) -> None:
        """Take the run's data, and remove the files of steps that a resumed run repeats."""
        self._data = run.data.evaluation if run.session.is_main else None
        self._output, self._best = Path(run.config.output_dir), run.state.best_step
        if run.session.is_main:
            for path in (self._output / FOLDER).glob("step-*.json"):
                if int(path.stem.removeprefix("step-")) > run.state.step:
                    path.unlink()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""
        if evaluation.is_best:
            self._best = evaluation.step
        if not isinstance(self._data, RetrievalData) or evaluation.queries is None:
            return
        kept = {path_of(self._output, step) for step in (0, self._best, evaluation.step) if step is not None}
        try:
            metrics = dict.fromkeys((evaluation.metric, *TABLE))
            evaluation.queries.write(path_of(self._output, evaluation.step), self._data, list(metrics))
            for path in (self._output / FOLDER).glob("step-*.json"):
                if path not in kept:
                    path.unlink()
        except OSError as error:
            log.warning("the results of the queries could not be written (%s); the report lacks them", error)
