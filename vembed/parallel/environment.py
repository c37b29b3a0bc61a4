"""What a process knows before it meets the others: the launcher's variables, the network and the cores of this machine."""

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vembed.config.values import Environment
from vembed.errors import UserError

GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of which either all or none must be set."""


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of a process, over all machines and on its own machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    is_counted: bool = True
    """False if nobody has said how many processes run on this machine; `local_world_size` then is that of all."""


def read_rank_info(env: Environment = os.environ) -> RankInfo:
    """Read the launcher's variables; none means one process. Raise UserError if only some are set."""
    present = [name for name in GROUP if env.get(name)]
    if not present:
        return RankInfo()
    missing = [name for name in GROUP if name not in present]
    if missing:
        values_set = ", ".join(f"{name}={env[name]}" for name in present)
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set although {values_set}: set "
            f"{', '.join(GROUP)} together (torchrun and accelerate launch do), or none of them for one process."
        )
    rank, world_size, local_rank = (
        _whole_number(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if not 0 <= rank < world_size:
        raise UserError(
            f"RANK={rank} must be between 0 and WORLD_SIZE - 1 = {world_size - 1}: RANK is the number of the process."
        )
    _whole_number(env, "MASTER_PORT")
    # Started by hand: the processes of each machine are counted when all have met (meeting.counted).
    is_counted = bool(env.get("LOCAL_WORLD_SIZE"))
    local_world_size = world_size
    if is_counted:
        local_world_size = min(_whole_number(env, "LOCAL_WORLD_SIZE"), world_size)
    return RankInfo(
        rank,
        world_size,
        local_rank,
        local_world_size,
        is_counted or world_size == 1,
    )


def _whole_number(env: Environment, name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise UserError(f"{name}={env[name]!r} is not a whole number.") from None


# ---- network -----------------------------------------------------------------

ELSEWHERE = "198.51.100.1"
"""An address reserved for documentation, which no machine has; packets to it take the default route."""


def interface_to(address: str) -> str | None:
    """Return the interface for packets to an IPv4 address or a host; None without a route. Sends nothing."""
    with (
        suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((address, 9))  # UDP: chooses the route, sends nothing
        source = probe.getsockname()[0]
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address == source for entry in entries):
                return name
    return None


def machine_name() -> str:
    """Return a name that processes share if and only if they run on one machine: the host's name and its boot.

    Two machines may have the same name (localhost), and containers of one machine the same boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


# ---- cores -------------------------------------------------------------------


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    count = os.cpu_count() or 1
    if sys.platform == "linux":
        count = len(os.sched_getaffinity(0))
    return count
