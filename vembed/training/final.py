"""End of a run: the model in final/, the summary and the report."""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.data.examples import ImageRef, Item
from vembed.errors import RunError
from vembed.evaluation.report.report import write_report
from vembed.evaluation.report.summary import RunSummary, collect_versions
from vembed.evaluation.scores import deciding_metric
from vembed.inference.encoding import encode_items
from vembed.models.precision import saved_dtype
from vembed.models.quantized import is_quantized, store_rounded
from vembed.parallel import collectives
from vembed.parallel.parameters import full_state_dict, num_parameters
from vembed.parallel.session import Session
from vembed.saving.card import Card, properties_of
from vembed.saving.durability import way_out
from vembed.saving.files import save_model
from vembed.training.checkpoint.folder import list_checkpoints
from vembed.training.setup import RunData, RunModel
from vembed.training.update import LoopState

log = logging.getLogger("vembed")


def save_final(
    config: TrainConfig,
    session: Session,
    data: RunData,
    parts: RunModel,
    state: LoopState,
) -> Path:
    """Write final/ and the report; return the model's folder. Collective: every rank contributes its weights."""
    try:
        return _save(config, session, data, parts, state)
    except (OSError, SafetensorError) as error:
        kept = [path.name for _, path in list_checkpoints(Path(config.run.output_dir))]
        what = (
            f"resume from {kept[-1]}"
            if kept
            else "train again (save_steps would have kept checkpoints)"
        )
        raise RunError(
            f"final/ could not be written ({error}): {way_out(str(error), Path(config.run.output_dir))} and {what}"
        ) from error


def check_embeddings(config: TrainConfig, session: Session, parts: RunModel) -> None:
    """Raise RunError if the model gives embeddings that are not finite: `final/` is not replaced by it. Collective."""
    family = parts.embedder.description.traits
    items = (
        [Item("a text of a few words"), Item("another")] if family.reads_text else []
    )
    if family.has_image_encoder or not items:
        with io.BytesIO() as file:
            Image.linear_gradient("L").convert("RGB").save(file, "PNG")
            items.append(Item(images=(ImageRef(data=file.getvalue()),)))
    # On all ranks, before any file is written: a model that gives NaN must not replace an older final/.
    vectors = encode_items(
        parts.model,
        parts.featuriser,
        items,
        "document",
        session=session,
        normalize=False,
    )
    if not np.isfinite(vectors).all():
        raise RunError(
            f"final/ is not written: the trained model's embeddings are not finite; {_way_out(config)}"
        )


def _check_weights(
    config: TrainConfig, weights: Mapping[str, Tensor], packed: Collection[str] = ()
) -> None:
    """Raise RunError if a weight is not finite. Each value of a process's weights is looked at once.

    `packed`: names of 4-bit weights. They are stored as 16-bit floats, and any bits may look like a NaN.
    """
    broken = next(
        (
            name
            for name, one in weights.items()
            if name not in packed
            and one.is_floating_point()
            and not bool(torch.isfinite(one).all())
        ),
        None,
    )
    named = next(
        (one for one in collectives.gather_objects_as_json(broken) if one is not None),
        None,
    )
    if named is not None:
        raise RunError(
            f"final/ is not written: the trained weights of {named} are not finite; "
            + _way_out(config)
        )


def _way_out(config: TrainConfig) -> str:
    kept = [path.name for _, path in list_checkpoints(Path(config.run.output_dir))]
    newest = (
        f"resume from an earlier checkpoint ({kept[-1]} is the newest)"
        if kept
        else "train again"
    )
    return f"lower learning_rate (now {config.optimizer.learning_rate:g}) or max_grad_norm, and {newest}"


