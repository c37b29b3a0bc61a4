"""`vembed export`: a copy of a trained model in a new folder, on request with its adapter merged into the weights."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from vembed.errors import UserError

log = logging.getLogger("vembed")


def run_export(model: str, output: str, *, merge: bool = False) -> Path:
    """Copy `model` (a model, a run or an adapter) to the new folder `output`. A checkpoint is made into a model. With
    `merge`, write whole weights."""
    target = Path(output)
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    # Imported late: torch takes seconds, and the check above needs none of it.
    from vembed.families.model_files import read_model
    from vembed.weights.checkpoints import is_checkpoint, whole_model

    if is_checkpoint(Path(model).expanduser()):
        made = whole_model(model, target)
        assert made is not None
        return made
    files = read_model(model)
    if not any(files.backbone.rglob("*.safetensors")) and files.adapter is None:
        raise UserError(f"{model} has no weights (*.safetensors), so there is no model to copy")
    if not merge:
        shutil.copytree(files.folder, target)
        return target
    if files.adapter is None:
        raise UserError(f"{model} holds whole weights and no adapter to merge; leave out --merge to copy it")
    from vembed.models.embedding_model import load_embedder
    from vembed.saving.files import save_model

    embedder = load_embedder(model)
    state = embedder.state_dict()
    return save_model(target, embedder.description, embedder.backbone, embedder.head, state)
