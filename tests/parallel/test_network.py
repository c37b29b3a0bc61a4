"""Which interface gloo gets: names that are loopback on machine 0, hosts of several addresses, IPv6."""

import logging
import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from vembed.parallel import environment, session
from vembed.parallel.environment import (
    default_interface,
    interface_to,
    is_loopback_by_name,
)

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.1", "fe80::1%eth0"],
    "eth1": ["fd00::1", "fe80::1%eth1"],
}
ROUTES = {
    "127.0.0.1": "127.0.0.1",
    "127.0.1.1": "127.0.0.1",
    "::1": "::1",
    "10.0.0.2": "10.0.0.1",
    "fd00::2": "fd00::1",
    "fe80::2%eth1": "fe80::1%eth1",
}
"""Where packets go to -> the own address that they come from."""
HOSTS = {
    "head": ["127.0.1.1"],
    "both": ["fd99::1", "127.0.1.1", "10.0.0.2"],
    "six": ["fd00::2"],
}


@pytest.fixture
def routes(monkeypatch):
    """A machine with two interfaces and a table of hosts."""
    known = dict(ROUTES)

    class Probe(socket.socket):
        def connect(self, target):
            if target[0] not in known:
                raise OSError(101, "Network is unreachable")
            self.own = known[target[0]]

        def getsockname(self):
            return self.own, 40000

    def look_up(host, port, **_):
        if host == "nowhere":
            raise socket.gaierror("Name or service not known")
        entries = []
        for address in HOSTS.get(host, [host]):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            entries.append((family, socket.SOCK_DGRAM, 0, "", (address, port)))
        return entries

    interfaces = {}
    for name, addresses in INTERFACES.items():
        interfaces[name] = [SimpleNamespace(address=address) for address in addresses]
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    return known


@pytest.mark.usefixtures("routes")
@pytest.mark.parametrize(
    ("host", "interface", "is_hidden"),
    [
        ("10.0.0.2", "eth0", False),
        # No route leads to its first address, and the second is loopback.
        ("both", "eth0", False),
        ("six", "eth1", False),
        ("127.0.0.1", "lo", False),
        ("head", "lo", True),
        ("nowhere", None, False),
    ],
)
def test_the_interface_that_leads_to_a_host(host, interface, is_hidden):
    assert interface_to(host, 29500) == interface
    assert is_loopback_by_name(host) == is_hidden


@pytest.mark.parametrize(
    ("default", "interface"),
    [(None, None), ("10.0.0.1", "eth0"), ("fd00::1", "eth1")],
)
def test_a_name_of_machine_0_that_is_loopback_there(
    routes, default, interface, monkeypatch, caplog
):
    """Debian maps a machine's own name to 127.0.1.1: with loopback for gloo the others find nobody there."""
    if default is not None:
        routes[environment._ELSEWHERE[":" in default]] = default
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with caplog.at_level(logging.INFO, "vembed"):
        session._choose_interface()
    assert default_interface() == os.environ.get("GLOO_SOCKET_IFNAME") == interface
    named = "to --main-process-ip"
    if interface is not None:
        named = f"interface {interface} (the default route's, because head is loopback"
    assert named in caplog.text
