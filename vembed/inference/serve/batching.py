"""Batcher: requests that wait while the model computes are encoded together next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from vembed.inference.serve.encoder import ServedInput, TextEncoder
from vembed.inference.serve.metrics import Metrics

MAX_BATCH_INPUTS = 512
"""Inputs of several requests that are encoded together. A longer request is encoded alone."""

Encoded = tuple[np.ndarray, int]
"""[n, d] float32 embeddings of a request, and the number of its tokens."""


@dataclass(frozen=True)
class _Request:
    inputs: Sequence[ServedInput]
    result: Future[Encoded] = field(default_factory=Future)


class Batcher:
    """A thread that encodes requests in the order of their arrival."""

    def __init__(self, encoder: TextEncoder, metrics: Metrics) -> None:
        self.encoder = encoder
        self.metrics = metrics
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(
            target=self._work, name="vembed-serve", daemon=True
        )
        self._thread.start()

    def submit(self, inputs: Sequence[ServedInput]) -> Future[Encoded]:
        """Queue a request. A future that is cancelled before its turn is not computed."""
        request = _Request(inputs)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()
        return request.result

    def close(self) -> None:
        """Cancel what waits and end the thread."""
        with self._changed:
            self._closed = True
            for request in self._waiting:
                request.result.cancel()
            self._changed.notify()
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Return the number of requests whose turn has not come."""
        return len(self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                batch = self._next_batch()
            if batch:
                self._encode(batch)

    def _next_batch(self) -> list[_Request]:
        batch: list[_Request] = []
        num_inputs = 0
        while self._waiting:
            num_inputs += len(self._waiting[0].inputs)
            if batch and num_inputs > MAX_BATCH_INPUTS:
                break
            request = self._waiting.popleft()
            if request.result.set_running_or_notify_cancel():
                batch.append(request)
        return batch

    def _encode(self, batch: list[_Request]) -> None:
        inputs = [served for request in batch for served in request.inputs]
        try:
            embeddings, num_tokens = self.encoder.encode(inputs)
        except Exception as error:
            if len(batch) > 1:
                # The fault is in one of the requests: the others get their answers.
                for request in batch:
                    self._encode([request])
            else:
                batch[0].result.set_exception(error)
            return
        self.metrics.count_batch(len(inputs), sum(num_tokens))
        start = 0
        for request in batch:
            stop = start + len(request.inputs)
            answer = embeddings[start:stop], sum(num_tokens[start:stop])
            request.result.set_result(answer)
            start = stop
