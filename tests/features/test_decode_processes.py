"""Processes that decode images: the same pixels, started only where they help, and gone whatever happens."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import tiny
from tests.data.pictures import encoded
from tests.data.test_stream import wait_until
from tests.features.sized_images import (
    LARGE,
    LARGE_BYTES,
    SECONDS,
    SLOW,
    WRONG,
    Sized,
    file_of,
    use_until_ready,
)
from tests.features.test_image_features import of_images
from tests.features.test_text_features import featuriser
from vembed.data.examples import ImageRef
from vembed.data.features import Featuriser
from vembed.data.images import decoders as module
from vembed.data.images.decoders import PIXELS_KEY, Decoders
from vembed.errors import RunError, UserError


@pytest.fixture
def decoders(tmp_path, monkeypatch):
    """Decoders with their processes at work."""
    monkeypatch.setattr(module, "DECODED_BY_THREADS", 1)
    started = Decoders(Sized(), 2)
    (tmp_path / "first").mkdir()
    use_until_ready(started, file_of(tmp_path / "first", (4, 4)), 2)
    yield started
    started.close()


def test_processes_give_the_pixels_of_threads(tmp_path, monkeypatch):
    description = featuriser(tiny.tiny_clip).description
    mine = Featuriser(description, decoders=2)
    inputs = []
    for seed in range(40):
        path = tmp_path / f"{seed}.jpg"
        path.write_bytes(encoded("JPEG", (50, 30 + seed), seed=seed))
        inputs.append(of_images(ImageRef(path=str(path))))
    inputs.append(of_images(ImageRef(data=path.read_bytes())))
    features = mine.features(inputs)
    decoders = mine.pixels.decoders
    by_threads = mine.collate(features)[PIXELS_KEY]
    assert not decoders.pids
    monkeypatch.setattr(module, "DECODED_BY_THREADS", 1)
    # Of its own, which has nothing in its cache.
    other = Featuriser(description, decoders=2)
    assert other.collate(features)[PIXELS_KEY].equal(by_threads)
    assert other.pixels.decoders.pids
    other.pixels.decoders.close()
    decoders.close()


def test_one_core_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DECODED_BY_THREADS", 1)
    alone = Decoders(Sized(), 1)
    for decoding in alone.start([file_of(tmp_path, (4, 4))] * 20):
        decoding.wait()
    assert not alone.pids


def test_bad_images_errors_and_large_images(tmp_path, decoders):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 nothing")
    good, bad, wrong, large = decoders.start(
        [
            file_of(tmp_path, (4, 4)),
            ImageRef(path=str(broken)),
            file_of(tmp_path, WRONG),
            file_of(tmp_path, LARGE),
        ]
    )
    assert good.wait()[PIXELS_KEY].tolist() == [4]
    assert large.wait()[PIXELS_KEY].size == LARGE_BYTES
    with pytest.raises(UserError, match=r"broken\.jpg"):
        bad.wait()
    with pytest.raises(RuntimeError, match=r"(?s)sized_images.py.*ZeroDivisionError"):
        wrong.wait()


def test_a_process_that_is_killed_names_its_image(tmp_path, decoders):
    (slow,) = decoders.start([file_of(tmp_path, SLOW)])
    time.sleep(0.5)
    for pid in decoders.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"3x5-.* exit code -9"):
        slow.wait()


def test_processes_end_with_their_owner(tmp_path, decoders):
    pids = decoders.pids
    decoders.start([file_of(tmp_path, SLOW)])
    decoders.close()
    assert not any(map(psutil.pid_exists, pids)), "neither a process nor a zombie"
    other = Decoders(Sized(), 2)
    use_until_ready(other, file_of(tmp_path, (4, 4)), 2)
    pids = other.pids
    del other
    gc.collect()
    assert not any(map(psutil.pid_exists, pids))


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


PROGRAM = """
import sys, time
from tests.features.sized_images import Sized, use_until_ready
from vembed.data.images import decoders as module
from vembed.data.examples import ImageRef
module.DECODED_BY_THREADS = 1
decoders = module.Decoders(Sized(), 2)
use_until_ready(decoders, ImageRef(path=sys.argv[1]), 2)
print(*decoders.pids, flush=True)
if sys.argv[2] == "exception":
    raise SystemError("on purpose")
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL", "exception"])
def test_no_process_outlives_the_program(tmp_path, end):
    image = file_of(tmp_path, (4, 4))
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(image.path), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    if end != "exception":
        program.send_signal(signal.Signals[end])
    program.communicate(timeout=SECONDS)
    assert program.returncode != 0
    # Those of a killed program are waited for by process 1, which may take its time over it.
    wait_until(lambda: not any(map(is_running, pids)), "a process is still there")
