"""`vembed train`: resolve the config, choose the number of processes, then train here, start them, or report (dry
run)."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vembed.config.accelerate_file import AccelerateFile
from vembed.config.arguments import TrainArguments
from vembed.config.fsdp import AskedPrecision
from vembed.config.loading import render, require_earlier_stage, resolve_run
from vembed.config.paths import data_paths, missing_data
from vembed.config.resolved import Decision, ResolvedRun
from vembed.config.schema import DataSection
from vembed.errors import UserError
from vembed.parallel.environment import GROUP, RankInfo, read_rank_info
from vembed.parallel.launch import (
    DEFAULT_PORT,
    RUN_ID,
    num_visible_devices,
    rank_environments,
    run_ranks,
)
from vembed.training.checkpoint.resume import candidates, refuse_own_model


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes of a run."""

    num_processes: int
    """Processes on this machine."""
    reason: str
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    changes: Mapping[str, str] | None = None
    """Additional environment variables for the processes."""

    @property
    def world_size(self) -> int:
        """Number of processes on all machines."""
        return self.num_processes * self.num_machines

    @property
    def first_rank(self) -> RankInfo:
        """Rank 0 of these processes, for what is predicted without starting them."""
        return RankInfo(0, self.world_size, 0, self.num_processes, launched=True)


def run_train(
    arguments: TrainArguments,
    env: Mapping[str, str] = os.environ,
    *,
    starts_processes: bool = True,
    on_result: Callable[[dict[str, Any]], object] | None = None,
) -> int:
    """Train on as many processes as the config and the machine say; return the exit code. `on_result` gets the result.

    Training runs in this process, and raises its exceptions here, if a launcher has started it (torchrun, accelerate
    launch, vembed itself) or if one process is all there is. `starts_processes=False`: without a requested number, a
    plain process stays single on any machine.
    """
    run_variables = {} if arguments.run_id is None else {RUN_ID: arguments.run_id}
    env = {**env, **run_variables}
    resolved = resolve_run(
        arguments.source, arguments.overrides, stage=arguments.stage, env=env
    )
    config = resolved.config
    rank_info = _rank_info(arguments, resolved, env)
    if rank_info is not None:
        launch = Launch(rank_info.world_size, "set by the launcher")
    else:
        launch = resolve_launch(
            resolved, arguments, env, starts_processes=starts_processes
        )
        if launch.world_size == 1:
            read_rank_info(
                env
            )  # refuses some of torch's variables without the others, as the run itself would
    # Resuming compares the global batch with the checkpoint's, and keeps that one.
    if not config.run.resume:
        config.batch.rows_per_process(launch.world_size)
    if arguments.is_dry_run:
        sys.stdout.write(describe_run(resolved, launch, arguments))
        # No data are fetched for a dry run.
        if not missing_data(config.data):
            # A mistake in the data is reported after what is known.
            sys.stdout.flush()
            from vembed.data_tools.init.data_page import data_facts

            sys.stdout.write(f"\n==== data\n{data_facts(config).page}")
        if on_result is not None:
            on_result(
                {
                    "is_dry_run": True,
                    "processes": launch.world_size,
                    "options": config.to_dict(),
                }
            )
        return 0
    require_earlier_stage(resolved)
    if rank_info is None:
        refuse_own_model(config.run, config.model)
        candidates(
            config.run
        )  # refuses a folder with an earlier run before any process is started
    if rank_info is not None or launch.world_size == 1:
        os.environ.update({**(launch.changes or {}), **run_variables})
        code = _train_here(resolved)
    else:
        code = run_ranks(_command(arguments), _environments(launch, env))
    if code == 0 and on_result is not None:
        on_result(result_of(config.run.output_dir))
    return code


def result_of(output_dir: str | Path) -> dict[str, Any]:
    """Return the result of a finished run as JSON values, from its folder."""
    from vembed.evaluation.report.comparison import run_json
    from vembed.evaluation.report.record import read_run

    folder = Path(output_dir)
    return {
        "model_dir": str(folder / "final"),
        **run_json(folder.resolve().name, read_run(folder)),
    }


