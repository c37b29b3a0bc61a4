"""Teachers: models that teach. They answer for the training data before the first step, and for each batch.

A VectorTeacher gives one vector per input, a PairTeacher scores pairs of a query and a document. Answers are read from
disk where they are known, by content, and computed where not.
"""

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vembed.config.schema import DataSection, ModelSection, ObjectiveSection, Teacher
from vembed.config.terms import listed_teachers, needed_teachers, source_terms
from vembed.data.batching.rank_batch import RankBatch, to_device
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item, Kind, input_digest
from vembed.data.features import ANSWER_END, ANSWER_PROMPT, Featuriser, Pair
from vembed.data.row_store import KEY_BYTES, RowStore, lasting_identity
from vembed.errors import UserError
from vembed.files import cache_folder, short_hash
from vembed.inference.encoding import encode_features, from_all_ranks, unit_rows
from vembed.inference.reranker import Reranker
from vembed.losses.batch import LossBatch, TeacherScores, TeacherVectors
from vembed.losses.similarity import arithmetic_dtype
from vembed.models.building import build_model
from vembed.models.families.description import describe
from vembed.models.families.model_files import kind_of, model_folder
from vembed.models.precision import bf16_weights_of
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.parallel.sharding import shard_for_use
from vembed.progress import ProgressReport
from vembed.training.checkpoint.folders import of_model

log = logging.getLogger("vembed")

QUESTIONS_PER_WRITE = 2048
"""Questions per rank between two writes."""


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
        self.by_name: dict[str, VectorTeacher | PairTeacher] = {}
        needs_vectors = set()
        self._sources: dict[str | None, set[int]] = defaultdict(set)
        """By name of a teacher: the sources of the data whose losses it serves."""
        terms = []
        for source, of_source in enumerate(
            source_terms(objective, data, model.model_name)
        ):
            terms += of_source
            for term in of_source:
                self._sources[term.teacher].add(source)
                self._sources[term.guide].add(source)
                needs_vectors.add(term.guide)
                if term.loss.needs_vectors():
                    needs_vectors.add(term.teacher)
        listed = [teacher.label for teacher in listed_teachers(objective)]
        for teacher in needed_teachers(objective, data, model):
            name = teacher.label
            options = ModelSection(
                model_name=teacher.model,
                trust_remote_code=model.trust_remote_code,
                max_length=teacher.max_length,
                query_prompt=teacher.query_prompt,
                document_prompt=teacher.document_prompt,
            )
            if name == model.model_name and name not in listed:
                # The start model is read as the run reads it, in the dtype of its file.
                options = model.model_copy(update={"torch_dtype": "auto"})
            files = model_folder(
                teacher.model, options.model_revision, option="teacher"
            )
            kind = teacher_kind(teacher, files, needs_vectors=name in needs_vectors)
            form: type[VectorTeacher | PairTeacher] = PairTeacher
            if kind == "embedder":
                form = VectorTeacher
                for term in terms:
                    lowest, highest = term.loss.score_limits or (-1.0, 1.0)
                    if term.teacher == name and lowest > -1.0:
                        raise UserError(
                            f"teacher {name} is an embedding model, whose scores lie from -1 to 1, and loss: "
                            f"{term.loss.name} takes scores from {lowest:g} to {highest:g}: name a reranker as teacher, or "
                            "use loss: mse or kl"
                        )
            elif name in needs_vectors:
                raise UserError(
                    f"teacher {name} is a reranker, which scores listed pairs alone, and the losses need "
                    "its vectors: use an embedding model for guide, embedding, relational and kl over the batch"
                )
            self.by_name[name] = form(
                teacher,
                kind,
                files,
                session,
                folder or cache_folder(),
                options,
            )

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the teachers' vectors."""
        return {name: teacher.dim for name, teacher in self.by_name.items()}

    def prepare(self, examples: ExampleStore) -> None:
        """Compute all answers for the training data that are not on disk. Collective; every rank passes all examples."""
        for name, teacher in self.by_name.items():
            questions: dict[bytes, Any] = {}
            for number, example in enumerate(examples):
                if examples.source_of(number) not in self._sources[name]:
                    continue
                for key, question in teacher.questions(example):
                    questions.setdefault(key, question)
            teacher.complete(questions)

    def attach(
        self,
        loss_batch: LossBatch,
        rank_batch: RankBatch,
        by_row: list[int],
        by_negative: list[int],
    ) -> LossBatch:
        """Return the loss batch with everything that its teachers say about it. Collective, if there are teachers.

        `by_row`, `by_negative`: numbers of rows and hard negatives of each rank.
        """
        teachers = {}
        dtype = arithmetic_dtype(loss_batch.embeddings)
        for name, teacher in self.by_name.items():
            # Sources of different losses have batches of their own.
            if rank_batch.source_index in self._sources[name]:
                teachers[name] = teacher.teaching(
                    rank_batch, by_row, by_negative, dtype
                )
        return replace(loss_batch, teachers=teachers)


