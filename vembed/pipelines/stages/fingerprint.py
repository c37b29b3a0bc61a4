"""Fingerprints: what a step depends on, in one short word, so that a finished step is not run again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vembed.config.entries import DataSource
from vembed.config.schema import TrainConfig
from vembed.config.terms import needed_teachers
from vembed.data.cache import add_content
from vembed.training.checkpoint.resume import MAY_CHANGE

PART = 2**20
"""Bytes that are read at the beginning, in the middle and at the end of a large file."""
RESULTS = frozenset(
    [
        "epochs",
        "max_steps",
        "max_train_minutes",
        "load_best_model_at_end",
        "save_dtype",
        "save_merged",
        "on_nonfinite",
    ]
)
"""Options that a resumed run may change, and that change what comes out."""


def of_training(config: TrainConfig, before: str | None, world_size: int) -> str:
    """Return the fingerprint of a training stage. `before`: that of the step whose model it starts from."""
    facts = {
        name: value
        for name, value in config.to_dict().items()
        if name not in MAY_CHANGE or name in RESULTS
    }
    model = config.model
    data = config.data
    evaluation = config.evaluation
    # The gradient depends on the global batch only, so the same fingerprint holds for 2 x 32 and 4 x 16.
    batch = config.batch
    facts["global batch"] = batch.global_batch_size or batch.batch_size * world_size
    facts["model_name"] = before or _of_place(model.model_name)
    paths = data.data_path if isinstance(data.data_path, list) else [data.data_path]
    facts["data"] = [
        [_of_place(source.path), source.model_dump(mode="json", exclude={"path"})]
        if isinstance(source, DataSource)
        else _of_place(source)
        for source in paths
    ]
    # What may end the run early, or chooses among its checkpoints.
    scored_by = [evaluation.eval_metric, evaluation.eval_steps]
    if config.run.load_best_model_at_end and data.val_data_path:
        facts["validation data"] = [_of_place(data.val_data_path), *scored_by]
    if evaluation.patience not in (None, "auto"):
        validated: Any = data.val_split
        if data.val_data_path:
            validated = _of_place(data.val_data_path)
        facts["patience"] = [evaluation.patience, *scored_by, validated]
    if evaluation.guards:
        facts["guards"] = [
            [_of_place(guard.path), guard.model_dump(mode="json")]
            for guard in evaluation.listed_guards()
        ]
    # Further files that only some runs read.
    if model.model_class is not None:
        facts["model_class"] = _of_place(model.model_class.rpartition(":")[0])
    others = {
        "image_model_name": model.image_model_name,
        "tokenizer_name": model.tokenizer_name,
    }
    for teacher in needed_teachers(config.objective, data, model):
        others[f"teacher {teacher.label}"] = teacher.model
    for key, name in others.items():
        # The names of those that are no folder here are among the options.
        if name and _of_place(name) != name:
            facts[key] = _of_place(name)
    return _short(facts)


def of_options(options: Mapping[str, Any], before: list[str]) -> str:
    """Return the fingerprint of a step between: its options, the files that they name, and the steps before it."""
    return _short(
        {
            "options": {key: _of_value(value) for key, value in options.items()},
            "before": before,
        }
    )


def _of_value(value: Any) -> Any:
    if isinstance(value, str):
        return _of_place(value)
    if isinstance(value, list):
        return [_of_value(entry) for entry in value]
    return value


def _of_place(name: str) -> str:
    """Return a digest of the content of a file or folder; any other name as it is."""
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return _of_file(path)
        if path.is_dir():
            files = sorted(inner for inner in path.rglob("*") if inner.is_file())
            return _short(
                [[file.relative_to(path).as_posix(), _of_file(file)] for file in files]
            )
    except (OSError, ValueError):  # not a valid name of a file
        return name
    return name


def _of_file(path: Path) -> str:
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    add_content(digest, path, pieces=3, piece_bytes=PART, whole_bytes=PART)
    return digest.hexdigest()


def _short(value: Any) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, default=str).encode()
    ).hexdigest()[:16]
