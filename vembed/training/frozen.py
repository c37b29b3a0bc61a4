"""Pooled outputs of frozen towers: computed once per step, or once per run and cached on disk.

`InputBuilder` does so for modalities followed only by a head or a projection. In a vision-language model a frozen image
tower precedes a trained language model: `InputSource` keeps its hidden states between the two phases of Gradient Cache, so
that images pass it once per step.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from vembed.data.batching.rank_batch import (
    Feeder,
    MicroBatch,
    ModalityIndices,
    ModelInputs,
    index_tensor,
    indices_by_modality,
    to_device,
)
from vembed.data.features import Features
from vembed.data.row_store import RowStore, tower_keys
from vembed.errors import UserError
from vembed.files import cache_folder
from vembed.inference.encoding import InterruptCheck, split_in_step
from vembed.models.embedding_model import (
    IMAGE_STATES,
    POOLED,
    TOWERS_OF_MODALITY,
    EmbeddingModel,
    tower_module,
)
from vembed.models.families.description import ModelDescription
from vembed.models.families.family import Modality
from vembed.models.precision import RoundedLinear
from vembed.models.processors import load_image_processor
from vembed.parallel import collectives
from vembed.parallel.session import Session

log = logging.getLogger("vembed")

Stores = Mapping[Modality, RowStore]
CachedRows = dict[int, np.ndarray]
"""Position of an input in its rank batch -> what its frozen tower gave, pooled, of one modality."""
IMAGES_SHARE = 0.05
"""Fraction of a process's memory that hidden states of images may take between the phases of a step."""


def open_stores(embedding_model: EmbeddingModel, session: Session) -> Stores:
    """Open the stores of all frozen modalities, for `cache_frozen_features: true`. Collective.

    Call it while rank 0 holds the whole model: the stores' names depend on the weights.
    """
    description = embedding_model.description
    modalities = embedding_model.frozen_modalities()
    if not modalities:
        raise UserError(
            f"cache_frozen_features: true needs a tower without trained parameters, and {description.name} "
            f"({description.family_traits.name}) has none in this run: freeze one of two towers (freeze: [vision] or [text]), or set "
            "it to false"
        )
    identities = {}
    if session.is_main:
        for modality in modalities:
            identities[modality] = tower_identity(
                description,
                embedding_model.backbone,
                modality,
                session.mixed_precision,
            )
    identities = collectives.broadcast_object(identities)
    folder = cache_folder() / "features"
    stores = {}
    for modality in modalities:
        store = RowStore(
            folder, identities[modality], "cache_frozen_features", ".features"
        )
        stores[modality] = store
        log.info(
            f"frozen {modality} tower: {len(store):,d} outputs kept in {store.folder}"
        )
    return stores


def log_store_use(stores: Stores) -> None:
    """Log how many tower outputs were computed and how many read, summed over the ranks. Collective."""
    for modality, store in stores.items():
        computed, read = collectives.sum_ints([store.num_added, store.num_read])
        log.info(
            f"frozen {modality} tower: {computed:,d} outputs computed, {read:,d} read from {store.folder}"
        )


