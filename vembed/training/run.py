"""train(): a training run from its config, on this process of the group. The loop is in trainer.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from vembed.config.decisions import ResolvedRun
from vembed.config.loading import Source, require_earlier_stage, resolve_run
from vembed.config.rules import require_paths
from vembed.config.schema import FILE_OPTIONS
from vembed.data.in_memory import as_path
from vembed.errors import UserError
from vembed.models.custom.own_code import as_options
from vembed.parallel.environment import RankInfo, launched_rank
from vembed.parallel.launch_check import COMPARED
from vembed.parallel.session import start_session
from vembed.training.checkpoint.checkpointer import Checkpointer
from vembed.training.checkpoint.folders import (
    NothingLeft,
    precision_before,
    require_output_folder,
)
from vembed.training.fingerprints import of_option
from vembed.training.hooks.base import Callbacks, Hook, OnEvaluation, OnStep
from vembed.training.hooks.publishing import hub_of, push_final
from vembed.training.interrupts import Interrupts
from vembed.training.lock import OutputLock
from vembed.training.run_log import HEADLINE, RunLog
from vembed.training.trackers import require_trackers
from vembed.training.trainer import Trainer, TrainResult

log = logging.getLogger("vembed")

MAY_DIFFER = {
    "output_dir": "machines may mount the shared folder under other names; all must see there what rank 0 writes",
    "image_root": "machines may keep the images in other folders",
    "accelerate_config": "the settings in the file are compared, not its place",
    "num_processes": "each launcher counts for its own machine; the number of processes of the whole run is compared",
    "num_workers": "threads of each process, by the cores of its machine",
    "console": "the console of rank 0 alone shows the run",
    "log_file": "rank 0 alone writes it",
    "report_to": "rank 0 alone starts trackers",
    "run_name": "rank 0 alone starts trackers",
    "wandb_project": "rank 0 alone starts trackers",
    "wandb_tags": "rank 0 alone starts trackers",
}
"""Option -> the reason why ranks may have different values of it."""

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
    `on_evaluation` are called with a StepInfo (`vembed/training/hooks/base.py`) and an Evaluation and may return
    "stop", which ends the run with a model and a report. `model`: a torch module or its class, as `model_class`; a
    module's weights are where training starts. `hooks`: additions to the loop (`vembed/training/hooks/base.py`).
    """
    if isinstance(config, Mapping):
        options = dict(config)
        for key, value in config.items():
            if key in DATA:
                options[key] = as_path(key, value)
        config = as_options(options, model)
    elif model is not None:
        raise UserError(
            "model= goes with a config that is a dict; in a file, model_class names the class"
        )
    if on_step is not None or on_evaluation is not None:
        hooks = [*hooks, Callbacks(on_step, on_evaluation)]
    resolved = resolve_run(config, overrides)
    settings = resolved.config
    require_output_folder(settings.run.output_dir)
    output = Path(settings.run.output_dir)
    require_earlier_stage(resolved)
    require_trackers(settings.logging.report_to)
    hub = hub_of(settings.logging)
    lock = OutputLock(output)

    def report_facts(ranks: RankInfo) -> dict[str, Any]:
        """Check what can be checked before devices are chosen. Return the facts that all ranks compare."""
        if ranks.rank == 0:
            # Now, since a pass over large data takes minutes.
            require_paths(settings.model, settings.data, resolved.origins)
            lock.take()  # before anything is read
            if hub is not None:
                hub.open()
        return facts_of(resolved) if ranks.world_size > 1 else {}

    with (
        # They are left from last to first: the newest checkpoint is on disk before the group of processes ends, and
        # another run may write here only after all of them.
        lock,
        RunLog(settings.logging, output, launched_rank()) as run_log,
        Interrupts(settings.run.max_train_minutes) as interrupts,
        start_session(
            resolved, report_facts, lambda: precision_before(settings.run)
        ) as session,
        Checkpointer(settings.run, session) as checkpointer,
    ):
        for line in resolved.translated:
            log.info(line)
        for line in resolved.notes:
            log.info(f"note: {line}", extra=HEADLINE)
        try:
            trainer = Trainer(
                settings, session, checkpointer, interrupts, run_log, hooks
            )
            result = trainer.run()
        except NothingLeft as end:
            log.info(str(end), extra=HEADLINE)
            run = end.run
            return TrainResult(run.model_dir, run.folder, run.scores(), run.step)
        if session.is_main and hub is not None:
            push_final(hub, output)
        return result


def facts_of(run: ResolvedRun) -> dict[str, Any]:
    """Return what must be equal on all ranks, by name: the options, the decisions behind them, and their files."""
    config = run.config
    facts: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name == "resume":
            # Rank 0 chooses the checkpoint; the ranks compare it when they have found it.
            is_switch = isinstance(value, bool) or value == "auto"
            facts[name] = value if is_switch else "a path"
        elif name in FILE_OPTIONS:
            content = of_option(name, value, config.model.model_revision)
            facts[name] = value
            if content != value:
                facts[name] = {COMPARED: content, "shown": f"{value} ({content})"}
        elif name not in MAY_DIFFER:
            facts[name] = value
    # What follows from options, files and the environment together.
    decisions: dict[str, Any] = {
        "strategy": run.strategy.value,
        "gradient checkpointing": run.recomputation.value,
        "mixed precision": run.precision.value,
        "dist_timeout_minutes": run.timeout_minutes.value,
    }
    if run.fsdp is not None:
        for name, value in asdict(run.fsdp).items():
            if name != "source":
                decisions[f"fsdp {name}"] = str(value)
    for name, value in decisions.items():
        facts[f"{name} (decided)"] = value
    return facts
