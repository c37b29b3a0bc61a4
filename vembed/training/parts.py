"""RunData and RunModel: the data and the model of a run, each with all that is made once at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from vembed.config.schema import TrainConfig
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.example_store import ExampleStore
from vembed.data.features import Featuriser
from vembed.evaluation.dataset import EvalData
from vembed.losses.batch import EmbeddingLoss
from vembed.models.embedding_model import EmbeddingModel
from vembed.teachers.supply import Teachers
from vembed.training.frozen import InputSource


@dataclass(frozen=True, slots=True)
class RunData:
    """Examples, evaluation data and the order of the batches."""

    examples: ExampleStore
    evaluation: EvalData | None
    batch_schedule: BatchSchedule
    batches_per_step: int
    """Global batches of an optimizer step: gradient_accumulation_steps."""
    epochs: float
    """Passes over the data, where `max_steps` does not say how long the run is."""
    total_steps: int
    """Optimizer steps of the whole run."""
    warnings: tuple[str, ...] = ()
    """Problems between training and validation data, on rank 0."""
    by_task: Mapping[str, EvalData] = field(default_factory=dict)
    """Evaluation data of single tasks, by the task's name."""

    @property
    def examples_per_step(self) -> int:
        """Examples of all global batches of an optimizer step."""
        return self.batch_schedule.global_batch_size * self.batches_per_step

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs, with a fraction, that are done after `step` optimizer steps."""
        return step * self.batches_per_step / self.batch_schedule.steps_per_epoch


@dataclass(frozen=True, slots=True)
class RunModel:
    """Model, loss and optimizer."""

    embedder: EmbeddingModel
    """The model as it was built: description and layout of the files. Its parameters may be shards by now."""
    model: nn.Module
    """The model as it is called: replicated or sharded."""
    loss: EmbeddingLoss
    optimizer: torch.optim.Optimizer
    featuriser: Featuriser
    source: InputSource
    teachers: Teachers
    config: TrainConfig
    """The config, with the learning rate that was decided for this model."""

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for module in (self.model, self.loss):
            module.zero_grad(set_to_none=True)
