"""ExampleMiner: hard negatives for the examples of a training run, found by the run's own model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vembed.config.schema import DataSection, EpochMining
from vembed.data.cache import short_hash
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item, Kind
from vembed.mining.candidates import CandidateSearch
from vembed.mining.choice import choose_negatives, columns_by_row
from vembed.mining.config import DataOptions
from vembed.mining.inputs import Documents, KnownPositives, Rows, array_identity
from vembed.mining.retrievers import DenseRetriever
from vembed.parallel.session import Session

Encode = Callable[[Sequence[tuple[Item, Kind]]], np.ndarray]
"""[n, d] vectors of this rank's items, whose dot product is the similarity. Collective: all ranks call it, also those without items."""


class _ExampleTable:
    """Examples in the form of a table of `vembed mine`."""

    name = "the training data"
    image_folder = ""

    def __init__(self, examples: ExampleStore, *, has_ids: bool) -> None:
        self._examples = examples
        self._has_ids = has_ids

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, number: int) -> Example:
        """See Table."""
        return self._examples[number]

    def record(self, number: int) -> dict[str, Any]:
        """See Table. Without a corpus, whose ids it may name, nothing."""
        return self._examples.record(number) if self._has_ids else {}


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
        examples: ExampleStore,
        session: Session,
        seed: int,
    ) -> None:
        """Read all examples, and the corpus if there is one."""
        self._examples = examples
        self._session = session
        self._options = options
        self._seed = seed
        data_options = DataOptions(
            data_path=[],
            corpus_path=options.corpus_path,
            image_root=data.image_root,
            allow_image_urls=data.allow_image_urls,
            on_bad_record=data.on_bad_record,
        )
        has_ids = options.corpus_path is not None
        rows = Rows([_ExampleTable(examples, has_ids=has_ids)])
        self.documents = Documents(data_options, rows)
        self._known = KnownPositives(rows, self.documents, data_options)
        self.notes = self._known.notes
        """Lines for the log."""
        self.fingerprint = short_hash(array_identity(self.documents.exact))
        """Hash of the documents in their order: numbers of documents mean the same only where it is the same."""

    def mine(self, encode: Encode, folder: Path, epoch: int) -> Mined:
        """Encode queries and documents, search, and choose. Collective.

        `folder`: for vectors; all ranks see it, and it is empty before and gone afterwards. `epoch`: random choices
        differ between epochs.
        """
        session = self._session
        options = self._options
        known = self._known
        # Vectors of other weights must not be taken for those of now.
        self._clear(folder)
        dense = DenseRetriever(folder, "run", self.documents, known, session)

        def encode_queries(numbers: np.ndarray) -> np.ndarray:
            return encode(
                [(known.item(number), "query") for number in numbers.tolist()]
            )

        def encode_documents(numbers: np.ndarray) -> np.ndarray:
            items = map(self.documents.item, numbers.tolist())
            return encode([(item, "document") for item in items])

        # Ranks run together, as those of sharded weights must.
        dense.queries.encode(encode_queries, together=True)
        dense.documents.encode(encode_documents, together=True)
        excluded = known.excluded(with_negatives=True)
        search = CandidateSearch(
            options,
            known,
            [dense],
            session,
            excluded=excluded,
            folder=folder / "candidates",
        )
        choice = choose_negatives(
            search,
            options,
            self._seed + epoch,
            self.documents,
            session,
            depth=options.budget,
        )
        note = ""
        if choice.calibration is not None:
            note = choice.calibration.summary(options.max_false_negative_rate)
        chosen = choice.chosen
        # A rank may still read what rank 0 is about to remove.
        session.barrier()
        self._clear(folder)
        scores = chosen.scores[chosen.documents >= 0]
        mean = float(scores.mean()) if len(scores) else float("nan")
        number = options.num_negatives
        by_example = np.full((len(self._examples), number), -1, np.int64)
        rows = columns_by_row(chosen, known.query_of_row, number)
        for row, columns in enumerate(rows):
            query = known.query_of_row[row]
            by_example[row, : len(columns)] = chosen.documents[query, columns]
        num_short = int((by_example < 0).any(axis=1).sum())
        return Mined(by_example, mean, num_short, note)

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

    def _clear(self, folder: Path) -> None:
        if self._session.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        self._session.barrier()
