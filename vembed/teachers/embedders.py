"""VectorTeacher: an embedding model that gives one vector per input, in the role of query or document."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vembed.config.entries import Teacher
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item, Kind
from vembed.data.features import Featuriser
from vembed.distributed.session import Session
from vembed.families.decisions import describe
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import encode_rank_items

log = logging.getLogger("vembed")

Question = tuple[Item, Kind]
"""An input in a role."""


class VectorTeacher:
    """An embedding model as teacher. Its weights are read when the first vector is computed."""

    def __init__(self, teacher: Teacher, config: TrainConfig, session: Session) -> None:
        self.teacher = teacher
        self.session = session
        self.trust_remote_code = config.trust_remote_code
        described = describe(
            TrainConfig(
                model_name=teacher.model, data_path=[], pure_dtype=True, trust_remote_code=config.trust_remote_code,
                max_length=teacher.max_length, query_prompt=teacher.query_prompt,
                document_prompt=teacher.document_prompt,
            )
        )  # fmt: skip
        self.description = described
        self.dim = described.embedding_dim
        self.roles_differ = described.query_prompt != described.document_prompt
        self._embedder: Embedder | None = None
        self._featuriser: Featuriser | None = None

    def compute(self, questions: Sequence[Question]) -> np.ndarray:
        """Return vectors [n, dim] of length 1 of this rank's questions. Collective: ranks may ask different things,
        and at least one rank asks something."""
        embedder = self._loaded()
        assert self._featuriser is not None
        found = encode_rank_items(embedder.model, self._featuriser, questions, session=self.session)
        unit: np.ndarray = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return unit

    def release(self) -> None:
        """Give up the weights; they are read again if something is missing later."""
        self._embedder = None

    def _loaded(self) -> Embedder:
        if self._embedder is None:
            log.info("teacher %s: %s", self.teacher.label, self.description.summary())
            self._embedder = Embedder(
                self.teacher.model,
                mixed_precision="bf16" if self.session.placement.copies_weights else "no",
                session=self.session,
                trust_remote_code=self.trust_remote_code,
            )
            wanted = self.description
            self._featuriser = Featuriser(
                replace(
                    self._embedder.description,
                    query_prompt=wanted.query_prompt,
                    document_prompt=wanted.document_prompt,
                    max_length=wanted.max_length,
                )
            )
        return self._embedder
