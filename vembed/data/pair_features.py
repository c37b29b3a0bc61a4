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

from vembed.data.examples import Example, Item
from vembed.data.features import BaseFeaturiser, Features, Featuriser, input_key
from vembed.data.processing import Padding
from vembed.errors import UserError
from vembed.models.families.description import ModelDescription
from vembed.models.families.family import Modality
from vembed.models.modalities import SEGMENTS
from vembed.models.processors import load_tokenizer

Pair = tuple[Item, Item]
"""A query and a document."""
ANSWER_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The form that Qwen3-Reranker was trained on."""


class PairFeaturiser(BaseFeaturiser[Pair]):
    """Converter from pairs of texts to token ids, and to the tensors of a forward pass. Thread-safe."""

    modalities: tuple[Modality, ...] = ("text",)

    def __init__(self, description: ModelDescription, role: str = "") -> None:
        """`role` names the model in messages; by default its own name."""
        self.description = description
        self.role = role or description.name
        self._tokenizer = load_tokenizer(description)
        self._padding = Padding(self._tokenizer, description)
        self._lock = Lock()  # a fast tokenizer keeps the truncation as a state

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids that the tokenizer has."""
        return len(self._tokenizer)

    def units(self, example: Example) -> list[Pair]:
        """See BaseFeaturiser."""
        documents = (*example.positives, *example.negatives)
        return [(example.query, document) for document in documents]

    def features(self, units: Sequence[Pair]) -> list[Features]:
        """See BaseFeaturiser. A pair that is longer than `max_length` loses tokens of the longer text."""
        if not units:
            return []
        document_prompt = self.description.document_prompt
        queries = [self._text(item) for item, _ in units]
        documents = [document_prompt + self._text(item) for _, item in units]
        if self.description.scores == "answer":
            rows = self._questions(queries, documents)
            segments = None
        else:
            query_prompt = self.description.query_prompt
            with self._lock:
                encoded = self._tokenizer(
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
            features.append(
                Features(
                    modality="text",
                    length=len(token_ids),
                    key=input_key("text", token_ids, ()),
                    content=item.key(),
                    token_ids=token_ids,
                    segments=segment,
                )
            )
        return features

    def joined(self, features: Sequence[Features]) -> dict[str, Tensor]:
        """See BaseFeaturiser."""
        rows = []
        for feature in features:
            assert feature.token_ids is not None
            rows.append(feature.token_ids)
        batch = self._padding.pad(rows)
        if features[0].segments is not None:
            segments = torch.zeros_like(batch["input_ids"])
            mask = batch.get("attention_mask", torch.ones_like(segments))
            joined = np.concatenate([feature.segments for feature in features])
            segments[mask.bool()] = torch.from_numpy(joined).long()
            batch[SEGMENTS] = segments
        return batch

    def dummy(self, modality: Modality) -> Features:
        """See BaseFeaturiser. Its texts have tokens: decoders' tokenizers make none of an empty text."""
        del modality
        return self.features([(Item(text="a"), Item(text="a"))])[0]

    def _questions(
        self, queries: Sequence[str], documents: Sequence[str]
    ) -> list[list[int]]:
        """Return the token ids of the questions whose answer is yes or no. What is too long is cut at its end."""
        begin = self._tokenizer.encode(ANSWER_PROMPT, add_special_tokens=False)
        end = self._tokenizer.encode(ANSWER_END, add_special_tokens=False)
        room = self.description.max_length - len(begin) - len(end)
        bodies = []
        for query, document in zip(queries, documents, strict=True):
            question = f"<Instruct>: {self.description.query_prompt}\n<Query>: {query}"
            bodies.append(f"{question}\n<Document>: {document}")
        with self._lock:
            encoded = self._tokenizer(
                bodies,
                add_special_tokens=False,
                truncation=True,
                max_length=max(room, 1),
            )
        return [[*begin, *body, *end] for body in encoded["input_ids"]]

    def _text(self, item: Item) -> str:
        if item.text is None or item.images:
            raise UserError(
                f"{self.role} scores texts, and the data have images: use an embedding model"
            )
        return item.text


def pair_template(description: ModelDescription) -> str:
    """Return the question of `_questions` as a chat template, by which other libraries ask a decoder about a pair.

    Its messages have the roles query and document, and system for another instruction.
    """
    lines = []
    for name in ("system", "query", "document"):
        of_role = f"messages | selectattr('role', 'equalto', '{name}')"
        lines.append(
            f"{{%- set {name} = {of_role} | map(attribute='content') | first %}}"
        )
    instruction = f"system | default({json.dumps(description.query_prompt)}, true)"
    parts = [
        json.dumps(ANSWER_PROMPT + "<Instruct>: "),
        f"({instruction})",
        json.dumps("\n<Query>: "),
        "query",
        json.dumps("\n<Document>: " + description.document_prompt),
        "document",
        json.dumps(ANSWER_END),
    ]
    lines.append("{{- " + " ~ ".join(parts) + " }}")
    return "\n".join(lines)


def build_featuriser(
    description: ModelDescription, **options: Any
) -> BaseFeaturiser[Any]:
    """Return the featuriser of a model. `options`: those of `Featuriser`, which a reranker does not need."""
    if description.scores is not None:
        return PairFeaturiser(description)
    return Featuriser(description, **options)
