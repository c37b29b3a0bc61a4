"""EarlierCheckpoints: checkpoints from before a run was resumed, of its folder or another, which `final/` may get."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vembed.parallel import collectives
from vembed.training.integrity import MANIFEST, PARTIAL, checkpoint_name

log = logging.getLogger("vembed")

CHOICES: dict[str, dict[str, Any]] = {
    "best_step": {"best": None, "best_step": None, "best_scores": {}},
    "held_step": {"held_step": None, "held_scores": {}},
}
"""Keys of the loop's state that name a checkpoint for `final/`, and what the state is without it."""


class EarlierCheckpoints:
    """Places of the checkpoints that the state of a resumed run names."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._elsewhere: dict[int, Path] = {}

    def look_for(self, chosen: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes of a state that names checkpoints which are gone. `chosen`: the one that is resumed from,
        which may be in another folder, beside those of its run. Collective."""
        # The one that is resumed from too: its own scores may be the best.
        steps = {state["step"], *(state[key] for key in CHOICES)} - {None}
        found = {
            step: self._look(
                step, chosen if step == state["step"] else None, chosen.parent
            )
            for step in steps
        }
        gone = collectives.broadcast_json(
            [step for step in steps if found[step] is None]
        )
        self._elsewhere = {
            step: place
            for step, place in found.items()
            if place is not None and step not in gone
        }
        changes: dict[str, Any] = {}
        for key, without in CHOICES.items():
            if state[key] in gone:
                log.warning(
                    "%s is not there any more: final/ gets a later one",
                    checkpoint_name(state[key]),
                )
                changes |= without
        return changes

    def place(self, step: int) -> Path:
        """Return the folder of a step's checkpoint: of this run, or of the one that was resumed."""
        own = self.output / checkpoint_name(step)
        return own if own.is_dir() else self._elsewhere.get(step, own)

    def take_along(self, steps: Iterable[int]) -> None:
        """Copy those of these checkpoints that are in another folder, which may be removed before this run ends. Called
        by rank 0 after a checkpoint was written: none that is older may be the newest here."""
        for step in steps:
            own = self.output / checkpoint_name(step)
            place = self.place(step)
            if place == own or not place.is_dir():
                continue
            partial = own.with_name(own.name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            # Files of a checkpoint are never changed, so that both folders may share them.
            shutil.copytree(place, partial, copy_function=_linked)
            partial.rename(own)
            log.info("copied %s (final/ may get it)", place)

    def _look(self, step: int, chosen: Path | None, folder: Path) -> Path | None:
        places = [
            self.output / checkpoint_name(step),
            chosen,
            folder / checkpoint_name(step),
        ]
        return next(
            (one for one in places if one is not None and (one / MANIFEST).is_file()),
            None,
        )


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
    return target
