"""The short version of `make chaos`. VEMBED_CHAOS_ROUNDS=10 in the environment makes it longer."""

import os

import pytest

from tests.stress.chaos import chaos


@pytest.mark.timeout(900)
def test_a_broken_run_ends_like_an_unbroken_one(tmp_path):
    rounds = int(os.environ.get("VEMBED_CHAOS_ROUNDS", "2"))
    faults = chaos(tmp_path, rounds, seed=12, is_forked=True)
    assert faults.total() >= rounds
