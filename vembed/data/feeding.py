"""Feeder: collated micro-batches on the device, one call after the other, images decoded ahead by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from vembed.data.features import Features, Featuriser
from vembed.models.description import Lane
from vembed.models.packing import TOKENS, token_index

Part = tuple[Lane, list[int]]
"""A lane, and the inputs (by number) of one of its micro-batches; without any, a dummy runs."""
Call = list[Part]
"""One forward of the model."""
Inputs = list[tuple[Lane, dict[str, Tensor]]]
"""What a forward takes: each lane with its tensors."""
DECODERS = 4
"""Threads that decode images; Pillow works outside of Python's lock."""
CALLS_AHEAD = 2
"""Calls whose images are decoded before they are needed; bounds the pixels in host memory."""


class Feeder:
    """Turns calls (lanes with indices of inputs) into what the model's forward takes."""

    def __init__(self, featuriser: Featuriser, device: torch.device, *, packs_texts: bool = False) -> None:
        """`packs_texts`: the model takes texts without their padding."""
        self.featuriser = featuriser
        self.device = device
        self.packs_texts = packs_texts
        self.pool: ThreadPoolExecutor | None = None

    def feed(self, calls: Sequence[Call], features: Sequence[Features]) -> Iterator[Inputs]:
        """The inputs of each call, in order."""
        if all(lane == "text" for call in calls for lane, _ in call):
            for call in calls:
                yield self._to_device(self._collate(call, features))
            return
        if self.pool is None:
            self.pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="vembed-images")
        waiting: deque[Future[Inputs]] = deque()
        for call in calls:
            waiting.append(self.pool.submit(self._collate, call, features))
            if len(waiting) > CALLS_AHEAD:
                yield self._to_device(waiting.popleft().result())
        while waiting:
            yield self._to_device(waiting.popleft().result())

    def padded_tokens(self, call: Call, features: Sequence[Features]) -> int:
        """Tokens and patches that the call puts through the model, padding included."""
        total = 0
        for lane, rows in call:
            lengths = [features[row].length for row in rows]
            is_packed = lane == "text" and self.packs_texts
            total += sum(lengths) if is_packed else len(rows) * max(lengths, default=0)
        return total

    def _collate(self, call: Call, features: Sequence[Features]) -> Inputs:
        return [
            (lane, self.featuriser.collate([features[row] for row in rows] or [self.featuriser.dummy(lane)]))
            for lane, rows in call
        ]

    def _to_device(self, inputs: Inputs) -> Inputs:
        if self.device.type == "cuda":
            for lane, batch in inputs:
                if lane == "text" and "attention_mask" in batch:
                    batch[TOKENS] = token_index(batch["attention_mask"])  # to ask the GPU for it would be to wait
        return [
            (lane, {name: to_device(tensor, self.device) for name, tensor in batch.items()}) for lane, batch in inputs
        ]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for a GPU."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Row numbers as an index on the device."""
    return to_device(torch.tensor(rows, dtype=torch.int64), device)
