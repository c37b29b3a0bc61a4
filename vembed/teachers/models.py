"""Teachers by kind: VectorTeacher gives one vector per input, PairTeacher scores pairs of a query and a document."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from vembed.config.schema import ModelSection, Teacher
from vembed.data.examples import Example, Item, Kind
from vembed.data.features import ANSWER_END, ANSWER_PROMPT, Featuriser, Pair
from vembed.data.row_store import KEY_BYTES, lasting_identity
from vembed.files import add_content
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import encode_features
from vembed.inference.reranker import Reranker
from vembed.models.building import load_embedder
from vembed.models.families.description import describe
from vembed.models.families.model_files import model_folder
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.parallel.sharding import shard_for_use

log = logging.getLogger("vembed")

FORMAT = 2
"""Version of the identities. Increase it when a teacher gives other answers for the same files and settings."""
SAMPLE_BYTES = 2**20
"""Bytes that are read at the beginning, middle and end of a large file."""
LARGEST_SHARE = 0.8
"""Share of a process's memory that a copy of a teacher may take."""
GB = 10**9


class VectorTeacher:
    """An embedding model as teacher. Its weights are read when the first vector is computed."""

    def __init__(
        self, teacher: Teacher, session: Session, *, trust_remote_code: bool
    ) -> None:
        self.teacher = teacher
        self.session = session
        self.trust_remote_code = trust_remote_code
        self.description = describe(
            ModelSection(
                model_name=teacher.model,
                trust_remote_code=trust_remote_code,
                max_length=teacher.max_length,
                query_prompt=teacher.query_prompt,
                document_prompt=teacher.document_prompt,
            )
        )
        self.dim = self.description.embedding_dim
        self._loaded: tuple[nn.Module, Featuriser] | None = None

    def compute(self, questions: Sequence[tuple[Item, Kind]]) -> np.ndarray:
        """Return vectors [n, dim] of length 1 of this rank's inputs, each in its role. Collective: ranks may ask
        different things, and at least one rank asks something."""
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
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: np.ndarray = vectors / np.maximum(norms, 1e-12)
        return unit

    def questions(self, example: Example) -> Iterator[tuple[bytes, tuple[Item, Kind]]]:
        """Yield the key and the question of each input of an example."""
        yield self.question(example.query, "query")
        for document in (*example.positives, *example.negatives):
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

    def release(self) -> None:
        """Give up the weights. They are read again if something is missing later."""
        self._loaded = None

    def _load(self) -> tuple[nn.Module, Featuriser]:
        """Return the model, as a copy or as this rank's shard, and what prepares its inputs."""
        session = self.session
        teacher = self.teacher
        with_run = session.fsdp is not None and teacher.sharded is not False
        model: nn.Module
        if not with_run and is_sharded(
            teacher, model_folder(teacher.model, option="teacher"), session
        ):
            # Rank 0 reads the weights into host memory, the others build on the meta device and get their shards
            # from it.
            loaded = load_embedder(
                teacher.model,
                device="cpu",
                computes_on=session.device,
                meta=not session.is_main,
                trust_remote_code=self.trust_remote_code,
            )
            description = loaded.description
            model = shard_for_use(
                loaded, description.layer_classes, session.device, only_rank0_reads=True
            )
        else:
            # On CPUs as the trained model, on a GPU in the dtype of the teacher's weights.
            on_cpu = session.device.type == "cpu"
            embedder = Embedder(
                teacher.model,
                device=session.device,
                mixed_precision="bf16"
                if on_cpu and session.placement.copies_weights
                else "no",
                # Without FSDP in the run each rank has a whole copy. An Embedder without a session makes no collectives.
                session=session if with_run or session.fsdp is None else None,
                trust_remote_code=self.trust_remote_code,
            )
            model = embedder.model
            description = embedder.description
        description = replace(
            description,
            query_prompt=self.description.query_prompt,
            document_prompt=self.description.document_prompt,
            max_length=self.description.max_length,
        )
        return model, Featuriser(description)


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
            reranker = self._load()
        return reranker.score(pairs, self._world_size)

    def questions(self, example: Example) -> Iterator[tuple[bytes, Pair]]:
        """Yield the key and the pair of each document of an example."""
        for document in (*example.positives, *example.negatives):
            yield self.question(example.query, document)

    def question(self, query: Item, document: Item) -> tuple[bytes, Pair]:
        """Return the key of a pair, and the pair."""
        return pair_key(query, document), (query, document)

    def release(self) -> None:
        """Give up the weights. They are read again if something is missing later."""
        self._reranker = None

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
            trust_remote_code=self.trust_remote_code,
            holds="cpu" if is_shard else device,
        )
        if is_shard:
            # Every rank has read the file: weights that are tied would come apart on their way from rank 0.
            layers = reranker.description.layer_classes
            reranker.model = shard_for_use(
                reranker.model, layers, device, only_rank0_reads=False
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


def is_sharded(teacher: Teacher, folder: Path, session: Session) -> bool:
    """Return whether each process holds a shard of the teacher, and log why. Collective."""
    if session.world_size == 1:
        return False
    if teacher.sharded != "auto":
        return teacher.sharded
    # Rank 0 decides for all: the caches of several machines may hold different files.
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    size = collectives.broadcast_object(size)
    memory = session.memory
    if size <= LARGEST_SHARE * memory:
        return False
    log.info(
        "teacher %s: sharded over %d processes (its weights take %.1f GB, and a process has %.1f GB)",
        teacher.label,
        session.world_size,
        size / GB,
        memory / GB,
    )
    return True


def teacher_identity(folder: Path, teacher: Teacher, kind: str, arithmetic: str) -> str:
    """Return a hash of a teacher's files and settings; of files above 3 MiB, of the size and three samples of 1 MiB."""
    digest = hashlib.blake2b(digest_size=16)
    settings = [
        FORMAT,
        kind,
        arithmetic,
        teacher.query_prompt,
        teacher.document_prompt,
        teacher.max_length,
    ]
    if kind == "yes_no":
        settings += [teacher.instruction, ANSWER_PROMPT, ANSWER_END]
    digest.update(json.dumps(settings).encode())
    for path in sorted(folder.rglob("*")):
        if (
            path.suffix in (".json", ".safetensors", ".txt", ".model", ".jinja", ".bin")
            and path.is_file()
        ):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}".encode())
            add_content(
                digest,
                path,
                pieces=3,
                piece_bytes=SAMPLE_BYTES,
                whole_bytes=3 * SAMPLE_BYTES,
            )
    return digest.hexdigest()


def item_key(item: Item, kind: Kind | None) -> bytes:
    """Return the key of an input in a role; `None` if the role makes no difference to the teacher."""
    digest = _content(item, kind)
    if (
        item.prompt is not None or item.max_length is not None
    ):  # its own, in place of the teacher's
        digest.update(b"\0p" + json.dumps([item.prompt, item.max_length]).encode())
    return digest.digest()


def pair_key(query: Item, document: Item) -> bytes:
    """Return the key of a (query, document) pair. Rerankers know no prompts."""
    contents = (
        _content(query, "query").digest() + _content(document, "document").digest()
    )
    return hashlib.blake2b(contents, digest_size=KEY_BYTES).digest()


def _content(item: Item, kind: Kind | None) -> hashlib.blake2b:
    digest = hashlib.blake2b((kind or "").encode(), digest_size=KEY_BYTES)
    if item.text is not None:
        # The letters tell a text from an image; lengths keep (a, bc) and (ab, c) apart.
        digest.update(b"t" + item.text.encode("utf-8", "surrogatepass"))
    for image in item.images:
        identity = lasting_identity(image)
        digest.update(b"\0i" + len(identity).to_bytes(8, "little") + identity)
    return digest
