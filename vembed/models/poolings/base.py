"""Pooling: the base class of all poolings. Imports no torch, because the config reads it."""

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
    """Server or format -> its name for this pooling. Those that are missing refuse."""
    needs_order: ClassVar[bool] = False
    """True: it needs tokens in an order, which those of an image do not have."""
    is_trained: ClassVar[bool] = False
    """True: `build` gives a module with parameters, which is called instead of `pool`.
    It stays outside what is cached of a frozen tower."""

    def refusal(
        self, *, is_causal: bool, is_image: bool, has_class_token: bool
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

    def reference(self, tokens: Tensor) -> Tensor:
        """Map [tokens, hidden_dim] of one text without padding to [width], in the
        plainest way. Tests compare `pool` with it."""
        raise NotImplementedError(f"{self.name} has no reference")
