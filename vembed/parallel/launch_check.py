"""Meeting: the comparison of how all processes of a run were started, before anything is built.

Each rank writes two records into the store: `hello` (machine, number of processes, versions) at once, and `record`
(what the run says about itself) when it has read its data's fingerprints. Rank 0 compares them and writes the result,
which all ranks read: a run id, or one sentence with which each of them ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

import vembed
from vembed.errors import UserError
from vembed.parallel import collectives
from vembed.parallel.environment import RankInfo
from vembed.parallel.launch import LAUNCH_ID, LAUNCHER, RUN_ID
from vembed.parallel.network import machine_name
from vembed.parallel.rendezvous import (
    POLL_SECONDS,
    Limit,
    Waiting,
    address,
    not_found,
    poll,
)

RankFacts = Callable[[RankInfo], Mapping[str, Any]]
"""Facts of a rank about its run: values by name, equal on all ranks. It may raise UserError, which then ends all."""

JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_COMPLETION_ID")
"""Variables of cluster systems that are the same on all machines of a job."""
COMPARED_PACKAGES = ("torch", "transformers", "accelerate")
"""Beside vembed itself."""
COMPARED = "compared"
"""Key of a fact that is a dict of what is compared and how a message shows it ("shown")."""
DERIVED = " (decided)"
"""Ending of the name of a fact that follows from others."""
REFUSAL_SECONDS = 5.0
"""Time for which rank 0 keeps the store after a refusal, for ranks that have not read it yet."""
MAX_DIFFERENCES = 3
MAX_VALUE_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """Result of a meeting."""

    run_id: str
    machines: tuple[str, ...]
    """Machine of each rank."""


def is_named() -> bool:
    """Return whether this process was given an id of its run or job, by which another run's machine is sentence apart."""
    return bool(_job().keys() - {LAUNCH_ID})


def new_run_id() -> str:
    """Return an id for a run."""
    return uuid.uuid4().hex[:12]


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    digest = sources_digest(Path(vembed.__file__).parent)
    versions = {"vembed's version": f"{vembed.__version__} (sources {digest})"}
    for name in COMPARED_PACKAGES:
        versions[f"{name}'s version"] = metadata.version(name)
    return versions


def sources_digest(folder: Path) -> str:
    """Return a digest of a package's source files: checkouts of different days have one version number."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        digest.update(
            path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes()
        )
    return digest.hexdigest()


def check_launch(
    store: Store,
    ranks: RankInfo,
    limit: Limit,
    launch: Mapping[str, Any],
    rank_facts: RankFacts,
) -> LaunchFacts:
    """Compare all ranks and return the run's id and machines. Raise the same UserError on every rank if they differ.

    `launch`: facts that are known without reading a file. They are compared first.
    """
    _claim_rank(store, ranks)
    hello = {
        "machine": machine_name(),
        "host": _host(ranks),
        "facts": {**launch, **versions()},
        "job": _job(),
    }
    _put(store, f"hello-{ranks.rank}", hello)
    try:
        if ranks.rank == 0:
            return _coordinate(store, ranks, limit, hello, rank_facts)
        return _report(store, ranks, limit, rank_facts)
    except dist.DistNetworkError as error:
        raise UserError(
            f"Rank {ranks.rank} lost the connection to rank 0, which ended during the launch check: its own message "
            "says why; start all machines again"
        ) from error


def require_equal(name: str, value: Any, advice: str) -> None:
    """Raise the same UserError on every rank unless all have the same value. Collective."""
    facts = {}
    gathered = collectives.gather_objects_as_json([value, _host(None)])
    for rank, (rank_value, host) in enumerate(gathered):
        facts[rank] = ({name: rank_value}, host)
    problem = difference(facts)
    if problem is not None:
        raise UserError(f"{problem}: {advice}")


def difference(facts: Mapping[int, tuple[Mapping[str, Any], str]]) -> str | None:
    """Return what differs between ranks, on which rank and machine, with the values. None if nothing does.

    `facts`: values by name, and the machine, of each rank.
    """
    names: dict[str, None] = {}
    for values, _ in facts.values():
        names |= dict.fromkeys(values)
    differing = []
    for name in names:
        if len({_compared(values.get(name)) for values, _ in facts.values()}) > 1:
            differing.append(name)
    if not differing:
        return None
    # What follows from options that differ would only repeat them.
    differing = [name for name in differing if not name.endswith(DERIVED)] or differing
    sentences = [_sentence(name, facts) for name in differing[:MAX_DIFFERENCES]]
    num_more = len(differing) - len(sentences)
    more = f"; and {num_more} more differ" if num_more else ""
    return f"the processes of this run were not started alike: {'; '.join(sentences)}{more}"


def _sentence(name: str, facts: Mapping[int, tuple[Mapping[str, Any], str]]) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank in sorted(facts):
        value = _compared(facts[rank][0].get(name))
        ranks_by_value.setdefault(value, []).append(rank)
    parts = []
    for ranks in list(ranks_by_value.values())[:MAX_DIFFERENCES]:
        values, host = facts[ranks[0]]
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        parts.append(f"{_shown(values.get(name))} on rank {ranks[0]} ({host}){others}")
    return f"{name} is {' but '.join(parts)}"


def _compared(value: Any) -> str:
    return json.dumps(
        value[COMPARED] if isinstance(value, dict) and COMPARED in value else value,
        sort_keys=True,
    )


def _shown(value: Any) -> str:
    if isinstance(value, dict) and COMPARED in value:
        text = str(value["shown"])
    elif isinstance(value, str):
        text = value
    elif isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "not set"}[value]
    else:
        text = json.dumps(value)
    # The end matters too: long values may differ there alone.
    return (
        text
        if len(text) <= MAX_VALUE_CHARACTERS
        else f"{text[: MAX_VALUE_CHARACTERS // 2]}...{text[-MAX_VALUE_CHARACTERS // 2 :]}"
    )


def _claim_rank(store: Store, ranks: RankInfo) -> None:
    """Take the place of this machine, or of this rank, in the run. Raise UserError if another has it."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:  # it has started all processes of this machine
        place = ranks.rank - ranks.local_rank
        process = f"{_host(None)}, process {launcher}"
    else:
        place = ranks.rank
        process = f"{_host(None)}, process {os.getpid()}"
    # Writes only where nothing stands: the first process wins, and all others read its name.
    holder = store.compare_set(f"claim-{place}", "", process).decode()
    if holder != process:
        raise UserError(
            f"rank {ranks.rank} of the run at {address()} is taken already (by {holder}), so this process ({process}) has "
            "no place in it: give each machine its own --machine-rank (RANK), and each run its own port "
            "(--main-process-port)"
        )


