"""What holds for all tests."""

from __future__ import annotations

import os
import signal

# Before torch is imported: processes with more threads than there are cores wait much longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionstart() -> None:
    """A shell that runs tests in the background lets them ignore Ctrl-C and the closing of its terminal; the processes
    that tests start are to obey them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
