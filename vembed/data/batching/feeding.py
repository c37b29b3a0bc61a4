"""Feeder: collated micro-batches on the device, in order, with images decoded ahead on other cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vembed.data.features import BaseFeaturiser, Features
from vembed.models.attention import TOKEN_INDEX, real_tokens
from vembed.models.families.family import Modality

ModalitySlice = tuple[Modality, list[int]]
"""A modality and the indices of its inputs in a micro-batch. Without indices, a dummy input runs."""
MicroBatch = list[ModalitySlice]
"""One forward pass of the model: the slice of each modality."""
ModelInputs = list[tuple[Modality, dict[str, Tensor]]]
"""Arguments of a forward pass: the tensors of each modality."""
MICRO_BATCHES_AHEAD = 2
"""Micro-batches whose images are decoded ahead; limits the pixels in host memory."""


def indices_by_modality(
    features: Sequence[Features], modalities: Iterable[Modality]
) -> dict[Modality, list[int]]:
    """Return where the inputs of each of these modalities are."""
    indices: dict[Modality, list[int]] = {modality: [] for modality in modalities}
    for index, feature in enumerate(features):
        if feature.modality in indices:
            indices[feature.modality].append(index)
    return indices


class Feeder:
    """Converter from micro-batches of indices to the tensors of a forward pass."""

    def __init__(
        self,
        featuriser: BaseFeaturiser[Any],
        device: torch.device,
        *,
        packs_texts: bool = False,
    ) -> None:
        """`packs_texts`: the model removes the padding of texts."""
        self.featuriser = featuriser
        self.device = device
        self.packs_texts = packs_texts
        # These only wait for images and join them; the featuriser's decoders work elsewhere.
        self._pool: ThreadPoolExecutor | None = None

    def feed(
        self, micro_batches: Sequence[MicroBatch], features: Sequence[Features]
    ) -> Iterator[ModelInputs]:
        """Yield the inputs of each micro-batch, in order."""
        with_images = []
        for micro_batch in micro_batches:
            for modality, rows in micro_batch:
                if modality != "text":
                    with_images += [features[row] for row in rows]
        if not with_images:
            # Nothing is to be decoded, so no thread is needed.
            for micro_batch in micro_batches:
                yield self._to_device(self._collate(micro_batch, features))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MICRO_BATCHES_AHEAD + 1, "vembed-collate")
        self.featuriser.decode_ahead(with_images)
        waiting: deque[Future[ModelInputs]] = deque()
        for micro_batch in micro_batches:
            waiting.append(self._pool.submit(self._collate, micro_batch, features))
            if len(waiting) > MICRO_BATCHES_AHEAD:
                yield self._to_device(waiting.popleft().result())
        while waiting:
            yield self._to_device(waiting.popleft().result())

    def padded_tokens(
        self, micro_batch: MicroBatch, features: Sequence[Features]
    ) -> int:
        """Return the tokens and patches of a micro-batch, including padding that the model computes."""
        total = 0
        for modality, rows in micro_batch:
            lengths = [features[row].length for row in rows]
            is_packed = modality == "text" and self.packs_texts
            if is_packed:
                total += sum(lengths)
            else:
                total += len(rows) * max(lengths, default=0)
        return total

    def _collate(
        self, micro_batch: MicroBatch, features: Sequence[Features]
    ) -> ModelInputs:
        """Return the tensors of a micro-batch on the host. With images this runs in a thread beside the step."""
        inputs = []
        for modality, rows in micro_batch:
            chosen = [features[row] for row in rows]
            if not chosen:
                chosen = [self.featuriser.dummy(modality)]
            batch = self.featuriser.joined(chosen)
            if (
                self.device.type == "cuda"
                and modality == "text"
                and "attention_mask" in batch
            ):
                # On the GPU this would force a sync.
                batch[TOKEN_INDEX] = real_tokens(batch["attention_mask"])
            for name, tensor in batch.items():
                batch[name] = pinned(tensor, self.device)
            inputs.append((modality, batch))
        return inputs

    def _to_device(self, inputs: ModelInputs) -> ModelInputs:
        moved: ModelInputs = []
        for modality, batch in inputs:
            tensors = {}
            for name, tensor in batch.items():
                tensors[name] = tensor.to(self.device, non_blocking=True)
            # Pixels of 8 bits become numbers where the model computes.
            moved.append((modality, self.featuriser.finished(tensors)))
        return moved


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor in memory from which a copy to the device overlaps with computation: from pageable memory
    it would block the host."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, without a GPU synchronisation."""
    return pinned(tensor, device).to(device, non_blocking=True)


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Return row numbers as an index tensor on the device."""
    return to_device(torch.tensor(rows, dtype=torch.int64), device)
