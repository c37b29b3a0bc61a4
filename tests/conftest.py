"""What holds for all tests."""

import atexit
import gc
import logging
import os
import shutil
import signal
import socket
import tempfile

import pytest
from hypothesis import settings

# Before torch is imported: processes with more threads than there are cores wait much longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test outlives a power cut, and waiting for the disk is a sixth of a small run. Tests of flushing replace it again.
os.fsync = lambda _: None
gc.disable()  # until all tests are collected: what is imported stays

LONG = (
    "imitation/test_imitation.py",
    "docs/test_recipes.py",
    "export/test_export.py",
    "serve/test_serve.py",
    "parity/test_parity.py",
    "export/test_rerankers.py",
    "parity/test_families_parity.py",
    "stages/test_stages.py",
    "launch/test_restarts.py",
    "families/test_learning.py",
    "models/test_compiled.py",
    "models/test_sharded.py",
    "data/test_stream.py",
    "docs/test_extending.py",
    "training/test_frozen.py",
    "training/test_late_signals.py",
    "own/test_document.py",
    "own/test_own.py",
    "data/test_formats.py",
    "weights/test_edit.py",
    "weights/test_merge.py",
    "training/test_resume_run.py",
    "rerank/test_rerank.py",
    "parity/test_kept_graphs.py",
    "parity/test_teachers_parity.py",
    "benchmarks/test_gpu.py",
)
"""Files that take longest, which several workers begin with: a long one at the end would leave the others idle."""


def pytest_configure(config):
    """Let hypothesis draw the same examples on every machine, unless a seed or a longer search asks for others; let
    the workers take the files in our order, and share the folder of tiny models."""
    searches = (
        config.getoption("--hypothesis-seed") is not None or "VEMBED_FUZZ" in os.environ
    )
    settings.register_profile(
        "vembed", derandomize=not searches, database=None, deadline=None
    )
    settings.load_profile("vembed")
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False
    if "VEMBED_TINY_MODELS" not in os.environ:
        folder = os.environ["VEMBED_TINY_MODELS"] = tempfile.mkdtemp(
            prefix="vembed-tiny-"
        )
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def pytest_addoption(parser):
    """Add --promise ROW."""
    parser.addoption(
        "--promise", help="run the tests of one row of tests/acceptance/README.md alone"
    )


def pytest_collection_modifyitems(config, items):
    """Keep the tests whose mark names the row of --promise, and begin with the long files."""
    row = config.getoption("--promise")
    if row is not None:
        items[:] = [
            item
            for item in items
            if any(row in mark.args for mark in item.iter_markers("promise"))
        ]
    places = {f"tests/{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda entry: places.get(entry.nodeid.partition("::")[0], len(LONG)))


def pytest_collection_finish():
    """Leave the modules that are loaded now out of every later garbage collection, and let collections of all objects
    be ten times as rare: tests load more modules, and each collection passes them all (a third of the time of some
    files)."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


def pytest_sessionstart(session):
    """Prepare signals, and the connection of --reruns.

    A shell that runs tests in the background lets them ignore Ctrl-C and the closing of its terminal; the processes
    that tests start are to obey them. A worker sends --reruns two messages before each test and waits for the answer
    to the second one, which Nagle's algorithm holds back until the first is acknowledged: 40 ms later.
    """
    connection = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def cache_home(tmp_path_factory, monkeypatch):
    """An empty cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _logger_as_at_the_start():
    """Reset the logger "vembed", which an earlier test may have left as a run sets it."""
    log = logging.getLogger("vembed")
    log.setLevel(logging.NOTSET)
    log.propagate = True
    log.disabled = False
