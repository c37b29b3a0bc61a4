"""Featurisers: conversion of items, or of pairs for a reranker, to model inputs, and collation of micro-batches.

Texts and conversations with images become token ids, identical to those of `SentenceTransformer(folder)` on the saved
model. Only caches change after construction, so all classes are thread-safe.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from vembed.data.examples import Example, ImageRef, Item, Kind, input_digest
from vembed.data.images.decoders import PIXELS_KEY
from vembed.data.images.files import image_name
from vembed.data.images.pixels import Pixels, blank_image
from vembed.errors import UserError
from vembed.models.attention import SHARED_PREFIX
from vembed.models.embedding_model import SEGMENTS
from vembed.models.families.description import (
    DESCRIPTION_FILE,
    IMAGE_INSTRUCTION,
    RERANK_INSTRUCTION,
    ModelDescription,
)
from vembed.models.families.family import Modality
from vembed.models.families.model_files import ANSWER_SETTINGS
from vembed.models.processors import (
    image_placeholder,
    load_chat_template,
    load_tokenizer,
)
from vembed.models.vision import POSITIONS, token_positions, tower_inputs

_ENTRY_BYTES = 400
"""Estimated overhead of one cached entry besides its token ids, in bytes."""

Address = tuple[int, str, int | None]
"""Cache key of an item's features: content, prompt, and the item's own maximum length."""


@dataclass(frozen=True, slots=True)
class Features:
    """Model inputs of one Item, before padding."""

    modality: Modality
    length: int
    """Tokens plus image patches, as counted by the token budget."""
    key: int
    """63-bit hash of the model input after prompt and truncation. Equal keys mean equal inputs to the model."""
    content: int
    """`item.key()`: hash of the content only, used by the loss to mask duplicates."""
    images: tuple[ImageRef, ...] = ()
    """Decoded only in `collate`."""
    num_vectors: int = 1
    """Vectors that the model gives for this input, known from its tokens. The score of a pair is a vector of width 1."""
    token_ids: np.ndarray | None = None
    """int32, special tokens included."""
    segments: np.ndarray | None = None
    """int32, 0 for tokens of a pair's query and 1 for those of its document, where the tokenizer tells."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the arrays as bytes: it would read many small arrays as slowly as it makes them."""
        contents = [
            None if array is None else array.tobytes()
            for array in (self.token_ids, self.segments)
        ]
        return received_features, (
            self.modality,
            self.length,
            self.key,
            self.content,
            self.images,
            self.num_vectors,
            *contents,
        )


def received_features(*values: Any) -> Features:
    """Return features that another process has sent."""
    *columns, token_ids, segments = values
    arrays = [
        None if content is None else np.frombuffer(content, np.int32)
        for content in (token_ids, segments)
    ]
    return Features(*columns, *arrays)


