"""End of a run: the model in final/, the summary and the report."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path

from safetensors import SafetensorError

from vembed.config.schema import TrainConfig
from vembed.distributed.parameters import full_state_dict, num_parameters
from vembed.distributed.session import Session
from vembed.errors import RunError
from vembed.evaluation.scores import deciding_metric
from vembed.models.precision import saved_dtype
from vembed.report.summary import RunSummary, collect_versions
from vembed.saving.card import Card
from vembed.saving.files import save_model
from vembed.training.integrity import list_checkpoints
from vembed.training.loop_state import LoopState
from vembed.training.parts import RunData, RunModel

log = logging.getLogger("vembed")


def save_final(config: TrainConfig, session: Session, data: RunData, parts: RunModel, state: LoopState) -> Path:
    """Write final/ and the report; return the model's folder. Collective: every rank contributes its weights."""
    try:
        return _save(config, session, data, parts, state)
    except (OSError, SafetensorError) as error:
        kept = [path.name for _, path in list_checkpoints(Path(config.output_dir))]
        what = f"resume from {kept[-1]}" if kept else "train again (save_steps would have kept checkpoints)"
        raise RunError(
            f"final/ and the report could not be written ({error}): make room in {config.output_dir} and {what}"
        ) from error


def _save(config: TrainConfig, session: Session, data: RunData, parts: RunModel, state: LoopState) -> Path:
    output = Path(config.output_dir)
    directory = output / "final"
    embedder, evaluation = parts.embedder, data.evaluation
    # Collective: every rank contributes its shards.
    weights = full_state_dict(parts.model)
    num_total, num_trained = num_parameters(parts.model), num_parameters(parts.model, trainable_only=True)
    if session.is_main:
        learned = parts.loss.scale_and_bias()
        if learned is not None:
            embedder.write_scale_and_bias(*learned, weights)
        dtype = saved_dtype(config, embedder.description)
        log.info(
            "weights: stored %s (save_dtype: %s)", f"in {dtype}" if dtype else "as they are held", config.save_dtype
        )
        save_model(
            directory,
            embedder.description,
            embedder.backbone,
            embedder.head,
            weights,
            dtype=dtype,
            merge_adapters=config.save_merged,
            card=_card(config, data, state),
        )
    summary = RunSummary(
        model=embedder.description.summary(),
        data=list(data.examples.summary()),
        evaluation=evaluation.summary() if evaluation else "",
        metric=deciding_metric(config, evaluation, state.scores) if evaluation and state.scores else "",
        final_step=state.scored_step if state.scores else state.step,
        num_steps=state.step,
        num_examples=len(data.examples),
        num_parameters=num_total,
        num_trainable=num_trained,
        num_processes=session.world_size,
        strategy=session.strategy,
        device=str(session.device),
        precision=session.mixed_precision,
        decisions={name: one.as_text() for name, one in session.placement.decisions.items()},
        seconds=state.seconds,
        finished=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=collect_versions(),
        warnings=[*data.warnings, *_warnings(state)],
    )
    if session.is_main:
        summary.save(output)
        from vembed.report.report import write_report  # imports matplotlib, so it is not done before the first step

        write_report(output)
        log.info("model: %s", directory)
        log.info("report: %s", output / "report.html")
    session.barrier()
    return directory


def _warnings(state: LoopState) -> list[str]:
    found = [] if state.fell is None else [f"{state.fell}; final/ is the checkpoint of step {state.held_step:,d}"]
    if state.num_skipped:
        found.append(f"{state.num_skipped:,d} steps were left out because a number was not finite")
    return found


def _card(config: TrainConfig, data: RunData, state: LoopState) -> Card:
    defaults = TrainConfig(model_name="", data_path="").to_dict()
    return Card(
        data=tuple(data.examples.summary()),
        settings={key: value for key, value in config.to_dict().items() if value != defaults[key]},
        scores=state.scores,
        before=state.before,
        evaluation=data.evaluation.summary().partition(", from")[0] if data.evaluation else "",
        num_steps=state.step,
        versions=collect_versions(),
    )
