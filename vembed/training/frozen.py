"""What frozen towers give for the inputs of a step: computed once per step, or once per run and kept on disk.

`FrozenTowers` is for lanes that nothing but a head or a projection follows. `FrozenImages` is for a vision-language
model, whose frozen image tower stands before a language model that is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vembed.config.schema import TrainConfig
from vembed.data.cache import cache_folder
from vembed.data.feature_store import FeatureStore, size_of_all
from vembed.data.features import Features
from vembed.data.feeding import Call, Feeder, Inputs, Part
from vembed.distributed import collectives
from vembed.distributed.session import Session
from vembed.errors import UserError
from vembed.evaluation.encoding import Between, plan_in_step
from vembed.models.description import Lane
from vembed.models.embedder import FEATURES, EmbeddingModel
from vembed.models.identity import tower_identity
from vembed.models.lanes import IMAGE_FEATURES

log = logging.getLogger("vembed")

Stores = Mapping[Lane, FeatureStore]
IMAGES_SHARE = 0.05
"""Share of a process's memory that images may take between the phases of a step."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a store holds for one lane's inputs of a share, and which of them it lacks, by their places in the share."""

    places: list[int]
    rows: list[np.ndarray]
    missing: list[int]


def open_stores(config: TrainConfig, session: Session, embedder: EmbeddingModel) -> dict[Lane, FeatureStore]:
    """Stores of all frozen lanes, with `cache_frozen_features: true`; collective. To be called while rank 0 has the
    whole model: their names depend on the weights."""
    if not config.cache_frozen_features:
        return {}
    lanes = embedder.frozen_lanes()
    if not lanes:
        family = embedder.description.family
        hint = (
            "a vision-language model's images pass its language model too, so there is nothing to keep; set it to false"
            if family == "vision_language"
            else "freeze one (freeze: [vision] or [text], or lora_towers), or set it to false"
        )
        raise UserError(
            f"cache_frozen_features: true needs a tower of which nothing is trained, and {config.model_name} "
            f"({family}) has none in this run: {hint}"
        )
    arithmetic = str(session.mixed_precision)
    identities = {}
    if session.is_main:
        identities = {lane: tower_identity(embedder.description, embedder.backbone, lane, arithmetic) for lane in lanes}
    identities = collectives.broadcast_json(identities)
    folder = cache_folder() / "features"
    stores = {lane: FeatureStore(folder, identities[lane]) for lane in lanes}
    for lane, store in stores.items():
        log.info("frozen features, %s: %s kept in %s", lane, f"{len(store):,d}", store.folder)
    if session.is_main:
        num_towers, num_bytes = size_of_all(folder)
        log.info(
            "frozen features: %s holds those of %s towers, %.1f MB in all; vembed deletes none, you may at any time",
            folder, f"{num_towers:,d}", num_bytes / 1e6,
        )  # fmt: skip
    return stores


def log_use(stores: Stores) -> None:
    """Say how many features were computed and how many read, by all ranks together; collective."""
    for lane, store in stores.items():
        computed, read = collectives.sum_ints([store.num_added, store.num_read])
        log.info(
            "frozen features, %s: %s computed, %s read from %s (%.1f MB there)",
            lane, f"{computed:,d}", f"{read:,d}", store.folder, store.num_bytes / 1e6,
        )  # fmt: skip


class FrozenTowers:
    """Puts each input of a frozen lane through its tower at most once per step, without dropout and without graphs."""

    def __init__(self, model: nn.Module, lanes: Sequence[Lane], feeder: Feeder, stores: Stores) -> None:
        self.model = model
        self.lanes = tuple(sorted(lanes))  # in the same order on every rank
        self.feeder = feeder
        self.stores = stores
        self._dummies: dict[Lane, Tensor] = {}

    def look_up(self, features: Sequence[Features]) -> dict[Lane, Known]:
        """What need not be computed; each rank for itself."""
        known = {}
        for lane in self.lanes:
            places = [place for place, one in enumerate(features) if one.lane == lane]
            found = self.stores[lane].find([features[place] for place in places]) if lane in self.stores else {}
            known[lane] = Known(
                places=[places[position] for position in found],
                rows=list(found.values()),
                missing=[place for position, place in enumerate(places) if position not in found],
            )
        return known

    def see(
        self, features: Sequence[Features], budget: int, max_rows: int | None, between: Between | None
    ) -> dict[Lane, Tensor]:
        """The same as `features` outside of a step, whose ranks have agreed on nothing yet; collective."""
        known = self.look_up(features)
        missing = {lane: one.missing for lane, one in known.items()}
        plans = plan_in_step(features, missing, budget, max_rows, collectives.world_size())
        return self.features(features, known, plans, between)

    def features(
        self,
        features: Sequence[Features],
        known: Mapping[Lane, Known],
        plans: Mapping[Lane, list[list[int]]],
        between: Between | None = None,
    ) -> dict[Lane, Tensor]:
        """Per frozen lane [len(features), width], with zeros for inputs of other lanes. Collective: `plans` holds as
        many micro-batches of what is missing on every rank; `between` is called after each."""
        dummies = {lane: self._dummy(lane) for lane in self.lanes}
        made: dict[Lane, list[tuple[list[int], Tensor]]] = {lane: [] for lane in self.lanes}
        calls: list[Call] = [[(lane, rows)] for lane in self.lanes for rows in plans.get(lane, [])]
        for call, output in zip(calls, self._towers(calls, features), strict=True):
            ((lane, rows),) = call
            if rows:
                made[lane].append((rows, output))
            if rows and lane in self.stores:
                self.stores[lane].add([features[row] for row in rows], output.cpu().numpy())
            if between is not None:
                between()
        tables = {}
        for lane in self.lanes:
            table = dummies[lane].new_zeros(len(features), dummies[lane].shape[1])
            if known[lane].places:
                table[known[lane].places] = torch.from_numpy(np.stack(known[lane].rows)).to(table)
            for rows, output in made[lane]:
                table[rows] = output
            tables[lane] = table
        return tables

    def inputs(self, part: Part, tables: Mapping[Lane, Tensor]) -> tuple[Lane, dict[str, Tensor]]:
        """A frozen lane's part of a call, as the model takes it."""
        lane, rows = part
        return lane, {FEATURES: tables[lane][rows] if rows else self._dummy(lane)}

    def _dummy(self, lane: Lane) -> Tensor:
        """[1, width], for ranks that have no input of this lane; every rank computes it in its first step."""
        if lane not in self._dummies:
            (self._dummies[lane],) = self._towers([[(lane, [])]], [])
        return self._dummies[lane]

    def _towers(self, calls: Sequence[Call], features: Sequence[Features]) -> Iterator[Tensor]:
        for inputs in self.feeder.feed(calls, features):
            with torch.no_grad():
                (output,) = self.model(inputs, features_only=True)
            yield output


