"""Which interface gloo gets, also where the name of machine 0 is loopback."""

import logging
import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from vembed.parallel import environment, session
from vembed.parallel.environment import interface_to

ROUTES = {"127.0.0.1": "127.0.0.1", "head": "127.0.0.1", "node0": "10.0.0.1"}
"""Where packets go to -> the own address that they come from."""


@pytest.fixture
def routes(monkeypatch):
    """A machine with one interface beside loopback."""
    known = dict(ROUTES)

    class Probe(socket.socket):
        def connect(self, target):
            if target[0] not in known:
                raise OSError(101, "Network is unreachable")
            self.own = known[target[0]]

        def getsockname(self):
            return self.own, 40000

    actual = {}
    for name, address in (("lo", "127.0.0.1"), ("eth0", "10.0.0.1")):
        actual[name] = [SimpleNamespace(address=address)]
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: actual)
    return known


@pytest.mark.usefixtures("routes")
@pytest.mark.parametrize(
    ("host", "interface"), [("node0", "eth0"), ("head", "lo"), ("nowhere", None)]
)
def test_the_interface_that_leads_to_a_host(host, interface):
    assert interface_to(host) == interface


@pytest.mark.parametrize("default", [None, "10.0.0.1"])
def test_a_name_of_machine_0_that_is_loopback_there(
    routes, default, monkeypatch, caplog
):
    """Debian maps a machine's own name to 127.0.1.1: with loopback for gloo the others find nobody there."""
    if default is not None:
        routes[environment.ELSEWHERE] = default
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with caplog.at_level(logging.INFO, "vembed"):
        session._choose_interface()
    expected = None if default is None else "eth0"
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    assert ("to --main-process-ip" in caplog.text) is (expected is None)
    line = f"interface {expected} (the default route's, because head is loopback on"
    assert (line in caplog.text) == bool(expected)
