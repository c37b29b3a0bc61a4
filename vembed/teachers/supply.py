"""Teachers: all teachers of a run. They answer for the training data before the first step, and for each batch."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vembed.config.entries import Teacher
from vembed.config.schema import DataSection, ModelSection, ObjectiveSection
from vembed.config.terms import needed_teachers, run_terms
from vembed.data.batching.feeding import to_device
from vembed.data.batching.rank_batch import RankBatch
from vembed.data.examples import Example
from vembed.errors import UserError
from vembed.inference.reranker import Pair
from vembed.losses.batch import (
    LossBatch,
    TeacherScores,
    TeacherVectors,
    Teaching,
)
from vembed.losses.similarity import arithmetic_dtype
from vembed.models.families.model_files import ModelKind, kind_of, model_folder
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.teachers.cached import CachedTeacher
from vembed.teachers.embedders import Question, VectorTeacher
from vembed.teachers.rerankers import PairTeacher
from vembed.teachers.teacher_identity import pair_key, teacher_identity

log = logging.getLogger("vembed")


class TaughtData(Protocol):
    """Examples by number, with a fingerprint of their contents."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


class Teachers:
    """The teachers of a run, by name; none where no loss follows one."""

    def __init__(
        self,
        objective: ObjectiveSection,
        data: DataSection,
        model: ModelSection,
        session: Session,
        folder: Path | None = None,
    ) -> None:
        """`folder`: of the cache, by default vembed's own."""
        self.session = session
        self.vectors: dict[str, CachedTeacher[Question]] = {}
        self.pairs: dict[str, CachedTeacher[Pair]] = {}
        self._models: dict[str, VectorTeacher] = {}
        self._scales: dict[str, float] = {}
        wants_vectors = set()
        for term in run_terms(objective, data, model.model_name):
            wants_vectors.add(term.guide)
            if term.loss.needs_vectors():
                wants_vectors.add(term.teacher)
        for teacher in needed_teachers(objective, data, model):
            files = model_folder(teacher.model, option="teacher")
            kind = teacher_kind(
                teacher, files, wants_vectors=teacher.label in wants_vectors
            )
            if kind != "embedder":
                if teacher.label in wants_vectors:
                    raise UserError(
                        f"teacher {teacher.label} is a reranker, which scores listed pairs alone, and the losses need "
                        "its vectors: use an embedding model for guide, embedding, relational and kl over the batch"
                    )
                identity = teacher_identity(files, teacher, kind, "float32")
                reranker = PairTeacher(
                    teacher,
                    "yes_no" if kind == "yes_no" else "reranker",
                    files,
                    session,
                    trust_remote_code=model.trust_remote_code,
                )
                self.pairs[teacher.label] = CachedTeacher(
                    teacher.label, reranker, identity, session, folder
                )
                self._scales[teacher.label] = teacher.scale
            else:
                embedder = VectorTeacher(
                    teacher, session, trust_remote_code=model.trust_remote_code
                )
                identity = teacher_identity(
                    files, teacher, "embedder", str(session.mixed_precision)
                )
                self.vectors[teacher.label] = CachedTeacher(
                    teacher.label, embedder, identity, session, folder
                )
                self._models[teacher.label] = embedder

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the teachers' vectors."""
        return {name: model.dim for name, model in self._models.items()}

    def prepare(self, examples: TaughtData) -> None:
        """Compute all answers for the training data that are not on disk. Collective; every rank passes all examples.

        If all of them were computed before, which a note on disk says by the data's fingerprint, no example is read.
        """
        fingerprint = examples.fingerprint
        open_vectors = [
            name
            for name, vector in self.vectors.items()
            if not vector.is_complete(fingerprint)
        ]
        open_pairs = [
            name
            for name, pair in self.pairs.items()
            if not pair.is_complete(fingerprint)
        ]
        for name in [*self.vectors, *self.pairs]:
            if name not in (*open_vectors, *open_pairs):
                log.info("teacher %s: all answers were computed before", name)
        if not open_vectors and not open_pairs:
            return
        questions: dict[str, dict[bytes, Question]] = {
            name: {} for name in open_vectors
        }
        pairs: dict[bytes, Pair] = {}
        for example in (examples[number] for number in range(len(examples))):
            documents = (*example.positives, *example.negatives)
            for name in open_vectors:
                asked = questions[name]
                model = self._models[name]
                asked.setdefault(*model.question(example.query, "query"))
                for document in documents:
                    asked.setdefault(*model.question(document, "document"))
            if open_pairs:
                for document in documents:
                    pairs.setdefault(
                        pair_key(example.query, document), (example.query, document)
                    )
        for name in open_vectors:
            self.vectors[name].complete(
                fingerprint, list(questions[name]), list(questions[name].values())
            )
        for name in open_pairs:
            self.pairs[name].complete(fingerprint, list(pairs), list(pairs.values()))

    def attach(
        self,
        loss_batch: LossBatch,
        rank_batch: RankBatch,
        by_row: list[int],
        by_negative: list[int],
    ) -> LossBatch:
        """Return the loss batch with everything that the teachers say about it. Collective, if there are teachers.

        `by_row`, `by_negative`: numbers of rows and hard negatives of each rank.
        """
        teachers: dict[str, Teaching] = {}
        for name in self.vectors:
            dtype = arithmetic_dtype(loss_batch.embeddings)
            teachers[name] = self._vectors(name, rank_batch, by_row, by_negative, dtype)
        for name in self.pairs:
            positive, negative = self._scores(name, rank_batch)
            teachers[name] = TeacherScores(
                self._gather(positive, by_row), self._gather(negative, by_negative)
            )
        return replace(loss_batch, teachers=teachers)

    def log_use(self) -> None:
        """Log how many answers were computed during the run. Collective."""
        used = {name: teacher.num_later for name, teacher in self.vectors.items()}
        used |= {name: teacher.num_later for name, teacher in self.pairs.items()}
        for name, later in zip(
            used, collectives.sum_ints(list(used.values())) if used else [], strict=True
        ):
            if later:
                log.info(
                    "teacher %s: %s answers were computed during the run",
                    name,
                    f"{later:,d}",
                )

    def _vectors(
        self,
        name: str,
        rank_batch: RankBatch,
        by_row: list[int],
        by_negative: list[int],
        dtype: torch.dtype,
    ) -> TeacherVectors:
        """Return a teacher's vectors of the global batch. Collective. An input has one for each of its roles, if the
        teacher's differ."""
        documents = np.concatenate((rank_batch.positive, rank_batch.negative))
        keys: dict[bytes, int] = {}
        questions: list[Question] = []
        place: dict[tuple[int, bool], int] = {}
        for is_query, places in ((True, rank_batch.query), (False, documents)):
            for feature in np.unique(places).tolist():
                key, question = self._models[name].question(
                    rank_batch.items[feature], "query" if is_query else "document"
                )
                if key not in keys:
                    keys[key] = len(questions)
                    questions.append(question)
                place[feature, is_query] = keys[key]
        rows = self.vectors[name].answers(list(keys), questions)
        counts = [row[0] for row in collectives.all_gather_ints([len(rows)])]
        vectors = to_device(torch.from_numpy(rows), self.session.device)
        vectors = collectives.all_gather_rows(vectors, counts)
        # Gathered vectors are in rank order, so this rank's begin behind those of lower ranks.
        offset = sum(counts[: self.session.rank])
        index = [
            np.array(
                [place[feature, is_query] + offset for feature in places.tolist()],
                dtype=np.int64,
            )
            for is_query, places in (
                (True, rank_batch.query),
                (False, rank_batch.positive),
                (False, rank_batch.negative),
            )
        ]
        query, positive, negative = (
            self._gather(numbers, sizes)
            for numbers, sizes in zip(index, (by_row, by_row, by_negative), strict=True)
        )
        return TeacherVectors(vectors.to(dtype), query, positive, negative)

    def _scores(
        self, name: str, rank_batch: RankBatch
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a reranker's scores of this rank's rows [rows] and hard negatives [negatives], in float64, times its
        `scale`. Collective."""
        # Hard negatives name their example; an example with several positives has several rows, all with the same
        # query.
        query_of = dict(
            zip(rank_batch.example.tolist(), rank_batch.query.tolist(), strict=True)
        )
        asked = [
            *zip(rank_batch.query.tolist(), rank_batch.positive.tolist(), strict=True)
        ]
        asked += [
            (query_of[example], negative)
            for example, negative in zip(
                rank_batch.negative_example.tolist(),
                rank_batch.negative.tolist(),
                strict=True,
            )
        ]
        pairs = [
            (rank_batch.items[query], rank_batch.items[document])
            for query, document in asked
        ]
        distinct = {pair_key(*pair): pair for pair in pairs}
        answers = (
            self.pairs[name].answers(list(distinct), list(distinct.values()))[:, 0]
            * self._scales[name]
        )
        by_key = dict(zip(distinct, answers.tolist(), strict=True))
        scores = np.array([by_key[pair_key(*pair)] for pair in pairs], dtype=np.float64)
        return scores[: len(rank_batch.query)], scores[len(rank_batch.query) :]

    def _gather(self, values: np.ndarray, counts: list[int]) -> Tensor:
        column = to_device(torch.from_numpy(values), self.session.device)
        return collectives.all_gather_rows(column, counts)


def teacher_kind(teacher: Teacher, files: Path, *, wants_vectors: bool) -> ModelKind:
    """Return the kind of a teacher. `wants_vectors`: a loss of the run needs the teacher's vectors."""
    if teacher.kind != "auto":
        return teacher.kind
    kind = kind_of(files)
    if kind not in ("embedder", "reranker", "yes_no"):
        raise UserError(
            f"teacher {teacher.label} is a {kind}, and a teacher is an embedding model or a reranker"
        )
    # A decoder without files of Sentence Transformers may be either.
    return "embedder" if kind == "yes_no" and wants_vectors else kind
