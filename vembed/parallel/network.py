"""Network interfaces: the interface of this machine that leads to the other machines."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from pathlib import Path

import psutil

_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
"""Addresses reserved for documentation, which no machine has; packets to them take the default route."""


def interface_to(address: str, port: int) -> str | None:
    """Return the interface for packets to an address or a host; None without a route. Sends nothing.

    Of a host's addresses, the first one that is not loopback is preferred.
    """
    sources: list[str] = []
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            address, port, type=socket.SOCK_DGRAM
        ):
            # An IPv6 address without an IPv6 network, for example, fails.
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # UDP: chooses the route, sends nothing
                sources.append(str(probe.getsockname()[0]))
    if not sources:
        return None
    source = min(sources, key=_is_loopback)
    # An IPv6 address may carry its interface (fe80::1%eth0), and two interfaces may have the same bare address.
    interfaces: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            interfaces.setdefault(entry.address, name)
            interfaces.setdefault(entry.address.partition("%")[0], name)
    return interfaces.get(source) or interfaces.get(source.partition("%")[0])


def default_interface() -> str | None:
    """Return the interface of the default route; None without one. Sends nothing."""
    for address in _ELSEWHERE:
        interface = interface_to(address, 9)
        if interface is not None:
            return interface
    return None


def is_loopback_by_name(host: str) -> bool:
    """Return True if a host name resolves to loopback only, as Debian's /etc/hosts maps the machine's own name.

    False for localhost and 127.0.0.1, which users give on purpose to run several "machines" on one.
    """
    if host == "localhost" or _is_loopback(host):
        return False
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return all(_is_loopback(str(entry[4][0])) for entry in addresses)


def machine_name() -> str:
    """Return a name that processes share if and only if they run on one machine: the host's name and its boot.

    Two machines may have the same name (localhost), and containers of one machine the same boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _is_loopback(text: str) -> bool:
    """Return True if a text is a loopback address."""
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False
