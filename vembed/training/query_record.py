"""QueryRecord: writes the results of every query of an evaluation, which the report compares before and after."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.query_results import EMBEDDED, named, write_content
from vembed.evaluation.report.query_changes import (
    FOLDER,
    compare_results,
    path_of,
    read_queries,
)
from vembed.evaluation.report.record import TABLE
from vembed.evaluation.report.thumbnails import thumbnail_of
from vembed.training.hooks import Evaluation, Hook, Run

log = logging.getLogger("vembed")


class QueryRecord(Hook):
    """Files of the evaluations before training, of the best step and of the newest one. Other steps' are removed."""

    def on_start(self, run: Run) -> None:
        """Take the run's data, and remove the files of steps that a resumed run repeats."""
        self._data = run.data.evaluation if run.session.is_main else None
        self._output, self._best = Path(run.config.run.output_dir), run.state.best_step
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
        kept = {
            path_of(self._output, step)
            for step in (0, self._best, evaluation.step)
            if step is not None
        }
        try:
            metrics = dict.fromkeys((evaluation.metric, *TABLE))
            content = evaluation.queries.content(self._data, list(metrics))
            content["pictures"] = self._pictures(content, evaluation.metric)
            write_content(path_of(self._output, evaluation.step), content)
            for path in (self._output / FOLDER).glob("step-*.json"):
                if path not in kept:
                    path.unlink()
        except OSError as error:
            log.warning(
                "the results of the queries could not be written (%s); the report lacks them",
                error,
            )

    def _pictures(self, content: dict[str, Any], metric: str) -> dict[str, str]:
        """Return thumbnails of the images that the data hold themselves, of the queries that changed most. The report
        is written from the run's folder, where only images with paths can be read again."""
        assert isinstance(self._data, RetrievalData)
        before = read_queries(path_of(self._output, 0))
        found = None if before is None else compare_results(before, content, metric)
        pictures: dict[str, str] = {}
        for one in (*found.better, *found.worse) if found is not None else ():
            cells = (
                one.query,
                *one.relevant[:1],
                *(item for item, _ in (*one.found_before[:1], *one.found_after[:1])),
            )
            for name in (
                name
                for cell in cells
                for name in cell["images"]
                if name.startswith(EMBEDDED)
            ):
                image = next(
                    (
                        one
                        for one in named(self._data, name).images
                        if one.data is not None
                    ),
                    None,
                )
                address = None if image is None else thumbnail_of(image)
                if address is not None:
                    pictures[name] = address
        return pictures
