"""Resuming: finished runs, the checkpoints a run may resume from, the settings that may differ, the cut of its metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vembed.config.fsdp import PRECISIONS, Precision
from vembed.config.schema import TrainConfig, option_fields
from vembed.errors import UserError
from vembed.evaluation.report.record import read_run
from vembed.evaluation.report.summary import SUMMARY_FILE, read_summary
from vembed.saving.durability import write_durably
from vembed.training.checkpoint.folder import MANIFEST, STATE, list_checkpoints, step_of

log = logging.getLogger("vembed")

FINAL = "final"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has written its model and its summary."""

    folder: Path
    step: int
    """Number of optimizer steps of the run."""
    when: str
    """Date and time of its end; empty if not known."""

    @property
    def model_dir(self) -> Path:
        """Folder of the model."""
        return self.folder / FINAL

    def __str__(self) -> str:
        when = f", {self.when[:16].replace('T', ' ')}" if self.when else ""
        return f"a finished run ({self.step:,d} steps{when})"

    def scores(self) -> dict[str, float]:
        """Return the scores of the saved model, and those before training with the prefix "before/"."""
        record = read_run(self.folder)
        return {
            **{f"before/{name}": value for name, value in record.before.items()},
            **record.after,
        }

    def leaves_nothing(self, total_steps: int, checkpoint_step: int | None) -> bool:
        """Return whether a resumed run that ends at `total_steps` has nothing to add to this one.

        A checkpoint of exactly the last step means that the run was stopped before it wrote its model.
        """
        return self.step >= total_steps or (
            checkpoint_step is not None and checkpoint_step > total_steps
        )


class NothingLeft(Exception):  # noqa: N818 - not an error: the run is done
    """The end of a resumed run whose folder holds a finished one that it would not change."""

    def __init__(self, run: FinishedRun, total_steps: int) -> None:
        super().__init__(
            f"nothing is left to train: {run} is in {run.model_dir}, and epochs or max_steps ask for "
            f"{total_steps:,d} steps; nothing was changed"
        )
        self.run = run


def finished_run(output_dir: Path) -> FinishedRun | None:
    """Return the finished run of a folder, or None: both the model and run.json must be there."""
    if not (output_dir / SUMMARY_FILE).is_file() or not (output_dir / FINAL).is_dir():
        return None
    summary = read_summary(output_dir)
    step = summary.num_steps
    if step is None:  # written by an older vembed
        steps = (
            read_run(output_dir).steps if (output_dir / "config.yaml").is_file() else []
        )
        step = int(steps[-1]["step"]) if steps else 0
    return FinishedRun(output_dir, step, summary.finished)


def forget_finished(output_dir: Path) -> None:
    """Remove summary and report, so that the folder no longer counts as finished. `final/` stays until the new model
    replaces it."""
    for name in (SUMMARY_FILE, "report.html", "report.md"):
        (output_dir / name).unlink(missing_ok=True)


METRICS = "metrics.jsonl"

_LENGTH_AND_MACHINES = """
    epochs max_steps max_train_minutes strategy accelerate_config num_processes num_machines
    dist_timeout_minutes fsdp_version fsdp_sharding_strategy fsdp_offload_params
    fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_wrap_embeddings
    fsdp_reshard_after_forward fsdp_backward_prefetch fsdp_forward_prefetch fsdp_limit_all_gathers
    fsdp_use_orig_params fsdp_state_dict_type fsdp_cpu_ram_efficient_loading
    fsdp_sync_module_states
"""
_MEMORY_AND_SPEED = """
    num_workers micro_batch_tokens gradient_cache_chunk_size use_gradient_cache
    kept_graph_tokens loss_exchange cache_frozen_features gradient_checkpointing torch_compile attn_implementation
    padding_free deterministic
"""
_WATCHED_AND_KEPT = """
    val_data_path patience eval_steps eval_before eval_metric eval_ks eval_batch_tokens guards save_steps
    save_total_limit save_merged load_best_model_at_end async_save on_save_error save_dtype on_nonfinite
    logging_steps report_to run_name wandb_project wandb_tags console log_file debug profile_steps output_dir
    overwrite resume resume_anyway trust_remote_code
"""
BATCH = frozenset({"batch_size", "global_batch_size"})
"""Options whose product with the number of processes must stay."""
BY_CONTENT = frozenset({"data_path", "image_root"})
"""Options that name data. The data are compared by the fingerprint of their content."""

