"""EpochMiner: hard negatives that the run's own model mines between epochs (`mine`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vembed.config.schema import EpochMining
from vembed.data.examples import Example, Item, Kind
from vembed.errors import UserError
from vembed.inference.encoding import encode_features, first_dims
from vembed.mining.mine import ExampleMiner
from vembed.progress import duration
from vembed.training.hooks.base import Hook, HookState, StepReport

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

MINING_FOLDER = "mining"
"""Folder of the vectors inside output_dir, while a mining is under way."""


class MinedExamples:
    """The examples of a run with the negatives of the newest mining."""

    def __init__(self, miner: ExampleMiner, numbers_EN: Tensor) -> None:
        """`numbers_EN`: documents of each example, -1 where there are fewer. It is read anew for each example."""
        self._miner = miner
        self._numbers = numbers_EN

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:
        return self._miner.example(index, self._numbers[index].tolist())


class EpochMiner(Hook):
    """Mines before epochs. The negatives are a tensor of the checkpoints, so that a resumed run has the same."""

    name = "mine"

    def __init__(self, options: EpochMining) -> None:
        self._options = options
        self._metrics: dict[str, float] = {}

    def on_build(self, run: Trainer) -> None:
        """See Hook."""
        examples = run.data.examples
        if any(labels is not None for labels in examples.labels):
            raise UserError(
                "mine needs pairs of queries and documents, and the data are texts or images with labels"
            )
        self.run = run
        self._miner = ExampleMiner(
            self._options,
            run.config.data,
            examples,
            run.session,
            run.config.run.seed,
        )
        self._numbers = torch.full(
            (len(examples), self._options.num_negatives), -1, dtype=torch.int64
        )
        for line in self._miner.notes:
            log.info(f"mine: {line}")

    def on_start(self, run: Trainer) -> None:
        """See Hook."""
        # The stream has begun with the examples as they are in the data; a resumed run has its negatives already.
        run.stream.store = MinedExamples(self._miner, self._numbers)
        run.restart_stream()

    def on_epoch(self, epoch: int) -> None:
        """See Hook."""
        is_due = (
            epoch % self._options.every_epochs == 0 if epoch else self._options.at_start
        )
        if not is_due:
            return
        began = time.monotonic()
        result = self._miner.mine(self._encode, self.run.output / MINING_FOLDER, epoch)
        mined = torch.from_numpy(result.documents)
        num_mined = int((mined >= 0).sum())
        # In place: the stream and the checkpoints hold this tensor.
        self._numbers.copy_(mined)
        self.run.restart_stream()  # batches of this epoch were prepared with the earlier negatives
        seconds = time.monotonic() - began
        self._metrics = {
            "mine/negatives": num_mined / max(len(mined), 1),
            "mine/score": result.mean_score,
            "mine/seconds": seconds,
        }
        note = f"; {result.note}" if result.note else ""
        log.info(
            f"mine: before epoch {epoch + 1}, {num_mined:,d} negatives for {len(mined):,d} examples (mean score "
            f"{result.mean_score:.4f}, {result.num_short:,d} examples got fewer than "
            f"{self._options.num_negatives}); took {duration(seconds)}{note}"
        )

    def metrics(self, report: StepReport) -> Mapping[str, Any]:
        """See Hook."""
        del report
        metrics = self._metrics
        self._metrics = {}  # each mining is logged once
        return metrics

    def state(self) -> HookState:
        """See Hook."""
        return {"documents": self._miner.fingerprint}

    def load_state(self, state: HookState) -> None:
        """See Hook."""
        if state["documents"] != self._miner.fingerprint:
            raise UserError(
                "mine: the documents that are mined have changed: restore them, or start anew in another output_dir"
            )

    def tensors(self) -> Mapping[str, Tensor]:
        """See Hook."""
        return {"negatives": self._numbers}

    def _encode(self, items: Sequence[Item], kind: Kind) -> np.ndarray:
        run = self.run
        builder = run.components.input_builder
        featuriser = run.components.featuriser
        vectors = encode_features(
            run.components.model,
            featuriser,
            featuriser.features([(item, kind) for item in items]),
            run.session.device,
            world_size=run.session.world_size,
            check_interrupt=run.interrupts.check,
            input_builder=builder if builder.stores else None,
        )
        is_unit = run.config.objective.similarity == "cosine"
        return first_dims(vectors, None, is_unit)
