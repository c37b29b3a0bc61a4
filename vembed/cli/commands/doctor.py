"""`vembed doctor`: hardware and software of this machine, a self-test of sharded training, and checks of a config."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import vembed
from vembed.cli.commands.plan import FITS
from vembed.cli.commands.train import Launch, resolve_launch
from vembed.config.loading import resolve_run
from vembed.config.resolved import ResolvedRun
from vembed.errors import UserError
from vembed.models.families.decisions import describe
from vembed.models.families.weight_files import check_whole_weights, read_tensors
from vembed.parallel.devices import bf16_instructions
from vembed.parallel.environment import RankInfo
from vembed.parallel.estimate import GIB, ModelSize, measure, optimizer_bytes
from vembed.parallel.launch import num_visible_devices, rank_environments, run_ranks
from vembed.parallel.placement import FITS_SHARE, Placement, memory_of_a_process, place

PACKAGES = ("torch", "accelerate", "transformers", "peft", "datasets", "safetensors")
OPTIONAL_PACKAGES = ("flash-attn", "bitsandbytes", "torchao")
SMALL_GPU_GB = 8
LARGEST_SIMPLE_BATCH = 16
# Variables of a launcher that has started the doctor would tell the self-test's processes that they are ranks of its
# run.
LAUNCHER_VARIABLES = re.compile(r"(ACCELERATE|FSDP|TORCHELASTIC)_|GROUP_|ROLE_")


def run_doctor(
    config_path: str | None = None,
    nproc: int | None = None,
    *,
    on_result: Callable[[Any], None] = lambda _: None,
) -> int:
    """Print the environment, run the self-test, check the config. Return 0 if all passes, else 1.

    `nproc`: processes of both; by default as many as the config's run would have on this machine.
    `on_result` takes what was found.
    """
    run = None if config_path is None else resolve_run(config_path)
    launch = Launch(nproc, "--nproc") if nproc else None
    if launch is None and run is not None:
        launch = resolve_launch(run)
    num_tested = nproc or (
        launch.num_processes if run and run.processes.value != "auto" and launch else 0
    )
    # Two on a machine without GPUs: one process shards nothing.
    num_tested = num_tested or num_visible_devices() or 2
    _say("vembed doctor", "=" * 50)
    machine = list(describe_machine())
    for line in machine:
        _say(line)
    _say("", f"Self-test on {_processes(num_tested)}", "=" * 50)
    env = {
        name: value
        for name, value in os.environ.items()
        if not LAUNCHER_VARIABLES.match(name)
    }
    code = run_ranks(
        [sys.executable, "-m", "vembed.cli.commands.selftest"],
        rank_environments(num_tested, env=env),
    )
    works = code == 0
    checks: list[dict[str, Any]] = []
    _say(f"Self-test: {'pass' if works else 'FAIL'}")
    if run is not None and launch is not None:
        _say(
            "",
            f"Checklist for {config_path} on {_processes(launch.world_size)}",
            "=" * 50,
        )
        for number, (is_well, line) in enumerate(
            checklist(run, launch, self_test_passed=works), start=1
        ):
            _say(f"{number}. {line}: {'pass' if is_well else 'FAIL'}")
            checks.append({"passed": is_well, "check": line})
            works = works and is_well
    on_result(
        {
            "passed": works,
            "self_test_passed": code == 0,
            "num_processes": num_tested,
            "machine": machine,
            "checks": checks,
        }
    )
    return 0 if works else 1


def _processes(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


# ---- the machine -----------------------------------------------------------------------------------------------------


def describe_machine() -> Iterator[str]:
    """Return versions, devices, their interconnect and the available kernels."""
    yield f"vembed {vembed.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
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
        small = (
            f" (less than the {SMALL_GPU_GB}GB that training wants)"
            if size < SMALL_GPU_GB
            else ""
        )
        yield f"GPU {index}: {facts.name}, {size:.1f}GB{small}, compute capability {facts.major}.{facts.minor}"
    memory = psutil.virtual_memory()
    yield (
        f"CPU: {psutil.cpu_count(logical=False) or psutil.cpu_count()} cores, {memory.total / GIB:.1f}GB memory, "
        f"{memory.available / GIB:.1f}GB of it free"
    )
    yield f"Interconnect: {interconnect(num_devices)}"
    if num_devices:
        yield f"bf16: {'yes' if torch.cuda.is_bf16_supported(including_emulation=False) else 'no'}"
    elif instructions := bf16_instructions():
        yield f"bf16: yes (by the CPU's {instructions}, which mixed_precision: auto takes where it pays)"
    else:
        yield "bf16: emulated, and slow (the CPU has neither AMX nor AVX512-BF16; mixed_precision: auto keeps float32)"
    for name in OPTIONAL_PACKAGES:
        yield f"{name}: {_version(name)}"


def interconnect(num_devices: int) -> str:
    """Return the links between this machine's GPUs, and to other machines."""
    between_machines = (
        "InfiniBand"
        if any(Path("/sys/class/infiniband").glob("*"))
        else "no InfiniBand"
    )
    if num_devices < 2:
        return f"{num_devices} GPU(s), no links between them; {between_machines}"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return f"unknown between GPUs (no nvidia-smi); {between_machines}"
    table = subprocess.run(
        [tool, "topo", "-m"], capture_output=True, text=True, check=False, timeout=20
    ).stdout
    # Cells of the table between two GPUs: NV4 are four NVLinks; PIX, PXB, PHB, NODE and SYS go over PCIe.
    links = re.findall(r"\bNV\d+\b", table)
    if links:
        return f"NVLink between GPUs ({links[0]}); {between_machines}"
    return f"PCIe between GPUs, on which sharding costs noticeable time (nvidia-smi topo -m); {between_machines}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# ---- a config --------------------------------------------------------------------------------------------------------


