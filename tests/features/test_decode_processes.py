"""Processes that decode images: the same pixels, started only where they help, and gone whatever happens."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests import tiny
from tests.features.sized_images import (
    LARGE,
    SECONDS,
    SLOW,
    WRONG,
    Here,
    Sized,
    file_of,
    until,
    use_until_ready,
)
from tests.features.test_text_features import featuriser
from vembed.data.examples import ImageRef, Item
from vembed.data.features import Featuriser
from vembed.data.images import decoders as module
from vembed.data.images.decode_worker import HALF_BYTES
from vembed.data.images.decoders import Decoders, Decoding
from vembed.data.images.picture_bytes import PIXELS, FirstHalf
from vembed.errors import RunError, UserError


def is_gone(pid: int) -> bool:
    """Return True if the process has ended and somebody has waited for it."""
    return not psutil.pid_exists(pid)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITED_FOR", 1)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Decoders]]:
    """Decoders with their processes at work."""
    made: list[Decoders] = []

    def start(first: FirstHalf | None = None, count: int = 2) -> Decoders:
        one = Decoders(Here(), first or Sized(), count)
        made.append(one)
        folder = tmp_path / "first"
        folder.mkdir()
        use_until_ready(one, file_of(folder, (4, 4)), count)
        return one

    yield start
    for one in made:
        one.close()


def error_of(decoders: Decoders, decoding: Decoding) -> BaseException:
    with pytest.raises(Exception) as caught:
        decoders.wait(decoding)
    return caught.value


def test_processes_give_the_pixels_of_threads(tmp_path: Path) -> None:
    mine = Featuriser(featuriser(tiny.shared(tiny.tiny_clip)).description, decoders=2)
    images = []
    for seed in range(40):
        values = np.random.default_rng(seed).integers(
            0, 256, (30 + seed, 50, 3), dtype=np.uint8
        )
        images.append(ImageRef(path=str(tmp_path / f"{seed}.jpg")))
        Image.fromarray(values).save(str(images[-1].path))
    images.append(ImageRef(data=Path(str(images[0].path)).read_bytes()))
    features = mine.features([(Item(images=(one,)), "document") for one in images])
    decoders = mine.decoders
    assert decoders is not None
    wanted = mine.collate(features)[PIXELS]

    def ready() -> bool:
        mine.forget_images()
        mine.collate(features)
        return len(decoders.pids) == 2

    try:
        until(ready)
        mine.forget_images()
        assert mine.collate(features)[PIXELS].equal(wanted)
        assert len(decoders.pids) == 2
    finally:
        decoders.close()


def test_few_images_and_one_core_start_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = file_of(tmp_path, (4, 4))
    for waited_for, count in ((512, 2), (1, 1)):
        monkeypatch.setattr(module, "WAITED_FOR", waited_for)
        before = {one.pid for one in psutil.Process().children()}
        decoders = Decoders(Here(), Sized(), count)
        for _ in range(20):
            for decoding in decoders.start([image] * 8):
                decoders.wait(decoding)
        assert {one.pid for one in psutil.Process().children()} <= before
        decoders.close()


def test_a_broken_image_is_named(
    tmp_path: Path, started: Callable[..., Decoders]
) -> None:
    decoders = started()
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 nothing")
    good = file_of(tmp_path, (4, 4))
    first, second, third = decoders.start([good, ImageRef(path=str(broken)), good])
    assert (
        decoders.wait(first)[PIXELS].tolist()
        == decoders.wait(third)[PIXELS].tolist()
        == [4]
    )
    error = error_of(decoders, second)
    assert isinstance(error, UserError) and "broken.jpg" in str(error)
    assert len(decoders.pids) == 2


def test_an_error_in_a_processor_keeps_its_traceback(
    tmp_path: Path, started: Callable[..., Decoders]
) -> None:
    decoders = started()
    (decoding,) = decoders.start([file_of(tmp_path, WRONG)])
    error = error_of(decoders, decoding)
    assert "ZeroDivisionError: a bug" in str(error) and "sized_images.py" in str(error)


def test_an_image_that_does_not_fit_into_the_shared_memory(
    tmp_path: Path, started: Callable[..., Decoders]
) -> None:
    decoders = started()
    large, small = decoders.start([file_of(tmp_path, LARGE), file_of(tmp_path, (4, 4))])
    assert decoders.wait(large)[PIXELS].size == HALF_BYTES + 1
    assert decoders.wait(small)[PIXELS].tolist() == [4]


def test_a_process_that_is_killed_names_its_image(
    tmp_path: Path, started: Callable[..., Decoders]
) -> None:
    decoders = started()
    pids = decoders.pids
    slow, *others = decoders.start(
        [file_of(tmp_path, SLOW), *[file_of(tmp_path, (4, 4)) for _ in range(12)]]
    )
    time.sleep(
        0.5
    )  # one of the processes is asleep in its job, and the other one has done what it had
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    error = error_of(decoders, slow)
    assert isinstance(error, RunError)
    assert (
        "3x5-" in str(error)
        and "SIGKILL" in str(error)
        and "take the image out" in str(error)
    )
    assert [decoders.wait(one)[PIXELS].tolist() for one in others] == [[4]] * 12
    decoders.close()
    assert all(map(is_gone, pids))


def test_signals_for_the_whole_group_do_not_end_the_processes(
    tmp_path: Path, started: Callable[..., Decoders]
) -> None:
    decoders = started()
    pids = decoders.pids
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        for pid in pids:
            os.kill(pid, signum)
    (decoding,) = decoders.start([file_of(tmp_path, (4, 4))])
    assert decoders.wait(decoding)[PIXELS].tolist() == [4]
    assert decoders.pids == pids and not any(map(is_gone, pids))


def test_processes_end_with_their_owner(
    started: Callable[..., Decoders], tmp_path: Path
) -> None:
    decoders = started()
    pids = decoders.pids
    (waiting,) = decoders.start([file_of(tmp_path, (4, 4))])
    decoders.close()
    assert all(map(is_gone, pids)), "neither a process nor a zombie"
    if not waiting.is_done:
        assert "closed" in str(error_of(decoders, waiting))
    decoders = Decoders(Here(), Sized(), 2)
    use_until_ready(decoders, file_of(tmp_path, (4, 4)), 2)
    pids = decoders.pids
    del decoders
    gc.collect()
    assert all(map(is_gone, pids))


def test_idle_processes_end_and_come_back(
    tmp_path: Path, started: Callable[..., Decoders], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders = started()
    monkeypatch.setattr(module, "WAITED_FOR", 10**6)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    pids = decoders.pids
    image = file_of(tmp_path, (4, 4))

    def ended() -> bool:
        for decoding in decoders.start(
            [image] * 64
        ):  # the first wait was begun with the old time
            decoders.wait(decoding)
        time.sleep(0.5)
        return all(map(is_gone, pids))

    until(ended)
    assert decoders.pids == []
    monkeypatch.setattr(module, "WAITED_FOR", 1)
    monkeypatch.setattr(module, "IDLE_SECONDS", 60.0)
    use_until_ready(decoders, image, 2)


def test_a_processor_that_other_processes_do_not_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = types.ModuleType("hidden_processor")
    hidden.Half = type("Half", (Sized,), {"__module__": "hidden_processor"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hidden_processor", hidden)
    decoders = Decoders(Here(), hidden.Half(), 2)  # type: ignore[attr-defined]
    image = file_of(tmp_path, (4, 4))
    with caplog.at_level(logging.INFO):

        def said() -> bool:
            for decoding in decoders.start([image] * 8):
                assert decoders.wait(decoding)[PIXELS].tolist() == [4]
            return "threads only" in caplog.text

        until(said)
    assert "hidden_processor" in caplog.text and decoders.pids == []
    decoders.close()


PROGRAM = """
import sys, time
from tests.features.sized_images import Here, Sized, use_until_ready
from vembed.data.images import decoders as module
from vembed.data.examples import ImageRef
module.WAITED_FOR = 1
decoders = module.Decoders(Here(), Sized(), 2)
use_until_ready(decoders, ImageRef(path=sys.argv[1]), 2)
print(*decoders.pids, flush=True)
if sys.argv[2] == "exception":
    raise SystemError("on purpose")
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL", "exception"])
def test_no_process_outlives_the_program(tmp_path: Path, end: str) -> None:
    image = file_of(tmp_path, (4, 4))
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(image.path), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert program.stdout is not None
    pids = [int(one) for one in program.stdout.readline().split()]
    assert len(pids) == 2
    if end != "exception":
        program.send_signal(signal.Signals[end])
    _, said = program.communicate(timeout=SECONDS)
    assert program.returncode != 0 and ("on purpose" in said) == (end == "exception")
    # Those of a killed program are waited for by process 1, which may take its time over it.
    until(
        lambda: all(
            is_gone(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            for pid in pids
        )
    )
    if end in ("SIGINT", "exception"):
        assert all(map(is_gone, pids)), (
            "a program that ends in order waits for its processes"
        )