class InputBuilder:
    """Builds the model's inputs: collated micro-batches, with pooled outputs in place of the inputs of frozen towers.

    Each input passes a frozen tower at most once per step, without dropout and without graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        feeder: Feeder,
        session: Session,
        *,
        frozen: Sequence[Modality] = (),
        stores: Stores | None = None,
        image_bytes: int | None = None,
    ) -> None:
        """Collective. `frozen`: modalities whose towers are not trained. Each of their inputs passes its tower once per
        step, or never if `stores` holds its output. `image_bytes`: see `EmbeddingModel.frozen_image_token_bytes`."""
        self.model = model
        self.feeder = feeder
        # The same order on every rank: FSDP gathers weights in each call.
        self.frozen_modalities = tuple(sorted(frozen))
        self.stores = stores or {}
        self._dummies: dict[Modality, Tensor] = {}
        self.max_tokens_to_keep_images = 0
        """Tokens of a rank's batch up to which hidden states of images are kept between the phases of a step."""
        if image_bytes is not None:
            num_tokens = int(IMAGES_SHARE * session.placement.memory) // image_bytes
            # The minimum over the ranks: all must make the same choice, or their FSDP gathers would differ.
            self.max_tokens_to_keep_images = -collectives.max_ints([-num_tokens])[0]
            log.info(
                f"frozen image tower: its outputs are kept between the phases of a step for up to "
                f"{self.max_tokens_to_keep_images:,d} tokens per rank ({image_bytes:,d} bytes each, {IMAGES_SHARE:.0%} of the "
                "memory)"
            )

    def look_up(
        self, features: Sequence[Features]
    ) -> tuple[dict[Modality, CachedRows], dict[Modality, list[int]]]:
        """Return what the stores hold for each frozen modality, and the indices of inputs that its tower must
        encode. Local to the rank."""
        cached = {}
        missing = {}
        for modality, indices in indices_by_modality(
            features, self.frozen_modalities
        ).items():
            rows = {}
            if modality in self.stores:
                store = self.stores[modality]
                keys = tower_keys(features[index] for index in indices)
                for position, row in store.find_rows(keys).items():
                    rows[indices[position]] = row
            cached[modality] = rows
            missing[modality] = [index for index in indices if index not in rows]
        return cached, missing

    def encode(
        self,
        features: Sequence[Features],
        budget: int,
        max_inputs: int | None,
        check_interrupt: InterruptCheck | None,
    ) -> dict[Modality, Tensor]:
        """Return the same as `encode_missing`, outside of a training step. Collective: the ranks share their counts first."""
        cached, missing = self.look_up(features)
        splits = split_in_step(
            features, missing, budget, max_inputs, collectives.world_size()
        )
        return self.encode_missing(features, cached, splits, check_interrupt)

    def encode_missing(
        self,
        features: Sequence[Features],
        cached: Mapping[Modality, CachedRows],
        splits: Mapping[Modality, list[list[int]]],
        check_interrupt: InterruptCheck | None = None,
    ) -> dict[Modality, Tensor]:
        """Return a [len(features), width] table per frozen modality, with zeros for inputs of other modalities.

        Collective: `splits` must hold equally many micro-batches of the missing inputs on every rank. `check_interrupt` is
        called after each micro-batch.
        """
        tables = {}
        # Before the micro-batches and on every rank: a dummy is a forward pass, which is collective under FSDP.
        for modality in self.frozen_modalities:
            dummy = self._dummy(modality)
            tables[modality] = dummy.new_zeros(len(features), dummy.shape[1])
        micro_batches = []
        for modality, table in tables.items():
            rows = cached[modality]
            if rows:
                values = torch.from_numpy(np.stack(list(rows.values())))
                values = values.to(table.dtype)
                index = index_tensor(list(rows), table.device)
                table[index] = to_device(values, table.device)
            for indices in splits.get(modality, []):
                micro_batches.append([(modality, indices)])
        # One modality per forward pass, and equally many of each on every rank.
        outputs = self._run(micro_batches, features)
        for ((modality, indices),), output in zip(micro_batches, outputs, strict=True):
            if indices:  # otherwise a dummy: it was run only for its collectives
                tables[modality][index_tensor(indices, output.device)] = output
                if modality in self.stores:
                    store = self.stores[modality]
                    keys = tower_keys(features[index] for index in indices)
                    store.add_rows(keys, output.cpu().numpy())
            if check_interrupt is not None:
                check_interrupt()
        return tables

    def inputs(
        self, modality_slice: ModalityIndices, tables: Mapping[Modality, Tensor]
    ) -> tuple[Modality, dict[str, Tensor]]:
        """Return a frozen modality's slice of a micro-batch in the form that the model takes."""
        modality, indices = modality_slice
        if not indices:
            return modality, {POOLED: self._dummy(modality)}
        table = tables[modality]
        # A list of Python numbers as an index would be copied to the device while the host waits.
        return modality, {POOLED: table[index_tensor(indices, table.device)]}

    def _dummy(self, modality: Modality) -> Tensor:
        """Return a [1, width] output for ranks without inputs of this modality. Every rank computes it in its first
        step."""
        if modality not in self._dummies:
            (self._dummies[modality],) = self._run([[(modality, [])]], [])
        return self._dummies[modality]

    def _run(
        self, micro_batches: Sequence[MicroBatch], features: Sequence[Features]
    ) -> Iterator[Tensor]:
        for inputs in self.feeder.feed(micro_batches, features):
            with torch.no_grad():
                (output,) = self.model(inputs, stop_after="pooled")
            yield output