MAY_CHANGE = (
    frozenset(f"{_LENGTH_AND_MACHINES} {_MEMORY_AND_SPEED} {_WATCHED_AND_KEPT}".split())
    | BATCH
    | BY_CONTENT
)
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
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in option_fields().items()
    }
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
    # A changed global batch alone has a way out of its own.
    batch = next((one for one in forbidden if one.name == "global_batch_size"), None)
    if batch is not None and len(forbidden) == 1:
        raise UserError(
            f"{checkpoint} was trained with {batch.saved} examples per step, and this run asks for {batch.now}: give "
            f"global_batch_size={batch.saved} (over all processes), start anew in another output_dir, or set "
            "resume_anyway: true (--resume-anyway)"
        )
    if forbidden:
        raise UserError(
            f"{checkpoint} was trained with other settings: {'; '.join(map(str, forbidden))}; put them back, start "
            "anew in another output_dir, or set resume_anyway: true (--resume-anyway)"
        )


def candidates(config: TrainConfig) -> list[Path]:
    """Return the checkpoints that `resume` allows, best first. Their integrity is not checked.

    Two runs never share a folder by accident. Without `resume` or `overwrite`, an output_dir with checkpoints or with a
    finished run is refused: only the user knows whether to resume or to keep the old run.
    """
    output = Path(config.run.output_dir)
    _refuse_inside_a_run(output)
    # Newest first: a damaged one is passed over for the one before.
    own = [path for _, path in reversed(list_checkpoints(output))]
    finished = finished_run(output)
    if config.run.resume is False:
        if not config.run.overwrite:
            _refuse_earlier_run(output, own, finished)
        return []
    if config.run.resume in (True, "auto"):
        if not own and finished is None and config.run.resume is True:
            raise UserError(
                f"resume: true, but output_dir: {output} holds no checkpoint; use resume: auto to start anew where "
                "there is none"
            )
        return own
    wanted = Path(str(config.run.resume))
    if not wanted.is_dir():
        raise UserError(
            f"resume: {wanted} is not a folder; give a checkpoint-<step> folder, a run's output_dir, or true"
        )
    found = [wanted]
    if not (wanted / MANIFEST).is_file() and wanted not in [
        path for _, path in list_checkpoints(wanted.parent)
    ]:
        found = [path for _, path in reversed(list_checkpoints(wanted))]
    if not found:
        raise UserError(
            f"resume: {wanted} is neither a checkpoint nor a folder with checkpoints"
        )
    if (own or finished) and found[0].resolve().parent != output.resolve():
        held = f"checkpoints already (newest {own[0].name})" if own else str(finished)
        raise UserError(
            f"resume: {wanted} is of another run, and output_dir: {output} holds {held}: choose another output_dir"
        )
    return found


def _refuse_inside_a_run(output: Path) -> None:
    """Raise UserError if output_dir is a model or a checkpoint of a run, or inside one: what is there is replaced or
    removed with it, and published with the model."""
    place = output.resolve()
    for folder in (place, *place.parents):
        is_model = folder.name == FINAL and any(
            (folder / name).is_file() for name in ("config.json", "modules.json")
        )
        if is_model or (
            step_of(folder.name) is not None and (folder / MANIFEST).is_file()
        ):
            inside = "is" if folder == place else "is inside"
            what = "the model of a run, and would be replaced and published with it"
            if not is_model:
                what = "a checkpoint of a run, and would be removed with it"
            raise UserError(
                f"output_dir: {output} {inside} {folder}, {what}: choose a folder outside of it"
            )


def refuse_own_model(config: TrainConfig) -> None:
    """Raise UserError if the run would overwrite the model that it starts from."""
    output = Path(config.run.output_dir).resolve()
    for option, name in (
        ("model_name", config.model.model_name),
        ("image_model_name", config.model.image_model_name),
    ):
        path = Path(name).expanduser() if name is not None else None
        if path is None or not path.is_dir():
            continue
        model = path.resolve()
        # A run's folder stands for its final/, unless it is a model folder itself.
        is_own_run = (
            model == output
            and (output / FINAL).is_dir()
            and not (output / "config.json").is_file()
        )
        below = [one.name for one in (model, *model.parents) if one.parent == output]
        if is_own_run or any(
            one == FINAL or one.startswith("checkpoint-") for one in below
        ):
            raise UserError(
                f"{option}: {name} is inside output_dir: {config.run.output_dir}, where this run would overwrite it: give "
                "another output_dir"
            )


def _refuse_earlier_run(
    output: Path, own: list[Path], finished: FinishedRun | None
) -> None:
    """Raise UserError if a new run would replace what is in its output_dir."""
    ways = (
        "choose another output_dir (output_dir: runs/{model}-{time} names a new one each time), or replace it "
        "(overwrite: true, --overwrite)"
    )
    if own:
        raise UserError(
            f"output_dir: {output} holds {len(own)} checkpoint(s) of an earlier run, the newest {own[0].name}: go "
            f"on with it (resume: true, --resume), {ways}"
        )
    if finished is not None:
        raise UserError(f"output_dir: {output} holds {finished}: {ways}")


