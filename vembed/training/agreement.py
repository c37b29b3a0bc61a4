"""Facts of a run that must be equal on all ranks: its options, the decisions behind them, and its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from vembed.config.ranks import BY_CONTENT, MAY_DIFFER
from vembed.config.resolved import ResolvedRun
from vembed.parallel.meeting import COMPARED, DECIDED
from vembed.training.fingerprints import of_data, of_model


def facts_of(run: ResolvedRun) -> dict[str, Any]:
    """Return the values by name. Reads the fingerprints of data and models, and nothing else of them."""
    config = run.config
    facts: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name == "resume":
            # Rank 0 chooses the checkpoint; the ranks compare it when they have found it.
            facts[name] = (
                value if isinstance(value, bool) or value == "auto" else "a path"
            )
        elif name in BY_CONTENT:
            facts[name] = content(
                value, _print_of(BY_CONTENT[name], config.model.model_revision)
            )
        elif name not in MAY_DIFFER:
            facts[name] = value
    facts |= {f"{name}{DECIDED}": value for name, value in _decisions(run).items()}
    return facts


def content(value: Any, print_of: Callable[[str], str | None]) -> Any:
    """Return what is compared of the value of an option that names files, and how a message shows it."""
    compared = by_content(value, print_of)
    return (
        compared
        if compared == value
        else {COMPARED: compared, "shown": f"{value} ({compared})"}
    )


def by_content(value: Any, print_of: Callable[[str], str | None]) -> Any:
    """Return a value with the names of files and folders replaced by their fingerprints, at any depth."""
    if isinstance(value, str):
        found = print_of(value)
        return value if found is None else f"content {found}"
    if isinstance(value, list):
        return [by_content(one, print_of) for one in value]
    if isinstance(value, Mapping):
        return {key: by_content(one, print_of) for key, one in value.items()}
    return value


def _print_of(kind: str, revision: str | None) -> Callable[[str], str | None]:
    return of_data if kind == "data" else lambda name: of_model(name, revision)


def _decisions(run: ResolvedRun) -> dict[str, Any]:
    """Return what follows from options, files and the environment together."""
    fsdp = (
        {}
        if run.fsdp is None
        else {f"fsdp {name}": value for name, value in asdict(run.fsdp).items()}
    )
    for name in ("fsdp source", "fsdp precision_reason"):
        fsdp.pop(name, None)
    return {
        "strategy": run.strategy.value,
        "gradient checkpointing": run.recomputation.value,
        "mixed precision": run.precision.value,
        "dist_timeout_minutes": run.timeout_minutes.value,
        **{name: str(value) for name, value in fsdp.items()},
    }
