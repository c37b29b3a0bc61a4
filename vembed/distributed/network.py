"""The network between machines: which interface of this one leads to the others."""

from __future__ import annotations

import socket

import psutil


def interface_to(address: str, port: int) -> str | None:
    """Name of the interface that packets to an address leave by; None where nothing leads there. Sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        # An IPv6 address may carry its interface: fe80::1%eth0.
        if any(entry.family == family and entry.address.partition("%")[0] == own for entry in entries):
            return name
    return None
