"""The whole model inside a checkpoint, for fsdp_state_dict_type: FULL_STATE_DICT. Other types hold only pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import nn

from vembed.config.schema import TrainConfig
from vembed.losses.batch import EmbeddingLoss
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.precision import saved_dtype
from vembed.parallel.parameters import full_state_dict
from vembed.parallel.session import Session
from vembed.saving.files import save_model

log = logging.getLogger("vembed")

FOLDER = "model"


def whole_model_writer(
    config: TrainConfig,
    session: Session,
    embedder: EmbeddingModel,
    model: nn.Module,
    loss: EmbeddingLoss,
) -> Callable[[Path], None] | None:
    """Return the function that writes the model in the layout of final/ into a checkpoint, or None if the config does
    not ask.

    The pieces are written too: the run resumes from those, on any number of processes. The function is collective.
    """
    kind = None if session.fsdp is None else session.fsdp.state_dict_type
    if kind == "LOCAL_STATE_DICT":
        log.info(
            "fsdp_state_dict_type: LOCAL_STATE_DICT: each process writes its own pieces, as with SHARDED_STATE_DICT; "
            "here any number of processes can read them"
        )
    if kind != "FULL_STATE_DICT":
        return None
    log.info(
        "fsdp_state_dict_type: FULL_STATE_DICT: each checkpoint holds the whole model too, in %s/",
        FOLDER,
    )

    def write(checkpoint: Path) -> None:
        # Collective, so it comes before the branch on rank 0.
        weights = full_state_dict(model)
        if session.is_main:
            learned = loss.scale_and_bias()
            if learned is not None:
                embedder.write_scale_and_bias(*learned, weights)
            merge = config.adapters.save_merged
            save_model(
                checkpoint / FOLDER,
                embedder.description,
                embedder.backbone,
                embedder.head,
                weights,
                dtype=saved_dtype(config.run.save_dtype, embedder.description),
                merge_adapters=merge,
            )

    return write
