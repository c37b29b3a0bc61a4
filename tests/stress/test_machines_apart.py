"""Two "machines" with addresses of their own and a slow link: one is killed, and all are started again.

VEMBED_MACHINES=ddp-2 (or several names, or `all`) in the environment runs it: real commands take minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress.machines import ROWS, all_rows, bare_namespaces, why_not
from tests.stress.slow_links import delayed_links, has_tun

ASKED = os.environ.get("VEMBED_MACHINES", "").split()


@pytest.mark.skipif(
    not ASKED,
    reason="minutes of real commands: VEMBED_MACHINES=all, or python -m tests.stress.machines",
)
@pytest.mark.timeout(1200)
def test_losses_over_machines_are_those_of_one(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    all_rows(tmp_path, [row for row in ROWS if "all" in ASKED or row.name in ASKED])


def test_machines_of_their_own_or_a_reason() -> None:
    reason = why_not()
    assert reason is None or reason.strip()


# Prints the seconds of a connection, an answer, and 2 MB in one direction.
CLIENT = """
import socket, time
began = time.monotonic()
with socket.create_connection(("10.77.0.1", 7777), timeout=20) as there:
    print(time.monotonic() - began)
    began = time.monotonic()
    there.sendall(bytes(2_000_000))
    there.shutdown(socket.SHUT_WR)
    assert there.recv(9) == b"2000000"
    print(time.monotonic() - began)
"""
SERVER = """
import socket
with socket.create_server(("10.77.0.1", 7777)) as door:
    print("open", flush=True)
    with door.accept()[0] as there:
        size = 0
        while data := there.recv(2**20):
            size += len(data)
        there.sendall(str(size).encode())
"""


def test_links_of_this_process_delay_and_limit() -> None:
    if (reason := why_not()) is not None or not has_tun():
        pytest.skip(reason or "no TUN devices")
    # 100 ms there and as much back; 2 MB at 16 Mbit/s are a second.
    with bare_namespaces(2) as names, delayed_links(names, 0.1, 16e6):
        enter = [["ip", "netns", "exec", name, sys.executable, "-c"] for name in names]
        with subprocess.Popen([*enter[0], SERVER], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            done = subprocess.run(
                [*enter[1], CLIENT],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
    connected, sent = map(float, done.stdout.split())
    assert connected >= 0.2
    assert sent >= 1.0 + 0.2