class InputSource:
    """Inputs of one rank batch. They may be fed twice: Gradient Cache runs every micro-batch again."""

    def __init__(self, builder: InputBuilder, features: Sequence[Features]) -> None:
        """Reads the stores; local to the rank."""
        self.builder = builder
        self.features = features
        # What is known of each frozen modality, and the indices of the inputs that its tower must encode.
        self._cached, self.uncached = builder.look_up(features)
        self._tables: dict[Modality, Tensor] = {}
        self._keeps_images = False
        self._images: list[Any] = []
        """Hidden states of the images of each micro-batch, from the first feeding on; None for one of texts alone."""
        self._tokens: dict[int, ModelInputs] = {}
        """Texts of micro-batches that will be fed again, on the device."""

    def encode_frozen(
        self, splits: Mapping[Modality, list[list[int]]], *, keeps_image_states: bool
    ) -> None:
        """Run the frozen towers on the micro-batches `splits` of the missing inputs. Collective. `keeps_image_states`: keep
        the hidden states of a frozen vision tower for the second feeding."""
        if self.builder.frozen_modalities:
            self._tables = self.builder.encode_missing(
                self.features, self._cached, splits
            )
        self._keeps_images = keeps_image_states

    def feed(
        self,
        micro_batches: Sequence[MicroBatch],
        starts_at: int = 0,
        first_replayed: int | None = None,
    ) -> Iterator[ModelInputs]:
        """Yield the model's input for each forward pass, from the micro-batch `starts_at` on. The token ids of those from
        `first_replayed` on are kept, for the second call, which feeds the replays."""
        builder = self.builder
        # Frozen slices are not collated: they are rows of the tables [n, width] that `encode_frozen` has made.
        trained = []
        for micro_index in range(starts_at, len(micro_batches)):
            if micro_index not in self._tokens:
                micro_batch = micro_batches[micro_index]
                trained.append(
                    [
                        part
                        for part in micro_batch
                        if part[0] not in builder.frozen_modalities
                    ]
                )
        fed = builder.feeder.feed(trained, self.features)
        for micro_index in range(starts_at, len(micro_batches)):
            inputs = self._tokens.pop(micro_index, None)
            if inputs is None:
                inputs = next(fed)
            # Pixels are not kept: they take far more memory than token ids.
            has_images = any(modality != "text" for modality, _ in inputs)
            is_replayed = first_replayed is not None and micro_index >= first_replayed
            if is_replayed and not has_images:
                self._tokens[micro_index] = [
                    (modality, dict(tensors)) for modality, tensors in inputs
                ]
            for part in micro_batches[micro_index]:
                if part[0] in builder.frozen_modalities:
                    inputs.append(builder.inputs(part, self._tables))
            if self._keeps_images:
                self._use_image_states(inputs, micro_index)
            yield inputs

    def _use_image_states(self, inputs: ModelInputs, micro_index: int) -> None:
        """Put hidden states in the place of the pixels of a micro-batch. The first feeding computes them."""
        chats = [part for part in inputs if part[0] == "multimodal"]
        if micro_index == len(self._images):
            states = None
            if chats:
                # Without a graph: for the trained language model behind it they are constants.
                with torch.no_grad():
                    (states,) = self.builder.model(chats, stop_after="images")
            self._images.append(states)
        for _, tensors in chats:
            tensors[IMAGE_STATES] = self._images[micro_index]
            tensors.pop("pixel_values", None)


# ---- fingerprint of a modality's towers, for what is kept of frozen ones --------------


FINGERPRINT_VERSION = 2
"""Version of the fingerprint. Increase it when towers give other outputs for the same inputs and weights."""
_FIELDS = (
    "family",
    "pooling",
    "image_pooling",
    "max_length",
    "padding_side",
    "bidirectional_attention",
    "min_pixels",
    "max_pixels",
)
"""Description fields that change what a tower gives. Prompts are part of the inputs."""


def tower_identity(
    description: ModelDescription,
    backbone: Any,
    modality: Modality,
    arithmetic: str,
) -> str:
    """Return a hash that is equal in any run with the same weights, settings and dtypes. It reads every weight.

    `arithmetic`: the dtype that the run computes in.
    """
    settings: list[object] = [
        FINGERPRINT_VERSION,
        modality,
        arithmetic,
        transformers.__version__,
    ]
    described = description.to_dict()
    settings += [described[name] for name in _FIELDS]
    if modality != "text":
        processor = load_image_processor(description)
        settings += [type(processor).__name__, processor.to_dict()]
    digest = hashlib.blake2b(digest_size=16)
    for tower in TOWERS_OF_MODALITY[modality]:
        module: Any = tower_module(backbone, description.family_traits, tower)
        settings.append(type(module).__name__)
        for name, layer in module.named_modules():
            if isinstance(layer, RoundedLinear):
                settings.append(f"{name} in int8")
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                # The header separates tensors: equal bytes under another name or shape give another hash.
                digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
                flat = value.detach().contiguous().cpu().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        settings.append(module.config.to_dict())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()
