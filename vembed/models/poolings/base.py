"""Pooling: the base class of all poolings, and those without parameters: cls, mean, last, weighted_mean, max.

Imports no torch, because the config reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn


class Pooling:
    """Base class of poolings, for what most of them share. The first sentence of a
    class's docstring stands in the docs."""

    name: ClassVar[str]
    """Value of the option `pooling`."""
    spellings: ClassVar[str] = ""
    """Other spellings that the option accepts, separated by spaces."""
    modes: ClassVar[tuple[str, ...]] = ()
    """Modes of Sentence Transformers' Pooling module that do the same. Without any, the
    pooling is saved as a module of vembed's own, which only vembed loads."""
    servers: ClassVar[Mapping[str, str]] = {}
    """Server -> its name for this pooling. Those that are missing refuse."""
    needs_order: ClassVar[bool] = False
    """True: it needs tokens in an order, which those of an image do not have."""
    is_trained: ClassVar[bool] = False
    """True: `build` gives a module with parameters, which is called instead of `pool`.
    It stays outside what is cached of a frozen tower."""

    def refusal(
        self,
        *,
        is_causal: bool,
        is_image: bool,
        has_class_token: bool,
    ) -> str | None:
        """Return why the pooling does not go with a model, and what does; or None."""
        del is_causal, has_class_token
        if is_image and self.needs_order:
            return "an image's tokens have no order; use mean or max"
        return None

    def width(self, hidden_dim: int) -> int:
        """Return the size of the pooled vector."""
        return hidden_dim

    def build(self, hidden_dim: int) -> nn.Module:
        """Return the module of a trained pooling, which maps as `pool` does. Its state
        dict is saved and loaded by vembed."""
        raise NotImplementedError(f"{self.name} is not trained")

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Map [n, tokens, hidden_dim] to [n, width].

        `mask` [n, tokens] is 1 on real tokens, with the padding on either side. None: no
        padding. Texts that were packed for the model are padded again before this.
        """
        raise NotImplementedError(self.name)


class Cls(Pooling):
    """The first token, which BERT-like models train for this."""

    name = "cls"
    spellings = "first"
    modes = ("cls",)
    servers = {"tei": "cls", "vllm": "CLS", "llama.cpp": "cls"}

    def refusal(
        self,
        *,
        is_causal: bool,
        is_image: bool,
        has_class_token: bool,
    ) -> str | None:
        if is_causal:
            return (
                "the first token of a causal decoder sees no other, so that every text "
                "would get the same embedding; use pooling: last, or "
                "bidirectional_attention: true"
            )
        if is_image and not has_class_token:
            return "this image encoder has no class token; use mean or max"
        return None

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return hidden[:, 0]
        # argmax returns the first maximum, that is the first real token.
        return _take(hidden, mask.int().argmax(dim=1))


class Mean(Pooling):
    """The mean of all tokens."""

    name = "mean"
    spellings = "average avg"
    modes = ("mean",)
    servers = {"tei": "mean", "vllm": "MEAN", "llama.cpp": "mean"}

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return hidden.mean(dim=1)
        weight = mask.to(hidden.dtype)
        # Not a matrix product: on GPUs that is computed in TF32, forward and backward, with
        # the mantissa of float16.
        total = (hidden * weight.unsqueeze(-1)).sum(dim=1)
        return total / weight.sum(dim=1, keepdim=True)


class Last(Pooling):
    """The last token, the only one of a causal decoder that sees the whole text."""

    name = "last"
    spellings = "last_token lasttoken eos"
    modes = ("lasttoken",)
    servers = {"tei": "last-token", "vllm": "LAST", "llama.cpp": "last"}
    needs_order = True

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return hidden[:, -1]
        # The first real token of the flipped mask is the last one.
        num_behind = mask.int().flip(1).argmax(dim=1)
        return _take(hidden, mask.shape[1] - 1 - num_behind)


class WeightedMean(Mean):
    """The mean with weight k for the k-th token, for causal decoders (SGPT)."""

    name = "weighted_mean"
    spellings = "weightedmean"
    modes = ("weightedmean",)
    servers = {}
    needs_order = True

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = hidden.new_ones(hidden.shape[:2]).long()
        # The sum up to a token is its place among the real tokens, also behind padding. Times the mask: padding counts 0.
        return super().pool(hidden, mask.cumsum(dim=1) * mask)


class Max(Pooling):
    """The largest value of each coordinate."""

    name = "max"
    modes = ("max",)

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            hidden = hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf"))
        return hidden.amax(dim=1)


def _take(hidden: Tensor, position: Tensor) -> Tensor:
    # [n] -> [n, 1, hidden_dim]: gather wants an index for every coordinate.
    index = position[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, index).squeeze(1)
