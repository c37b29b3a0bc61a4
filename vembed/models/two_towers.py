"""TwoTowers: a text encoder and an image encoder with projections into one space, with CLIP's attribute names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from vembed.errors import UserError
from vembed.models.families.description import IMAGE_TOWER_FOLDER

PROJECTIONS_FILE = "projections.safetensors"
"""File with the weights of both projections, in the text tower's folder."""


class TwoTowers(nn.Module):
    """Two independent models, projected into a shared space."""

    def __init__(
        self,
        text_model: PreTrainedModel,
        vision_model: PreTrainedModel,
        *,
        text_dim: int,
        image_dim: int,
        shared_dim: int,
    ) -> None:
        super().__init__()
        self.text_model = text_model
        self.vision_model = vision_model
        self.text_projection = _projection(text_dim, shared_dim)
        self.visual_projection = _projection(image_dim, shared_dim)

    def load_projections(self, folder: Path) -> None:
        """Load the projections of a saved composed model."""
        path = folder / PROJECTIONS_FILE
        if not path.is_file():
            raise UserError(
                f"{folder} is a composed model without {PROJECTIONS_FILE}; it is incomplete"
            )
        weights = load_file(path)
        with torch.no_grad():
            self.text_projection.weight.copy_(weights["text_projection.weight"])
            self.visual_projection.weight.copy_(weights["visual_projection.weight"])

    def save_pretrained(
        self, folder: str | Path, *, state_dict: dict[str, Tensor]
    ) -> None:
        """Save the text tower and the projections in `folder`, and the image tower in a subfolder."""
        folder = Path(folder)
        for tower, name, place in (
            (self.text_model, "text_model.", folder),
            (self.vision_model, "vision_model.", folder / IMAGE_TOWER_FOLDER),
        ):
            # Each tower's file has the names of the tower itself, so that it loads alone.
            part = {
                key.removeprefix(name): value
                for key, value in state_dict.items()
                if key.startswith(name)
            }
            tower.save_pretrained(place, state_dict=part)
        # Whatever belongs to no tower: the projections.
        projections = {
            key: value.contiguous()
            for key, value in state_dict.items()
            if not key.startswith(("text_model.", "vision_model."))
        }
        save_file(projections, folder / PROJECTIONS_FILE)


def _projection(width: int, shared_dim: int) -> nn.Linear:
    """Return a projection initialised as the identity if the sizes agree, otherwise as an orthogonal matrix."""
    linear = nn.Linear(width, shared_dim, bias=False)
    if width == shared_dim:
        nn.init.eye_(linear.weight)
    else:
        nn.init.orthogonal_(linear.weight)
    return linear
