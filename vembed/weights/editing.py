"""Editor: takes a direction out of a model in memory, whole or in shards, measures what that does, and undoes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vembed.data.examples import Item, Kind
from vembed.evaluation.dataset import EvalData
from vembed.evaluation.scores import evaluate
from vembed.inference.embedder import Embedder
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.heads import Dense, Head
from vembed.parallel import collectives
from vembed.parallel.parameters import (
    copy_local_shards,
    edit_weights,
    full_state_dict,
    restore_local_shards,
)
from vembed.saving.card import Card
from vembed.saving.files import save_model
from vembed.weights.directions import (
    Direction,
    directions,
    erasure,
    linear_probe,
    projection,
)
from vembed.weights.residual_writers import Writer, writers_of

log = logging.getLogger("vembed")

Where = Literal["layers", "embedding", "both"]
ACROSS_K = 10
ONE_BY_ONE = 1
"""Texts at a time where directions are estimated: a text's numbers then depend on no other text, so that any number of
ranks finds the same bits."""


@dataclass(frozen=True)
class EditPlan:
    """Specification of an edit: direction, places and strength."""

    where: Where = "layers"
    """layers: out of the weights that write to the residual stream; embedding: by a linear layer behind the model."""
    direction: Direction = "mean_difference"
    components: int = 1
    """principal: how many directions."""
    strength: float = 1.0
    layers: tuple[int, ...] | None = None
    """Of which layers' weights; None: of all."""


@dataclass(frozen=True)
class TextSets:
    """Two sets of texts that differ in what is to be removed. Every other text is held out for the probe."""

    first: tuple[str, ...]
    second: tuple[str, ...]

    @property
    def is_paired(self) -> bool:
        """True if line i of one set belongs to line i of the other."""
        return len(self.first) == len(self.second)


