"""PairTeacher: a reranker (a sequence classifier with one output) that scores (query, document) pairs of texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vembed.config.entries import Teacher
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.distributed.session import Session
from vembed.errors import UserError
from vembed.inference.reranker import Reranker

log = logging.getLogger("vembed")

Pair = tuple[Item, Item]
"""A query and a document."""
LONGEST = 512


class PairTeacher:
    """A reranker as teacher. Every rank holds a copy, whose weights are read when the first score is computed."""

    dim = 1

    def __init__(self, teacher: Teacher, folder: Path, config: TrainConfig, session: Session) -> None:
        self.teacher = teacher
        self.folder = folder
        self.session = session
        self.trust_remote_code = config.trust_remote_code
        self._reranker: Reranker | None = None

    def compute(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return scores [n, 1] of this rank's pairs, before `scale`."""
        reranker = self._loaded()
        prompts = self.teacher.query_prompt, self.teacher.document_prompt
        texts = [(self._text(query, prompts[0]), self._text(document, prompts[1])) for query, document in pairs]
        limit = self.teacher.max_length or min(LONGEST, reranker.tokenizer.model_max_length)
        scores = np.empty((len(texts), 1), np.float32)
        for number, logits in reranker.logits(texts, limit):
            scores[number] = logits.numpy()
        return scores

    def release(self) -> None:
        """Give up the weights; they are read again if something is missing later."""
        self._reranker = None

    def _loaded(self) -> Reranker:
        if self._reranker is None:
            self._reranker = Reranker(
                self.folder, role=f"teacher {self.teacher.label}", max_labels=1, dtype=None,
                device=self.session.device, trust_remote_code=self.trust_remote_code,
            )  # fmt: skip
            log.info("teacher %s: reranker (%s)", self.teacher.label, self._reranker.name)
        return self._reranker

    def _text(self, item: Item, prompt: str | None) -> str:
        if item.text is None or item.images:
            raise UserError(
                f"teacher {self.teacher.label} scores texts, and the data have images: use an embedding model"
            )
        return (prompt or "") + item.text
