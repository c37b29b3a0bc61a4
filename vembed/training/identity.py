"""Identity of a run: what must be equal on all ranks, and what must stay when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vembed.config.resolved import ResolvedRun
from vembed.config.schema import FILE_OPTIONS, TrainConfig
from vembed.config.terms import compares_own_rank, run_terms
from vembed.parallel.launch_check import COMPARED, DERIVED, require_equal
from vembed.training.fingerprints import of_evaluation, of_examples, of_option
from vembed.training.setup import RunData

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


TASK_OPTIONS = {"losses", "temperature", "batch_size", "global_batch_size"}
"""Options of a source that are no part of the data's fingerprint."""


def identity_of(config: TrainConfig, data: RunData, world_size: int) -> dict[str, Any]:
    """Return what besides the options must stay when the run is resumed.

    The content of every file and folder that an option names is part of it. A model that is not on this machine yet
    (a Hub name) has no fingerprint.
    """
    tasks = []
    for source in config.data.sources():
        tasks.append(
            source.model_dump(mode="json", include=TASK_OPTIONS, exclude_none=True)
        )
    identity = {
        "data": data.examples.fingerprint,
        "tasks": tasks if any(tasks) else [],
        "global_batch_size": data.examples_per_step,
    }
    terms = run_terms(config.objective, config.data, config.model.model_name)
    if compares_own_rank(terms):
        identity["world_size"] = world_size
    images = of_examples(data.examples)
    if images is not None:
        identity["image_files"] = images
    options = config.to_dict()
    for name, kind in FILE_OPTIONS.items():
        contents = of_option(name, options[name], config.model.model_revision)
        # The examples have a fingerprint of their own.
        if kind != "data" and contents != options[name]:
            identity[f"{name}_files"] = contents
    return identity


def require_same_data(identity: Mapping[str, Any], data: RunData) -> None:
    """Raise the same UserError on every rank unless all have read the same data, with the same images. Collective."""
    advice = "give every machine the same data_path"
    require_equal("the data's content", data.examples.fingerprint, advice)
    prints = {
        "data's": identity.get("image_files"),
        "validation data's": of_evaluation(data.evaluation),
    }
    for owner, content in prints.items():
        name = f"the content of the {owner} image files"
        require_equal(name, content, "give every machine the same images")


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
        facts[f"{name}{DERIVED}"] = value
    return facts