def resolve_launch(
    run: ResolvedRun,
    arguments: TrainArguments | None = None,
    env: Mapping[str, str] = os.environ,
    *,
    starts_processes: bool = True,
    num_gpus: int | None = None,
) -> Launch:
    """Return the number of processes and machines, and the reason: as asked for, else one process per GPU.

    Without `arguments`, as for a dry run: the number of this machine need not be known. `num_gpus`: of another machine
    that is planned for.
    """
    file = run.file
    is_dry_run = arguments is None or arguments.is_dry_run
    changes = _device_changes(file)
    num_devices = num_visible_devices(dict(env) | changes) if starts_processes else 0
    num_devices = num_devices if num_gpus is None else num_gpus
    num_machines = run.machines.value
    num_processes, reason = _processes_here(run, num_devices, starts_processes)
    if num_gpus is not None and num_processes > num_gpus:
        raise UserError(
            f"{num_processes} processes ({reason}) do not fit on --gpu with {num_gpus} GPU(s) per machine"
        )
    if num_devices and num_processes > num_devices and not is_dry_run:
        raise UserError(
            f"{num_processes} processes ({reason}), but this machine shows {num_devices} GPU(s): give --nproc "
            f"{num_devices}, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    if run.strategy.value == "single" and num_processes * num_machines > 1:
        raise UserError(
            f"strategy: single is one process, but {num_processes * num_machines} were asked for ({reason}): "
            "leave strategy out, or the number"
        )
    launch = Launch(num_processes, reason, num_machines, changes=changes)
    return (
        launch
        if num_machines == 1 or arguments is None
        else _among_machines(launch, arguments, file)
    )


def describe_run(run: ResolvedRun, launch: Launch, arguments: TrainArguments) -> str:
    """Return the output of `--dry-run`: the merged config, the decisions, and the processes to launch."""
    config = run.config
    strategy = run.strategy.value
    lines = [render(config, run.origins, only_given=not arguments.shows_all).rstrip()]
    lines += (
        []
        if arguments.shows_all
        else ["# All other options have their defaults; --all lists them."]
    )
    lines.append("")
    lines += [f"translated: {line}" for line in run.translated]
    lines += [
        f"note: {line}"
        for line in (*run.notes, *(run.fsdp_notes if strategy != "auto" else ()))
    ]
    if launch.world_size == 1:
        asked = (
            ""
            if strategy in ("auto", "single")
            else f", although {strategy} was asked for"
        )
        lines.append(f"strategy: single (one process{asked})")
    elif strategy == "auto":
        lines.append(f"strategy: auto ({run.strategy.reason})")
    else:
        lines.append(f"strategy: {strategy}")
    if run.fsdp is not None and strategy == "fsdp":
        offload = ", offloaded to host memory" if run.fsdp.offload else ""
        lines.append(
            f"fsdp: version {run.fsdp.version}, {run.fsdp.sharding_strategy}, {run.fsdp.wrap_policy}{offload} "
            f"({run.fsdp.source})"
        )
    lines.append(f"gradient checkpointing: {run.recomputation}")
    lines += run.left_to_gpus()
    precision = run.asked_precision(
        sharded=strategy == "fsdp" and launch.world_size > 1
    )
    lines.append(f"mixed precision: {precision.value} ({_precision_reason(precision)})")
    machines = (
        f" on each of {launch.num_machines} machines" if launch.num_machines > 1 else ""
    )
    lines.append(
        f"world size: {launch.world_size} = {launch.num_processes} process(es){machines} ({launch.reason})"
    )
    per_process = (
        config.batch.batch_size
        if config.batch.global_batch_size is None
        else config.batch.global_batch_size / launch.world_size
    )
    total = (
        config.batch.global_batch_size or config.batch.batch_size * launch.world_size
    )
    lines.append(
        f"global batch: {total:,d} = {launch.world_size} x {per_process:g} examples"
    )
    lines += [
        f"{name}: {value} ({_found(value)})" for name, value in _paths(config.data)
    ]
    lines.append("would run: " + _shown_command(launch, arguments))
    return "\n".join(lines) + "\n"


def _rank_info(
    arguments: TrainArguments, run: ResolvedRun, env: Mapping[str, str]
) -> RankInfo | None:
    """Return the rank info of this process if a launcher has started it; None if vembed is to start the processes."""
    if all(env.get(name) for name in GROUP):
        return read_rank_info(env)
    # `accelerate launch` sets no rank for the one process that it starts without GPUs, however many were asked for.
    if "ACCELERATE_MIXED_PRECISION" in env and not any(
        env.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    ):
        if not env.get("MASTER_ADDR"):
            return RankInfo()
        if run.processes.value == "auto":
            raise UserError(
                f"accelerate launch was asked for several processes (MASTER_ADDR={env['MASTER_ADDR']} is set), but "
                "without GPUs it starts one, without a RANK: add --nproc N to the words after the script, or run "
                "`vembed train CONFIG --nproc N` or `torchrun --nproc_per_node N vembed/entrypoints/train.py CONFIG`"
            )
        return None
    asked = (
        arguments.machine_rank is not None
        or arguments.main_process_ip is not None
        or run.machines.value > 1
    )
    # Cluster systems set some of these variables per machine with other meanings, so explicit flags are required.
    if asked or env.get("WORLD_SIZE", "1") == "1":
        return None
    if env.get("LOCAL_RANK") is None:
        raise UserError(
            f"WORLD_SIZE={env['WORLD_SIZE']} is set, but not LOCAL_RANK, so this is no process of torchrun or "
            f"accelerate launch: for {env['WORLD_SIZE']} machines give --num-machines, --machine-rank and "
            "--main-process-ip; for several processes here give --nproc; or unset WORLD_SIZE"
        )
    return read_rank_info(env)


def _device_changes(file: AccelerateFile | None) -> dict[str, str]:
    if file is None:
        return {}
    if file.use_cpu:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {} if file.gpu_ids is None else {"CUDA_VISIBLE_DEVICES": file.gpu_ids}


def _precision_reason(asked: Decision[AskedPrecision]) -> str:
    return (
        "as the device allows: bf16 on GPUs that have it"
        if asked.value == "auto"
        else asked.reason
    )


def _processes_here(
    run: ResolvedRun, num_devices: int, starts_processes: bool
) -> tuple[int, str]:
    asked = run.processes
    if asked.value != "auto":
        return asked.value, asked.reason
    if run.strategy.value == "single":
        return 1, "strategy: single"
    if not starts_processes:
        return 1, "started as one"
    return (num_devices, "one per GPU") if num_devices else (1, "no GPU here")


def _among_machines(
    launch: Launch, arguments: TrainArguments, file: AccelerateFile | None
) -> Launch:
    ip = arguments.main_process_ip or (file.main_process_ip if file else None)
    port = arguments.main_process_port or (file.main_process_port if file else None)
    rank = arguments.machine_rank
    missing = [
        flag
        for flag, value in (("--machine-rank", rank), ("--main-process-ip", ip))
        if value is None
    ]
    if missing and not arguments.is_dry_run:
        raise UserError(
            f"num_machines: {launch.num_machines} needs {' and '.join(missing)}: start the same command on every "
            f"machine, with its number (0 to {launch.num_machines - 1}) and the address of machine 0"
        )
    if rank is not None and rank >= launch.num_machines:
        raise UserError(
            f"--machine-rank {rank} must be below num_machines: {launch.num_machines}; machines count from 0"
        )
    return replace(
        launch, machine_rank=rank or 0, main_process_ip=ip, main_process_port=port
    )


def _train_here(resolved: ResolvedRun) -> int:
    from vembed.training.run import train

    train(resolved)
    return 0


def _command(arguments: TrainArguments) -> list[str]:
    return [sys.executable, "-m", "vembed.entrypoints.train", *arguments.command_line()]


def _environments(launch: Launch, env: Mapping[str, str]) -> list[dict[str, str]]:
    return rank_environments(
        launch.num_processes,
        num_machines=launch.num_machines,
        machine_rank=launch.machine_rank,
        main_process_ip=launch.main_process_ip,
        main_process_port=launch.main_process_port,
        env=dict(env) | dict(launch.changes or {}),
    )


def _shown_command(launch: Launch, arguments: TrainArguments) -> str:
    command = shlex.join(
        ["python", "-m", "vembed.entrypoints.train", *arguments.shown_command_line()]
    )
    changes = "".join(
        f"{name}={value} " for name, value in (launch.changes or {}).items()
    )
    if launch.world_size == 1:
        return f"{changes}{command} (in this process)"
    first = launch.machine_rank * launch.num_processes
    address = f"{launch.main_process_ip or ('127.0.0.1' if launch.num_machines == 1 else 'ADDRESS')}"
    port = launch.main_process_port or (
        DEFAULT_PORT if launch.num_machines > 1 else "a free one"
    )
    ranks = (
        f"ranks {first} to {first + launch.num_processes - 1} of {launch.world_size}"
    )
    return f"{changes}{command} ({ranks}, main process at {address}, port {port})"


def _paths(data: DataSection) -> list[tuple[str, str]]:
    names = {"data_path": "data", "val_data_path": "validation data"}
    return [(names[option], path) for option, path in data_paths(data)]


def _found(path: str) -> str:
    try:
        place = Path(path).expanduser()
        if not place.exists():
            return "not here: a name on the Hub, or a path that is missing"
        return f"{place.stat().st_size:,d} bytes" if place.is_file() else "a folder"
    except (OSError, ValueError, RuntimeError):
        return "no name that a file can have"