def teacher_kind(
    teacher: Teacher,
    files: Path,
    *,
    needs_vectors: bool,
) -> str:
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


IDENTITY_VERSION = 4
"""Version of the identities. Increase it when a teacher gives other answers for the same files and settings."""
LARGEST_SHARE = 0.8
"""Share of a process's memory that a copy of a teacher may take."""


class CachedTeacher(ABC):
    """One teacher, and its answers by key. The first process of each machine writes what all have computed before the
    first step; what is asked for later is written by the rank that computes it."""

    dim = 1
    """Numbers of an answer."""

    def __init__(
        self,
        teacher: Teacher,
        kind: str,
        folder: Path,
        session: Session,
        cache: Path,
        options: ModelSection,
    ) -> None:
        """`folder`: of the model's files. `options`: how the model is read."""
        self.teacher = teacher
        self.kind = kind
        self.folder = folder
        self.session = session
        self.options = options
        self._loaded: Any = None
        """The model, once something is computed."""
        settings = [
            IDENTITY_VERSION,
            of_model(str(folder)),
            kind,
            *self.answer_settings(),
        ]
        if kind == "yes_no":
            settings += [teacher.instruction, ANSWER_PROMPT, ANSWER_END]
        identity = short_hash(*settings)
        self.store = RowStore(cache / "teachers", identity, "teacher", ".answers")

    def answer_settings(self) -> list[Any]:
        """Return the precision in which it computes, the prompts and the maximum length, which change its answers."""
        teacher = self.teacher
        return [
            "float32",
            teacher.query_prompt,
            teacher.document_prompt,
            teacher.max_length,
        ]

    @abstractmethod
    def compute(self, questions: Sequence[Any]) -> np.ndarray:
        """Return answers [n, dim] to this rank's questions. Collective: ranks may ask different things, and at least one
        rank asks something."""

    def answers(
        self, groups: Iterable[Iterable[tuple[bytes, Any]]]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return [n, dim] float32, and for each group of questions with their keys the row of each. Equal questions have
        one row. Collective: ranks may ask different things, and compute together what is missing."""
        questions: dict[bytes, Any] = {}
        places: dict[bytes, int] = {}
        rows_of_groups = []
        for group in groups:
            rows_of_group = []
            for key, question in group:
                questions.setdefault(key, question)
                rows_of_group.append(places.setdefault(key, len(places)))
            rows_of_groups.append(np.array(rows_of_group, np.int64))
        keys = list(questions)
        stored = self.store.find_rows(keys)
        missing = [place for place in range(len(keys)) if place not in stored]
        rows = np.zeros((len(keys), self.dim), np.float32)
        # `compute` is collective: all ranks call it as soon as one of them misses an answer, the others with no
        # question.
        if collectives.max_ints([len(missing)])[0]:
            missing_keys = [keys[place] for place in missing]
            computed = self.compute([questions[key] for key in missing_keys])
            self.store.add_rows(missing_keys, computed)
            stored |= zip(missing, computed, strict=True)
        for place, row in stored.items():
            rows[place] = row
        return rows, rows_of_groups

    def complete(self, questions: Mapping[bytes, Any]) -> None:
        """Compute what is missing of these answers. Collective: all ranks pass the same questions."""
        session = self.session
        keys = list(questions)
        # Rank 0 decides for all: the files may change while the ranks look at them.
        found_missing = self.store.missing(keys) if session.is_main else []
        missing = collectives.broadcast_object(found_missing)
        log.info(
            f"teacher {self.teacher.label}: {len(missing):,d} of {len(keys):,d} answers are missing"
        )
        chunk_size = QUESTIONS_PER_WRITE * session.world_size
        with ProgressReport(
            f"teacher {self.teacher.label}", active=session.is_main, log=log.info
        ) as progress:
            for start in range(0, len(missing), chunk_size):
                chunk = [keys[place] for place in missing[start : start + chunk_size]]
                # Dealt to the ranks in turn.
                share = chunk[session.rank :: session.world_size]
                computed = self.compute([questions[key] for key in share])
                rows = from_all_ranks(computed, len(chunk), session)
                # A machine may have a disk of its own, so one process of each machine writes.
                if session.local_rank == 0:
                    self.store.add_rows(chunk, rows)
                progress(start + len(chunk), len(missing))
        # Its weights are read again if something is missing later.
        self._loaded = None

    def _gather(self, values: np.ndarray, counts: list[int]) -> Tensor:
        column = to_device(torch.from_numpy(values), self.session.device)
        return collectives.all_gather_parts(column, counts)


class VectorTeacher(CachedTeacher):
    """An embedding model as teacher. Its weights are read when the first vector is computed."""

    def __init__(self, *args: Any) -> None:
        self.description = describe(args[-1])
        self.dim = self.description.output_dim
        super().__init__(*args)

    def answer_settings(self) -> list[Any]:
        """Return those of the session and the description, which may decide the prompts by the name of the folder."""
        described = self.description
        return [
            self.session.mixed_precision,
            described.query_prompt,
            described.document_prompt,
            described.max_length,
            described.pooling,
            described.bidirectional_attention,
            self.options.model_arguments,
        ]

    def compute(self, questions: Sequence[tuple[Item, Kind]]) -> np.ndarray:
        """Return vectors [n, dim] of length 1 of this rank's inputs, each in its role. Collective."""
        if self._loaded is None:
            log.info("teacher %s: %s", self.teacher.label, self.description.summary())
            self._loaded = self._load()
        model, featuriser = self._loaded
        vectors = encode_features(
            model,
            featuriser,
            featuriser.features(questions),
            self.session.device,
            world_size=self.session.world_size,
        )
        return unit_rows(vectors[:, : self.dim])

    def questions(self, example: Example) -> Iterator[tuple[bytes, tuple[Item, Kind]]]:
        """Yield the key of each input of an example, and the input."""
        yield self.question(example.query, "query")
        for document in example.documents:
            yield self.question(document, "document")

    def question(self, item: Item, kind: Kind) -> tuple[bytes, tuple[Item, Kind]]:
        """Return the key of an input in a role, and the question. What the config gives the teacher itself comes
        before the prompt and length that the data give."""
        role_prompt = self.teacher.document_prompt
        if kind == "query":
            role_prompt = self.teacher.query_prompt
        if role_prompt is not None:
            item = replace(item, prompt=None)
        if self.teacher.max_length is not None:
            item = replace(item, max_length=None)
        described = self.description
        roles_differ = described.query_prompt != described.document_prompt
        return item_key(item, kind if roles_differ else None), (item, kind)

    def teaching(
        self,
        rank_batch: RankBatch,
        by_row: list[int],
        by_negative: list[int],
        dtype: torch.dtype,
    ) -> TeacherVectors:
        """Return what it says about a global batch. An input has one vector for each of its roles, if the teacher's differ.
        `dtype`: of the vectors. Collective: see `Teachers.attach`."""
        row_items = rank_batch.row_items
        negative_items = rank_batch.negative_items
        rows, (query, positive, negative) = self.answers(
            [
                [self.question(query, "query") for query, _ in row_items],
                [self.question(item, "document") for _, item in row_items],
                [self.question(item, "document") for _, item in negative_items],
            ]
        )
        counts = collectives.all_gather_int(len(rows))
        # Gathered vectors are in rank order, so this rank's begin behind those of lower ranks.
        offset = sum(counts[: self.session.rank])
        return TeacherVectors(
            self._gather(rows, counts).to(dtype),
            self._gather(query + offset, by_row),
            self._gather(positive + offset, by_row),
            self._gather(negative + offset, by_negative),
        )

    def _load(self) -> tuple[nn.Module, Featuriser]:
        """Return the model, as a copy or as this rank's shard, and what prepares its inputs."""
        session = self.session
        is_shard = is_sharded(self.teacher, self.folder, session)
        # Of shards rank 0 reads the weights into host memory, the others build on the meta device and get theirs from it.
        loaded = build_model(
            self.description,
            self.options,
            device="cpu" if is_shard else session.device,
            computes_on=session.device,
            meta=is_shard and not session.is_main,
            for_inference=True,
        )
        loaded.eval().requires_grad_(False)
        model: nn.Module = loaded
        if is_shard:
            layers = self.description.layer_classes
            model = shard_for_use(loaded, layers, session.device, only_rank0_reads=True)
        elif session.device.type == "cpu" and session.placement.copies_weights:
            # On CPUs as the trained model, on a GPU in the dtype of the teacher's weights.
            loaded.compute_in_bf16()
            bf16_weights_of(loaded).num_holders += 1
        return model, Featuriser(self.description)


class PairTeacher(CachedTeacher):
    """A reranker as teacher. Its weights are read when the first score is computed."""

    _world_size = 1
    """Number of ranks that compute together: those of a sharded teacher."""

    def compute(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return scores [n, 1] of this rank's pairs, before `scale`. Collective, where the teacher is sharded."""
        self._loaded = self._loaded or self._load()
        # With several ranks one without pairs goes on: the forward passes of the others gather its shards.
        if not pairs and self._world_size == 1:
            return np.empty((0, self.dim), np.float32)
        features = self._loaded.featuriser.features(pairs)
        scores: np.ndarray = self._loaded.scores_of(features, self._world_size)
        return scores

    def questions(self, example: Example) -> Iterator[tuple[bytes, Pair]]:
        """Yield the key of each pair of the query and a document, and the pair."""
        for document in example.documents:
            yield pair_key(example.query, document), (example.query, document)

    def teaching(
        self,
        rank_batch: RankBatch,
        by_row: list[int],
        by_negative: list[int],
        dtype: torch.dtype,
    ) -> TeacherScores:
        """Return what it says about a global batch, in float64, times the teacher's `scale`. Collective: see `Teachers.attach`."""
        del dtype
        answers, (positive, negative) = self.answers(
            [(pair_key(*pair), pair) for pair in pairs]
            for pairs in (rank_batch.row_items, rank_batch.negative_items)
        )
        scores = answers[:, 0].astype(np.float64) * self.teacher.scale
        return TeacherScores(
            self._gather(scores[positive], by_row),
            self._gather(scores[negative], by_negative),
        )

    def _load(self) -> Reranker:
        teacher = self.teacher
        device = self.session.device
        is_shard = is_sharded(teacher, self.folder, self.session)
        reranker = Reranker(
            self.folder,
            role=f"teacher {teacher.label}",
            device=device,
            head="answer" if self.kind == "yes_no" else "auto",
            instruction=teacher.instruction,
            max_length=teacher.max_length,
            query_prompt=teacher.query_prompt,
            document_prompt=teacher.document_prompt,
            trust_remote_code=self.options.trust_remote_code,
            holds="cpu" if is_shard else device,
        )
        if is_shard:
            # Every rank has read the file: weights that are tied would come apart on their way from rank 0.
            layers = reranker.description.layer_classes
            reranker.model = shard_for_use(
                reranker.model, layers, device, only_rank0_reads=False
            )
            self._world_size = self.session.world_size
        return reranker


def is_sharded(
    teacher: Teacher,
    folder: Path,
    session: Session,
) -> bool:
    """Return whether each process holds a shard of the teacher, and log why. Collective."""
    if session.world_size == 1:
        return False
    if teacher.sharded != "auto":
        return teacher.sharded
    if session.fsdp is not None:
        return True
    # Rank 0 decides for all: the caches of several machines may hold different files.
    files_size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    size = collectives.broadcast_object(files_size)
    if size <= LARGEST_SHARE * session.memory:
        return False
    log.info("teacher %s: sharded over the processes (by its size)", teacher.label)
    return True


def item_key(item: Item, kind: Kind | None) -> bytes:
    """Return the key of an input in a role; `None` if the role makes no difference to the teacher."""
    settings = json.dumps([kind, item.prompt, item.max_length, item.text is None])
    text = (item.text or "").encode("utf-8", "surrogatepass")
    return input_digest(
        settings,
        np.frombuffer(text, np.uint8),
        item.images,
        num_bytes=KEY_BYTES,
        identity_of=lasting_identity,
    )


def pair_key(query: Item, document: Item) -> bytes:
    """Return the key of a (query, document) pair. Rerankers know no prompts."""
    keys = b""
    for item in (query, document):
        keys += item_key(replace(item, prompt=None, max_length=None), None)
    return hashlib.blake2b(keys, digest_size=KEY_BYTES).digest()
