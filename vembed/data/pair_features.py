"""PairFeaturiser: conversion of pairs of a query and a document to the inputs of a reranker.

A pair takes the place of an input: it is tokenised whole, counts by its length, and its output is one row [1].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vembed.data.examples import Example, ImageRef, Item
from vembed.data.features import BaseFeaturiser, Features, Featuriser, input_key
from vembed.errors import UserError
from vembed.models.embedding_model import SEGMENTS
from vembed.models.families.description import ModelDescription
from vembed.models.families.family import Modality
from vembed.models.processors import image_placeholder

Pair = tuple[Item, Item]
"""A query and a document."""
ANSWER_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The form that Qwen3-Reranker was trained on."""
IMAGE_ANSWER_END = "<|im_end|>\n<|im_start|>assistant\n"
"""The same of Qwen3-VL-Reranker."""


class PairFeaturiser(BaseFeaturiser[Pair]):
    """Converter from pairs of texts (of vision-language models also images) to token ids, and to the tensors of a forward
    pass."""

    def __init__(
        self, description: ModelDescription, role: str = "", **options: Any
    ) -> None:
        """`role` names the model in messages; by default its own name. `options`: those of BaseFeaturiser."""
        super().__init__(description, **options)
        assert self.texts is not None
        self._texts = self.texts
        if self.chat is not None:
            self._placeholder = image_placeholder(description)
        self.role = role or description.name
        self._lock = Lock()  # a fast tokenizer keeps the truncation as a state

    def units(self, example: Example) -> list[Pair]:
        """See BaseFeaturiser."""
        documents = (*example.positives, *example.negatives)
        return [(example.query, document) for document in documents]

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
        features = []
        for number, (_, item) in enumerate(units):
            token_ids = np.asarray(rows[number], dtype=np.int32)
            segment = None
            if segments is not None:
                segment = np.asarray(segments[number], dtype=np.int32)
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
        """See BaseFeaturiser."""
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
        instruction, query_mark, document_mark, end_text = answer_form(self.description)
        begin, end = self._texts.tokenize([ANSWER_PROMPT, end_text])
        room = max(self.description.max_length - len(begin) - len(end), 1)
        bodies = []
        for query, document in zip(queries, documents, strict=True):
            bodies.append(instruction + query_mark + query + document_mark + document)
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


def answer_form(description: ModelDescription) -> tuple[str, str, str, str]:
    """Return the texts around the query and the document of a question after ANSWER_PROMPT, and its end, in the form that
    Qwen3-Reranker was trained on, or Qwen3-VL-Reranker."""
    begin = f"<Instruct>: {description.query_prompt}"
    if description.traits.reads_chats:
        return begin, "<Query>:", "\n<Document>:", IMAGE_ANSWER_END
    return begin, "\n<Query>: ", "\n<Document>: ", ANSWER_END


def pair_template(description: ModelDescription, image_placeholder: str = "") -> str:
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
        json.dumps(ANSWER_PROMPT + "<Instruct>: "),
        f"(content('system') or {instruction})",
        json.dumps(query_mark),
        "content('query')",
        json.dumps(document_mark + description.document_prompt),
        "content('document')",
        json.dumps(end),
    ]
    lines.append("{{- " + " ~ ".join(parts) + " }}")
    return "\n".join(lines)


def build_featuriser(
    description: ModelDescription, **options: Any
) -> BaseFeaturiser[Any]:
    """Return the featuriser of a model. `options`: those of `Featuriser`."""
    if description.scores is not None:
        return PairFeaturiser(description, **options)
    return Featuriser(description, **options)
