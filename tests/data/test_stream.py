"""Batches that a process prepares: those of a thread, with its errors, and no process left."""

import os
import pickle
import signal
import time
from dataclasses import fields, replace

import numpy as np
import psutil
import pytest

from tests import tiny
from tests.data.files import text_records, write_jsonl
from tests.harness import forkserver
from vembed.config.schema import TrainConfig
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.batching.stream import BatchProcess, RankBatchStream
from vembed.data.example_store import open_examples
from vembed.data.features import build_featuriser
from vembed.errors import RunError, UserError
from vembed.models.families.description import describe

NUM_ROWS = 40
BATCH_SIZE = 8
NUM_BATCHES = 2 * NUM_ROWS // BATCH_SIZE
MICRO_BATCH_TOKENS = 64
READY_SECONDS = 120
"""Longest time in which a process imports what it needs, on a busy machine."""


def open_stream(path, make=tiny.tiny_bert, **options):
    config = TrainConfig(
        model_name=str(tiny.shared(make)), data_path=str(path), **options
    )
    store = open_examples(config.data, str(path))
    return RankBatchStream(
        store,
        BatchSchedule([len(store)], BATCH_SIZE, seed=3),
        build_featuriser(describe(config.model)),
        rank=1,
        world_size=2,
        num_workers=1,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        uses_process=True,
    )


@pytest.fixture
def path(tmp_path):
    records = text_records(NUM_ROWS)
    for row, record in enumerate(records):
        record["negatives"] = [f"negative {row}"] * (row % 3)
    return write_jsonl(tmp_path / "pairs.jsonl", records)


def wait_until(condition, message):
    end = time.monotonic() + READY_SECONDS
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.05)


def assert_equal(actual, wanted):
    """Compare values of dataclasses, lists and arrays."""
    assert type(actual) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert actual.dtype == wanted.dtype
        np.testing.assert_array_equal(actual, wanted)
    elif isinstance(wanted, list):
        for pair in zip(actual, wanted, strict=True):
            assert_equal(*pair)
    elif hasattr(wanted, "__dataclass_fields__"):
        for field in fields(wanted):
            assert_equal(getattr(actual, field.name), getattr(wanted, field.name))
    else:
        assert actual == wanted


def test_a_reranker_has_the_same_pairs(path):
    stream = open_stream(path, tiny.tiny_reranker, task="rerank")
    sent = pickle.loads(pickle.dumps(stream))
    batch = pickle.loads(pickle.dumps(sent.rank_batch(1)))
    assert_equal(batch, stream.rank_batch(1))


def test_packing_keeps_missing_rows_and_segments(path):
    batch = open_stream(path).rank_batch(0)
    first, second, third, *_ = batch.features
    features = [
        replace(first, segments=np.ones_like(first.token_ids)),
        replace(second, token_ids=None),
        replace(third, segments=np.zeros_like(third.token_ids), num_vectors=4),
    ]
    batch = replace(batch, features=features)
    assert_equal(pickle.loads(pickle.dumps(batch)), batch)


def test_the_stream_is_in_order_from_any_batch_on(path):
    stream = open_stream(path)
    for first in (0, 7):
        batches = list(stream.from_batch(first, NUM_BATCHES))
        assert len(batches) == NUM_BATCHES - first
        for number, batch in enumerate(batches, start=first):
            assert_equal(batch, stream.rank_batch(number))


def test_batches_wait_for_no_start(path):
    process = BatchProcess(open_stream(path))
    try:
        assert not process.is_ready()
        assert len(process.rank_batch(0).where) == BATCH_SIZE // 2
    finally:
        process.close()


def test_a_process_that_has_ended_is_named(path):
    process = BatchProcess(open_stream(path))
    os.kill(process.pid, signal.SIGKILL)
    killed = psutil.Process(process.pid)
    wait_until(lambda: killed.status() == psutil.STATUS_ZOMBIE, "it is still there")
    with pytest.raises(RunError, match="exit code -9"):
        process.rank_batch(0)
    process.close()


def test_the_process_ends_with_the_stream(path, monkeypatch):
    pids = []
    start = BatchProcess.__init__

    def noted(self, stream):
        start(self, stream)
        pids.append(self.pid)

    monkeypatch.setattr(BatchProcess, "__init__", noted)
    batches = open_stream(path).from_batch(0, NUM_BATCHES)
    next(batches)
    batches.close()
    (pid,) = pids
    assert not psutil.pid_exists(pid)


def use_process(path, sender):
    """Compare the batches of a process, let it meet a changed file, send its number, and wait to be killed."""
    stream = open_stream(path)
    process = BatchProcess(stream)
    wait_until(process.is_ready, "the process did not start")
    for number in range(NUM_BATCHES):
        batch = process.rank_batch(number)
        assert list(batch.splits) == [MICRO_BATCH_TOKENS]
        assert_equal(batch, stream.rank_batch(number))
    # After a shortage of memory the step has another budget.
    stream.micro_batch_tokens = MICRO_BATCH_TOKENS // 2
    assert list(process.rank_batch(0).splits) == [MICRO_BATCH_TOKENS // 2]
    os.truncate(path, 0)
    with pytest.raises(UserError, match=r"pairs\.jsonl:\d+ has changed"):
        process.rank_batch(0)
    sender.send(process.pid)
    time.sleep(READY_SECONDS)


def test_the_batches_are_those_of_a_thread_and_no_process_outlives_its_parent(path):
    context = forkserver()
    receiver, sender = context.Pipe(duplex=False)
    parent = context.Process(target=use_process, args=(path, sender), daemon=True)
    parent.start()
    sender.close()
    pid = receiver.recv()
    parent.kill()
    wait_until(lambda: not psutil.pid_exists(pid), "the process is still there")
