"""Which interface gloo gets: names that are loopback on machine 0, hosts of several addresses, IPv6."""

import logging
import os
import socket

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
        if host not in HOSTS and ":" not in host and not host[0].isdigit():
            raise socket.gaierror("Name or service not known")
        return [
            (
                socket.AF_INET6 if ":" in entry else socket.AF_INET,
                socket.SOCK_DGRAM,
                0,
                "",
                (entry, port),
            )
            for entry in HOSTS.get(host, [host])
        ]

    actual = {
        name: [type("Entry", (), {"address": address})() for address in addresses]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: actual)
    return known


@pytest.mark.usefixtures("routes")
@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("10.0.0.2", "eth0"),
        (
            "both",
            "eth0",
        ),  # no route leads to its first address, and the second is loopback
        ("six", "eth1"),
        ("fe80::2%eth1", "eth1"),
        ("127.0.0.1", "lo"),
        ("head", "lo"),
        ("nowhere", None),
        ("192.0.2.9", None),
    ],
)
def test_the_interface_that_leads_to_a_host(host, interface):
    assert interface_to(host, 29500) == interface


@pytest.mark.usefixtures("routes")
def test_which_names_hide_behind_loopback():
    hosts = [
        "head",
        "both",
        "six",
        "localhost",
        "127.0.0.1",
        "::1",
        "10.0.0.2",
        "nowhere",
    ]
    assert [host for host in hosts if is_loopback_by_name(host)] == ["head"]


@pytest.mark.parametrize(
    "default", [None, "10.0.0.1", "fd00::1"], ids=["none", "IPv4", "IPv6"]
)
def test_a_name_of_machine_0_that_is_loopback_there(
    routes, default, monkeypatch, caplog
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
    expected = {None: None, "10.0.0.1": "eth0", "fd00::1": "eth1"}[default]
    assert default_interface() == os.environ.get("GLOO_SOCKET_IFNAME") == expected
    assert ("to --main-process-ip" in caplog.text) is (expected is None)
    assert (
        f"interface {expected} (the default route's, because head is loopback on"
        in caplog.text
    ) is bool(expected)
