"""What holds for the tests of data."""

import pytest

from vembed.data import example_store


@pytest.fixture(autouse=True)
def _own_cache(cache_home):
    """Nothing that these tests cache goes to the user's own folder."""
    return cache_home


@pytest.fixture(autouse=True)
def _no_child_processes(monkeypatch):
    """Parts of files are read in this process, unless a test asks for more: each child imports for a second."""
    monkeypatch.setattr(example_store, "num_cores", lambda: 1)
