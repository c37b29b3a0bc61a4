"""Slow links between network namespaces where the kernel has no netem: TUN devices, whose packets this process delays.

A packet leaves its machine when those before it have been sent at the link's rate, and arrives so many seconds later.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

DEVICE = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
"""Large packets: each costs this process the same."""
MOST_WAITING = 64 * 2**20
"""Bytes on the way; more are dropped, as by a full queue."""
NETWORK = "10.77.0"


def has_tun() -> bool:
    """Return whether this kernel has TUN devices, and lets this process make one."""
    with suppress(OSError):
        os.close(_tun(f"vl{os.getpid() % 10**6}-probe"))
        return True
    return False


@contextmanager
def delayed_links(
    names: Sequence[str], delay: float, bits_per_second: float
) -> Iterator[None]:
    """Give the namespaces the addresses 10.77.0.1, 10.77.0.2, ... on links that delay what each sends."""
    ends: list[int] = []
    stop, stopped = os.pipe()
    try:
        for number, name in enumerate(names):
            device = f"vl{os.getpid() % 10**6}-{number}"
            ends.append(_tun(device))
            for words in (
                ("link", "set", device, "netns", name),
                ("-n", name, "link", "set", device, "name", "eth0"),
                (
                    "-n",
                    name,
                    "addr",
                    "add",
                    f"{NETWORK}.{number + 1}/24",
                    "dev",
                    "eth0",
                ),
                ("-n", name, "link", "set", "eth0", "mtu", str(MTU), "up"),
            ):
                subprocess.run(("ip", *words), check=True, capture_output=True)
        switch = threading.Thread(
            target=_carry, args=(ends, stop, delay, bits_per_second), daemon=True
        )
        switch.start()
        try:
            yield
        finally:
            os.write(stopped, b".")
            switch.join()
    finally:
        for one in (*ends, stop, stopped):
            os.close(one)


def _tun(name: str) -> int:
    """Return the end of a new device that this process reads and writes. It lasts until that is closed."""
    end = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(
            end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI)
        )
    except OSError:
        os.close(end)
        raise
    return end


def _carry(
    ends: Sequence[int], stop: int, delay: float, bits_per_second: float
) -> None:
    """Carry packets between the devices, by their destination, until `stop` can be read."""
    waiting: list[tuple[float, int, int, bytes]] = []
    free_at, held, number = dict.fromkeys(ends, 0.0), 0, 0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select((*ends, stop), (), (), left)[0]
        if stop in readable:
            return
        for end in readable:
            packet, now = os.read(end, 2**16), time.monotonic()
            # IPv4 alone, to an address of the network.
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if not 0 <= to < len(ends) or held + len(packet) > MOST_WAITING:
                continue
            free_at[end] = max(free_at[end], now) + 8 * len(packet) / bits_per_second
            number, held = number + 1, held + len(packet)
            heapq.heappush(waiting, (free_at[end] + delay, number, ends[to], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            held -= len(packet)
            with suppress(OSError):  # a machine that is down takes nothing
                os.write(end, packet)
