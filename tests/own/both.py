"""A user's module of two inputs: words for texts, patches for images, and a layer that both pass."""

import torch
from torch import nn


class Both(nn.Module):
    """One vector for each token of a text, or for each patch of an image."""

    def __init__(self, vocab_size=400, width=16, image_size=16, patch=4):
        super().__init__()
        self.image_size = image_size
        self.words = nn.Embedding(vocab_size, width)
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.shared = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def forward(self, input_ids=None, attention_mask=None, pixel_values=None):
        """Return [n, tokens or patches, width]."""
        if input_ids is not None:
            hidden = self.words(input_ids)
        else:
            hidden = self.patches(pixel_values).flatten(2).transpose(1, 2)
        for layer in self.shared:
            hidden = hidden + torch.relu(layer(hidden))
        return hidden