def _coordinate(
    store: Store,
    ranks: RankInfo,
    limit: Limit,
    hello: Mapping[str, Any],
    rank_facts: RankFacts,
) -> LaunchFacts:
    """Collect the records of all ranks, compare, and write the result. On rank 0."""
    run_id = os.environ.get(RUN_ID) or os.environ.get(LAUNCH_ID) or new_run_id()
    hellos: dict[int, Mapping[str, Any]] = {0: hello}
    records: dict[int, Mapping[str, Any]] = {}
    problem: str | None = None

    def has_all_hellos() -> bool:
        nonlocal problem
        for rank in range(1, ranks.world_size):
            if rank not in hellos and store.check([f"hello-{rank}"]):
                hellos[rank] = _get(store, f"hello-{rank}")
                problem = problem or _launch_difference(hellos)
        return problem is not None or len(hellos) == ranks.world_size

    def has_all_records() -> bool:
        nonlocal problem
        for rank in range(1, ranks.world_size):
            if rank not in records and store.check([f"record-{rank}"]):
                records[rank] = _get(store, f"record-{rank}")
                problem = problem or _refusal(records[rank], rank, hellos[rank])
        return problem is not None or len(records) == ranks.world_size

    def absent() -> str:
        known = records if len(hellos) == ranks.world_size else hellos
        missing = [rank for rank in range(ranks.world_size) if rank not in known]
        listed = ", ".join(map(str, missing[:8])) + (
            ", ..." if len(missing) > 8 else ""
        )
        what = "" if known is hellos else " (which read their data's fingerprints)"
        return f"rank{'s' if len(missing) > 1 else ''} {listed} of {ranks.world_size}{what}"

    # The lock on output_dir comes first: another run's folder must not be waited for.
    records[0] = _rank_record(rank_facts, ranks)
    problem = _refusal(records[0], 0, hello)
    if problem is None:
        with Waiting(ranks, limit, absent):
            # Two phases: what is known without reading a file is compared before anyone waits for fingerprints of the
            # data.
            if not (
                poll(limit, has_all_hellos)
                and (problem is not None or poll(limit, has_all_records))
            ):
                problem = str(not_found(ranks, limit, f"{absent()} did not come"))
    if problem is None:
        sentence = difference(
            {
                rank: (records[rank]["facts"], hellos[rank]["host"])
                for rank in sorted(records)
            }
        )
        problem = None if sentence is None else f"{sentence}: {_ADVICE}"
    machines = [hellos[rank]["machine"] for rank in sorted(hellos)]
    _put(store, "result", {"error": problem, "run": run_id, "machines": machines})
    if problem is not None:
        _wait_for_readers(store, ranks)
        raise UserError(problem)
    return LaunchFacts(run_id, tuple(machines))


