"""Model folders made from checkpoints of a run and from adapters, so that they can be merged like any other model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from vembed.config.schema import TrainConfig
from vembed.config.terms import needed_teachers
from vembed.errors import UserError
from vembed.losses.build import build_loss
from vembed.models.building import build_model, load_embedder
from vembed.models.families.description import describe
from vembed.models.families.model_files import read_model
from vembed.models.precision import saved_dtype, store_rounded
from vembed.parallel.parameters import full_state_dict
from vembed.saving.files import save_model
from vembed.training.checkpoint import folders as integrity
from vembed.training.checkpoint.checkpointer import read_state
from vembed.training.checkpoint.tensors import Trained, restore, stored_tensors
from vembed.training.hooks.averaging import averages_of, put_averages

log = logging.getLogger("vembed")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of a run."""
    return (folder / integrity.STATE).is_file() and (
        folder / integrity.MANIFEST
    ).is_file()


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints of a run, oldest first."""
    checkpoints = [path for _, path in integrity.list_checkpoints(run)]
    if len(checkpoints) < count:
        raise UserError(
            f"{run} has {len(checkpoints)} checkpoints, and the last {count} are asked for: set save_steps and "
            "save_total_limit so that the run keeps more of them"
        )
    return checkpoints[-count:]


def whole_model(name: str, folder: Path) -> Path | None:
    """Write a checkpoint or an adapter to `folder` as a model with whole weights; None where `name` is one already."""
    path = Path(name).expanduser()
    if is_checkpoint(path):
        return _from_checkpoint(path, folder)
    files = read_model(name)
    if files.adapter is None:
        return None
    embedder = load_embedder(name)
    return save_model(folder, embedder, embedder.state_dict())


def _from_checkpoint(checkpoint: Path, folder: Path) -> Path:
    problems = integrity.verify(checkpoint)
    if problems:
        raise UserError(f"{checkpoint} is damaged ({problems[0]}); leave it out")
    saved = read_state(checkpoint)
    config = TrainConfig(**saved["config"])
    description = describe(
        config.model,
        config.matryoshka,
        similarity=config.objective.similarity,
        use_qlora=config.adapters.use_qlora,
    )
    embedder = build_model(
        description,
        config.model,
        config.adapters,
        objective=config.objective,
        seed=config.run.seed,
    )
    scale, bias = embedder.initial_scale_and_bias or (None, None)
    size = description.embedding_dim
    teachers = needed_teachers(config.objective, config.data, config.model)
    loss = build_loss(
        config,
        mrl_dims=description.mrl_dims,
        start_scale=scale,
        start_bias=bias,
        embedding_dim=size,
        teacher_dims={teacher.label: size for teacher in teachers},
    )
    # The loss is built only for its learned scale and bias, which are stored beside the weights; no optimizer state is
    # read.
    stored = stored_tensors(checkpoint)
    for name, parameter in loss.named_parameters(prefix="loss"):
        # The checkpoint knows the size of a teacher's vectors without the teacher.
        shape = stored[name].size
        if parameter.shape != shape:
            parameter.data = torch.empty(shape)
    averages = averages_of(embedder) if config.optimizer.ema else {}
    # no_dist: rank 0 alone reads, inside a process group of several ranks too; others would wait in a collective.
    trained = Trained(embedder, loss, of_hooks=averages)
    restore(trained, checkpoint, no_dist=True)
    if averages:
        put_averages(embedder, averages)
    weights = full_state_dict(embedder)
    learned = loss.scale_and_bias()
    if learned is not None:
        embedder.write_scale_and_bias(*learned, weights)
    # In the run's own order (finish.py): first the learned scale and bias, then the weights as int8 layers round them.
    store_rounded(embedder, weights)
    log.info("%s: step %d", checkpoint, saved["loop"]["step"])
    return save_model(
        folder,
        embedder,
        weights,
        dtype=saved_dtype(config.model.torch_dtype, description),
    )
