"""train(): a training run from its config, on this process of the group. The loop is in trainer.py."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from vembed.config.loading import Source, require_earlier_stage, resolve_run
from vembed.config.resolved import ResolvedRun
from vembed.distributed.session import start_session
from vembed.training.checkpoint import Checkpointer
from vembed.training.hooks import Hook
from vembed.training.interrupts import Interrupts
from vembed.training.logs import require_trackers, run_logging
from vembed.training.setup import make_output_folder
from vembed.training.trainer import Runtime, Trainer, TrainResult

log = logging.getLogger("vembed")


def train(config: Source | ResolvedRun, overrides: Sequence[str] = (), hooks: Sequence[Hook] = ()) -> TrainResult:
    """Train as the config says (a path, a dict or a TrainConfig); return the model's folder and its scores. `hooks`:
    additions to the loop, see `vembed/training/hooks.py`."""
    resolved = resolve_run(config, overrides)
    settings = resolved.config
    require_earlier_stage(resolved)
    require_trackers(resolved.config)
    make_output_folder(settings)
    with (
        run_logging(settings, rank=int(os.environ.get("RANK", "0"))) as console,
        Interrupts(settings) as interrupts,
        start_session(resolved) as session,
        Checkpointer(settings, session) as checkpointer,
    ):
        for line in (*resolved.translated, *resolved.notes):
            log.info(line)
        return Trainer(settings, Runtime(session, checkpointer, interrupts, console), hooks).run()