_ADVICE = "give every machine the same config, data, model and packages"


def _report(
    store: Store, ranks: RankInfo, limit: Limit, rank_facts: RankFacts
) -> LaunchFacts:
    """Introduce this rank and wait for the result. On all ranks but 0."""
    # A result that is there already is a refusal: the data need not be read for it.
    if not store.check(["result"]):
        _put(store, f"record-{ranks.rank}", _rank_record(rank_facts, ranks))
    state = f"rank 0 at {address()}, which waits for the other processes"
    with Waiting(ranks, limit, lambda: state):
        if not poll(limit, lambda: bool(store.check(["result"]))):
            raise not_found(ranks, limit, "rank 0 did not answer")
    result = _get(store, "result")
    store.set(f"read-{ranks.rank}", "1")
    if result["error"] is not None:
        raise UserError(result["error"])
    return LaunchFacts(result["run"], tuple(result["machines"]))


def _rank_record(rank_facts: RankFacts, ranks: RankInfo) -> dict[str, Any]:
    """Return the record of this rank: its facts, or the mistake that it found."""
    try:
        return {"facts": dict(rank_facts(ranks))}
    except UserError as error:
        return {"error": str(error)}


def _refusal(
    record: Mapping[str, Any], rank: int, hello: Mapping[str, Any]
) -> str | None:
    if "error" not in record:
        return None
    return (
        str(record["error"])
        if rank == 0
        else f"{record['error']} (rank {rank}, {hello['host']})"
    )


def _launch_difference(hellos: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return what differs between the launches of the ranks that have come, or None."""
    sentence = difference(
        {rank: (hello["facts"], hello["host"]) for rank, hello in hellos.items()}
    )
    if sentence is not None:
        return f"{sentence}: {_ADVICE}, and the same number of machines and processes"
    first_job = hellos[0]["job"]
    first_host = hellos[0]["host"]
    for rank, hello in hellos.items():
        job = hello["job"]
        host = hello["host"]
        first_id = first_job.get(RUN_ID)
        run_id = job.get(RUN_ID)
        if (first_id is None) != (run_id is None):
            return (
                f"the run id is {first_id or 'not given'} on rank 0 ({first_host}) and "
                f"{run_id or 'not given'} on rank {rank} ({host}): give the same "
                "--run-id (VEMBED_RUN_ID) on every machine, or on none"
            )
        # A job id that only one of the two has does not tell them apart.
        for name in first_job.keys() & job.keys():
            if first_job[name] != job[name]:
                return (
                    f"rank 0 ({first_host}) and rank {rank} ({host}) belong to different "
                    f"runs ({name} {first_job[name]} and {job[name]}): give each run a "
                    "port of its own (--main-process-port)"
                )
    return None


def _wait_for_readers(store: Store, ranks: RankInfo) -> None:
    """Keep the store until all ranks have read the result, or for some seconds."""
    end = time.monotonic() + REFUSAL_SECONDS
    names = [f"read-{rank}" for rank in range(1, ranks.world_size)]
    while time.monotonic() < end and not store.check(names):
        time.sleep(POLL_SECONDS)


def _host(ranks: RankInfo | None) -> str:
    """Return the name of this machine for messages, with its number if the launcher has said it."""
    name = machine_name().partition(" ")[0]
    if (
        ranks is None
        or not ranks.is_counted
        or ranks.local_world_size == ranks.world_size
    ):
        return name
    return f"machine {ranks.rank // ranks.local_world_size}, {name}"


def _job() -> dict[str, str]:
    """Return the ids of run and job that this process was given."""
    # The parts of a heterogeneous Slurm job have different ids.
    jobs = [
        name
        for name in JOB_IDS
        if name != "SLURM_JOB_ID" or "SLURM_HET_SIZE" not in os.environ
    ]
    return {
        name: value
        for name in (RUN_ID, LAUNCH_ID, *jobs)
        if (value := os.environ.get(name))
    }


def counted(ranks: RankInfo, launch_facts: LaunchFacts) -> RankInfo:
    """Return the rank info with the number of processes on this machine, if no launcher has said it."""
    if ranks.is_counted:
        return ranks
    count = launch_facts.machines.count(launch_facts.machines[ranks.rank])
    return replace(ranks, local_world_size=count, is_counted=True)


def _put(store: Store, key: str, value: Mapping[str, Any]) -> None:
    store.set(key, json.dumps(value))


def _get(store: Store, key: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(store.get(key))
    return value
