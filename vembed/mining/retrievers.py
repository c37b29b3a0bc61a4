"""Retrievers: BM25 by the package bm25s, vectors of models, and the fusion of several rankings."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from vembed.data.cache import short_hash
from vembed.data.near_duplicates import words
from vembed.errors import UserError
from vembed.evaluation.ranking_keys import NOTHING, as_keys, documents_of, scores_of
from vembed.mining.documents import Documents, array_identity
from vembed.mining.known import Known, Pairs
from vembed.parallel import collectives
from vembed.parallel.session import Session

FORMAT = 2
"""Format version of the index. Increase it when `words` gives other words."""


def check_bm25() -> None:
    """Raise where the package is missing."""
    if find_spec("bm25s") is None:
        raise UserError("bm25 needs the package bm25s: pip install 'vembed[mine]'")


class LexicalRetriever:
    """Words in common, weighted by how rare they are. While the index is built, it is held in memory by one process."""

    def __init__(
        self, folder: Path, documents: Documents, known: Known, session: Session
    ) -> None:
        check_bm25()
        self._documents, self._known, self._session = documents, known, session
        # With their order: the index knows documents by their numbers alone.
        self._folder = (
            folder / "bm25" / short_hash(FORMAT, array_identity(documents.exact))
        )
        if session.is_main and not self._folder.exists():
            self._build()
        session.barrier()
        if not self._folder.exists():
            raise UserError(
                f"{self._folder} is not here: work_dir must be a folder that all machines see"
            )
        import bm25s

        self._index = bm25s.BM25.load(
            str(self._folder), mmap=True, load_corpus=False, show_progress=False
        )

    def search(
        self, first: int, last: int, k: int, excluded: Pairs
    ) -> tuple[np.ndarray, np.ndarray]:
        """[Q, k] best candidates for queries first .. last - 1, and their scores, as `search` of dense vectors.

        `excluded` counts queries from `first`. Collective: the ranks share the queries.
        """
        numbers = torch.arange(self._documents.num_candidates)
        bounds = excluded.bounds(last - first)
        best = torch.full((last - first, k), NOTHING, dtype=torch.int64)
        # The index is mapped by every rank, so that the queries are shared and not the documents.
        for query in range(self._session.rank, last - first, self._session.world_size):
            scores = torch.from_numpy(
                self._scores(first + query)[: self._documents.num_candidates].copy()
            )
            # A score of 0 means no word in common, and no candidate.
            keys = torch.where(scores > 0, as_keys(scores, numbers), NOTHING)
            own = excluded.documents[bounds[query] : bounds[query + 1]]
            # Documents of the rows beyond the candidates may be excluded too, and have no key.
            keys[torch.from_numpy(own[own < len(keys)])] = NOTHING
            found = keys.topk(min(k, len(keys))).values
            best[query, : len(found)] = found
        merged = self._from_all(best)
        return documents_of(merged).numpy(), scores_of(merged).numpy()

    def pair_scores(self, first: int, pairs: Pairs) -> np.ndarray:
        """The score of each pair, whose queries count from `first`. Collective."""
        found = torch.zeros(len(pairs))
        order = np.argsort(pairs.queries, kind="stable")
        queries, starts = np.unique(pairs.queries[order], return_index=True)
        for query, chosen in zip(queries, np.split(order, starts)[1:], strict=True):
            if query % self._session.world_size == self._session.rank:
                scores = self._scores(first + int(query))
                found[torch.from_numpy(chosen)] = torch.from_numpy(
                    scores[pairs.documents[chosen]].copy()
                )
        return collectives.sum_tensor(found).numpy()

    def _from_all(self, best_QK: torch.Tensor) -> torch.Tensor:
        world_size = self._session.world_size
        if world_size == 1:
            return best_QK
        own = best_QK[self._session.rank :: world_size]
        counts = [
            len(range(rank, len(best_QK), world_size)) for rank in range(world_size)
        ]
        gathered = collectives.all_gather_rows(
            own.to(self._session.device), counts
        ).cpu()
        for rank, part in enumerate(torch.split(gathered, counts)):
            best_QK[rank::world_size] = part
        return best_QK

    def _scores(self, query: int) -> np.ndarray:
        found = self._index.get_tokens_ids(words(self._known.item(query).text or ""))
        if not found:
            return np.zeros(len(self._documents), np.float32)
        scores: np.ndarray = self._index.get_scores_from_ids(found)
        return scores.astype(np.float32, copy=False)

    def _build(self) -> None:
        import bm25s

        vocabulary: dict[str, int] = {}
        ids = [
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in words(self._documents.item(number).text or "")
            ]
            for number in range(len(self._documents))
        ]
        if not vocabulary:
            raise UserError(
                "bm25 finds words in common, and the documents hold no text"
            )
        index = bm25s.BM25()
        index.index((ids, vocabulary), show_progress=False)
        partial = self._folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        index.save(str(partial), show_progress=False)
        # Renamed when whole: an index that a killed run left half built never counts.
        partial.rename(self._folder)
