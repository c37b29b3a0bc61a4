"""Checks of `vembed doctor` that need torch: devices, the self-test on several processes, the checklist of a config."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from vembed.cli.run_train import Launch, resolve_launch
from vembed.cli.support import LINE, Result, print_lines
from vembed.config.decisions import ResolvedRun
from vembed.config.loading import resolve_run
from vembed.errors import UserError
from vembed.parallel.devices import GIB, bf16_instructions
from vembed.parallel.launch import num_visible_devices, rank_environments, run_ranks
from vembed.parallel.placement import Placement
from vembed.parallel.step_memory import MemoryEstimate, ModelSize, measure
from vembed.pipelines.prediction import FITS, place_here
from vembed.progress import counted

SELF_TEST = """
from vembed.cli.support import quieten_libraries

quieten_libraries()
from vembed.cli.selftest import main

raise SystemExit(main())
"""
"""Program of each process of the self-test. What libraries say about missing kernels is no finding."""
LARGEST_SIMPLE_BATCH = 16
# Variables of a launcher that has started the doctor would tell the self-test's processes that they are ranks of its
# run.
LAUNCHER_VARIABLES = re.compile(r"(ACCELERATE|FSDP|TORCHELASTIC)_|GROUP_|ROLE_")


def check_machine(
    config: str | None,
    nproc: int | None,
    versions: Sequence[str],
) -> tuple[Result, int]:
    """Print the devices, run the self-test, and check a config. Return the result and the exit code."""
    run = None if config is None else resolve_run(config)
    launch = None
    if nproc is not None:
        launch = Launch(nproc, "--nproc")
    elif run is not None:
        launch = resolve_launch(run)
    # Two on a machine without GPUs: one process shards nothing.
    num_tested = nproc or num_visible_devices() or 2
    if launch is not None and run is not None and run.processes.value != "auto":
        num_tested = launch.num_processes
    devices = list(describe_devices())
    tested = counted(num_tested, "process", "processes")
    print_lines(*devices, "", f"Self-test on {tested}", LINE)
    env = {
        name: value
        for name, value in os.environ.items()
        if not LAUNCHER_VARIABLES.match(name)
    }
    code = run_ranks(
        [sys.executable, "-c", SELF_TEST],
        rank_environments(num_tested, env=env),
    )
    passes_all = code == 0
    print_lines(f"Self-test: {'pass' if passes_all else 'FAIL'}")
    findings = []
    if run is not None and launch is not None:
        processes = counted(launch.world_size, "process", "processes")
        print_lines("", f"Checklist for {config} on {processes}", LINE)
        checks = checklist(run, launch, self_test_passed=code == 0)
        for number, (passed, line) in enumerate(checks, start=1):
            print_lines(f"{number}. {line}: {'pass' if passed else 'FAIL'}")
            findings.append({"passed": passed, "check": line})
            passes_all = passes_all and passed
    result = {
        "passed": passes_all,
        "self_test_passed": code == 0,
        "num_processes": num_tested,
        "machine": [*versions, *devices],
        "checks": findings,
    }
    return result, 0 if passes_all else 1


def describe_devices() -> Iterator[str]:
    """Yield the devices, their interconnect and their arithmetic."""
    num_devices = torch.cuda.device_count()
    yield f"Found {num_devices} GPU(s)"
    yield f"CUDA available: {torch.cuda.is_available()}"
    yield f"CUDA devices: {num_devices}"
    yield f"NCCL available: {dist.is_nccl_available()}"
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    yield f"NCCL version: {'.'.join(str(part) for part in nccl) or 'not available'}"
    for index in range(num_devices):
        facts = torch.cuda.get_device_properties(index)
        size = facts.total_memory / GIB
        yield f"GPU {index}: {facts.name}, {size:.1f}GB, compute capability {facts.major}.{facts.minor}"
    memory = psutil.virtual_memory()
    yield (
        f"CPU: {psutil.cpu_count(logical=False) or psutil.cpu_count()} cores, {memory.total / GIB:.1f}GB memory, "
        f"{memory.available / GIB:.1f}GB of it free"
    )
    yield f"Interconnect: {interconnect(num_devices)}"
    has_bf16 = bool(bf16_instructions())
    if num_devices:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    yield f"bf16: {'yes' if has_bf16 else 'no, mixed_precision: auto keeps float32'}"


def interconnect(num_devices: int) -> str:
    """Return the links between this machine's GPUs, and to other machines."""
    has_infiniband = any(Path("/sys/class/infiniband").glob("*"))
    between_machines = "InfiniBand" if has_infiniband else "no InfiniBand"
    if num_devices < 2:
        return f"{num_devices} GPU(s), no links between them; {between_machines}"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return f"unknown between GPUs (no nvidia-smi); {between_machines}"
    table = subprocess.run(
        [tool, "topo", "-m"], capture_output=True, text=True, check=False, timeout=20
    ).stdout
    return f"{between_machines} (NV: NVLink, others: PCIe, on which sharding costs noticeable time)\n{table}"


