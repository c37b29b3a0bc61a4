"""What holds for all tests."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# Before torch is imported: processes with more threads than there are cores wait much longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis draw the same examples on every machine, unless a seed or a longer search asks for others."""
    searches = config.getoption("--hypothesis-seed") is not None or "VEMBED_FUZZ" in os.environ
    settings.register_profile("vembed", derandomize=not searches, database=None, deadline=None)
    settings.load_profile("vembed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --promise ROW."""
    parser.addoption("--promise", help="run the tests of one row of tests/acceptance/README.md alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests whose mark names the row of --promise."""
    row = config.getoption("--promise")
    if row is not None:
        items[:] = [one for one in items if any(row in mark.args for mark in one.iter_markers("promise"))]


def pytest_sessionstart() -> None:
    """A shell that runs tests in the background lets them ignore Ctrl-C and the closing of its terminal; the processes
    that tests start are to obey them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