def nothing_left(
    config: TrainConfig, checkpoint: tuple[int, Path] | None, total_steps: int
) -> FinishedRun | None:
    """Return the finished run of output_dir to which a resumed run of `total_steps` would add nothing, or None.

    Raise UserError if it would add steps and there is no checkpoint to start from.
    """
    if config.run.resume is False:
        return None
    finished = finished_run(Path(config.run.output_dir))
    if finished is None:
        return None
    if finished.leaves_nothing(
        total_steps, None if checkpoint is None else checkpoint[0]
    ):
        return finished
    if checkpoint is None:
        raise UserError(
            f"output_dir: {config.run.output_dir} holds {finished} without a checkpoint, so {total_steps:,d} steps cannot "
            f"go on from it: train further from its model in another folder (model_name={finished.model_dir} "
            "output_dir=...), or start anew (resume: false, overwrite: true); save_steps keeps checkpoints"
        )
    return None


def keep_global_batch(
    config: TrainConfig, saved: Mapping[str, Any], world_size: int
) -> TrainConfig:
    """Return the config with the global batch of a checkpoint, where only the number of processes has changed it.

    `batch_size` counts per process. A resumed run on another number of processes keeps the examples per step, unless
    the user has changed one of the batch options.
    """
    before = saved["config"]
    same = all(
        config.options()[name] == before[name]
        for name in ("batch_size", "gradient_accumulation_steps")
    )
    examples = saved["identity"].get("global_batch_size")
    if config.batch.global_batch_size is not None or not same or examples is None:
        return config
    # The identity counts the examples of a step, and the option those of one batch.
    size = examples // config.batch.gradient_accumulation_steps
    if size == config.batch.batch_size * world_size:
        return config
    log.info(
        "global batch: %s examples, as in the checkpoint (batch_size: %d x %d process(es) would be %s)",
        f"{size:,d}",
        config.batch.batch_size,
        world_size,
        f"{config.batch.batch_size * world_size:,d}",
    )
    return config.changed(**{"global_batch_size": size})


def keep_decisions(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """Return the config with the values that the checkpoint's run had for options that are left to `auto`, so that a
    resumed run is the same run whatever vembed would choose today."""
    given = config.options()
    names = ["learning_rate", "epochs", "logging_steps"]
    # Their `auto` follows from the cost of an evaluation: other data, another rhythm.
    if all(given[name] == saved.get(name) for name in ("val_data_path", "val_split")):
        names += ["eval_steps", "save_steps"]
    kept = {
        name: saved[name] for name in names if given[name] == "auto" and name in saved
    }
    is_decided = (
        "temperature" not in config.given
        and not config.objective.learn_temperature
        and config.objective.losses is None
    )
    if (
        is_decided
        and config.objective.loss == saved.get("loss")
        and "temperature" in saved
    ):
        kept["temperature"] = saved["temperature"]
    if "learning_rate" in kept and config.optimizer.head_learning_rate is None:
        kept["head_learning_rate"] = saved["head_learning_rate"]
    return config.changed(**kept)


def precision_before(config: TrainConfig) -> Precision | None:
    """Return the precision in which the run that is resumed has computed; None for a new run, or if it is unknown.

    Read before the devices are chosen. What is wrong with a checkpoint is said later, where one is chosen.
    """
    if config.run.resume is False:
        return None
    try:
        paths = candidates(config)
    except UserError:
        return None
    for path in paths:
        try:
            found = json.loads((path / STATE).read_bytes()).get("precision")
        except (OSError, ValueError, AttributeError):
            continue
        return next((one for one in PRECISIONS if one == found), None)
    return None


def trim_metrics(output_dir: Path, step: int, *, is_scored: bool = True) -> int:
    """Drop lines of metrics.jsonl after `step`, and an incomplete last line, so that no step appears twice. Return
    how many. `is_scored`: false drops the evaluation of `step` too, which the run will make again."""
    path = output_dir / METRICS
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if line.endswith(b"\n") and _place_of(line) <= (step, is_scored)
    ]
    if len(kept) != len(lines):
        # Written to a temporary file and renamed, so that a crash loses nothing.
        aside = path.with_name(METRICS + ".partial")
        write_durably(aside, b"".join(kept))
        aside.replace(path)
    return len(lines) - len(kept)


def _place_of(line: bytes) -> tuple[float, bool]:
    """Return the step of a line, and whether it is an evaluation, which comes after the step's own line."""
    try:
        values = json.loads(line)
        step, is_evaluation = values["step"], "eval" in values
    except (ValueError, KeyError, TypeError):
        return float("inf"), False
    return (
        float(step) if isinstance(step, int | float) else float("inf")
    ), is_evaluation
