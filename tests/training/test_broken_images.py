"""Images that cannot be read while a run trains on them are named with the record that has them."""

import gc
import time

import psutil
import pytest

import vembed
from tests import tiny
from tests.data.files import write_jsonl
from tests.data.pictures import encoded
from vembed.data.images import decoders
from vembed.errors import UserError
from vembed.training import setup


def train(folder, images, **more):
    rows = [
        {"query": f"{tiny.WORDS[number % 20]} {number}", "positive": {"image": image}}
        for number, image in enumerate(images)
    ]
    write_jsonl(folder / "train.jsonl", rows)
    on_step = more.pop("on_step", None)
    config = {
        "model_name": str(tiny.shared(tiny.tiny_clip)),
        "data_path": str(folder / "train.jsonl"),
        "output_dir": str(folder / "out"),
        "batch_size": 8,
        "epochs": 1,
        **more,
    }
    vembed.train(config, on_step=on_step)


def test_an_image_that_breaks_during_a_run(tmp_path, monkeypatch):
    """It is decoded by a process, which ends with the run."""
    monkeypatch.setattr(decoders, "DECODED_BY_THREADS", 1)
    monkeypatch.setattr(setup, "num_cores", lambda: 2)
    built = []
    original = decoders.Decoders.start

    def start(self, images):
        built.append(self)
        return original(self, images)

    monkeypatch.setattr(decoders.Decoders, "start", start)
    file = tmp_path / "file.jpg"
    file.write_bytes(encoded())
    for number in range(400):
        (tmp_path / f"{number}.jpg").symlink_to(file)
    pids = []

    def on_step(_):
        if len(built[-1].pids) == 2:
            pids[:] = built[-1].pids
            broken = tmp_path / "broken.jpg"
            broken.write_bytes(b"\xff\xd8\xff\xe0 nothing")
            broken.replace(file)  # never empty in between
        time.sleep(0.2)

    with pytest.raises(
        UserError, match=r"image .*/(\d+)\.jpg \(.*train\.jsonl:\d+\) is broken"
    ) as caught:
        train(tmp_path, [f"{number}.jpg" for number in range(400)], on_step=on_step)
    said = str(caught.value)
    del caught  # its traceback holds the run
    built.clear()
    gc.collect()
    name, line = said.split(".jpg (")
    assert int(name.split("/")[-1]) + 1 == int(line.split("jsonl:")[1].split(")")[0])
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))