def checklist(
    run: ResolvedRun, launch: Launch, *, self_test_passed: bool
) -> Iterator[tuple[bool, str]]:
    """Yield eight checks for before a long run, each as (passed, finding)."""
    device = (
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )
    ranks = launch.first_rank
    num_devices = torch.cuda.device_count()
    sharded = run.strategy.value == "fsdp" and launch.world_size > 1
    if num_devices:
        here = launch.num_processes
        yield here <= num_devices, f"GPUs visible: {num_devices} for {here} process(es)"
    else:
        precision = run.asked_precision(sharded=sharded).value
        yield precision != "fp16", "GPUs visible: none, the run computes on the CPU"
    placement, problem = _placed(run, ranks, device)
    size, unknown = _measured(placement)
    yield _strategy_point(placement, problem, size)
    yield _batch_point(run, placement, launch)
    recomputation = run.recomputation if placement is None else placement.recomputation
    # Off by default means that micro-batches fit without it; off by hand may not be meant.
    passes = recomputation.value or not sharded or recomputation.source == "default"
    yield (
        passes,
        f"gradient checkpointing: {'on' if recomputation.value else 'off'} ({recomputation.reason})",
    )
    yield _memory_point(placement, size, problem or unknown)
    yield _dtype_point(placement, problem)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    yield self_test_passed, f"{backend}: the self-test's collectives ran without errors"
    yield _weights_point(run)


def _placed(
    run: ResolvedRun, ranks: RankInfo, device: torch.device
) -> tuple[Placement | None, str]:
    """Return the placement, or the sentence why there is none."""
    try:
        return place(
            run,
            ranks,
            device,
            memory_of_a_process(ranks, device),
            instructions=bf16_instructions(),
        ), ""
    except UserError as error:
        return None, str(error)


def _measured(placement: Placement | None) -> tuple[ModelSize | None, str]:
    """Return the model's sizes, or the sentence why they are not known."""
    if placement is None:
        return None, ""
    try:
        return placement.size or measure(placement.run.config), ""
    except UserError as error:
        return None, str(error)


