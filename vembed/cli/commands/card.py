"""`vembed card`: the model card of a trained model, written again from its run."""

from __future__ import annotations

from pathlib import Path

from vembed.config.loading import resolve_run
from vembed.errors import UserError
from vembed.evaluation.report.record import read_run
from vembed.models.families.decisions import describe
from vembed.saving.card import Card, render_card
from vembed.saving.publication import CARD, MODEL_FOLDER


def run_card(model: str) -> Path:
    """Write README.md of a run's model from what the run's folder says; return its path. `model`: the folder of a run,
    or the model in it."""
    path = Path(model).expanduser().resolve()
    folder = path / MODEL_FOLDER if (path / "config.yaml").is_file() else path
    run = folder.parent
    if not folder.is_dir() or not (run / "config.yaml").is_file():
        raise UserError(
            f"{model} is neither the folder of a finished run nor the {MODEL_FOLDER}/ in one, so there is nothing to "
            "write a card from; give the output_dir of the run"
        )
    record = read_run(run)
    summary = record.summary
    card = Card(
        data=tuple(summary.data),
        language=summary.language,
        settings=record.changed_settings(),
        scores=record.after,
        before=record.before,
        evaluation=summary.evaluation.partition(", from")[0],
        num_steps=summary.num_steps,
        versions=summary.versions,
    )
    config = resolve_run(run / "config.yaml").config
    description = describe(
        config.model,
        config.matryoshka,
        similarity=config.objective.similarity,
        use_qlora=config.adapters.use_qlora,
    )
    is_adapter = any(folder.rglob("adapter_config.json"))
    target = folder / CARD
    text = render_card(description, card, adapter_alone=is_adapter)
    target.write_text(text, encoding="utf-8", errors="backslashreplace")
    return target