class BaseFeaturiser(ABC):
    """Converter from what a model reads at once (an input, or a pair of them) to features and tensors. Thread-safe."""

    reads_pairs: ClassVar[bool] = False
    """True if each unit is a pair of query and document."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        image_cache_bytes: int = 2**30,
        decoders: int | None = None,
    ) -> None:
        """`image_cache_bytes` limits the pixels in memory (the most recently used are kept). `decoders`: images that are
        decoded at once; None: one per core."""
        self.description = description
        self.modalities = description.modalities
        self.pixels: Pixels | None = None
        self.texts: TextProcessing | None = None
        self.chat: ChatProcessing | None = None
        if description.modalities != ("text",):
            self.pixels = Pixels(
                description, cache_bytes=image_cache_bytes, decoders=decoders
            )
        if "multimodal" in description.modalities:
            assert self.pixels is not None
            self.chat = ChatProcessing(description, self.pixels)
            self.texts = self.chat
        elif "text" in description.modalities:
            self.texts = TextProcessing(description)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the tokenizer again."""
        return build_featuriser, (self.description,)

    @abstractmethod
    def units(self, example: Example) -> list[Any]:
        """Return what the model reads of an example, with its positives and hard negatives last, one unit for each."""

    @abstractmethod
    def features(self, units: Sequence[Any]) -> list[Features]:
        """Return the features of each unit, in order. Reads only the headers of images."""

    def dummy(self, modality: Modality) -> Features:
        """Return a minimal valid input of a modality, for ranks without inputs left.

        Under FSDP all ranks must run the same forward passes, because each one gathers parameters.
        """
        # Texts have tokens: decoders' tokenizers make none of an empty text.
        text = Item(text="a")
        document = text if modality == "text" else Item(images=(blank_image(),))
        *_, unit = self.units(Example(text, (document,)))
        return self.features([unit])[0]

    def joined(self, features: Sequence[Features]) -> dict[str, torch.Tensor]:
        """Return the tensors of features of one modality on the host: `collate` without `finished`, which runs on the
        device."""
        images = list(chain.from_iterable(each.images for each in features))
        rows = [each.token_ids for each in features if each.token_ids is not None]
        if not images:
            assert self.texts is not None
            return self.texts.pad(rows)
        if self.chat is not None:
            return self.chat.collate(rows, images)
        assert self.pixels is not None
        return self.pixels.stack(images)

    def finished(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what `joined` has given as the model takes it: pixels of 8 bits become numbers on their device."""
        if self.pixels is None or PIXELS_KEY not in batch:
            return batch
        return self.pixels.finished(batch)

    def collate(self, features: Sequence[Features]) -> dict[str, torch.Tensor]:
        """Return the tensors of a forward pass over features of one modality: padded token ids, decoded images.

        `attention_mask` is present only if a row is padded.
        """
        return self.finished(self.joined(features))

    def decode_ahead(self, features: Sequence[Features]) -> None:
        """Begin to decode the images of these features on other cores, as many as the cache holds."""
        if self.pixels is not None:
            images = chain.from_iterable(feature.images for feature in features)
            self.pixels.decode_ahead(list(images))


class Featuriser(BaseFeaturiser):
    """Converter from items in the role of query or document to features and tensors."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        cache_bytes: int = 512 * 2**20,
        **options: Any,
    ) -> None:
        """`cache_bytes` limits the features in memory; once it is full, further ones are not cached. `options`: those of
        BaseFeaturiser."""
        super().__init__(description, **options)
        self._prompts: dict[Kind, str] = {
            "query": description.query_prompt,
            "document": description.document_prompt,
        }
        self._cache: dict[Address, Features] = {}
        self._cache_bytes_left = cache_bytes

    def units(self, example: Example) -> list[tuple[Item, Kind]]:
        """See BaseFeaturiser."""
        units: list[tuple[Item, Kind]] = [(example.query, "query")]
        units.extend((document, "document") for document in example.documents)
        return units

    def features(self, units: Sequence[tuple[Item, Kind]]) -> list[Features]:
        """See BaseFeaturiser."""
        addresses = []
        known = {}
        missing: dict[Modality, dict[Address, Item]] = {}
        for item, kind in units:
            prompt = self._prompts[kind] if item.prompt is None else item.prompt
            address = (item.key(), prompt, item.max_length)
            addresses.append(address)
            if address in self._cache:
                known[address] = self._cache[address]
                continue
            modality: Modality = "text"
            if item.images:
                modality = "multimodal" if self.chat is not None else "image"
            num_contents = (item.text is not None) + len(item.images)
            is_readable = num_contents == 1 or modality == "multimodal"
            if not is_readable or modality not in self.modalities:
                # Of a text alone the place is not known.
                where = f"{item.images[0].where}: " if item.images else ""
                contents = f"{len(item.images)} image(s)"
                if item.text is not None:
                    contents = f"the text {item.text!r:.60} and {contents}"
                advice = (
                    "set retrieval_mode where plain strings are paths of images (i2i: all are), or take a vision-language "
                    "model, which reads a text and images together"
                )
                if self.modalities == ("text",):
                    advice = "take a model that reads images, such as a CLIP, or leave the images out of the data"
                raise UserError(
                    f"{where}{self.description.name or self.description.source} embeds one {' or '.join(self.modalities)} "
                    f"at a time, and got {contents}: {advice}"
                )
            missing.setdefault(modality, {})[address] = item
        for modality, items_of_modality in missing.items():
            known |= self._make(modality, items_of_modality)
        return [known[address] for address in addresses]

    def _make(
        self, modality: Modality, items: Mapping[Address, Item]
    ) -> dict[Address, Features]:
        """Return the features of items of one modality."""
        rows: Sequence[np.ndarray | None] = [None] * len(items)
        prompts = [prompt for _, prompt, _ in items]
        limits = [limit for _, _, limit in items]
        fixed = None
        if modality == "image":
            assert self.pixels is not None
            fixed = self.pixels.num_patches
        elif modality == "multimodal":
            assert self.chat is not None
            plain_texts = [item.text for item in items.values()]
            images = [item.images for item in items.values()]
            rows = self.chat.encode_with_images(prompts, plain_texts, images, limits)
        else:
            assert self.texts is not None
            fixed = self.texts.fixed_length
            texts = [item.text or "" for item in items.values()]
            rows = self.texts.encode(prompts, texts, limits)
        computed = {}
        for (address, item), row in zip(items.items(), rows, strict=True):
            features = Features(
                modality,
                length=fixed or (0 if row is None else len(row)),
                key=input_key(modality, row, item.images),
                content=address[0],
                token_ids=row,
                images=item.images,
            )
            computed[address] = features
            # Without tokens they are cheap to make again, and may hold the bytes of the image file. No lock: a race may
            # count or compute an entry twice, which does not change a result.
            if row is not None and self._cache_bytes_left > 0:
                image_bytes = sum(len(image.data or b"") for image in item.images)
                self._cache_bytes_left -= _ENTRY_BYTES + row.nbytes + image_bytes
                self._cache[address] = features
        return computed


