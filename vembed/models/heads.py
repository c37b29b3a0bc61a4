"""Dense modules after the pooling: those of Sentence Transformers, and the MRL projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vembed.errors import UserError
from vembed.models.families.model_settings import read_dense

IDENTITY = "torch.nn.modules.linear.Identity"


class Dense(nn.Module):
    """A linear layer and an activation, equivalent to the Dense module of Sentence Transformers."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        activation: str = IDENTITY,
    ) -> None:
        """`activation`: dotted path of a class in torch.nn, as Sentence Transformers writes it."""
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation_path = activation
        kind = vars(nn).get(activation.rsplit(".", 1)[-1])
        if not activation.startswith("torch.nn") or not isinstance(kind, type):
            raise UserError(
                f"the activation {activation} of a Dense module is not a module of torch.nn"
            )
        try:
            self.activation = kind()
        except TypeError as error:  # a layer with sizes of its own
            raise UserError(
                f"the activation {activation} of a Dense module is not an activation: {error}"
            ) from error

    def forward(self, vectors: Tensor) -> Tensor:
        """Map [n, in_features] to [n, out_features], in the dtype of the weights."""
        # Autocast is off here: without the cast a bfloat16 input would meet float32 weights.
        activated: Tensor = self.activation(
            self.linear(vectors.to(self.linear.weight.dtype))
        )
        return activated

    def settings(self) -> dict[str, Any]:
        """Return the module's config.json in the Sentence Transformers layout."""
        return {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": self.linear.bias is not None,
            "activation_function": self.activation_path,
        }


class Head(nn.Sequential):
    """Dense modules in sequence. They run outside autocast: they are small, and their output is the embedding."""

    def forward(self, vectors: Tensor, *, skips_last: bool = False) -> Tensor:
        """Map [n, hidden_dim] to [n, embedding_dim], or to the input of the last module."""
        with torch.autocast(vectors.device.type, enabled=False):
            for module in list(self)[: len(self) - skips_last]:
                vectors = module(vectors)
        return vectors


def load_dense(folder: Path) -> Dense:
    """Load a Dense module saved by Sentence Transformers."""
    settings = read_dense(folder)
    try:
        dense = Dense(
            settings.in_features,
            settings.out_features,
            bias=settings.bias,
            activation=settings.activation_function or IDENTITY,
        )
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    weights = load_file(folder / "model.safetensors")
    dense.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return dense


def principal_components(sample: Tensor, out_features: int) -> Tensor:
    """Return [out_features, dim], the principal components of the unit vectors of `sample` [n, dim], strongest first.

    Signs are fixed, so that all machines get the same result. If `sample` has fewer rows than components, the remaining
    ones are arbitrary orthogonal directions.
    """
    # float64: a covariance of float32 rounds away the weak directions.
    unit = nn.functional.normalize(sample.double(), dim=1)
    centred = unit - unit.mean(dim=0)
    covariance = centred.T @ centred
    # eigh returns ascending eigenvalues with eigenvectors as columns: flip, then transpose to rows.
    directions: Tensor = (
        torch.linalg.eigh(covariance).eigenvectors.flip(1).T[:out_features]
    )
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    return (directions * largest.sign()).to(sample.dtype)