class FrozenImages:
    """Puts images through the image tower once per step, where Gradient Cache would do it in both phases."""

    def __init__(self, model: nn.Module, session: Session, bytes_per_token: int | None) -> None:
        """Collective. `bytes_per_token`: see `EmbeddingModel.bytes_of_frozen_images`."""
        self.model = model
        self.max_tokens = 0
        if bytes_per_token is not None:
            room = int(IMAGES_SHARE * session.memory_of_a_process)
            self.max_tokens = -collectives.max_ints([-(room // bytes_per_token)])[0]
            log.info(
                "frozen image tower: its images pass it once per step where a share has at most %s tokens "
                "(%s bytes each, %d%% of the memory)",
                f"{self.max_tokens:,d}", f"{bytes_per_token:,d}", round(100 * IMAGES_SHARE),
            )  # fmt: skip

    def keeps(self, num_tokens: int) -> bool:
        """Whether a step keeps what the tower gives; the same answer on every rank for the same number."""
        return num_tokens <= self.max_tokens

    def see(self, inputs: Inputs) -> list[Tensor]:
        """What the tower gives for each part of the vision lane in a call."""
        parts = [part for part in inputs if part[0] == "vision"]
        if not parts:
            return []
        with torch.no_grad():
            seen: list[Tensor] = self.model(parts, images_only=True)
        return seen

    def instead(self, inputs: Inputs, seen: Sequence[list[Tensor]], call: int) -> Inputs:
        """The inputs of a call with what the tower gave in place of the pixels; as they are, where nothing is kept."""
        if not seen:
            return inputs
        given = iter(seen[call])
        return [
            (lane, {**_without(tensors, "pixel_values"), IMAGE_FEATURES: next(given)} if lane == "vision" else tensors)
            for lane, tensors in inputs
        ]


def _without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}
