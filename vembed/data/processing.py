"""Text and chat processing: tokenisation of texts and of conversations with images, and padding of micro-batches.

The token ids are identical to those of `SentenceTransformer(folder)` on the saved model. Only caches change after
construction, so all classes are thread-safe.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from vembed.data.examples import ImageRef
from vembed.data.images.files import image_name, image_size
from vembed.data.images.pixels import Pixels
from vembed.errors import UserError
from vembed.models.families.description import ModelDescription
from vembed.models.processors import load_chat_template, load_tokenizer
from vembed.models.vision import POSITIONS, token_positions, tower_inputs

log = logging.getLogger("vembed")

MAX_CHARACTERS_PER_TOKEN = 64
"""Texts of more characters than this times `max_length` are cut at a space before they are tokenised."""
_MARK = "vembed0text0stands0here"
"""Stands for the text while a template is rendered. It is not a special token of any model."""
_PROBE = "  two lines,\n with <b> & spaces "
UNKNOWN_SHARE = 0.1
UNKNOWN_SAMPLE_TOKENS = 5_000
LEAST_SAMPLE_TOKENS = 100


class TextProcessing:
    """Tokeniser of plain texts, with special tokens and truncation at max_length."""

    def __init__(self, description: ModelDescription) -> None:
        self.tokenizer = load_tokenizer(description)
        self._max_length = description.max_length
        self._cut_left = self.tokenizer.truncation_side == "left"
        self._before, self._after = _special_tokens_around(self.tokenizer)
        self._template_bos: str | None = None
        """Start token that a template puts before a conversation."""
        self._pad_id = int(self.tokenizer.pad_token_id)
        self._pads_left = description.padding_side == "left"
        self._is_masked = "attention_mask" in self.tokenizer.model_input_names
        self.fixed_length: int | None = None
        """SigLIP pools the last position, padding included, so all texts must have the same length."""
        if description.traits.has_fixed_length:
            self.fixed_length = description.max_length
        if self.tokenizer.is_fast:
            # Set once: `tokenizer(...)` sets it in each call, which is slow and not thread-safe.
            core: Any = self.tokenizer.backend_tokenizer
            core.no_padding()
            core.no_truncation()
            core.encode_special_tokens = self.tokenizer.split_special_tokens
        self.vocab_size = len(self.tokenizer)
        self._num_tokens = 0
        self._num_unknown = 0
        self._unknown: int | None = self.tokenizer.unk_token_id
        # Decoders name their end token as the unknown one, too.
        if self._unknown in (
            self.tokenizer.bos_token_id,
            self.tokenizer.eos_token_id,
        ):
            self._unknown = None

    def encode(
        self,
        prompts: Sequence[str],
        texts: Sequence[str],
        limits: Sequence[int | None],
    ) -> list[np.ndarray]:
        """Return the int32 token ids of each text after its prompt. `limits`: a smaller maximum length for each text."""
        # Of a very long text, only as much as fills `max_length` is tokenised.
        length = MAX_CHARACTERS_PER_TOKEN * self._max_length
        texts = [cut_words(text, length, from_left=self._cut_left) for text in texts]
        beginnings = texts
        if not self._cut_left:
            beginnings = [_beginning(text, length) for text in texts]
        rendered = list(map(self._render, prompts, beginnings))
        rows = []
        for number, ids in enumerate(self.tokenize(rendered)):
            text = texts[number]
            whole = rendered[number]
            if len(beginnings[number]) < len(text) and len(ids) <= self._max_length:
                whole = self._render(prompts[number], text)
                (ids,) = self.tokenize([whole])  # noqa: PLW2901
            row = self._cut(whole, ids, limits[number])
            if not row:
                raise UserError(
                    f"the text {text!r:.60} becomes no token at all with this model's tokenizer; take it out"
                )
            rows.append(np.asarray(row, dtype=np.int32))
        if self._unknown is not None and self._num_tokens < UNKNOWN_SAMPLE_TOKENS:
            self._count_unknown(rows[:UNKNOWN_SAMPLE_TOKENS])
        return rows

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without special tokens and truncation."""
        if not self.tokenizer.is_fast:
            encoded = self.tokenizer(list(texts), add_special_tokens=False)
            return list(encoded["input_ids"])
        core: Any = self.tokenizer.backend_tokenizer
        encodings = core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def pad(self, rows: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Return input_ids [n, length], and attention_mask if a row is padded."""
        lengths = [len(row) for row in rows]
        longest = self.fixed_length or max(lengths)
        ids = np.full((len(rows), longest), self._pad_id, dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=np.int64)
        for at, row in enumerate(rows):
            start = longest - len(row) if self._pads_left else 0
            ids[at, start : start + len(row)] = row
            mask[at, start : start + len(row)] = 1
        batch = {"input_ids": torch.from_numpy(ids)}
        if self._is_masked and min(lengths) < longest:
            batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def decoded(self, token_ids: np.ndarray) -> str:
        """Return the text that the model reads, with special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _render(self, prompt: str, text: str) -> str:
        return prompt + text

    def _cut(
        self,
        rendered: str,
        ids: list[int],
        limit: int | None,
    ) -> list[int]:
        """Truncate as the tokenizer does, with room for its special tokens, and add them."""
        before = self._before
        after = self._after
        if self._template_bos and rendered.startswith(self._template_bos):
            before = []  # the template has already added them
            after = []
        longest = self._longest(limit)
        room = longest - len(before) - len(after)
        if room < 1:
            raise UserError(
                f"max_length: {longest} leaves no room for text beside this model's {len(before) + len(after)} special "
                "tokens; raise it"
            )
        if len(ids) > room:
            ids = ids[len(ids) - room :] if self._cut_left else ids[:room]
        return [*before, *ids, *after]

    def _longest(self, limit: int | None) -> int:
        return min(limit or self._max_length, self._max_length)

    def _count_unknown(self, rows: Sequence[np.ndarray]) -> None:
        """Warn once if more than a tenth of the tokens of the first texts are unknown to the tokenizer."""
        special = {*self.tokenizer.all_special_ids} - {self._unknown}
        ids = np.concatenate(rows)
        self._num_tokens += int((~np.isin(ids, list(special))).sum())
        self._num_unknown += int((ids == self._unknown).sum())
        share = self._num_unknown / max(self._num_tokens, 1)
        if self._num_tokens >= LEAST_SAMPLE_TOKENS and share > UNKNOWN_SHARE:
            log.warning(
                "the tokenizer of %s does not know %.0f%% of the tokens of the first texts: is it that of the model, and "
                "of this language?",
                self.tokenizer.name_or_path,
                100 * share,
            )
            self._unknown = None


class ChatProcessing(TextProcessing):
    """Tokeniser of texts, images, or both, as a conversation of a vision-language model. Each image is represented by
    as many placeholder tokens as the model computes for it. If a text is truncated, the template's last tokens are
    kept, because the model pools over them."""

    def __init__(self, description: ModelDescription, pixels: Pixels) -> None:
        super().__init__(description)
        self._pixels = pixels
        self._template = load_chat_template(description, self.tokenizer)
        self._template_bos = self.tokenizer.bos_token
        self._frames: dict[tuple[str, int], tuple[str, str] | None] = {}
        self._tails: dict[str, list[int]] = {}
        self._config = description.read_config().to_dict()
        self.image_token_id = int(self._config["image_token_id"])

    def encode(
        self,
        prompts: Sequence[str],
        texts: Sequence[str],
        limits: Sequence[int | None],
    ) -> list[np.ndarray]:
        """See TextProcessing."""
        rows = super().encode(prompts, texts, limits)
        for prompt, row, limit in zip(prompts, rows, limits, strict=True):
            self._refuse_placeholders(row.tolist(), 0)
            if len(row) >= self._longest(limit):
                tail = self._tail(prompt)
                keep = min(len(tail), len(row))
                row[len(row) - keep :] = tail[len(tail) - keep :]
        return rows

    def encode_with_images(
        self,
        prompts: Sequence[str],
        texts: Sequence[str | None],
        images: Sequence[tuple[ImageRef, ...]],
    ) -> list[np.ndarray]:
        """Return the int32 token ids of conversations with images. Only the headers of the images are read."""
        rendered = []
        for prompt, text, item_images in zip(prompts, texts, images, strict=True):
            rendered.append(self._render(prompt, text, len(item_images)))
        rows = []
        encoded = self.tokenize(rendered)
        for text, ids, item_images in zip(rendered, encoded, images, strict=True):
            whole = self.with_image_tokens(ids, item_images)
            row = self._cut(text, whole, None)
            self.check_images(row, whole, len(item_images))
            rows.append(np.asarray(row, dtype=np.int32))
        return rows

    def collate(
        self, rows: Sequence[np.ndarray], images: Sequence[ImageRef]
    ) -> dict[str, torch.Tensor]:
        """Return the padded conversations and the pixels of all their images, in order."""
        batch = self.pad(rows)
        is_image = batch["input_ids"] == self.image_token_id
        pixels = self._pixels.stack(images)
        # grid [images, (time, height, width)] counts patches; the model merges merge_size**2 of them into one token.
        grid = pixels["image_grid_thw"]
        merge_size = self._pixels.merge_size
        if int(grid.prod(dim=1).sum()) != int(is_image.sum()) * merge_size**2:
            names = ", ".join(map(image_name, images[:4]))
            raise UserError(
                f"an image changed its size since its header was read, one of: {names}"
            )
        positions = token_positions(
            is_image, batch.get("attention_mask"), grid, merge_size
        )
        return {
            **batch,
            **pixels,
            **tower_inputs(self._config, grid),
            "mm_token_type_ids": is_image.long(),
            POSITIONS: positions,
        }

    def with_image_tokens(
        self, ids: list[int], images: Sequence[ImageRef]
    ) -> list[int]:
        """Return the ids of a rendered conversation with as many placeholders for each image as the model has tokens of
        it. The template has one per image."""
        self._refuse_placeholders(ids, len(images))
        counts = []
        for image in images:
            width, height = image_size(image)
            counts.append(self._pixels.num_vision_tokens(image, width, height))
        # Each id once, and the placeholder of an image as often as the image has tokens.
        compact = np.asarray(ids, dtype=np.int32)
        repeats = np.ones(len(compact), dtype=np.int64)
        repeats[compact == self.image_token_id] = counts
        whole: list[int] = np.repeat(compact, repeats).tolist()
        return whole

    def check_images(
        self,
        row: list[int],
        whole: list[int],
        num_images: int,
    ) -> None:
        """Raise UserError if the row, cut from `whole`, has lost tokens of an image."""
        num_tokens = whole.count(self.image_token_id)
        if row.count(self.image_token_id) != num_tokens:
            raise UserError(
                f"an item with {num_images} image(s) of {num_tokens:,d} tokens does not fit into max_length "
                f"{self._max_length:,d}: raise max_length or lower max_pixels"
            )

    def _refuse_placeholders(self, ids: list[int], num_images: int) -> None:
        if ids.count(self.image_token_id) != num_images:
            raise UserError(
                f"a text contains the model's own placeholder of an image (token {self.image_token_id}); take it out"
            )

    def _render(
        self,
        prompt: str,
        text: str | None,
        num_images: int = 0,
    ) -> str:
        """Return the text of a conversation. The template is rendered once per prompt and number of images, since that
        takes as long as tokenising a short text, and texts are inserted; one that modifies its texts, for each text."""
        if text is None:
            return self._rendered(prompt, None, num_images)
        key = (prompt, num_images)
        if key not in self._frames:
            marked = self._rendered(prompt, _MARK, num_images)
            before, _, after = marked.partition(_MARK)
            probe = self._rendered(prompt, _PROBE, num_images)
            is_plain = probe == before + _PROBE + after
            self._frames[key] = (before, after) if is_plain else None
        frame = self._frames[key]
        if frame is None:
            return self._rendered(prompt, text, num_images)
        return frame[0] + text + frame[1]

    def _rendered(
        self,
        prompt: str,
        text: str | None,
        num_images: int,
    ) -> str:
        """Apply the template to the prompt as system message if any, then the images, then the text."""
        content = [{"type": "image", "image": ""}] * num_images
        if text is not None:
            content.append({"type": "text", "text": text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if prompt:
            system = [{"type": "text", "text": prompt}]
            messages.insert(0, {"role": "system", "content": system})
        rendered: Any = self.tokenizer.apply_chat_template(
            messages,
            chat_template=self._template.template,
            tokenize=False,
            **self._template.options,
        )
        return str(rendered)

    def _tail(self, prompt: str) -> list[int]:
        """Return the tokens that the template appends after any text: the common suffix of two renderings."""
        if prompt not in self._tails:
            fillers = [self._render(prompt, filler) for filler in ("0", "1 2 3 4")]
            first, second = self.tokenize(fillers)
            shortest = min(len(first), len(second))
            count = 0
            while count < shortest and first[-1 - count] == second[-1 - count]:
                count += 1
            tail = [*first[len(first) - count :], *self._after]
            self._tails[prompt] = tail if count < shortest else []
        return self._tails[prompt]


def cut_words(
    text: str,
    length: int,
    *,
    from_left: bool = False,
) -> str:
    """Return the text with every word cut to `length` characters, at its beginning if `from_left`.

    A tokenizer needs minutes for a word of some millions of characters, of which the model reads only those that fill
    its maximum length.
    """
    if len(text) <= length:
        return text

    kept_span = slice(-length, None) if from_left else slice(length)
    # From the beginnings of words only: otherwise each position of a word is tried.
    return re.sub(rf"(?<!\S)\S{{{length}}}\S+", lambda match: match[0][kept_span], text)


def _beginning(text: str, length: int) -> str:
    """Return about the first `length` characters, up to a space: tokens do not reach over one."""
    if len(text) <= length:
        return text
    space = text.rfind(" ", length // 2, length)
    line_end = text.rfind("\n", length // 2, length)
    end = max(space, line_end)
    if end <= 0:
        end = length
    return text[:end]


def _special_tokens_around(
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after every text."""
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = range(len(whole))
    start = next(at for at in starts if whole[at : at + len(inner)] == inner)
    return whole[:start], whole[start + len(inner) :]
