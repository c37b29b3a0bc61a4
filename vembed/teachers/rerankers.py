"""PairTeacher: a reranker that scores (query, document) pairs of texts, as a sequence classifier or by yes and no."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vembed.config.entries import Teacher
from vembed.data.examples import Example, Item
from vembed.data.pair_features import Pair
from vembed.inference.reranker import Reranker
from vembed.parallel.session import Session
from vembed.parallel.sharding import shard_for_use
from vembed.teachers.shards import is_sharded
from vembed.teachers.teacher_identity import pair_key

log = logging.getLogger("vembed")


class PairTeacher:
    """A reranker as teacher. Its weights are read when the first score is computed."""

    dim = 1

    def __init__(
        self,
        teacher: Teacher,
        kind: Literal["reranker", "yes_no"],
        folder: Path,
        session: Session,
        *,
        trust_remote_code: bool,
    ) -> None:
        self.teacher = teacher
        self.kind = kind
        self.folder = folder
        self.session = session
        self.trust_remote_code = trust_remote_code
        self._reranker: Reranker | None = None
        self._world_size = 1
        """Number of ranks that compute together: those of a sharded teacher."""

    def compute(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return scores [n, 1] of this rank's pairs, before `scale`. Collective, where the teacher is sharded."""
        reranker = self._reranker
        if reranker is None:
            reranker = self._read()
        return reranker.score(pairs, self._world_size)

    def questions(self, example: Example) -> Iterator[tuple[bytes, Pair]]:
        """Yield the key and the pair of each document of an example."""
        for document in (*example.positives, *example.negatives):
            yield self.question(example.query, document)

    def question(self, query: Item, document: Item) -> tuple[bytes, Pair]:
        """Return the key of a pair, and the pair."""
        return pair_key(query, document), (query, document)

    def release(self) -> None:
        """Give up the weights; they are read again if something is missing later."""
        self._reranker = None

    def _read(self) -> Reranker:
        teacher = self.teacher
        device = self.session.device
        is_shard = is_sharded(teacher, self.folder, self.session)
        reranker = Reranker(
            self.folder,
            role=f"teacher {teacher.label}",
            device=device,
            head="answer" if self.kind == "yes_no" else "label",
            instruction=teacher.instruction,
            max_length=teacher.max_length,
            query_prompt=teacher.query_prompt,
            document_prompt=teacher.document_prompt,
            trust_remote_code=self.trust_remote_code,
            holds="cpu" if is_shard else device,
        )
        if is_shard:
            # Every rank has read the file: weights that are tied would come apart on their way from rank 0.
            layers = reranker.description.layer_classes
            reranker.model = shard_for_use(
                reranker.model, layers, device, one_reads=False
            )
            self._world_size = self.session.world_size
        log.info(
            "teacher %s: %s (%s)",
            teacher.label,
            "reranker" if self.kind == "reranker" else "asked for yes or no",
            reranker.description.layer_classes[0],
        )
        self._reranker = reranker
        return reranker
