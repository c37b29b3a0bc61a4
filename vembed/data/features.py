"""Featuriser: items to model inputs, tokenised once and cached; and the collation of one micro-batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vembed.data.examples import ImageRef, Item, Kind
from vembed.data.pixels import Pixels, blank_image
from vembed.data.processing import ChatProcessing, TextProcessing
from vembed.errors import UserError
from vembed.models.description import Lane, ModelDescription

_ENTRY_BYTES = 400
"""What one cached entry costs besides its token ids: the objects around them and its place in the table."""

Address = tuple[int, Kind]
"""Content and role of an item: what its features depend on."""


@dataclass(frozen=True, slots=True)
class Features:
    """One Item, ready to be padded into a micro-batch."""

    lane: Lane
    length: int
    """Tokens plus image patches: what the token budget counts."""
    key: int
    """Content and prompt and cut: the same key means the same input to the model (63 bits)."""
    content: int
    """`item.key()`: the content alone, which the loss masks by."""
    token_ids: np.ndarray | None = None
    """int32, special tokens included."""
    images: tuple[ImageRef, ...] = ()
    """Decoded only in `collate`."""


class Featuriser:
    """Turns items into features and features into the tensors of one forward pass. Threads may share one."""

    def __init__(
        self, description: ModelDescription, *, cache_bytes: int = 512 * 2**20, image_cache_bytes: int = 2**30
    ) -> None:
        """`cache_bytes` bounds the features kept in memory (when they fill it, further ones are made anew each time),
        `image_cache_bytes` the pixels (the newest are kept)."""
        self.description = description
        self._prompts: dict[Kind, str] = {"query": description.query_prompt, "document": description.document_prompt}
        # One entry serves both kinds where their prompts are equal.
        same = description.query_prompt == description.document_prompt
        self._cache_kind: dict[Kind, Kind] = {"query": "query", "document": "query" if same else "document"}
        self._cache: dict[Address, Features] = {}
        self._cache_bytes_left = cache_bytes
        self._chat: ChatProcessing | None = None
        self._text: TextProcessing | None = None
        self._pixels: Pixels | None = None
        if description.lanes != ("text",):
            self._pixels = Pixels(description, cache_bytes=image_cache_bytes)
        if "vision" in description.lanes:
            assert self._pixels is not None
            self._chat = ChatProcessing(description, self._pixels)
        elif "text" in description.lanes:
            self._text = TextProcessing(description)

    def features(self, items: Sequence[tuple[Item, Kind]]) -> list[Features]:
        """The features of each item in its role, in order. Of images at most the headers are read."""
        addresses: list[Address] = [(item.key(), self._cache_kind[kind]) for item, kind in items]
        found = {address: self._cache[address] for address in addresses if address in self._cache}
        missing = {address: item for address, (item, _) in zip(addresses, items, strict=True) if address not in found}
        for lane in self.description.lanes if missing else ():
            of_lane = {address: item for address, item in missing.items() if self._lane(item) == lane}
            made = self._make(lane, of_lane) if of_lane else {}
            found.update(made)
            self._keep(made)
        return [found[address] for address in addresses]

    def collate(self, features: Sequence[Features]) -> dict[str, torch.Tensor]:
        """The tensors of one forward pass over features of one lane: padded token ids, decoded images.

        `attention_mask` is there only where something is padded.
        """
        lane = features[0].lane
        rows = [one.token_ids for one in features if one.token_ids is not None]
        images = [image for one in features for image in one.images]
        if lane == "image":
            assert self._pixels is not None
            return self._pixels.stack(images)
        if lane == "vision":
            assert self._chat is not None
            return self._chat.collate(rows, images)
        padding = (self._chat or self._text_processing()).padding
        return padding.pad(rows)

    def dummy(self, lane: Lane) -> Features:
        """The smallest valid input of a lane, for ranks that have nothing left to encode."""
        item = Item(text="a") if lane == "text" else Item(images=(blank_image(),))
        return self.features([(item, "document")])[0]

    def _lane(self, item: Item) -> Lane:
        lanes, name = self.description.lanes, self.description.name or self.description.source
        if item.text is None and not item.images:
            raise UserError("an item has neither a text nor an image; give it one of them")
        if not item.images:
            if "text" not in lanes:
                raise UserError(
                    f"{name} embeds images only, and got the text {item.text!r:.60}; give it images: "
                    "retrieval_mode: i2i takes plain strings for their paths"
                )
            return "text"
        if "vision" in lanes:
            return "vision"
        if "image" not in lanes:
            raise UserError(f"{name} embeds texts only, and got an item with an image; give it texts")
        if item.text is not None or len(item.images) > 1:
            raise UserError(
                f"{name} embeds a text or one image, and got an item with {len(item.images)} image(s)"
                f"{' and a text' if item.text is not None else ''}; a vision-language model takes several at once"
            )
        return "image"

    def _make(self, lane: Lane, items: Mapping[Address, Item]) -> dict[Address, Features]:
        """Features of items of one lane."""
        if lane == "image":
            assert self._pixels is not None
            length = self._pixels.num_patches
            return {
                address: Features(lane, length, _key(lane, None, item.images), address[0], None, item.images)
                for address, item in items.items()
            }
        prompts = [self._prompts[kind] for _, kind in items]
        if lane == "vision":
            assert self._chat is not None
            texts, images = [item.text for item in items.values()], [item.images for item in items.values()]
            rows = self._chat.encode_with_images(prompts, texts, images)
        elif self._chat is not None:
            rows = self._chat.encode_texts(prompts, [item.text or "" for item in items.values()])
        else:
            rows = self._text_processing().encode(
                [prompt + (item.text or "") for prompt, item in zip(prompts, items.values(), strict=True)]
            )
        fixed = (self._chat or self._text_processing()).padding.fixed_length
        return {
            address: Features(lane, fixed or len(row), _key(lane, row, item.images), address[0], row, item.images)
            for (address, item), row in zip(items.items(), rows, strict=True)
        }

    def _keep(self, made: Mapping[Address, Features]) -> None:
        # Threads may race here: an entry is then counted twice or made twice, and neither changes a result.
        for address, one in made.items():
            if one.token_ids is None:
                continue  # an image's features cost nothing to make, and may hold the bytes of its file
            self._cache_bytes_left -= (
                _ENTRY_BYTES + one.token_ids.nbytes + sum(len(image.data or b"") for image in one.images)
            )
            if self._cache_bytes_left < 0:
                return
            self._cache[address] = one

    def _text_processing(self) -> TextProcessing:
        assert self._text is not None
        return self._text


def _key(lane: Lane, token_ids: np.ndarray | None, images: Sequence[ImageRef]) -> int:
    """The 63-bit number of an input: what the model gets, whatever text and prompt it was made from."""
    digest = hashlib.blake2b(lane.encode(), digest_size=8)
    if token_ids is not None:
        digest.update(token_ids.tobytes())
    for image in images:
        identity = image.identity()
        digest.update(len(identity).to_bytes(8, "little") + identity)
    return int.from_bytes(digest.digest(), "little") >> 1
