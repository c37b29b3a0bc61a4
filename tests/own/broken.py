"""Modules that each break one rule of own models."""

import numpy as np
import torch
from torch import nn

from tests.own.bag import Bag


class Padded(Bag):
    """Forgets the mask."""

    def forward(self, input_ids, attention_mask):
        """Average the padding too."""
        return self.out(self.words(input_ids).mean(1))


class Unused(Bag):
    """Has a layer that the forward does not use."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 4)


class Hidden(Bag):
    """Draws with numpy, which no seed of torch repeats."""

    def forward(self, input_ids, attention_mask):
        """Add noise in training."""
        vectors, losses = super().forward(input_ids, attention_mask)
        return (
            vectors + float(np.random.default_rng().normal())
            if self.training
            else vectors
        ), losses


class AlwaysDropped(Bag):
    """Drops in evaluation too."""

    def forward(self, input_ids, attention_mask):
        """Drop whatever the mode is."""
        return torch.dropout(super().forward(input_ids, attention_mask)[0], 0.5, True)


class MeanOfMeans(Bag):
    """Returns the largest of its inputs' losses, which micro-batches do not add up to."""

    def forward(self, input_ids, attention_mask):
        """Return a scalar that is no mean over the inputs."""
        vectors, _ = super().forward(input_ids, attention_mask)
        return vectors, {"largest": vectors.square().sum(1).max()}


class Forgetful(Bag):
    """Has a random tensor that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(16), persistent=False)

    def forward(self, input_ids, attention_mask):
        """Add it."""
        return super().forward(input_ids, attention_mask)[0] + self.noise
