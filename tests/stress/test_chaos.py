"""The short version of `make chaos`: a run of one process is stopped, and goes on with two, of which one is killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.stress.chaos import chaos


@pytest.mark.timeout(300)
def test_a_broken_run_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    story = chaos(tmp_path, rounds=2, draw=random.Random(294))
    assert story.killed and story.stopped
