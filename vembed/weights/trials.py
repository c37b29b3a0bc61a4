"""Judge: the score of a model folder on evaluation data; and greedy soups and sweeps, which choose by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.evaluation.dataset import TEST_FIRST, open_eval_data
from vembed.evaluation.scores import evaluate
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.weights.methods import Recipe

log = logging.getLogger("vembed")


class Judge:
    """Scores model folders on one set of evaluation data. Collective where a session has several ranks."""

    def __init__(
        self, data: str, metric: str = "auto", session: Session | None = None
    ) -> None:
        """`metric`: `auto` is nDCG@10, or Spearman's correlation for scored pairs."""
        config = TrainConfig(model_name="", data_path=data)
        self.data = open_eval_data(config, data, splits=TEST_FIRST)
        self.metric = self.data.metric if metric == "auto" else metric
        self.session = session

    @property
    def is_main(self) -> bool:
        """True if this process writes files."""
        return self.session is None or self.session.is_main

    def scores(self, folder: str | Path) -> dict[str, float]:
        """Return all metrics of a model."""
        found = evaluate(folder, self.data, session=self.session)
        if self.metric not in found:
            raise UserError(
                f"metric {self.metric} is not among what is measured: {', '.join(found)}"
            )
        return found

    def score(self, folder: str | Path) -> float:
        """Return the metric that decides."""
        return self.scores(folder)[self.metric]

    def made(self, write: Callable[[], object]) -> None:
        """Let the first process write files, and the others wait for them."""
        if self.is_main:
            write()
        collectives.barrier()


@dataclass(frozen=True)
class Trial:
    """A merged model that was evaluated."""

    at: float
    """sweep: the weight; soup: the number of models."""
    score: float
    scores: dict[str, float] = field(default_factory=dict)


Write = Callable[[Sequence[int], Recipe, Path], object]
"""Merges the models of these numbers into a folder."""


def greedy_soup(
    judge: Judge, members: Sequence[str | Path], write: Write, scratch: Path
) -> tuple[list[int], float]:
    """Return which members the best mean has, and its score on the judge's data.

    The best member is in it. In the order of their own scores the others are tried one by one, and one is kept if the
    mean with it scores no worse; so the soup is never below its best member on these data.
    """
    alone = [judge.score(one) for one in members]
    for member, score in zip(members, alone, strict=True):
        log.info("soup: %s alone: %s %.4f", member, judge.metric, score)
    order = sorted(range(len(members)), key=lambda place: -alone[place])
    chosen, best = order[:1], alone[order[0]]
    for place in order[1:]:
        candidate = [*chosen, place]
        recipe = Recipe("mean", (1.0,) * len(candidate))
        judge.made(partial(write, candidate, recipe, scratch))
        score = judge.score(scratch)
        is_kept = score >= best
        log.info(
            "soup: with %s: %s %.4f (%s)",
            members[place],
            judge.metric,
            score,
            "kept" if is_kept else "left out",
        )
        if is_kept:
            chosen, best = candidate, score
    return chosen, best


def sweep(
    judge: Judge, recipe: Recipe, points: Sequence[float], write: Write, scratch: Path
) -> list[Trial]:
    """Return the scores along a line: of two models, from the first (0) to the second (1); of one model, from its base
    to itself."""
    trials = []
    for at in points:
        members = range(len(recipe.weights))
        judge.made(partial(write, members, at_point(recipe, at), scratch))
        scores = judge.scores(scratch)
        trials.append(Trial(at, scores[judge.metric], scores))
        log.info("sweep: at %.3g: %s %.4f", at, judge.metric, trials[-1].score)
    return trials


def at_point(recipe: Recipe, at: float) -> Recipe:
    """Return the recipe at a point of the line."""
    if len(recipe.weights) == 1:
        return replace(recipe, interpolate=at)
    method = "weighted" if recipe.method == "mean" else recipe.method
    return replace(recipe, method=method, weights=(1 - at, at))
