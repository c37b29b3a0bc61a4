"""train(): a training run from its config, on this process of the group. The loop is in trainer.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vembed.config.loading import Source, require_earlier_stage, resolve_run
from vembed.config.places import require_places
from vembed.config.resolved import ResolvedRun
from vembed.data.in_memory import as_path
from vembed.errors import UserError
from vembed.models.custom.folder import as_options
from vembed.parallel.environment import RankInfo, launched_rank
from vembed.parallel.session import start_session
from vembed.training.checkpoint.checkpointer import Checkpointer
from vembed.training.checkpoint.resume import NothingLeft, precision_before
from vembed.training.hooks.base import Hook
from vembed.training.hooks.callbacks import Callbacks, OnEvaluation, OnStep
from vembed.training.hooks.metrics import require_trackers
from vembed.training.hooks.publishing import open_hub, push_final
from vembed.training.identity import facts_of
from vembed.training.interrupts import Interrupts
from vembed.training.lock import OutputLock
from vembed.training.run_log import HEADLINE, run_logging
from vembed.training.trainer import Runtime, Trainer, TrainResult

log = logging.getLogger("vembed")

DATA = ("data_path", "val_data_path", "train_data", "train_file", "val_data")
"""Options that may be Python objects, and the likeliest of their other names."""


def train(
    config: Source | ResolvedRun,
    overrides: Sequence[str] = (),
    hooks: Sequence[Hook] = (),
    *,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    model: nn.Module | type[nn.Module] | None = None,
) -> TrainResult:
    """Train as the config says (a path, a dict or a TrainConfig); return the model's folder and its scores.

    In a dict, `data_path` and `val_data_path` may be lists of dicts or a `datasets.Dataset`. `on_step` and
    `on_evaluation` are called with a StepInfo and an EvaluationInfo (`vembed/training/hooks/callbacks.py`) and may return
    "stop", which ends the run with a model and a report. `model`: a torch module or its class, as `model_class`; a
    module's weights are where training starts. `hooks`: additions to the loop (`vembed/training/hooks/base.py`).
    """
    if isinstance(config, Mapping):
        config = {
            key: as_path(key, value) if key in DATA else value
            for key, value in config.items()
        }
        config = as_options(config, model)
    elif model is not None:
        raise UserError(
            "model= goes with a config that is a dict; in a file, model_class names the class"
        )
    if on_step is not None or on_evaluation is not None:
        hooks = [*hooks, Callbacks(on_step, on_evaluation)]
    resolved = resolve_run(config, overrides)
    settings = resolved.config
    require_earlier_stage(resolved)
    require_trackers(resolved.config)
    lock = OutputLock(Path(settings.run.output_dir))

    def introduce(ranks: RankInfo) -> dict[str, Any]:
        if ranks.rank == 0:
            require_places(
                settings, resolved.origins
            )  # now, since a pass over large data takes minutes
            lock.take()  # before anything is read
            open_hub(settings)
        return facts_of(resolved) if ranks.world_size > 1 else {}

    with (
        # They are left from last to first: the newest checkpoint is on disk before the group of processes ends, and
        # another run may write here only after all of them.
        lock,
        run_logging(settings, rank=launched_rank()) as outlets,
        Interrupts(settings) as interrupts,
        start_session(
            resolved, introduce, lambda: precision_before(settings)
        ) as session,
        Checkpointer(settings, session) as checkpointer,
    ):
        for line in resolved.translated:
            log.info("%s", line)
        for line in resolved.notes:
            log.info("note: %s", line, extra=HEADLINE)
        try:
            result = Trainer(
                settings, Runtime(session, checkpointer, interrupts, outlets), hooks
            ).run()
            if session.is_main:
                push_final(settings)
            return result
        except NothingLeft as done:
            log.info("%s", done, extra=HEADLINE)
            return TrainResult(
                done.run.model_dir, done.run.folder, done.run.scores(), done.run.step
            )
