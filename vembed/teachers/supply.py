"""Teachers: all teachers of a run. They answer for the training data before the first step, and for each batch. Answers are
read from disk where they are known and computed where not."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from vembed.config.schema import DataSection, ModelSection, ObjectiveSection, Teacher
from vembed.config.terms import needed_teachers, run_terms
from vembed.data.batching.rank_batch import RankBatch, to_device
from vembed.data.example_store import ExampleStore
from vembed.data.row_store import RowStore
from vembed.errors import UserError
from vembed.files import cache_folder, read_json_object
from vembed.losses.batch import LossBatch, TeacherScores, TeacherVectors, Teaching
from vembed.losses.similarity import arithmetic_dtype
from vembed.models.families.model_files import ModelKind, kind_of, model_folder
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport, duration
from vembed.teachers.models import PairTeacher, VectorTeacher, teacher_identity

log = logging.getLogger("vembed")

CHUNK = 2048
"""Questions per rank between two writes."""


Q = TypeVar("Q")


class CachedTeacher(Generic[Q]):
    """Answers by key. The first process of each machine writes what all have computed before the first step; what is
    asked for later is written by the rank that computes it."""

    def __init__(
        self,
        label: str,
        model: Any,
        identity: str,
        session: Session,
        folder: Path | None,
    ) -> None:
        """`model`: a VectorTeacher or a PairTeacher."""
        self.label = label
        self.model = model
        self.session = session
        store_folder = (folder or cache_folder()) / "teachers"
        self.store = RowStore(store_folder, identity, "teacher", ".answers")
        self.num_later = 0
        """Answers that were computed during the run."""

    def answers(self, keys: Sequence[bytes], questions: Sequence[Q]) -> np.ndarray:
        """Return [n, dim] float32. Collective: ranks may ask different things, and compute together what is missing."""
        stored = self.store.find_rows(keys)
        missing = [place for place in range(len(keys)) if place not in stored]
        rows = np.zeros((len(keys), self.model.dim), np.float32)
        # `compute` is collective: all ranks call it as soon as one of them misses an answer, the others with no
        # question.
        if collectives.max_ints([len(missing)])[0]:
            computed = self.model.compute([questions[place] for place in missing])
            self.store.add_rows([keys[place] for place in missing], computed)
            self.num_later += len(missing)
            if missing:
                rows[missing] = computed
        if stored:
            rows[list(stored)] = np.stack(list(stored.values()))
        return rows

    def is_complete(self, what: str) -> bool:
        """Return whether all answers for some data (by their fingerprint) were computed before. Collective."""
        is_complete = False
        if self.session.is_main:
            # Where the note is not there, or damaged, the data are gone through again.
            with suppress(UserError, KeyError, TypeError):
                note = read_json_object(self._note(what))
                num_noted = note["num_answers"]
                is_complete = len(self.store) >= num_noted
                if not is_complete:
                    log.warning(
                        f"teacher {self.label}: {self.store.folder} holds {len(self.store):,d} answers of "
                        f"{num_noted:,d}: the others are computed anew"
                    )
        return bool(collectives.broadcast_object(is_complete))

    def complete(
        self, what: str, keys: Sequence[bytes], questions: Sequence[Q]
    ) -> None:
        """Compute what is missing of these answers. Collective: all ranks pass the same keys and questions."""
        session = self.session
        # Rank 0 decides for all: the files may change while the ranks look at them.
        found_missing = self.store.missing(keys) if session.is_main else []
        missing: list[int] = collectives.broadcast_object(found_missing)
        log.info(
            f"teacher {self.label}: {len(missing):,d} of {len(keys):,d} answers are missing"
        )
        began = time.perf_counter()
        with ProgressReport(
            f"teacher {self.label}", active=session.is_main, log=log.info
        ) as progress:
            for start in range(0, len(missing), CHUNK * session.world_size):
                chunk = missing[start : start + CHUNK * session.world_size]
                # Dealt to the ranks in turn.
                share = chunk[session.rank :: session.world_size]
                computed = self.model.compute([questions[place] for place in share])
                answers = torch.from_numpy(computed).to(session.device)
                rows = collectives.all_gather_dealt(answers, len(chunk)).cpu().numpy()
                if session.local_rank == 0:
                    self.store.add_rows([keys[place] for place in chunk], rows)
                progress(start + len(chunk), len(missing))
        if missing:
            seconds = time.perf_counter() - began
            log.info(f"teacher {self.label}: took {duration(seconds)}")
        # A machine may have a disk of its own, so one process of each machine writes.
        if session.local_rank == 0:
            note = self._note(what)
            # A full disk costs the next run a pass over the data.
            with suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                part = note.with_suffix(f".{session.rank}.part")
                part.write_text(json.dumps({"num_answers": len(keys)}))
                part.replace(note)
        self.model.release()

    def _note(self, what: str) -> Path:
        return self.store.folder / f"complete-{what}.json"


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
        self.by_name: dict[str, CachedTeacher[Any]] = {}
        needs_vectors = set()
        for term in run_terms(objective, data, model.model_name):
            needs_vectors.add(term.guide)
            if term.loss.needs_vectors():
                needs_vectors.add(term.teacher)
        for teacher in needed_teachers(objective, data, model):
            name = teacher.label
            files = model_folder(teacher.model, option="teacher")
            kind = teacher_kind(teacher, files, needs_vectors=name in needs_vectors)
            trust = model.trust_remote_code
            teacher_model: VectorTeacher | PairTeacher
            if kind == "embedder":
                teacher_model = VectorTeacher(teacher, session, trust_remote_code=trust)
                arithmetic = str(session.mixed_precision)
            else:
                if name in needs_vectors:
                    raise UserError(
                        f"teacher {name} is a reranker, which scores listed pairs alone, and the losses need "
                        "its vectors: use an embedding model for guide, embedding, relational and kl over the batch"
                    )
                teacher_model = PairTeacher(
                    teacher,
                    "yes_no" if kind == "yes_no" else "reranker",
                    files,
                    session,
                    trust_remote_code=trust,
                )
                arithmetic = "float32"
            identity = teacher_identity(files, teacher, kind, arithmetic)
            self.by_name[name] = CachedTeacher(
                name, teacher_model, identity, session, folder
            )

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the teachers' vectors."""
        return {name: teacher.model.dim for name, teacher in self.by_name.items()}

    def prepare(self, examples: ExampleStore) -> None:
        """Compute all answers for the training data that are not on disk. Collective; every rank passes all examples.

        If all of them were computed before, which a note on disk says by the data's fingerprint, no example is read.
        """
        fingerprint = examples.fingerprint
        questions: dict[str, dict[bytes, Any]] = {}
        for name, teacher in self.by_name.items():
            if teacher.is_complete(fingerprint):
                log.info("teacher %s: all answers were computed before", name)
            else:
                questions[name] = {}
        if not questions:
            return
        for number in range(len(examples)):
            example = examples[number]
            for name, by_key in questions.items():
                for key, question in self.by_name[name].model.questions(example):
                    by_key.setdefault(key, question)
        for name, by_key in questions.items():
            self.by_name[name].complete(
                fingerprint, list(by_key), list(by_key.values())
            )

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
        dtype = arithmetic_dtype(loss_batch.embeddings)
        for name, teacher in self.by_name.items():
            if isinstance(teacher.model, VectorTeacher):
                vectors, *indices = self._vectors(teacher, rank_batch)
                query, positive, negative = indices
                teachers[name] = TeacherVectors(
                    vectors.to(dtype),
                    self._gather(query, by_row),
                    self._gather(positive, by_row),
                    self._gather(negative, by_negative),
                )
            else:
                positive, negative = self._scores(teacher, rank_batch)
                teachers[name] = TeacherScores(
                    self._gather(positive, by_row), self._gather(negative, by_negative)
                )
        return replace(loss_batch, teachers=teachers)

    def log_use(self) -> None:
        """Log how many answers were computed during the run. Collective."""
        if not self.by_name:
            return
        counts = [teacher.num_later for teacher in self.by_name.values()]
        totals = collectives.sum_ints(counts)
        for name, total in zip(self.by_name, totals, strict=True):
            if total:
                log.info(
                    f"teacher {name}: {total:,d} answers were computed during the run"
                )

    def _vectors(
        self, teacher: CachedTeacher[Any], rank_batch: RankBatch
    ) -> tuple[Any, ...]:
        """Return a teacher's vectors of the global batch, and the index in them of each of this rank's queries,
        positives and negatives. Collective. An input has one vector for each of its roles, if the teacher's differ."""
        questions: dict[bytes, Any] = {}
        places: dict[bytes, int] = {}
        indices = []
        queries = [query for query, _ in rank_batch.row_items]
        positives = [positive for _, positive in rank_batch.row_items]
        negatives = [negative for _, negative in rank_batch.negative_items]
        for kind, items in (
            ("query", queries),
            ("document", positives),
            ("document", negatives),
        ):
            index = np.empty(len(items), dtype=np.int64)
            for position, item in enumerate(items):
                key, question = teacher.model.question(item, kind)
                questions.setdefault(key, question)
                index[position] = places.setdefault(key, len(places))
            indices.append(index)
        rows = teacher.answers(list(questions), list(questions.values()))
        counts = [row[0] for row in collectives.all_gather_ints([len(rows)])]
        # Gathered vectors are in rank order, so this rank's begin behind those of lower ranks.
        offset = sum(counts[: self.session.rank])
        return self._gather(rows, counts), *(index + offset for index in indices)

    def _scores(
        self, teacher: CachedTeacher[Any], rank_batch: RankBatch
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a reranker's scores of this rank's rows [rows] and hard negatives [negatives], in float64, times its
        `scale`. Collective."""
        keys = []
        questions = {}
        for query, document in (*rank_batch.row_items, *rank_batch.negative_items):
            key, question = teacher.model.question(query, document)
            keys.append(key)
            questions[key] = question
        answers = teacher.answers(list(questions), list(questions.values()))[:, 0]
        by_key = dict(zip(questions, answers.tolist(), strict=True))
        scores = np.array([by_key[key] for key in keys], dtype=np.float64)
        scores *= teacher.model.teacher.scale
        num_rows = len(rank_batch.row_items)
        return scores[:num_rows], scores[num_rows:]

    def _gather(self, values: np.ndarray, counts: list[int]) -> Tensor:
        column = to_device(torch.from_numpy(values), self.session.device)
        return collectives.all_gather_rows(column, counts)


def teacher_kind(teacher: Teacher, files: Path, *, needs_vectors: bool) -> ModelKind:
    """Return the kind of a teacher. `needs_vectors`: a loss of the run needs the teacher's vectors."""
    if teacher.kind != "auto":
        return teacher.kind
    kind = kind_of(files)
    if kind not in ("embedder", "reranker", "yes_no"):
        raise UserError(
            f"teacher {teacher.label} is a {kind}, and a teacher is an embedding model or a reranker"
        )
    # A decoder without files of Sentence Transformers may be either.
    return "embedder" if kind == "yes_no" and needs_vectors else kind
