"""VectorTeacher: an embedding model that gives one vector per input, in the role of query or document."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from vembed.config.entries import Teacher
from vembed.config.schema import ModelSection
from vembed.data.examples import Example, Item, Kind
from vembed.data.features import Featuriser
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import encode_features
from vembed.models.embedding_model import load_embedder
from vembed.models.families.description import ModelDescription, describe
from vembed.models.families.model_files import model_folder
from vembed.parallel.session import Session
from vembed.parallel.sharding import shard_for_use
from vembed.teachers.shards import is_sharded
from vembed.teachers.teacher_identity import item_key

log = logging.getLogger("vembed")

Question = tuple[Item, Kind]
"""An input in a role."""


class VectorTeacher:
    """An embedding model as teacher. Its weights are read when the first vector is computed."""

    def __init__(
        self, teacher: Teacher, session: Session, *, trust_remote_code: bool
    ) -> None:
        self.teacher = teacher
        self.session = session
        self.trust_remote_code = trust_remote_code
        described = describe(
            ModelSection(
                model_name=teacher.model,
                trust_remote_code=trust_remote_code,
                max_length=teacher.max_length,
                query_prompt=teacher.query_prompt,
                document_prompt=teacher.document_prompt,
            )
        )
        self.description = described
        self.dim = described.embedding_dim
        self.roles_differ = described.query_prompt != described.document_prompt
        self._model: nn.Module | None = None
        self._featuriser: Featuriser | None = None

    def compute(self, questions: Sequence[Question]) -> np.ndarray:
        """Return vectors [n, dim] of length 1 of this rank's questions. Collective: ranks may ask different things,
        and at least one rank asks something."""
        model, featuriser = self._loaded()
        vectors = encode_features(
            model,
            featuriser,
            featuriser.features(questions),
            self.session.device,
            world_size=self.session.world_size,
        )
        unit: np.ndarray = vectors / np.maximum(
            np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12
        )
        return unit

    def questions(self, example: Example) -> Iterator[tuple[bytes, Question]]:
        """Yield the key and the question of each input of an example."""
        yield self.question(example.query, "query")
        for document in (*example.positives, *example.negatives):
            yield self.question(document, "document")

    def question(self, item: Item, kind: Kind) -> tuple[bytes, Question]:
        """Return the key of an input in a role, and the question. What the config gives the teacher itself comes
        before the prompt and length that the data give."""
        role_prompt = (
            self.teacher.query_prompt
            if kind == "query"
            else self.teacher.document_prompt
        )
        if role_prompt is not None and item.prompt is not None:
            item = replace(item, prompt=None)
        if self.teacher.max_length is not None and item.max_length is not None:
            item = replace(item, max_length=None)
        return item_key(item, kind if self.roles_differ else None), (item, kind)

    def release(self) -> None:
        """Give up the weights; they are read again if something is missing later."""
        self._model = None

    def _loaded(self) -> tuple[nn.Module, Featuriser]:
        if self._model is None or self._featuriser is None:
            log.info("teacher %s: %s", self.teacher.label, self.description.summary())
            self._model, description = self._read()
            described = self.description
            self._featuriser = Featuriser(
                replace(
                    description,
                    query_prompt=described.query_prompt,
                    document_prompt=described.document_prompt,
                    max_length=described.max_length,
                )
            )
        return self._model, self._featuriser

    def _read(self) -> tuple[nn.Module, ModelDescription]:
        """Return the model, as a copy or as this rank's shard, and its description."""
        session = self.session
        with_run = self.session.fsdp is not None and self.teacher.sharded is not False
        if not with_run and is_sharded(
            self.teacher, model_folder(self.teacher.model, option="teacher"), session
        ):
            model = load_embedder(
                # Rank 0 reads the weights into host memory, the others build on the meta device and get their shards
                # from it.
                self.teacher.model,
                device="cpu",
                computes_on=session.device,
                meta=not session.is_main,
                trust_remote_code=self.trust_remote_code,
            )
            described = model.description
            return shard_for_use(
                model, described.layer_classes, session.device, one_reads=True
            ), described
        embedder = Embedder(
            self.teacher.model,
            device=session.device,
            # On CPUs as the trained model; on a GPU in the dtype of the teacher's weights.
            mixed_precision="bf16"
            if session.device.type == "cpu" and session.placement.copies_weights
            else "no",
            # Without FSDP in the run each rank has a whole copy; an Embedder without a session makes no collectives.
            session=session if with_run or session.fsdp is None else None,
            trust_remote_code=self.trust_remote_code,
        )
        return embedder.model, embedder.description
