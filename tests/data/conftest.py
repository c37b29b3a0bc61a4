"""Nothing that these tests cache goes to the user's own folder."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(cache_home):
    return cache_home
