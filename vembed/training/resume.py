"""Resuming: the checkpoints a run may resume from, the settings that may differ, and the cut of its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.training.integrity import MANIFEST, list_checkpoints, write_durably

METRICS = "metrics.jsonl"

_LENGTH_AND_MACHINES = """
    epochs max_steps max_train_minutes strategy use_fsdp accelerate_config num_processes num_machines
    dist_timeout_minutes fsdp_version fsdp_sharding_strategy fsdp_offload_params fsdp_cpu_offload
    fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_wrap_embeddings
    fsdp_reshard_after_forward fsdp_backward_prefetch fsdp_forward_prefetch fsdp_limit_all_gathers
    fsdp_use_orig_params fsdp_activation_checkpointing fsdp_state_dict_type fsdp_cpu_ram_efficient_loading
    fsdp_sync_module_states
"""
# Compared as their product, the global batch size.
_MEMORY_AND_SPEED = """
    batch_size global_batch_size num_workers micro_batch_tokens gradient_cache_chunk_size use_gradient_cache
    kept_graph_tokens cache_frozen_features gradient_checkpointing torch_compile attn_implementation padding_free
    deterministic
"""
_WATCHED_AND_KEPT = """
    val_data_path eval_steps eval_before eval_metric eval_ks eval_batch_tokens guards save_steps
    save_total_limit save_merged load_best_model_at_end async_save on_save_error save_dtype on_nonfinite
    logging_steps report_to run_name wandb_project wandb_tags log_file debug profile_steps output_dir resume
    resume_anyway trust_remote_code
"""
# Data are compared by the fingerprint of their content.
_WHERE_DATA_LIE = "data_path image_root"

MAY_CHANGE = frozenset(f"{_LENGTH_AND_MACHINES} {_MEMORY_AND_SPEED} {_WATCHED_AND_KEPT} {_WHERE_DATA_LIE}".split())
"""Options that a resumed run may change; all others must stay. A test checks the list against the schema."""

JUDGES = frozenset({"val_data_path", "eval_metric"})
"""Options that make earlier and later scores incomparable: the best score is reset."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs from the checkpoint's."""

    name: str
    saved: Any
    now: Any
    is_allowed: bool

    def __str__(self) -> str:
        return f"{self.name} {self.saved} -> {self.now}"


def compare_resume(
    saved: Mapping[str, Any],
    config: TrainConfig,
    saved_identity: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> list[Difference]:
    """Return the settings that differ from those in a checkpoint, each with whether it may.

    `identity` holds what is not an option but must stay (the data's fingerprint, the global batch size). An option that
    the checkpoint lacks (written by an older vembed) counts as its default.
    """
    now = config.to_dict()
    defaults = {name: field.get_default(call_default_factory=True) for name, field in type(config).model_fields.items()}
    differences = [
        Difference(name, before, value, name in MAY_CHANGE)
        for name, value in now.items()
        if (before := saved.get(name, defaults[name])) != value
    ]
    then, here = saved_identity or {}, identity or {}
    differences += [
        Difference(name, then[name], here[name], is_allowed=False)
        for name in sorted(set(then) & set(here))
        if then[name] != here[name]
    ]
    return differences


def refuse(differences: list[Difference], checkpoint: str) -> None:
    """Raise UserError that lists the forbidden differences, if any."""
    forbidden = [one for one in differences if not one.is_allowed]
    if forbidden:
        raise UserError(
            f"{checkpoint} was trained with other settings: {'; '.join(map(str, forbidden))}; put them back, start "
            "anew in another output_dir, or set resume_anyway: true (--resume-anyway)"
        )


def candidates(config: TrainConfig) -> list[Path]:
    """Return the checkpoints that `resume` allows, best first. Their integrity is not checked.

    Two runs never share a folder by accident. Without `resume`, an output_dir with checkpoints is refused: only the
    user knows whether to resume or to keep the old run.
    """
    output = Path(config.output_dir)
    own = [path for _, path in reversed(list_checkpoints(output))]
    if config.resume is False:
        if own:
            raise UserError(
                f"output_dir: {output} holds {len(own)} checkpoint(s) of an earlier run, the newest {own[0].name}: go "
                "on with it (resume: true, --resume), choose another output_dir, or delete them"
            )
        return []
    if config.resume in (True, "auto"):
        if not own and config.resume is True:
            raise UserError(
                f"resume: true, but output_dir: {output} holds no checkpoint; use resume: auto to start anew where "
                "there is none"
            )
        return own
    wanted = Path(str(config.resume))
    if not wanted.is_dir():
        raise UserError(
            f"resume: {wanted} is not a folder; give a checkpoint-<step> folder, a run's output_dir, or true"
        )
    found = [wanted]
    if not (wanted / MANIFEST).is_file() and wanted not in [path for _, path in list_checkpoints(wanted.parent)]:
        found = [path for _, path in reversed(list_checkpoints(wanted))]
    if not found:
        raise UserError(f"resume: {wanted} is neither a checkpoint nor a folder with checkpoints")
    if own and found[0].resolve().parent != output.resolve():
        raise UserError(
            f"resume: {wanted} is of another run, and output_dir: {output} holds checkpoints already (newest "
            f"{own[0].name}): choose another output_dir"
        )
    return found


def trim_metrics(output_dir: Path, step: int) -> int:
    """Drop lines of metrics.jsonl after `step`, and an incomplete last line, so that no step appears twice. Return
    how many."""
    path = output_dir / METRICS
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
    if len(kept) != len(lines):
        # Written to a temporary file and renamed, so that a crash loses nothing.
        aside = path.with_name(METRICS + ".partial")
        write_durably(aside, b"".join(kept))
        aside.replace(path)
    return len(lines) - len(kept)


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return float(step) if isinstance(step, int | float) else float("inf")
