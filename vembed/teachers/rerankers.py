"""PairTeacher: a reranker (a sequence classifier with one output) that scores (query, document) pairs of texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vembed.config.entries import Teacher
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.distributed.session import Session
from vembed.errors import UserError
from vembed.families.weight_files import check_whole_weights

log = logging.getLogger("vembed")

Pair = tuple[Item, Item]
"""A query and a document."""
PAIRS_AT_ONCE = 32
LONGEST = 512


class PairTeacher:
    """A reranker as teacher. Every rank holds a copy, whose weights are read when the first score is computed."""

    dim = 1

    def __init__(self, teacher: Teacher, folder: Path, config: TrainConfig, session: Session) -> None:
        self.teacher = teacher
        self.folder = folder
        self.session = session
        self.trust_remote_code = config.trust_remote_code
        self._model: Any = None
        self._tokenizer: Any = None

    def compute(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return scores [n, 1] of this rank's pairs, before `scale`."""
        model = self._loaded()
        prompts = self.teacher.query_prompt, self.teacher.document_prompt
        texts = [tuple(self._text(*one) for one in zip(pair, prompts, strict=True)) for pair in pairs]
        # Similar lengths side by side, the longest first.
        order = sorted(range(len(texts)), key=lambda place: -sum(map(len, texts[place])))
        scores = np.empty((len(texts), 1), np.float32)
        for start in range(0, len(order), PAIRS_AT_ONCE):
            some = order[start : start + PAIRS_AT_ONCE]
            queries, documents = zip(*(texts[place] for place in some), strict=True)
            inputs = self._tokenizer(
                list(queries), list(documents), padding=True, truncation=True, return_tensors="pt",
                max_length=self.teacher.max_length or min(LONGEST, self._tokenizer.model_max_length),
            )  # fmt: skip
            with torch.no_grad():
                logits = model(**inputs.to(self.session.device)).logits
            scores[some] = logits.float().cpu().numpy()
        return scores

    def release(self) -> None:
        """Give up the weights; they are read again if something is missing later."""
        self._model = None

    def _loaded(self) -> Any:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if self._model is None:
            check_whole_weights(self.folder)
            options = {"trust_remote_code": self.trust_remote_code}
            self._tokenizer = AutoTokenizer.from_pretrained(self.folder, **options)
            model = AutoModelForSequenceClassification.from_pretrained(self.folder, use_safetensors=True, **options)
            if model.config.num_labels != 1:
                raise UserError(
                    f"teacher {self.teacher.label} has {model.config.num_labels} outputs, and a reranker has one: "
                    "give a reranker, or an embedding model with kind: embedder"
                )
            if self._tokenizer.pad_token is None:
                self._tokenizer.pad_token = self._tokenizer.eos_token
                model.config.pad_token_id = self._tokenizer.pad_token_id
            self._model = model.to(self.session.device).eval().requires_grad_(False)
            log.info("teacher %s: reranker (%s)", self.teacher.label, type(model).__name__)
        return self._model

    def _text(self, item: Item, prompt: str | None) -> str:
        if item.text is None or item.images:
            raise UserError(
                f"teacher {self.teacher.label} scores texts, and the data have images: use an embedding model"
            )
        return (prompt or "") + item.text
