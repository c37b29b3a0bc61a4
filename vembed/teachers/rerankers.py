"""PairTeacher: a reranker that scores (query, document) pairs of texts, as a sequence classifier or by yes and no."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vembed.config.entries import Teacher
from vembed.data.examples import Item
from vembed.errors import UserError
from vembed.inference.reranker import Agree, Reranker, YesNoReranker, of_one_rank
from vembed.parallel import collectives, sharding
from vembed.parallel.session import Session
from vembed.teachers.shards import is_sharded

log = logging.getLogger("vembed")

Pair = tuple[Item, Item]
"""A query and a document."""
LONGEST = 512


class PairTeacher:
    """A reranker as teacher. Its weights are read when the first score is computed."""

    dim = 1

    def __init__(
        self,
        teacher: Teacher,
        folder: Path,
        session: Session,
        *,
        trust_remote_code: bool,
        yes_no: bool = False,
    ) -> None:
        self.teacher = teacher
        self.folder = folder
        self.session = session
        self.yes_no = yes_no
        self.trust_remote_code = trust_remote_code
        self._reranker: Reranker | YesNoReranker | None = None
        self._agree: Agree = of_one_rank

    def compute(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return scores [n, 1] of this rank's pairs, before `scale`. Collective, where the teacher is sharded."""
        reranker = self._loaded()
        prompts = self.teacher.query_prompt, self.teacher.document_prompt
        texts = [
            (self._text(query, prompts[0]), self._text(document, prompts[1]))
            for query, document in pairs
        ]
        # model_max_length is 1e30 in tokenizers that have no limit.
        limit = self.teacher.max_length or min(
            LONGEST, reranker.tokenizer.model_max_length
        )
        scores = np.empty((len(texts), 1), np.float32)
        for number, score in self._scored(reranker, texts, limit):
            if number < len(texts):
                scores[number] = score
        return scores

    def release(self) -> None:
        """Give up the weights; they are read again if something is missing later."""
        self._reranker = None

    def _scored(
        self,
        reranker: Reranker | YesNoReranker,
        texts: Sequence[tuple[str, str]],
        limit: int,
    ) -> Iterator[tuple[int, float]]:
        # A rank without a pair runs the forward passes of a sharded teacher too. The pair must have tokens: decoders'
        # tokenizers make none of an empty text. Its score has a number beyond the texts, and the caller drops it.
        asked = [("a", "a")] if self._agree is not of_one_rank and not texts else texts
        for number, logits in reranker.logits(asked, limit, self._agree):
            yield (
                number,
                float(logits[1] - logits[0]) if self.yes_no else float(logits[0]),
            )

    def _loaded(self) -> Reranker | YesNoReranker:
        if self._reranker is not None:
            return self._reranker
        device = self.session.device
        role = f"teacher {self.teacher.label}"
        sharded = is_sharded(self.teacher, self.folder, self.session)
        holds = "cpu" if sharded else device
        reranker: Reranker | YesNoReranker
        if self.yes_no:
            reranker = YesNoReranker(
                self.folder,
                role=role,
                instruction=self.teacher.instruction,
                dtype=None,
                device=device,
                holds=holds,
                trust_remote_code=self.trust_remote_code,
            )
        else:
            reranker = Reranker(
                self.folder,
                role=role,
                max_labels=1,
                dtype=None,
                device=device,
                holds=holds,
                trust_remote_code=self.trust_remote_code,
            )
        if sharded:
            # Every rank has read the file: weights that are tied would come apart on their way from rank 0.
            sharding.shard_for_use(reranker.model, (), device, one_reads=False)
            self._agree = _most
        log.info(
            "%s: %s (%s)",
            role,
            "asked for yes or no" if self.yes_no else "reranker",
            reranker.name,
        )
        self._reranker = reranker
        return reranker

    def _text(self, item: Item, prompt: str | None) -> str:
        if item.text is None or item.images:
            raise UserError(
                f"teacher {self.teacher.label} scores texts, and the data have images: use an embedding model"
            )
        return (prompt or "") + item.text


def _most(num_batches: int) -> int:
    return int(collectives.max_ints([num_batches])[0])
