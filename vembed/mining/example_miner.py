"""ExampleMiner: hard negatives for the examples of a training run, found by the run's own model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vembed.config.negatives import EpochMining
from vembed.config.schema import DataSection
from vembed.data.cache import short_hash
from vembed.data.examples import Example, Item, Kind
from vembed.mining.candidates import CHUNK, Candidates, ClaimFinder, with_claims
from vembed.mining.choice import Chooser, Limits, calibrate, of_turn
from vembed.mining.config import DataOptions, MineConfig
from vembed.mining.documents import array_identity, open_documents
from vembed.mining.known_positives import KnownPositives, Pairs
from vembed.mining.record_tables import Table
from vembed.mining.search import pair_scores, search
from vembed.mining.vectors import VectorStore, encode_together
from vembed.parallel.session import Session

Encode = Callable[[Sequence[tuple[Item, Kind]]], np.ndarray]
"""[n, d] vectors of this rank's items. Collective: all ranks call it, also those without items."""


class TrainingExamples(Protocol):
    """Examples by number, and the records that they were read from."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...

    def record(self, index: int) -> dict[str, Any]:
        """Return a record as it stands in its file."""
        ...

    def as_read(self, index: int, example: Example) -> Example:
        """Return an example with the prompts of the source that `index` is from."""
        ...


class _ExampleRows:
    """Examples in the form of the rows of `vembed mine`."""

    tables: Sequence[Table] = ()

    def __init__(self, examples: TrainingExamples, *, has_ids: bool) -> None:
        self._examples = examples
        self._has_ids = has_ids

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, row: int) -> Example:
        """Meaning of a row."""
        return self._examples[row]

    def record(self, row: int) -> dict[str, Any]:
        """A row as it stands in its file; without a corpus, whose ids it may name, nothing."""
        return self._examples.record(row) if self._has_ids else {}


@dataclass(frozen=True)
class Mined:
    """Result of one mining."""

    documents: np.ndarray
    """[num_examples, num_negatives] numbers of documents, -1 where there are fewer."""
    mean_score: float
    num_short: int
    """Examples that got fewer than `num_negatives`."""
    note: str
    """Result of `threshold: auto`, or nothing."""


class ExampleMiner:
    """Miner for the examples of one run. All ranks make one and call its methods together."""

    def __init__(
        self,
        options: EpochMining,
        data: DataSection,
        examples: TrainingExamples,
        session: Session,
        *,
        seed: int,
        normalize: bool,
    ) -> None:
        """Read all examples, and the corpus if there is one. `normalize`: vectors get length 1."""
        self._examples = examples
        self._session = session
        self._options = MineConfig.model_validate(
            options.model_dump(
                exclude={"every_epochs", "at_start", "corpus_path"}, exclude_unset=True
            )
            # The model is the run's own; nothing is written.
            | {"model_name": "", "data_path": [], "output_path": "", "seed": seed}
        )
        data_options = DataOptions(
            data_path=[],
            corpus_path=options.corpus_path,
            image_root=data.image_root,
            allow_image_urls=data.allow_image_urls,
            on_bad_record=data.on_bad_record,
        )
        rows = _ExampleRows(examples, has_ids=options.corpus_path is not None)
        self.documents = open_documents(data_options, rows)
        self._known = KnownPositives(rows, self.documents, data_options)
        self._excluded = self._known.excluded(with_negatives=True)
        self._unit = normalize
        self.fingerprint = short_hash(array_identity(self.documents.exact))
        """Hash of the documents in their order: numbers of documents mean the same only where it is the same."""

    @property
    def notes(self) -> list[str]:
        """Lines for the log."""
        return self._known.notes

    @property
    def num_queries(self) -> int:
        """Number of distinct queries."""
        return self._known.num_queries

    def mine(self, encode: Encode, folder: Path, epoch: int) -> Mined:
        """Encode queries and documents, search, and choose. Collective.

        `folder`: for vectors; all ranks see it, and it is empty before and gone afterwards. `epoch`: random choices
        differ between epochs.
        """
        # Vectors of other weights must not be taken for those of now.
        self._clear(folder)
        stores = [
            VectorStore(folder, "query", self._known.exact, "float32"),
            VectorStore(folder, "document", self.documents.exact, "float32"),
        ]
        for store, item in zip(
            stores, (self._known.item, self.documents.item), strict=True
        ):
            encode_together(store, item, encode, self._session, unit=self._unit)
        options = self._options.model_copy(update={"seed": self._options.seed + epoch})
        limits = Limits.of(options)
        note = ""
        if options.threshold == "auto":
            calibration = calibrate(self._candidates(*stores), options)
            limits = calibration.limits
            note = calibration.summary(options.max_false_negative_rate)
        chooser = Chooser(options, limits, self.documents, self._session)
        chunks = [
            chooser.choose(candidates, options.budget)
            for candidates in self._candidates(*stores)
        ]
        documents = np.concatenate([chunk.documents for chunk in chunks])
        scores = np.concatenate([chunk.scores for chunk in chunks])
        # A rank may still read vectors that rank 0 is about to remove.
        self._session.barrier()
        self._clear(folder)
        is_document = documents >= 0
        by_example = self._in_turns(documents)
        return Mined(
            by_example,
            float(scores[is_document].mean()) if is_document.any() else float("nan"),
            int((by_example < 0).any(axis=1).sum()),
            note,
        )

    def example(self, index: int, documents: Sequence[int]) -> Example:
        """Return an example with these documents after its own negatives."""
        example = self._examples[index]
        added = [self.documents.item(number) for number in documents if number >= 0]
        if not added:
            return example
        # The prompts of the source of the example, not of that of the document.
        plain = tuple(replace(item, prompt=None, max_length=None) for item in added)
        read = self._examples.as_read(index, replace(example, negatives=plain))
        return replace(
            read, negatives=example.negatives + read.negatives, negative_scores=None
        )

    def _candidates(
        self, queries: VectorStore, documents: VectorStore
    ) -> Iterator[Candidates]:
        """Yield the best documents of all queries, chunk by chunk. Collective."""
        claims: ClaimFinder | None = None
        if self._options.takes_claimed:
            claims = ClaimFinder(
                queries,
                documents,
                self._known.positives,
                queries.folder / "pairs",
                self._session,
            )
        for first in range(0, self.num_queries, CHUNK):
            last = min(first + CHUNK, self.num_queries)
            vectors = queries.between(first, last)
            among = self._excluded.among(first, last)
            excluded = Pairs(among.queries - first, among.documents)
            nearest, scores = search(
                vectors,
                documents,
                self.documents.num_candidates,
                self._options.top_k,
                excluded,
                self._session,
            )
            known = self._known.positives.among(first, last)
            positives = Pairs(known.queries - first, known.documents)
            positive_scores = pair_scores(vectors, documents, positives, self._session)
            yield with_claims(
                Candidates.unclaimed(
                    first, nearest, scores, positives, positive_scores
                ),
                claims,
            )

    def _in_turns(self, chosen: np.ndarray) -> np.ndarray:
        """[num_examples, num_negatives]: examples with the same query take turns through what it got."""
        number = self._options.num_negatives
        by_example = np.full((len(self._examples), number), -1, np.int64)
        turns = np.zeros(self.num_queries, np.int64)
        for row, query in enumerate(self._known.query_of_row):
            numbers = of_turn(
                chosen[query][chosen[query] >= 0], int(turns[query]), number
            )
            turns[query] += 1
            by_example[row, : len(numbers)] = numbers
        return by_example

    def _clear(self, folder: Path) -> None:
        if self._session.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        self._session.barrier()
