"""The end of a run: the model in final/, the summary and the report. Also the whole model in other folders of a run."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vembed.data.example_store import ExampleStore
from vembed.data.examples import spread
from vembed.data.language import MAX_SAMPLED_TEXTS, is_english, language_of
from vembed.errors import RunError
from vembed.evaluation.report.record import (
    RunSummary,
    changed_settings,
    collect_versions,
)
from vembed.evaluation.report.report import write_report
from vembed.models.precision import is_quantized, saved_dtype, store_rounded
from vembed.parallel import collectives
from vembed.parallel.parameters import full_state_dict, num_parameters
from vembed.saving.card import Card, properties_of
from vembed.saving.files import save_model
from vembed.training.checkpoint.folders import newest_checkpoint

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

WHOLE_MODEL = "model"
"""Folder of the whole model inside a checkpoint, for fsdp_state_dict_type: FULL_STATE_DICT."""


def write_whole_model(trainer: Trainer, checkpoint: Path) -> None:
    """Write the model as it is evaluated into a checkpoint under fsdp_state_dict_type: FULL_STATE_DICT. Collective.

    Beside its pieces, from which the run resumes on any number of processes.
    """
    fsdp = trainer.session.fsdp
    if fsdp is None or fsdp.state_dict_type != "FULL_STATE_DICT":
        return
    log.info(
        f"fsdp_state_dict_type: FULL_STATE_DICT: the checkpoint holds the whole model too, in {WHOLE_MODEL}/"
    )
    with trainer.hooks.evaluation_weights():
        weights = full_state_dict(trainer.components.model)
        if trainer.session.is_main:
            _store(trainer, checkpoint / WHOLE_MODEL, weights)


def _store(
    trainer: Trainer,
    folder: Path,
    weights: dict[str, Tensor],
    card: Card | None = None,
) -> None:
    """Write the model with gathered weights, rounded as its layers compute with them, in the layout of Sentence
    Transformers. Runs on rank 0."""
    config = trainer.config
    embedding_model = trainer.components.embedding_model
    store_rounded(embedding_model, weights)
    # Learned by the loss, and used by CLIP and SigLIP models: they go into the model's own file.
    learned = trainer.components.loss.logit_scale_and_bias()
    if learned is not None:
        embedding_model.write_logit_scale_and_bias(*learned, weights)
    save_model(
        folder,
        embedding_model,
        weights,
        dtype=saved_dtype(config.model.torch_dtype, embedding_model.description),
        merge_adapters=config.adapters.save_merged,
        card=card,
    )


def save_final(trainer: Trainer) -> Path:
    """Write final/ and the report; return the model's folder.

    Collective: every rank contributes its shards. Raise RunError, and write nothing, if the model is not finite.
    """
    config = trainer.config
    session = trainer.session
    components = trainer.components
    data = trainer.data
    state = trainer.state
    output = trainer.output
    metric = trainer.metric if state.scores else ""
    embedding_model = components.embedding_model
    description = embedding_model.description
    folder = output / "final"
    newest = newest_checkpoint(output)
    weights = full_state_dict(components.model)
    problem = _not_finite(embedding_model, weights)
    if problem is not None:
        advice = f"resume from an earlier checkpoint ({newest} is the newest)"
        raise RunError(
            f"final/ is not written: the trained weights of {problem} are not finite; lower learning_rate (now "
            f"{config.optimizer.learning_rate:g}) or max_grad_norm, and {advice if newest else 'train again'}"
        )
    warnings = list(data.warnings)
    if state.guard_message is not None:
        warnings.append(
            f"{state.guard_message}; final/ is the checkpoint of step {state.guarded_step:,d}"
        )
    if metric in state.before and state.scores[metric] < state.before[metric]:
        warnings.append(
            f"{metric} is {state.scores[metric]:.4f} in final/ and was {state.before[metric]:.4f} before training: use "
            f"the model as it was, or lower learning_rate (now {config.optimizer.learning_rate:g}), or look at the training "
            "data (vembed audit)"
        )
        log.warning(warnings[-1])
    if state.num_skipped:
        warnings.append(
            f"{state.num_skipped:,d} steps were left out because a number was not finite"
        )
    decisions = session.placement.decisions.items()
    start_changes = []
    for name in ("query_prompt", "document_prompt"):
        if getattr(config.model, name) is not None:
            start_changes.append(f"the {name} of the config")
    if description.adds_projection:
        start_changes.append(description.reasons["embedding_dim"])
    summary = RunSummary(
        model=description.summary(),
        properties=properties_of(description),
        start_changes=start_changes,
        data=list(data.examples.summary()),
        language=_language(data.examples) if session.is_main else None,
        evaluation="" if data.evaluation is None else data.evaluation.summary(),
        metric=metric,
        final_step=state.scored_step if state.scores else state.step,
        num_steps=state.step,
        num_examples=len(data.examples),
        num_parameters=num_parameters(components.model),
        num_trainable=num_parameters(components.model, trainable_only=True),
        num_processes=session.world_size,
        strategy=session.strategy,
        device=str(session.device),
        precision=session.mixed_precision,
        decided_options=trainer.decided_options,
        decisions={name: decision.as_record() for name, decision in decisions},
        seconds=state.seconds,
        versions=collect_versions(),
        warnings=warnings,
    )
    if session.is_main:
        # The scores are those of the newest evaluation.
        card = Card(
            summary, changed_settings(config.to_dict()), state.scores, state.before
        )
        dtype = saved_dtype(config.model.torch_dtype, description)
        stored = f"in {dtype}" if dtype else "as they are held"
        log.info(f"weights: stored {stored} (torch_dtype: {config.model.torch_dtype})")
        try:
            _store(trainer, folder, weights, card)
        except (OSError, SafetensorError) as error:
            advice = "train again (save_steps would have kept checkpoints)"
            if newest:
                advice = f"resume from {newest}"
            raise RunError(
                f"final/ could not be written ({error}): make room in {output} if its disk is full, and {advice}"
            ) from error
        log.info(f"model: {folder}")
        finished = datetime.now().astimezone().isoformat(timespec="seconds")
        summary = replace(summary, finished=finished)
        try:
            summary.save(output)
            write_report(output)
        except OSError as error:
            raise RunError(
                f"the model is in {folder}, but its report could not be written ({error}): "
                f"make room in {output} if its disk is full, then `vembed report {output}`"
            ) from error
        log.info(f"report: {output / 'report.html'}")
    session.barrier()
    return folder


def _not_finite(embedding_model: nn.Module, weights: dict[str, Tensor]) -> str | None:
    """Return the name of a weight that is not finite, of any rank. Collective."""
    # 4-bit weights are stored as 16-bit floats, and any bits may look like a NaN.
    packed = set()
    for name, module in embedding_model.named_modules():
        if is_quantized(module):
            packed.add(f"{name}.weight")
    first_broken = None
    for name, weight in weights.items():
        is_number = weight.is_floating_point() and name not in packed
        if is_number and not bool(torch.isfinite(weight).all()):
            first_broken = name
            break
    # Rank 0 has all of them.
    broken: str | None = collectives.broadcast_object(first_broken)
    return broken


def _language(examples: ExampleStore) -> str | None:
    """Return the language of a sample of the texts; "" where it is unclear and not English, None without texts."""
    texts = []
    for index in spread(len(examples), MAX_SAMPLED_TEXTS):
        example = examples[index]
        items = (example.query, *example.positives[:1])
        texts += [item.text for item in items if item.text]
    if not texts:
        return None
    return language_of(texts) or ("" if not is_english(texts) else None)