def checklist(
    run: ResolvedRun,
    launch: Launch,
    *,
    self_test_passed: bool,
) -> Iterator[tuple[bool, str]]:
    """Yield seven checks for before a long run, each as (passed, finding)."""
    num_devices = torch.cuda.device_count()
    if num_devices:
        num_processes = launch.num_processes
        yield (
            num_processes <= num_devices,
            f"GPUs visible: {num_devices} for {num_processes} process(es)",
        )
    else:
        yield (
            run.precision.value != "fp16",
            "GPUs visible: none, the run computes on the CPU",
        )
    try:
        placement = place_here(run, launch.first_rank)
        size = placement.size or measure(run.config)
    except UserError as error:
        yield False, f"strategy, batch, memory: {error}"
    else:
        yield _check_strategy(placement, size)
        batch = placement.run.config.batch
        passes = True
        line = f"batch: {placement.num_examples:,d} per process"
        # Memory depends on the micro-batch, unless the user disables Gradient Cache.
        if batch.use_gradient_cache is False:
            passes = placement.num_examples <= LARGEST_SIMPLE_BATCH
            line += " at once, as use_gradient_cache: false keeps all graphs"
        else:
            line += f", micro_batch_tokens: {batch.micro_batch_tokens}"
        yield passes, line
        recomputation = placement.recomputation
        is_sharded = run.strategy.value == "fsdp" and launch.world_size > 1
        # Off by default means that micro-batches fit without it; off by hand may not be meant.
        passes = recomputation.value or not is_sharded
        passes = passes or recomputation.origin == "default"
        line = f"gradient checkpointing: {'on' if recomputation.value else 'off'}"
        yield passes, f"{line} ({recomputation.reason})"
        need = MemoryEstimate(placement, size).in_step().total
        shard = ""
        if placement.num_shards > 1:
            shard = f", a shard of 1/{placement.num_shards} on each process"
        yield (
            need <= FITS * placement.memory,
            f"memory: {size.total:,d} parameters need {need / GIB:.2f}GB of the {placement.memory / GIB:.1f}GB of a "
            f"process{shard}",
        )
        precision = placement.precision
        is_pure = run.config.model.torch_dtype == "pure_bfloat16"
        masters = "bfloat16" if is_pure else "float32"
        arithmetic = masters if precision.value == "no" else precision.value
        yield (
            True,
            f"dtypes: masters {masters}, arithmetic {arithmetic} ({precision.reason}), FSDP units get one dtype each",
        )
    backend = "NCCL" if torch.cuda.is_available() else "gloo"
    yield self_test_passed, f"{backend}: the self-test's collectives ran without errors"


def _check_strategy(placement: Placement, size: ModelSize) -> tuple[bool, str]:
    fsdp = placement.fsdp
    line = f"strategy: {placement.strategy.value}"
    reason = f"({placement.strategy.reason})"
    if fsdp is not None:
        units = f"FSDP{fsdp.version} {fsdp.sharding_strategy}, {fsdp.wrap_policy}"
        return True, f"{line}, {units} {reason}"
    # A whole copy of the model on each process.
    share = size.state_bytes / placement.memory
    if share > FITS:
        reason += f"; a whole copy takes {share:.0%} of a process's memory: use_fsdp: true on several processes"
    return share <= FITS, f"{line} {reason}"
