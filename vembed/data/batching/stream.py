"""The stream of rank batches, prepared ahead: by threads, or beside a GPU by a process.

Python runs one thread at a time, so a thread that prepares batches keeps the one that launches kernels waiting.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

from vembed.data.batching.rank_batch import (
    RankBatch,
    make_rank_batch,
    with_in_batch_negatives,
)
from vembed.data.batching.schedule import BatchSchedule, rank_examples
from vembed.data.child_process import Child, answers, send
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Examples
from vembed.data.features import BaseFeaturiser, Features
from vembed.errors import RunError, UserError

COLUMNS_OF = attrgetter("modality", "length", "key", "content", "images", "num_vectors")
"""Returns the fields of `Features` before its arrays."""
AHEAD = 2
"""Number of batches that each worker prepares ahead."""
_CODE = (
    "import logging, sys\n"
    # What libraries say while they are imported, they have said to the parent.
    "logging.disable(logging.WARNING)\n"
    # Read before the imports, which take seconds: the parent does not wait for them.
    "stream = sys.stdin.buffer.read({num_bytes})\n"
    "from vembed.data.batching.stream import prepare_for_parent\n"
    "prepare_for_parent(stream)\n"
)


@dataclass
class RankBatchStream:
    """Rank batches of one rank in order, from any starting point, prepared ahead by threads."""

    store: Examples
    batch_schedule: BatchSchedule
    featuriser: BaseFeaturiser
    rank: int
    world_size: int
    num_workers: int
    pair: Callable[[int, int], Example] | None = None
    """The example of a labelled source with another one as its positive."""
    in_batch_negatives: int = 0
    """Positives of other examples of the global batch that each example gets as further negatives."""
    encodes_duplicates: bool = False
    micro_batch_tokens: int | None = None
    """Token budget of the step, by which batches are split ahead; None: they are not."""
    uses_process: bool = False
    """Let a process prepare them, for a single worker. It reads the files itself."""

    def rank_batch(self, batch_number: int) -> RankBatch:
        """Return the rank batch of a global batch of the run. It depends only on the number, so runs can resume."""
        epoch, batch_index = divmod(batch_number, self.batch_schedule.batches_per_epoch)
        indices = self.batch_schedule.batch(epoch, batch_index)
        positions = rank_examples(len(indices), self.rank, self.world_size)
        positives = None
        if self.pair is not None:
            positives = self.batch_schedule.positives(epoch, batch_index)

        @cache
        def example_at(position: int) -> Example:
            index = int(indices[position])
            if self.pair is None or positives is None:
                return self.store[index]
            return self.pair(index, int(positives[position]))

        examples = []
        for position in range(positions.start, positions.stop):
            example = example_at(position)
            if self.in_batch_negatives:
                # The examples after it in the batch, wrapping around at the end.
                others = map(
                    example_at,
                    (*range(position + 1, len(indices)), *range(position)),
                )
                example = with_in_batch_negatives(
                    example, others, self.in_batch_negatives
                )
            examples.append(example)
        source_index = self.batch_schedule.source_of(int(indices[0]))
        batch = make_rank_batch(
            examples,
            positions.start,
            self.featuriser,
            source_index,
            encodes_duplicates=self.encodes_duplicates,
        )
        if self.micro_batch_tokens is not None:
            batch.split(self.micro_batch_tokens)
        return batch

    def sample(self, num_batches: int = 4) -> list[Features]:
        """Return the features of the first batches, for the measurement of memory."""
        features = []
        for number in range(num_batches):
            features += self.rank_batch(number).features
        return features

    def from_batch(self, first: int, end: int) -> Generator[RankBatch, None, None]:
        """Yield the rank batches first .. end-1, in order. Close it: the garbage collector may run inside the start of a
        thread, where nothing can be joined."""
        if self.num_workers == 0:
            yield from map(self.rank_batch, range(first, end))
            return
        prepare = self.rank_batch
        process: BatchProcess | None = None
        # Other examples, such as those of `mine`, change in this process.
        if self.uses_process and isinstance(self.store, ExampleStore):
            process = BatchProcess(self)
            prepare = process.rank_batch
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="vembed-data")
        waiting: deque[Future[RankBatch]] = deque()
        next_number = first
        try:
            for _ in range(first, end):
                # Bounded: batches ahead hold token ids in memory.
                while next_number < end and len(waiting) <= AHEAD * self.num_workers:
                    waiting.append(pool.submit(prepare, next_number))
                    next_number += 1
                batch = waiting.popleft().result()
                # Its images, and those of the next batch, are decoded while the step computes.
                self.featuriser.decode_ahead(batch.features)
                if waiting and waiting[0].done() and not waiting[0].exception():
                    self.featuriser.decode_ahead(waiting[0].result().features)
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            if process is not None:
                process.close()


class BatchProcess:
    """Rank batches of a stream, from another process. Until that is ready, from this one."""

    def __init__(self, stream: RankBatchStream) -> None:
        self._stream = stream
        payload = pickle.dumps(stream)
        self._child = Child(_CODE.format(num_bytes=len(payload)))
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(payload)
        self._child.process.stdin.flush()
        self._is_ready = False

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._child.process.pid

    def is_ready(self) -> bool:
        """Return whether the process has begun to answer. Does not wait."""
        if not self._is_ready:
            answers_pipe = self._child.process.stdout
            assert answers_pipe is not None
            readable, _, _ = select.select([answers_pipe], [], [], 0)
            if readable:
                self._child.receive()
                self._is_ready = True
        return self._is_ready

    def rank_batch(self, batch_number: int) -> RankBatch:
        """Return a rank batch. Called by one thread."""
        try:
            if not self.is_ready():
                return self._stream.rank_batch(batch_number)
            self._child.send((batch_number, self._stream.micro_batch_tokens))
            answer: PackedBatch | Exception = self._child.receive()
        except (EOFError, BrokenPipeError) as error:
            raise RunError(
                f"the process that prepares batches ended with exit code {self._child.process.wait()}"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer.unpacked()

    def close(self) -> None:
        """End the process."""
        self._child.close()


def prepare_for_parent(payload: bytes) -> None:
    """Prepare the batches whose numbers come on standard input, until it ends. Runs in the child process."""
    out = answers()
    stream: RankBatchStream = pickle.loads(payload)
    jobs = sys.stdin.buffer
    try:
        send(out, "ready")
        while True:
            batch_number, stream.micro_batch_tokens = pickle.load(jobs)
            answer: PackedBatch | Exception
            try:
                answer = pack(stream.rank_batch(batch_number))
            except UserError as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            send(out, answer)
    except (EOFError, BrokenPipeError):  # the parent has ended
        os._exit(0)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A rank batch whose features are plain values: reading many small arrays would take as long as making them."""

    batch: RankBatch
    """Without features."""
    rows: list[tuple[Any, ...]]
    """The fields of the features of each input. Of its arrays the bytes."""

    def unpacked(self) -> RankBatch:
        """Return the rank batch."""
        features = []
        for *columns, token_ids, segments in self.rows:
            arrays = map(_array_of, (token_ids, segments))
            features.append(Features(*columns, *arrays))
        return replace(self.batch, features=features)


def pack(batch: RankBatch) -> PackedBatch:
    """Return a rank batch in the form that is sent."""
    rows = []
    for feature in batch.features:
        arrays = map(_bytes_of, (feature.token_ids, feature.segments))
        rows.append((*COLUMNS_OF(feature), *arrays))
    return PackedBatch(replace(batch, features=[]), rows)


def _bytes_of(array: np.ndarray | None) -> bytes | None:
    return None if array is None else array.tobytes()


def _array_of(content: bytes | None) -> np.ndarray | None:
    return None if content is None else np.frombuffer(content, np.int32)
