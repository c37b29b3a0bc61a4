"""Memory plan of a starter config on this machine: whether it fits, and if not the settings with which it does."""

from __future__ import annotations

from typing import Any

import torch
import yaml

from vembed.cli.commands.plan import FITS
from vembed.cli.commands.train import resolve_launch
from vembed.config.loading import one_line_yaml, resolve_run
from vembed.config.resolved import ResolvedRun
from vembed.parallel.devices import bf16_instructions
from vembed.parallel.estimate import GIB, measure
from vembed.parallel.placement import memory_of_a_process, place

CHANGES: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"use_fsdp": True},
    {"use_lora": True},
    {"use_lora": True, "gradient_checkpointing": True},
)
"""Settings that take less memory, in the order in which they are tried."""


def memory_lines(text: str) -> list[str]:
    """Return lines for a config whose model is on this machine: the memory of a process, and the settings that it needs
    to fit."""
    configured = yaml.safe_load(text)
    run = resolve_run(configured)
    need, available = _memory(run)
    heading = ["", "# Memory (`vembed plan` says more)"]
    if need <= FITS * available:
        return [
            *heading,
            f"# {_gb(need)} of the {_gb(available)} of a process on this machine: fits",
        ]
    short = f"# {_gb(need)} of the {_gb(available)} of a process on this machine without these settings"
    for change in CHANGES:
        if any(name in configured for name in change):
            continue
        changed = resolve_run({**configured, **change})
        # On one process there is nothing to shard.
        if "use_fsdp" in change and resolve_launch(changed).world_size == 1:
            continue
        lesser, _ = _memory(changed)
        if lesser <= FITS * available:
            options = [
                f"{name}: {one_line_yaml(value)}".ljust(32) + f"  # {_gb(lesser)}"
                for name, value in change.items()
            ]
            return [*heading, short, *options]
    return [
        *heading,
        f"# {_gb(need)}, more than the {_gb(available)} of a process on this machine: take a smaller model",
    ]


def _memory(run: ResolvedRun) -> tuple[float, float]:
    """Return the bytes that a process needs and has."""
    launch = resolve_launch(run)
    device = (
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )
    ranks = launch.first_rank
    available = memory_of_a_process(ranks, device)
    placement = place(run, ranks, device, available, instructions=bf16_instructions())
    return placement.predict(placement.size or measure(run.config)).total, float(
        available
    )


def _gb(count: float) -> str:
    return f"{count / GIB:.1f} GB"