def _save(
    config: TrainConfig,
    session: Session,
    data: RunData,
    parts: RunModel,
    state: LoopState,
) -> Path:
    output = Path(config.run.output_dir)
    directory = output / "final"
    embedder, evaluation = parts.embedder, data.evaluation
    # Collective: every rank contributes its shards.
    weights = full_state_dict(parts.model)
    packed = {
        f"{name}.weight"
        for name, module in embedder.named_modules()
        if is_quantized(module)
    }
    _check_weights(config, weights, packed)
    num_total, num_trained = (
        num_parameters(parts.model),
        num_parameters(parts.model, trainable_only=True),
    )
    if session.is_main:
        learned = parts.loss.scale_and_bias()
        # Learned by the loss, and used by CLIP and SigLIP models: they go into the model's own file.
        if learned is not None:
            embedder.write_scale_and_bias(*learned, weights)
        store_rounded(embedder, weights)
        dtype = saved_dtype(config.run.save_dtype, embedder.description)
        log.info(
            "weights: stored %s (save_dtype: %s)",
            f"in {dtype}" if dtype else "as they are held",
            config.run.save_dtype,
        )
        save_model(
            directory,
            embedder,
            weights,
            dtype=dtype,
            merge_adapters=config.adapters.save_merged,
            card=card_of(config, data, state),
        )
    metric = (
        deciding_metric(config, evaluation, state.scores)
        if evaluation and state.scores
        else ""
    )
    warnings = _warnings(config, state, metric)
    summary = RunSummary(
        model=embedder.description.summary(),
        properties=properties_of(embedder.description),
        data=list(data.examples.summary()),
        evaluation=evaluation.summary() if evaluation else "",
        metric=metric,
        final_step=state.scored_step if state.scores else state.step,
        num_steps=state.step,
        num_examples=len(data.examples),
        num_parameters=num_total,
        num_trainable=num_trained,
        num_processes=session.world_size,
        strategy=session.strategy,
        device=str(session.device),
        precision=session.mixed_precision,
        decisions={
            name: one.as_text() for name, one in session.placement.decisions.items()
        },
        seconds=state.seconds,
        finished=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=collect_versions(),
        warnings=[*data.warnings, *warnings],
    )
    if session.is_main:
        log.info("model: %s", directory)
        _report(output, summary)
    session.barrier()
    return directory


def _report(output: Path, summary: RunSummary) -> None:
    try:
        summary.save(output)
        write_report(output)
    except OSError as error:
        raise RunError(
            f"the model is in {output / 'final'}, but its report could not be written ({error}): "
            f"{way_out(str(error), output)}, then `vembed report {output}`"
        ) from error
    log.info("report: %s", output / "report.html")


def _warnings(config: TrainConfig, state: LoopState, metric: str) -> list[str]:
    """Return what the report warns of. Log what has not been said during the run."""
    found = (
        []
        if state.fell is None
        else [f"{state.fell}; final/ is the checkpoint of step {state.held_step:,d}"]
    )
    if metric in state.before and state.scores[metric] < state.before[metric]:
        found.append(
            f"{metric} is {state.scores[metric]:.4f} in final/ and was {state.before[metric]:.4f} before training: use "
            f"the model as it was, or lower learning_rate (now {config.optimizer.learning_rate:g}), or look at the training data "
            "(vembed audit)"
        )
        log.warning("%s", found[-1])
    if state.num_skipped:
        found.append(
            f"{state.num_skipped:,d} steps were left out because a number was not finite"
        )
    return found


def card_of(config: TrainConfig, data: RunData, state: LoopState) -> Card:
    """Return the facts of the model card, with the scores of the newest evaluation."""
    defaults = TrainConfig(model_name="", data_path="").to_dict()
    return Card(
        data=tuple(data.examples.summary()),
        settings={
            key: value
            for key, value in config.to_dict().items()
            if value != defaults[key]
        },
        scores=state.scores,
        before=state.before,
        evaluation=data.evaluation.summary().partition(", from")[0]
        if data.evaluation
        else "",
        num_steps=state.step,
        versions=collect_versions(),
    )