def _strategy_point(
    placement: Placement | None, problem: str, size: ModelSize | None
) -> tuple[bool, str]:
    if placement is None:
        return False, f"strategy: {problem}"
    detail = ""
    fsdp = placement.fsdp
    notes = (
        placement.run.fsdp_notes
        if fsdp is not None or placement.run.fsdp is None
        else ()
    )
    if fsdp is not None:
        offload = ", offloaded" if fsdp.offload else ""
        detail = f", FSDP{fsdp.version} {fsdp.sharding_strategy}{offload}, {fsdp.wrap_policy}"
    strategy = (
        f"strategy: {placement.strategy.value}{detail} ({placement.strategy.reason})"
    )
    need, is_well = _need_of_shards(placement, size)
    return is_well, "; ".join([strategy, *notes, *placement.notes, *need])


def _need_of_shards(
    placement: Placement, size: ModelSize | None
) -> tuple[list[str], bool]:
    """Return whether a whole copy of the model is too large for a process, in words, and whether the run does well."""
    if size is None:
        return [], True
    config = placement.run.config
    optimizer = optimizer_bytes(config.optimizer, config.model, size)
    whole = size.weight_bytes + size.gradient_bytes + optimizer
    share = whole / placement.memory
    needed = share > FITS_SHARE
    figures = f"a whole copy takes {whole / GIB:.2f}GB, {share:.0%} of the {placement.memory / GIB:.1f}GB of a process"
    way = (
        ""
        if not needed or placement.fsdp is not None
        else "; use_fsdp: true on several processes"
    )
    is_well = placement.fsdp is not None or share <= FITS
    return [f"fsdp needed: {'yes' if needed else 'no'} ({figures}{way})"], is_well


def _batch_point(
    run: ResolvedRun, placement: Placement | None, launch: Launch
) -> tuple[bool, str]:
    config = run.config
    size = placement.rows if placement is not None else config.batch.batch_size
    if (
        config.batch.global_batch_size is not None
        and config.batch.global_batch_size % launch.world_size
        and not config.run.resume
    ):
        return (
            False,
            f"batch: {config.batch.global_batch_size} examples cannot be divided among {launch.world_size}",
        )
    if size <= LARGEST_SIMPLE_BATCH:
        return True, f"batch: {size:,d} per process"
    # Memory depends on the micro-batch, unless the user disables Gradient Cache.
    if config.batch.use_gradient_cache is False:
        return (
            False,
            f"batch: {size:,d} per process at once, since use_gradient_cache: false keeps all graphs",
        )
    if config.batch.gradient_cache_chunk_size is not None:
        return (
            True,
            f"batch: {size:,d} per process, in micro-batches of {config.batch.gradient_cache_chunk_size:,d} rows",
        )
    return (
        True,
        f"batch: {size:,d} per process, in micro-batches of micro_batch_tokens: {config.batch.micro_batch_tokens}",
    )


def _memory_point(
    placement: Placement | None, size: ModelSize | None, problem: str
) -> tuple[bool, str]:
    if placement is None or size is None:
        return False, f"memory: not known ({problem})"
    need = placement.predict(size)
    shards = placement.num_shards
    shard = f", a shard of 1/{shards} on each process" if shards > 1 else ""
    return need.total <= FITS * placement.memory, (
        f"memory: {size.total:,d} parameters need {need.total / GIB:.2f}GB of the {placement.memory / GIB:.1f}GB of a "
        f"process{shard}"
    )


def _dtype_point(placement: Placement | None, problem: str) -> tuple[bool, str]:
    if placement is None:
        return False, f"dtypes: not known ({problem})"
    config = placement.run.config
    precision = placement.precision
    is_pure = config.model.torch_dtype == "pure_bfloat16"
    masters = "bfloat16" if is_pure else "float32"
    arithmetic = masters if precision.value == "no" else precision.value
    return (
        True,
        f"dtypes: masters {masters}, arithmetic {arithmetic} ({precision.reason}), FSDP units get one dtype each",
    )


def _weights_point(run: ResolvedRun) -> tuple[bool, str]:
    try:
        description = describe(run.config.model)
        folders = [
            Path(source)
            for source in (description.source, description.image_source)
            if source is not None
        ]
        for folder in folders:
            check_whole_weights(folder)
            read_tensors(folder)
    except UserError as error:
        return False, f"weights: {error}"
    return (
        True,
        f"weights: {' and '.join(sorted({str(folder) for folder in folders}))} has its weights, whole",
    )


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
