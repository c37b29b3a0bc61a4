"""The stream of rank batches, prepared ahead: by threads, or beside a GPU by a process.

Python runs one thread at a time, so a thread that prepares batches keeps the one that launches kernels waiting.
"""

import os
import pickle
import select
import sys
import traceback
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

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
        positives = self.batch_schedule.positives(epoch, batch_index)

        @cache
        def example_at(position: int) -> Example:
            index = int(indices[position])
            if positives is None:
                return self.store[index]
            # Mined examples, the other kind, have no labels.
            assert isinstance(self.store, ExampleStore)
            return self.store.pair(index, int(positives[position]))

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
            answer: RankBatch | Exception = self._child.receive()
        except (EOFError, BrokenPipeError) as error:
            raise RunError(
                f"the process that prepares batches ended with exit code {self._child.process.wait()}"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

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
            answer: RankBatch | Exception
            try:
                answer = stream.rank_batch(batch_number)
            except UserError as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            send(out, answer)
    except (EOFError, BrokenPipeError):  # the parent has ended
        os._exit(0)
