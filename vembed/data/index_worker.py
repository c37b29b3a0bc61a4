"""Worker of the first pass: indexes parts of a source in a process of its own. Reads jobs on stdin, writes to stdout.

A process started by its command, not by multiprocessing: it needs neither the memory of its parent nor a guard around
the user's script, and it imports no torch.
"""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from vembed.cores import num_cores
from vembed.data.formats.json_files import Part, Reader
from vembed.data.index_parts import PartIndex, index_part
from vembed.data.pipe_messages import (
    command_of,
    environment,
    messages,
    output_for_answers,
    send,
)
from vembed.data.records import RecordFormat
from vembed.errors import UserError

OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Python's default of 700 looks for cycles several times in each block of records, which have none."""
MOST_WORKERS = 16
"""More processes than these wait for the disk."""


def num_workers(num_parts: int) -> int:
    """Return how many processes a pass over so many parts takes: one for each core of this process."""
    return max(1, min(num_parts, num_cores(), MOST_WORKERS))


def in_processes(
    reader: Reader,
    form: RecordFormat,
    parts: Sequence[Part],
    *,
    with_keys: bool,
    say: Callable[[int, int], None],
) -> list[PartIndex]:
    """Index the parts in several processes, and return them in order. `say` is called with the records done, and with
    the sizes of the parts done."""
    count = num_workers(len(parts))
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    workers = []
    # Once for each worker; afterwards only the parts go over the pipe.
    job = pickle.dumps((reader, form, with_keys))
    command = command_of("vembed.data.index_worker")
    try:
        for _ in range(count):
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(),
            )
            workers.append(worker)
            _send(worker, job)
            idle.put(worker)

        def ask(part: Part) -> PartIndex:
            worker = idle.get()
            _send(worker, pickle.dumps(part))
            found = _received(worker)
            idle.put(worker)
            if isinstance(found, UserError):
                raise found
            assert isinstance(found, PartIndex)
            return found

        done, far, results = 0, 0, []
        with ThreadPoolExecutor(count, thread_name_prefix="vembed-index") as pool:
            for part, one in zip(parts, pool.map(ask, parts), strict=True):
                results.append(one)
                done, far = (
                    done + len(one.starts) + one.num_bad,
                    far + part.stop - part.start,
                )
                say(done, far)
        return results
    finally:
        # Also after an error or Ctrl-C: no worker outlives the pass. A worker ends where its input does; all of them at
        # the same time, since an interpreter takes a tenth of a second for it.
        for worker in workers:
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
        for worker in workers:
            worker.wait()


def _send(worker: subprocess.Popen[bytes], data: bytes) -> None:
    assert worker.stdin is not None
    send(worker.stdin, data)


def _received(worker: subprocess.Popen[bytes]) -> object:
    assert worker.stdout is not None
    data = next(messages(worker.stdout), None)
    if data is None:
        raise RuntimeError(
            f"a process of the first pass over the data ended with exit code {worker.wait()}"
        )
    return pickle.loads(data)  # from this process's own child


def main() -> None:
    """Index the parts that stdin names, until it ends."""
    out = output_for_answers()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    jobs = messages(sys.stdin.buffer)
    reader, form, with_keys = pickle.loads(next(jobs))  # from the parent process
    for data in jobs:
        try:
            answer: object = index_part(
                reader, form, pickle.loads(data), with_keys=with_keys
            )
        except UserError as error:
            answer = error
        send(out, pickle.dumps(answer))


if __name__ == "__main__":
    main()
