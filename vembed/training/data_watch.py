"""DataWatch: says once what happened to the data files during a run."""

from __future__ import annotations

import logging

from typing_extensions import override

from vembed.data.example_store import ExampleStore
from vembed.training.hooks import Hook, Run

log = logging.getLogger("vembed")


class DataWatch(Hook):
    """Looks at the data files at each epoch and at the end. Most changes do no harm: files stay open as they were."""

    def __init__(self) -> None:
        self._examples: ExampleStore | None = None
        self._said: set[str] = set()

    @override
    def on_start(self, run: Run) -> None:
        self._examples = run.data.examples

    @override
    def on_epoch(self, epoch: int) -> None:
        self._look()

    @override
    def on_finish(self, run: Run) -> None:
        self._look()

    def _look(self) -> None:
        for change in [] if self._examples is None else self._examples.changed_files():
            file = change.partition(" has ")[0]
            if file not in self._said:
                self._said.add(file)
                log.warning("%s", change)
