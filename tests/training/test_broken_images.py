"""Images that cannot be read while a run trains on them are named with the record that has them."""

import re

import pytest

import vembed
from tests import tiny
from tests.data.files import write_jsonl
from tests.data.pictures import encoded
from tests.training.test_run import settings_without_validation
from vembed.errors import UserError


def test_an_image_that_breaks_during_a_run_is_named_with_its_record(tmp_path):
    picture = tmp_path / "picture.jpg"
    picture.write_bytes(encoded())
    rows = []
    for number in range(400):
        (tmp_path / f"{number}.jpg").symlink_to(picture)
        rows.append({"query": f"red {number}", "positive": {"image": f"{number}.jpg"}})

    def on_step(_):
        broken = tmp_path / "broken.jpg"
        broken.write_bytes(b"\xff\xd8\xff\xe0 nothing")
        broken.replace(picture)  # never empty in between

    config = settings_without_validation(
        tmp_path,
        model_name=str(tiny.shared(tiny.tiny_clip)),
        max_steps=25,
    )
    write_jsonl(tmp_path / "train.jsonl", rows)
    with pytest.raises(UserError, match="is broken") as caught:
        vembed.train(config, on_step=on_step)
    named = re.search(r"/(\d+)\.jpg \(.*train\.jsonl:(\d+)\)", str(caught.value))
    image, line = map(int, named.groups())
    assert line == image + 1
