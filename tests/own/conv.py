"""A user's image encoder: two convolutions. It gives a map of features, as convolutional networks do."""

import torch
from torch import nn


class Block(nn.Module):
    """A convolution that halves the image, a norm over the channels, and an activation."""

    def __init__(self, before, after):
        super().__init__()
        self.convolution = nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, after)

    def forward(self, image):
        """Map [n, before, height, width] to [n, after, height / 2, width / 2]."""
        return torch.relu(self.norm(self.convolution(image)))


class Convolutions(nn.Module):
    """[n, 3, height, width] to [n, width, height / 4, width / 4]."""

    _no_split_modules = ("Block",)

    def __init__(self, width=8, image_size=16):
        super().__init__()
        self.image_size = image_size
        self.blocks = nn.ModuleList([Block(3, width), Block(width, width)])

    def forward(self, pixel_values):
        """Return the map."""
        hidden = pixel_values
        for block in self.blocks:
            hidden = block(hidden)
        return hidden
