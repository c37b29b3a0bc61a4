"""`vembed doctor`: hardware and software of this machine, a self-test of sharded training, and checks of a config."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import vembed
from vembed.config.fsdp import chosen_strategy, resolve_fsdp, resolve_gradient_checkpointing
from vembed.config.loading import load_config
from vembed.config.schema import TrainConfig
from vembed.distributed.devices import choose_precision
from vembed.distributed.environment import RankInfo
from vembed.distributed.launch import num_visible_devices, rank_environments, run_ranks
from vembed.distributed.strategy import GIB, choose_strategy, estimate_need
from vembed.errors import UserError

PACKAGES = ("torch", "accelerate", "transformers", "peft", "datasets", "safetensors")
OPTIONAL_PACKAGES = ("flash-attn", "bitsandbytes", "torchao")
SMALL_GPU_GB = 8
LARGEST_SIMPLE_BATCH = 16
FITS = 0.9
"""Largest fraction of a device's memory for weights, gradients and optimizer, without activations."""
LAUNCHER_VARIABLES = re.compile(r"(ACCELERATE|FSDP|TORCHELASTIC)_|GROUP_|ROLE_")


def run_doctor(config_path: str | None = None, nproc: int | None = None) -> int:
    """Print the environment, run the self-test on `nproc` processes, check the config. Return 0 if all passes, else
    1."""
    num_processes = nproc or num_visible_devices() or 2
    _say("vembed doctor", "=" * 50)
    for line in describe_machine():
        _say(line)
    _say("", f"Self-test on {num_processes} process{'es' if num_processes > 1 else ''}", "=" * 50)
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    code = run_ranks([sys.executable, "-m", "vembed.tools.selftest"], rank_environments(num_processes, env=env))
    works = code == 0
    _say(f"Self-test: {'pass' if works else 'FAIL'}")
    if config_path is not None:
        _say("", f"Checklist for {config_path} on {num_processes} process{'es' if num_processes > 1 else ''}", "=" * 50)
        for number, (is_well, line) in enumerate(
            checklist(config_path, num_processes, self_test_passed=works), start=1
        ):
            _say(f"{number}. {line}: {'pass' if is_well else 'FAIL'}")
            works = works and is_well
    return 0 if works else 1


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
        small = f" (less than the {SMALL_GPU_GB}GB that training wants)" if size < SMALL_GPU_GB else ""
        yield f"GPU {index}: {facts.name}, {size:.1f}GB{small}, compute capability {facts.major}.{facts.minor}"
    memory = psutil.virtual_memory()
    yield (
        f"CPU: {psutil.cpu_count(logical=False) or psutil.cpu_count()} cores, {memory.total / GIB:.1f}GB memory, "
        f"{memory.available / GIB:.1f}GB of it free"
    )
    yield f"Interconnect: {interconnect(num_devices)}"
    if num_devices:
        yield f"bf16: {'yes' if torch.cuda.is_bf16_supported(including_emulation=False) else 'no'}"
    else:
        yield "bf16: yes, but slowly (on the CPU)"
    for name in OPTIONAL_PACKAGES:
        yield f"{name}: {_version(name)}"


def interconnect(num_devices: int) -> str:
    """Return the links between this machine's GPUs, and to other machines."""
    between_machines = "InfiniBand" if any(Path("/sys/class/infiniband").glob("*")) else "no InfiniBand"
    if num_devices < 2:
        return f"{num_devices} GPU(s), no links between them; {between_machines}"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return f"unknown between GPUs (no nvidia-smi); {between_machines}"
    table = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, check=False, timeout=20).stdout
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


def checklist(config_path: str, num_processes: int, *, self_test_passed: bool) -> Iterator[tuple[bool, str]]:
    """Yield seven checks for a long run: (passed, finding)."""
    config = load_config(config_path)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rank_info = RankInfo(0, num_processes, 0, num_processes)
    num_devices = torch.cuda.device_count()
    if num_devices:
        yield num_processes <= num_devices, f"GPUs visible: {num_devices} for {num_processes} process(es)"
    else:
        yield config.mixed_precision != "fp16", "GPUs visible: none, the run computes on the CPU"
    yield _fsdp_point(config, rank_info, device)
    yield _batch_point(config, num_processes)
    checkpointing, why = resolve_gradient_checkpointing(config)
    wanted = chosen_strategy(config) == "fsdp"
    yield checkpointing or not wanted, f"gradient checkpointing: {'on' if checkpointing else 'off'} ({why})"
    yield _memory_point(config, rank_info, device)
    yield _dtype_point(config, device)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    yield self_test_passed, f"{backend}: the self-test's collectives ran without errors"


def _fsdp_point(config: TrainConfig, rank_info: RankInfo, device: torch.device) -> tuple[bool, str]:
    fsdp, notes = resolve_fsdp(config)
    try:
        choice = choose_strategy(config, fsdp, rank_info, device)
    except UserError as error:
        return False, f"strategy: {error}"
    detail = ""
    if choice.strategy == "fsdp" and fsdp is not None:
        offload = ", offloaded" if fsdp.offload else ""
        detail = f", FSDP{fsdp.version} {fsdp.sharding_strategy}{offload}, {fsdp.wrap_policy}"
    return True, "; ".join([f"strategy: {choice.strategy}{detail} ({choice.reason})", *notes])


def _batch_point(config: TrainConfig, num_processes: int) -> tuple[bool, str]:
    size = config.batch_size if config.global_batch_size is None else config.global_batch_size / num_processes
    if size <= LARGEST_SIMPLE_BATCH:
        return True, f"batch: {size:g} per process"
    # Memory depends on the micro-batch, unless the user disables Gradient Cache.
    if config.use_gradient_cache is False:
        return False, f"batch: {size:g} per process at once, since use_gradient_cache: false keeps all graphs"
    return True, f"batch: {size:g} per process, in micro-batches of micro_batch_tokens: {config.micro_batch_tokens}"


def _memory_point(config: TrainConfig, rank_info: RankInfo, device: torch.device) -> tuple[bool, str]:
    try:
        need = estimate_need(config, rank_info, device)
        strategy = choose_strategy(config, resolve_fsdp(config)[0], rank_info, device).strategy
    except UserError as error:
        return False, f"memory: {error}"
    shards = rank_info.world_size if strategy == "fsdp" else 1
    share = need.share / shards
    return share <= FITS, f"memory: {need}" + (f"; a shard of 1/{shards} takes {share:.0%}" if shards > 1 else "")


def _dtype_point(config: TrainConfig, device: torch.device) -> tuple[bool, str]:
    fsdp, _ = resolve_fsdp(config)
    wanted = config.mixed_precision if fsdp is None else fsdp.mixed_precision
    try:
        precision, why = choose_precision(wanted, device)
    except UserError as error:
        return False, f"dtypes: {error}"
    masters = config.torch_dtype if config.pure_dtype else "float32"
    arithmetic = masters if precision == "no" else precision
    return True, f"dtypes: masters {masters}, arithmetic {arithmetic} ({why}), FSDP units get one dtype each"


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