def input_key(
    modality: Modality,
    token_ids: np.ndarray | None,
    images: Sequence[ImageRef],
) -> int:
    """Return the 63-bit hash of a model input."""
    digest = input_digest(modality, token_ids, images, num_bytes=8)
    return int.from_bytes(digest, "little") >> 1


Pair = tuple[Item, Item]
"""A query and a document."""
ANSWER_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
INSTRUCTION_MARK = "<Instruct>: "
QUERY_MARK = "\n<Query>: "
DOCUMENT_MARK = "\n<Document>: "
ANSWER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The form that Qwen3-Reranker was trained on."""
IMAGE_ANSWER_END = "<|im_end|>\n<|im_start|>assistant\n"
"""The same of Qwen3-VL-Reranker."""


def refuse_prompts(num_prompts: int, name: str) -> None:
    """Raise UserError if records have prompts for themselves, which a PairFeaturiser does not read."""
    if num_prompts:
        raise UserError(
            f"{name} has a query_prompt for {num_prompts:,d} of its queries, and a reranker puts that of its run before "
            "each query: put it into the texts, or take the column out"
        )


class PairFeaturiser(BaseFeaturiser):
    """Converter from pairs of texts (of vision-language models also images) to token ids, and to the tensors of a forward
    pass."""

    reads_pairs = True

    def __init__(
        self,
        description: ModelDescription,
        role: str = "",
        **options: Any,
    ) -> None:
        """`role` names the model in messages; by default its own name. `options`: those of BaseFeaturiser."""
        super().__init__(description, **options)
        assert self.texts is not None
        self._texts = self.texts
        if self.chat is not None:
            self._placeholder = image_placeholder(description)
        self._template_length = 0
        if description.scores == "answer":
            refuse_other_question(description, self._texts.tokenizer)
            instruction, query_mark, document_mark, end_text = answer_form(description)
            texts = [
                ANSWER_PROMPT,
                instruction + query_mark,
                document_mark + description.document_prompt,
                end_text,
            ]
            parts = self._texts.tokenize(texts)
            begin, instructed, _, end = parts
            self._question_begin = begin
            self._question_end = end
            num_needed = sum(map(len, parts))
            if description.max_length <= num_needed:
                raise UserError(
                    f"max_length: {description.max_length} leaves no room for texts, because the template, the "
                    f"instruction and the prompt of a question take {num_needed} tokens. Raise it, or shorten "
                    "query_prompt and document_prompt"
                )
            # With bidirectional attention the states of the template depend on the text behind it.
            if self.chat is None and not description.bidirectional_attention:
                self._template_length = len(begin) + len(instructed)
        self.role = role or description.name
        self._lock = Lock()  # a fast tokenizer keeps the truncation as a state

    def units(self, example: Example) -> list[Pair]:
        """See BaseFeaturiser."""
        return [(example.query, document) for document in example.documents]

    def features(self, units: Sequence[Pair]) -> list[Features]:
        """See BaseFeaturiser. A pair that is longer than `max_length` loses tokens of the longer text."""
        if not units:
            return []
        document_prompt = self.description.document_prompt
        queries = [self._content(item) for item, _ in units]
        documents = [document_prompt + self._content(item) for _, item in units]
        images = [(*query.images, *document.images) for query, document in units]
        if self.description.scores == "answer":
            rows = self._questions(queries, documents, images)
            segments = None
        else:
            query_prompt = self.description.query_prompt
            with self._lock:
                encoded = self._texts.tokenizer(
                    [query_prompt + query for query in queries],
                    documents,
                    truncation=True,
                    max_length=self.description.max_length,
                )
            rows = encoded["input_ids"]
            segments = encoded.get(SEGMENTS)
            if self.description.pooling == "last":
                # Transformers takes the score from the last token that is no padding. Some tokenizers end texts with it.
                for row in rows:
                    while row and row[-1] == self._texts.tokenizer.pad_token_id:
                        row.pop()
        features = []
        for number, (_, item) in enumerate(units):
            token_ids = np.asarray(rows[number], dtype=np.int32)
            segment = None
            if segments is not None:
                segment = np.asarray(segments[number], dtype=np.int32)
                segment = segment[: len(token_ids)]
            modality: Modality = "multimodal" if images[number] else "text"
            features.append(
                Features(
                    modality=modality,
                    length=len(token_ids),
                    key=input_key(modality, token_ids, images[number]),
                    content=item.key(),
                    token_ids=token_ids,
                    images=images[number],
                    segments=segment,
                )
            )
        return features

    def joined(self, features: Sequence[Features]) -> dict[str, Tensor]:
        """See BaseFeaturiser. What all questions begin with is there once, as SHARED_PREFIX."""
        if self._template_length:
            rows = [np.asarray(feature.token_ids) for feature in features]
            # At most the template, because memory is measured with copies of one question.
            num_shared = shared_length(rows, self._template_length)
            if num_shared:
                batch = self._texts.pad([row[num_shared:] for row in rows])
                batch[SHARED_PREFIX] = torch.tensor(
                    rows[0][:num_shared], dtype=torch.int64
                )
                return batch
        batch = super().joined(features)
        if features[0].segments is not None:
            segments = torch.zeros_like(batch["input_ids"])
            mask = batch.get("attention_mask", torch.ones_like(segments))
            joined = np.concatenate([feature.segments for feature in features])
            segments[mask.bool()] = torch.from_numpy(joined).long()
            batch[SEGMENTS] = segments
        return batch

    def _questions(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        images: Sequence[tuple[ImageRef, ...]],
    ) -> list[list[int]]:
        """Return the token ids of the questions whose answer is yes or no. What is too long is cut at its end."""
        instruction, query_mark, document_mark, _ = answer_form(self.description)
        begin = self._question_begin
        end = self._question_end
        room = self.description.max_length - len(begin) - len(end)
        bodies = [
            instruction + query_mark + query + document_mark + document
            for query, document in zip(queries, documents, strict=True)
        ]
        rows = []
        encoded = self._texts.tokenize(bodies)
        for body, pair_images in zip(encoded, images, strict=True):
            row = body[:room]
            if self.chat is not None:
                whole = self.chat.with_image_tokens(body, pair_images)
                row = whole[:room]
                self.chat.check_images(row, whole, len(pair_images))
            rows.append([*begin, *row, *end])
        return rows

    def _content(self, item: Item) -> str:
        """Return the text of an item, after what stands for its images."""
        if self.chat is not None:
            return self._placeholder * len(item.images) + (item.text or "")
        if item.text is None or item.images:
            raise UserError(
                f"{self.role} scores texts, and the data have images: use a vision-language model"
            )
        return item.text


def shared_length(rows: Sequence[np.ndarray], limit: int) -> int:
    """Return how many tokens all rows begin with, at most `limit`, and fewer than any row has. One row shares none."""
    if len(rows) == 1:
        return 0
    shortest = min(map(len, rows))
    limit = min(limit, shortest - 1)
    beginnings = np.stack([row[:limit] for row in rows])
    is_equal = (beginnings == beginnings[0]).all(axis=0)
    return int(np.logical_and.accumulate(is_equal).sum())


def answer_form(description: ModelDescription) -> tuple[str, str, str, str]:
    """Return the texts around the query and the document of a question after ANSWER_PROMPT, and its end, in the form that
    Qwen3-Reranker was trained on, or Qwen3-VL-Reranker."""
    begin = INSTRUCTION_MARK + description.query_prompt
    if description.family_traits.is_vision_language:
        return begin, "<Query>:", "\n<Document>:", IMAGE_ANSWER_END
    return begin, QUERY_MARK, DOCUMENT_MARK, ANSWER_END


def blank_question() -> str:
    """Return what a decoder of texts reads around a pair, with the usual instruction."""
    begin = ANSWER_PROMPT + INSTRUCTION_MARK + RERANK_INSTRUCTION
    return begin + QUERY_MARK + DOCUMENT_MARK + ANSWER_END


def names_no_question(folder: Path) -> bool:
    """Return True if neither vembed nor CrossEncoder has saved the decoder in a folder as a reranker."""
    names = (DESCRIPTION_FILE, ANSWER_SETTINGS)
    return not any((folder / name).is_file() for name in names)


def refuse_other_question(description: ModelDescription, tokenizer: Any) -> None:
    """Raise UserError if a model was saved by CrossEncoder with a chat template that asks another question."""
    folder = description.folder
    # The template of vembed's own folders is the question, of any instruction and prompt.
    is_own = (folder / DESCRIPTION_FILE).is_file()
    if is_own or not (folder / ANSWER_SETTINGS).is_file():
        return
    if tokenizer.chat_template is None:
        return
    instruction, query_mark, document_mark, end = answer_form(description)
    contents = {"query": "red", "document": f"{description.document_prompt}green"}
    # The default instruction is that of the template too.
    if description.query_prompt not in (RERANK_INSTRUCTION, IMAGE_INSTRUCTION):
        contents = {"system": description.query_prompt, **contents}
    messages = []
    for role, text in contents.items():
        content: Any = text
        if description.family_traits.is_vision_language:
            content = [{"type": "text", "text": text}]
        messages.append({"role": role, "content": content})
    template, options = load_chat_template(description, tokenizer)
    body = f"{instruction}{query_mark}red{document_mark}{contents['document']}"
    try:
        question = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )
    except TemplateError:
        question = None
    if question != f"{ANSWER_PROMPT}{body}{end}":
        raise UserError(
            f"{folder}: its chat template asks {question!r:.400} of a pair, and vembed asks the question of "
            "Qwen3-Reranker, so the scores would differ. Use CrossEncoder, or give the instruction of the template as "
            "query_prompt, if the rest is the same"
        )


def pair_template(description: ModelDescription, image_placeholder: str) -> str:
    """Return the question of `_questions` as a chat template, by which other libraries ask a decoder about a pair.

    Its messages have the roles query and document, and system for another instruction.
    """
    _, query_mark, document_mark, end = answer_form(description)
    image = json.dumps(image_placeholder)
    lines = [
        "{%- macro content(role) -%}",
        "{%- for message in messages if message['role'] == role -%}",
        "{%- if message['content'] is string -%}{{- message['content'] -}}",
        "{%- else -%}{%- for part in message['content'] -%}",
        f"{{{{- {image} if part['type'] == 'image' else part['text'] -}}}}",
        "{%- endfor -%}{%- endif -%}{%- endfor -%}{%- endmacro -%}",
    ]
    instruction = json.dumps(description.query_prompt)
    parts = [
        json.dumps(ANSWER_PROMPT + INSTRUCTION_MARK),
        f"(content('system') or {instruction})",
        json.dumps(query_mark),
        "content('query')",
        json.dumps(document_mark + description.document_prompt),
        "content('document')",
        json.dumps(end),
    ]
    lines.append("{{- " + " ~ ".join(parts) + " }}")
    return "\n".join(lines)


def build_featuriser(description: ModelDescription, **options: Any) -> BaseFeaturiser:
    """Return the featuriser of a model. `options`: those of `Featuriser`."""
    if description.is_reranker:
        return PairFeaturiser(description, **options)
    return Featuriser(description, **options)


log = logging.getLogger("vembed")

MAX_CHARACTERS_PER_TOKEN = 64
"""Texts of more characters than this times `max_length` are cut at a space before they are tokenised."""
UNKNOWN_SHARE = 0.1
UNKNOWN_SAMPLE_TOKENS = 5_000
LEAST_SAMPLE_TOKENS = 100


class TextProcessing:
    """Tokeniser of plain texts, with special tokens and truncation at max_length."""

    def __init__(self, description: ModelDescription) -> None:
        self.tokenizer = load_tokenizer(description)
        self._max_length = description.max_length
        self._cut_left = self.tokenizer.truncation_side == "left"
        # The special tokens that the tokenizer puts before and after every text.
        inner = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        start = 0
        while whole[start : start + len(inner)] != inner:
            start += 1
        self._before = whole[:start]
        self._after = whole[start + len(inner) :]
        self._template_bos: str | None = None
        """Start token that a template puts before a conversation."""
        self._pads_left = description.padding_side == "left"
        is_fixed = description.family_traits.has_fixed_length
        self.fixed_length = description.max_length if is_fixed else None
        """SigLIP pools the last position, padding included, so all texts must have the same length."""
        if self.tokenizer.is_fast:
            # Set once: `tokenizer(...)` sets it in each call, which is slow and not thread-safe.
            core = self.tokenizer.backend_tokenizer
            core.no_padding()
            core.no_truncation()
            core.encode_special_tokens = self.tokenizer.split_special_tokens
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
        from_left = self._cut_left
        texts = [cut_words(text, length, from_left=from_left) for text in texts]
        beginnings = texts
        if not from_left:
            beginnings = [_beginning(text, length) for text in texts]
        rendered = list(map(self._render, prompts, beginnings))
        rows = []
        for number, ids in enumerate(self.tokenize(rendered)):
            text = texts[number]
            is_cut = len(beginnings[number]) < len(text)
            if is_cut and len(ids) <= self._max_length:
                whole = self._render(prompts[number], text)
                (ids,) = self.tokenize([whole])  # noqa: PLW2901
            row = self._cut(rendered[number], ids, limits[number])
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
        core = self.tokenizer.backend_tokenizer
        encodings = core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def pad(self, rows: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Return input_ids [n, length], and attention_mask if a row is padded."""
        lengths = [len(row) for row in rows]
        longest = self.fixed_length or max(lengths)
        ids = np.full((len(rows), longest), self.tokenizer.pad_token_id, dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=np.int64)
        for at, row in enumerate(rows):
            start = longest - len(row) if self._pads_left else 0
            ids[at, start : start + len(row)] = row
            mask[at, start : start + len(row)] = 1
        batch = {"input_ids": torch.from_numpy(ids)}
        is_masked = "attention_mask" in self.tokenizer.model_input_names
        if is_masked and min(lengths) < longest:
            batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def decoded(self, token_ids: np.ndarray) -> str:
        """Return the text that the model reads, with special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _render(self, prompt: str, text: str) -> str:
        return prompt + text

    def _longest(self, limit: int | None) -> int:
        return min(limit or self._max_length, self._max_length)

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

    def _count_unknown(self, rows: Sequence[np.ndarray]) -> None:
        """Warn once if more than a tenth of the tokens of the first texts are unknown to the tokenizer."""
        special = {*self.tokenizer.all_special_ids} - {self._unknown}
        ids = np.concatenate(rows)
        is_special = np.isin(ids, list(special))
        self._num_tokens += int((~is_special).sum())
        self._num_unknown += int((ids == self._unknown).sum())
        share = self._num_unknown / max(self._num_tokens, 1)
        if self._num_tokens >= LEAST_SAMPLE_TOKENS and share > UNKNOWN_SHARE:
            log.warning(
                f"the tokenizer of {self.tokenizer.name_or_path} does not know {share:.0%} of the tokens of the first "
                "texts: is it that of the model, and of this language?"
            )
            self._unknown = None


class ChatProcessing(TextProcessing):
    """Tokeniser of texts, images, or both, as a conversation of a vision-language model. Each image is represented by
    as many placeholder tokens as the model computes for it. If a text is truncated, the template's last tokens are
    kept, because the model pools over them."""

    def __init__(self, description: ModelDescription, pixels: Pixels) -> None:
        super().__init__(description)
        self._pixels = pixels
        self._template, self._template_options = load_chat_template(
            description, self.tokenizer
        )
        self._template_bos = self.tokenizer.bos_token
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
            # Sentence Transformers restores the template's end for texts alone, not beside images.
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
        limits: Sequence[int | None],
    ) -> list[np.ndarray]:
        """Return the int32 token ids of conversations with images. Only the headers of the images are read. `limits`: see
        `encode`."""
        rendered = list(map(self._render, prompts, texts, map(len, images)))
        rows = []
        for number, ids in enumerate(self.tokenize(rendered)):
            item_images = images[number]
            limit = limits[number]
            whole = self.with_image_tokens(ids, item_images)
            row = np.asarray(self._cut(rendered[number], whole, limit), dtype=np.int32)
            self.check_images(row.tolist(), whole, len(item_images), limit)
            rows.append(row)
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
        num_patches = int(grid.prod(dim=1).sum())
        num_tokens = int(is_image.sum())
        if num_patches != num_tokens * merge_size**2:
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
        remaining = iter(images)
        whole = []
        for token_id in ids:
            count = 1
            if token_id == self.image_token_id:
                count = self._pixels.num_vision_tokens(next(remaining))
            whole += [token_id] * count
        return whole

    def check_images(
        self,
        row: list[int],
        whole: list[int],
        num_images: int,
        limit: int | None = None,
    ) -> None:
        """Raise UserError if the row, cut from `whole`, has lost tokens of an image."""
        num_tokens = whole.count(self.image_token_id)
        if row.count(self.image_token_id) != num_tokens:
            raise UserError(
                f"an item with {num_images} image(s) of {num_tokens:,d} tokens does not fit into max_length "
                f"{self._longest(limit):,d}: raise max_length or lower max_pixels"
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
        """Apply the template to the prompt as system message if any, then the images, then the text."""
        content = [{"type": "image", "image": ""}] * num_images
        if text is not None:
            content.append({"type": "text", "text": text})
        messages = [{"role": "user", "content": content}]
        if prompt:
            system = [{"type": "text", "text": prompt}]
            messages.insert(0, {"role": "system", "content": system})
        rendered = self.tokenizer.apply_chat_template(
            messages,
            chat_template=self._template,
            tokenize=False,
            **self._template_options,
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
    from_left: bool,
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
