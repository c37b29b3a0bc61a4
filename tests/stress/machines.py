"""python -m tests.stress.machines: runs over several machines: network namespaces with addresses of their own.

Each machine has a link of 1 Gbit/s that delays what it sends by 20 ms, where the kernel has `tc ... netem`. Each is started by
the command of docs/multi-node.md; one is killed and all are started again; losses and weights are those of one process.
Needs root on Linux, `ip` and `tc`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.stress.chaos import (
    ENVIRONMENT,
    compare,
    finish,
    last_step,
    start_run,
    wait_for_steps,
    write_run,
)

NUM_STEPS = 8
KILLED_AFTER = 3
SECONDS_TO_NOTICE = 90.0
LINK = "netem delay 20ms rate 1gbit"


@dataclass(frozen=True)
class Row:
    """One row of the table: machines, processes of each, and options."""

    name: str
    machines: int
    nproc: int
    options: tuple[str, ...]


ROWS = (
    Row("ddp-2", 2, 1, ("strategy=ddp",)),
    Row("ddp-3", 3, 1, ("strategy=ddp",)),
    Row("fsdp2-2", 2, 1, ("strategy=fsdp", "fsdp_version=2")),
    Row("fsdp2-3", 3, 1, ("strategy=fsdp", "fsdp_version=2")),
    Row(
        "hsdp-2",
        2,
        2,
        ("strategy=fsdp", "fsdp_version=2", "fsdp_sharding_strategy=HYBRID_SHARD"),
    ),
)


def why_not():
    """Return why this machine cannot play several, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [entry for entry in ("ip", "tc") if shutil.which(entry) is None]:
        return f"{missing[0]} is not installed"
    try:
        with namespaces(1):
            return None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode().strip() or error.returncode
        return (
            f"network namespaces are not permitted here ({' '.join(error.cmd)}: {said})"
        )


@contextmanager
def namespaces(count):
    """Lay out machines 10.77.0.1, 10.77.0.2, ... with links between all, and give the names of their namespaces."""
    built = []
    try:
        for number in range(count + 1):
            name = f"vembed-{os.getpid()}-{number}"
            run(f"ip netns add {name}")
            built.append(name)
            run(f"ip -n {name} link set lo up")
        *names, hub = built
        run(f"ip -n {hub} link add switch type bridge")
        run(f"ip -n {hub} link set switch up")
        for number, name in enumerate(names):
            port = f"port{number}"
            run(f"ip -n {hub} link add {port} type veth peer name eth0 netns {name}")
            run(f"ip -n {hub} link set {port} master switch up")
            run(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            try:
                run(f"ip netns exec {name} tc qdisc add dev eth0 root {LINK}")
            except subprocess.CalledProcessError as error:
                print(
                    f"link without delay: {error.stderr.decode().strip()}", flush=True
                )
        yield names
    finally:
        for name in reversed(built):
            run(f"ip netns delete {name}")


def run(command):
    """Run a command; CalledProcessError has what it said."""
    subprocess.run(command.split(), check=True, capture_output=True)


def start(names, config, output, row):
    """Start every machine by the command of the docs."""
    machines = []
    for number, name in enumerate(names):
        options = (
            f"output_dir={output} --num-machines {row.machines} --machine-rank {number} "
            f"--main-process-ip 10.77.0.1 --run-id friday --nproc {row.nproc}"
        )
        command = f"ip netns exec {name} {sys.executable} -m vembed train {config} {options}".split()
        command += [*row.options, "dist_timeout_minutes=2"]
        with (output.parent / f"{output.name}-{number}.txt").open("ab") as console:
            machines.append(
                subprocess.Popen(
                    command,
                    stdout=console,
                    stderr=console,
                    cwd=output.parent,
                    start_new_session=True,
                    env=ENVIRONMENT,
                )
            )
    return machines


def kill_machine(name):
    """End every process of a machine at once, as a power failure does."""
    actual = subprocess.run(
        ["ip", "netns", "pids", name], check=True, capture_output=True, text=True
    )
    for pid in actual.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def train(row, folder, config, whole):
    """Train over the machines of a row, kill the last one, start all again, and compare with one process."""
    output = folder / row.name
    with namespaces(row.machines) as names:
        machines = start(names, config, output, row)
        wait_for_steps(machines[0], output, KILLED_AFTER)
        assert machines[0].poll() is None, (folder / f"{row.name}-0.txt").read_text()[
            -3000:
        ]
        kill_machine(names[-1])
        began = time.monotonic()
        for machine in machines:
            machine.wait(timeout=SECONDS_TO_NOTICE)
        noticed = time.monotonic() - began
        assert machines[0].returncode not in (0, 2), "the others end with an error"
        reached = last_step(output)
        for number, machine in enumerate(start(names, config, output, row)):
            code = machine.wait(timeout=600)
            assert code == 0, (folder / f"{row.name}-{number}.txt").read_text()[-3000:]
    print(
        f"{row.name}: killed after step {reached}, noticed in {noticed:.0f} s; ", end=""
    )
    compare(whole, output)


def all_rows(folder, rows):
    """Train every row, and one process to compare with."""
    config = write_run(folder, NUM_STEPS)
    whole = folder / "whole"
    finish(start_run(config, whole, 1, "ddp"))
    for row in rows:
        train(row, folder, config, whole)


def main(words=None):
    """Run the rows that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "rows", nargs="*", choices=[*(row.name for row in ROWS), []], default=[]
    )
    arguments = parser.parse_args(words)
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="vembed-machines-") as name:
        all_rows(
            Path(name),
            [row for row in ROWS if not arguments.rows or row.name in arguments.rows],
        )


if __name__ == "__main__":
    main()
