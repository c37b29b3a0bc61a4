"""Network interfaces: the interface of this machine that leads to the other machines."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import psutil

_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
"""Addresses reserved for documentation, which no machine has; packets to them take the default route."""


def interface_to(address: str, port: int) -> str | None:
    """Return the interface for packets to an address or a host; None without a route.

    Of a host's addresses, the first one that is not loopback is preferred. Sends nothing.
    """
    local_addresses = _own_addresses(address, port)
    outward = [
        local_address
        for local_address in local_addresses
        if not _is_loopback(local_address)
    ]
    return _interface_of((outward or local_addresses)[0]) if local_addresses else None


def default_interface() -> str | None:
    """Return the interface of the default route; None without one. Sends nothing."""
    return next(
        (
            name
            for address in _ELSEWHERE
            if (name := interface_to(address, 9)) is not None
        ),
        None,
    )


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


def _own_addresses(address: str, port: int) -> list[str]:
    """Return the source address of this machine for packets to each reachable address of a host."""
    try:
        addresses = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    local_addresses: list[str] = []
    for family, kind, protocol, _, target in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # UDP: chooses the route, sends nothing
                local_addresses.append(str(probe.getsockname()[0]))
        except OSError:  # an IPv6 address without an IPv6 network, for example
            continue
    return local_addresses


def _is_loopback(text: str) -> bool:
    """Return True if a text is a loopback address."""
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _interface_of(local_addresses: str) -> str | None:
    # An IPv6 address may carry its interface (fe80::1%eth0), and two interfaces may have the same bare address.
    entries = [
        (name, entry.address)
        for name, addresses in psutil.net_if_addrs().items()
        for entry in addresses
    ]
    exact = [name for name, address in entries if address == local_addresses]
    bare = [
        name
        for name, address in entries
        if address.partition("%")[0] == local_addresses.partition("%")[0]
    ]
    return next(iter(exact + bare), None)
