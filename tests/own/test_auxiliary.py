"""Sums and counts of auxiliary losses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vembed.config.schema import ObjectiveSection
from vembed.models.embedding_model import sums_and_counts
from vembed.training.auxiliary_losses import AuxiliaryBatch


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]])
def test_a_scalar_does_not_depend_on_the_cut_into_micro_batches(cut):
    query = np.array([0, 0, 0])
    rows = SimpleNamespace(
        query=query, positive=query + 1, negative=query[:0], features=range(4)
    )
    batch = AuxiliaryBatch(ObjectiveSection(), rows, torch.device("cpu"))
    of_inputs = torch.tensor([8.0, 0.0, 0.0, 0.0])
    for inputs in cut:
        losses = sums_and_counts({"kl": of_inputs[inputs].mean()}, len(inputs))
        batch.add([("text", inputs)], [losses])
    assert batch.of_rank["kl"].tolist() == [8.0, 4.0]
