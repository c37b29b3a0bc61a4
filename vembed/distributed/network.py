"""The network between machines: which interface of this one leads to the others."""

from __future__ import annotations

import ipaddress
import socket

import psutil

_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
"""Addresses that documents use and no machine has: what leads there is the default route."""


def interface_to(address: str, port: int) -> str | None:
    """Name of the interface that packets to an address or a host leave by; None where nothing leads there.

    Of a host's addresses the first that is not loopback counts, if there is one. Sends nothing.
    """
    own = _own_addresses(address, port)
    outward = [one for one in own if not _is_loopback(one)]
    return _interface_of((outward or own)[0]) if own else None


def default_interface() -> str | None:
    """Name of the interface of the default route; None where there is no such route. Sends nothing."""
    return next((name for address in _ELSEWHERE if (name := interface_to(address, 9)) is not None), None)


def is_loopback_by_name(host: str) -> bool:
    """Whether this machine knows a host's name as loopback only, as Debian's /etc/hosts has the machine's own name.

    Who writes localhost or 127.0.0.1 means it: several "machines" that are one.
    """
    if host == "localhost" or _is_loopback(host):
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return all(_is_loopback(str(entry[4][0])) for entry in found)


def _own_addresses(address: str, port: int) -> list[str]:
    """For each address of a host that something leads to: the address of this machine that packets would come from."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    own: list[str] = []
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                own.append(str(probe.getsockname()[0]))
        except OSError:  # an IPv6 address where there is no such network, for one
            continue
    return own


def _is_loopback(text: str) -> bool:
    """Whether a text is an address, and one of loopback."""
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _interface_of(own: str) -> str | None:
    # An IPv6 address may carry its interface, fe80::1%eth0, and two interfaces may have the same without it.
    entries = [(name, entry.address) for name, found in psutil.net_if_addrs().items() for entry in found]
    exact = [name for name, address in entries if address == own]
    bare = [name for name, address in entries if address.partition("%")[0] == own.partition("%")[0]]
    return next(iter(exact + bare), None)