class _Mapped(nn.Module):
    """A model with a linear map behind it."""

    def __init__(
        self,
        model: nn.Module,
        matrix: np.ndarray,
        offset: np.ndarray,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("matrix", torch.from_numpy(matrix).float().to(device))
        self.register_buffer("offset", torch.from_numpy(offset).float().to(device))

    def forward(self, parts: list[tuple[str, dict[str, Tensor]]]) -> list[Tensor]:
        """Return the embeddings of the parts, mapped."""
        matrix, offset = self.get_buffer("matrix"), self.get_buffer("offset")
        return [embeddings @ matrix.T + offset for embeddings in self.model(parts)]


class Editor:
    """A model, two sets of texts, and the data to score it on. Every method is collective where there are several
    ranks, and gives all of them the same."""

    def __init__(
        self,
        embedder: Embedder,
        sets: TextSets,
        kind: Kind,
        data: EvalData | None = None,
        *,
        keeps_original: bool,
    ) -> None:
        """`keeps_original`: so that edits can be undone, at the cost of a second copy of this rank's weights."""
        self.embedder = embedder
        self.sets = sets
        self.kind: Kind = kind
        self.data = data
        self._model = embedder.model
        self._map: tuple[np.ndarray, np.ndarray] | None = None
        self._original = copy_local_shards(embedder.model) if keeps_original else None
        self._states: np.ndarray | None = None

    # ---- what is measured ------------------------------------------------------------------------------------------

    def _vectors(
        self, *, batch_size: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of both sets."""
        first, second = (
            self.embedder.encode(
                [Item(text=one) for one in texts],
                self.kind,
                batch_size=batch_size,
                normalize=False,
            )
            for texts in (self.sets.first, self.sets.second)
        )
        return first, second

    def scores(self) -> dict[str, float]:
        """Return `probe` (what a linear probe finds in held-out texts), `across` (nDCG@10 from each text of the first
        set to its counterpart in the second, where they are paired), and the scores on the evaluation data."""
        first, second = self._vectors()
        if self.embedder.description.normalize:
            first, second = (_unit(one) for one in (first, second))
        # Even texts have estimated the direction (`apply`), odd ones test: the probe is fitted on the former as well.
        found = {
            "probe": linear_probe(
                (first[0::2], second[0::2]), (first[1::2], second[1::2])
            )
        }
        if self.sets.is_paired:
            found["across"] = _across(_unit(first[1::2]), _unit(second[1::2]))
        if self.data is not None:
            found |= evaluate(
                self.embedder, self.data, session=self.embedder.session, dims=[]
            )
        return found

    @property
    def deepest(self) -> int:
        """The number of the last layer."""
        return max(one.layer for one in self._writers())

    @property
    def metric(self) -> str | None:
        """The key of the main score; None without any."""
        if self.data is not None:
            return self.data.metric
        return "across" if self.sets.is_paired else None

    # ---- edits -----------------------------------------------------------------------------------------------------

    def apply(self, plan: EditPlan) -> None:
        """Edit the model as it is now."""
        if plan.where in ("layers", "both"):
            self._edit_layers(plan)
        if plan.where in ("embedding", "both"):
            # where: both estimates the embedding's direction behind the layers as they are edited now.
            first, second = (one[0::2] for one in self._vectors(batch_size=ONE_BY_ONE))
            if plan.direction == "erase":
                self._map = erasure(first, second, plan.strength)
            else:
                self._map = projection(
                    directions(first, second, plan.direction, plan.components),
                    plan.strength,
                )
            self.embedder.model = _Mapped(self._model, *self._map, self.embedder.device)

    def undo(self) -> None:
        """Bring the model back to what it was."""
        assert self._original is not None
        restore_local_shards(self._model, self._original)
        self.embedder.model, self._map = self._model, None

    def save(self, target: Path) -> Path:
        """Write the model as it is now."""
        weights = full_state_dict(self._model)
        if collectives.rank() == 0:
            description, head = self.embedder.description, self.embedder.head
            if self._map is not None:
                matrix, offset = self._map
                added = Dense(len(offset), len(offset), bias=True)
                head = Head(
                    [*(one for one in head or () if isinstance(one, Dense)), added]
                )
                # The map becomes the last Dense module of the saved model, in front of its normalisation.
                place = f"head.{len(head) - 1}.linear"
                weights[f"{place}.weight"] = torch.from_numpy(matrix).float()
                weights[f"{place}.bias"] = torch.from_numpy(offset).float()
            model = EmbeddingModel(
                description,
                self.embedder.backbone,
                head,
                pooling=self.embedder.pooling,
            )
            save_model(target, model, weights, card=Card())
        collectives.barrier()
        return target

    def _edit_layers(self, plan: EditPlan) -> None:
        by_layer = self._directions(plan)
        edits: dict[str, Callable[[Tensor], Tensor]] = {}
        for writer in self._writers():
            if plan.layers is not None and writer.layer not in plan.layers:
                continue
            vectors = torch.from_numpy(by_layer[writer.layer])
            edits[f"{writer.name}.weight"] = _without(
                vectors, plan.strength, by_rows=writer.by_rows
            )
            if writer.has_bias:
                edits[f"{writer.name}.bias"] = _without(
                    vectors, plan.strength, by_rows=True
                )
        edit_weights(self._model, edits)
        log.info("edited %d tensors of the residual stream's writers", len(edits))

    def _writers(self) -> list[Writer]:
        return writers_of(
            self._model, self.embedder.backbone, self.embedder.description
        )

    def _directions(self, plan: EditPlan) -> list[np.ndarray]:
        """Return [components, width] for each layer, from the model before any edit."""
        if self._states is None:
            texts = [*self.sets.first[0::2], *self.sets.second[0::2]]
            self._states = self.embedder.hidden_states(
                texts, "all", self.kind, batch_size=ONE_BY_ONE
            )
        count = len(self.sets.first[0::2])
        return [
            directions(
                self._states[:count, layer],
                self._states[count:, layer],
                plan.direction,
                plan.components,
            )
            for layer in range(self._states.shape[1])
        ]


def _without(
    vectors_CD: Tensor, strength: float, *, by_rows: bool
) -> Callable[[Tensor], Tensor]:
    """Return W -> W - strength * V'VW, or W - strength * WV'V by rows; computed in float64, so that every strategy
    stores the same bits."""

    def edit(weight: Tensor) -> Tensor:
        wide, vectors = weight.double(), vectors_CD.to(weight.device)
        part = (wide @ vectors.T) @ vectors if by_rows else vectors.T @ (vectors @ wide)
        return (wide - strength * part).to(weight.dtype)

    return edit


def _unit(vectors_ND: np.ndarray) -> np.ndarray:
    found: np.ndarray = vectors_ND / np.maximum(
        np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12
    )
    return found


def _across(first_ND: np.ndarray, second_ND: np.ndarray) -> float:
    """Return nDCG@10 of finding row i of the second set by row i of the first."""
    similarities = first_ND @ second_ND.T
    own = np.diag(similarities)
    # Pessimistic: candidates that tie with the right one count as ranked before it, so that equal vectors score low.
    rank = (similarities >= own[:, None]).sum(axis=1) - 1  # without itself
    return float(np.where(rank < ACROSS_K, 1 / np.log2(rank + 2), 0.0).mean())
