"""run_train(): resolve the config, choose the number of processes, then train here, start them, or report (dry
run)."""

import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from vembed.cli.arguments import TrainArguments
from vembed.cli.support import Result
from vembed.config.decisions import ResolvedRun
from vembed.config.loading import START_TIME, config_yaml, require_earlier_stage
from vembed.config.rules import data_paths, missing_path
from vembed.config.values import RESULT_SEPARATOR, Environment
from vembed.errors import UserError
from vembed.evaluation.report.page import render_page
from vembed.files import existing, similar_path
from vembed.parallel.environment import GROUP, RankInfo, read_rank_info
from vembed.parallel.launch import (
    DEFAULT_PORT,
    RUN_ID,
    num_visible_devices,
    rank_environments,
    run_ranks,
)
from vembed.training.checkpoint.folders import (
    LOCK,
    candidates,
    refuse_own_model,
    require_output_folder,
)
from vembed.training.trackers.table import require_trackers

DRY_RUN = TrainArguments(is_dry_run=True)


@dataclass(frozen=True)
class Launch:
    """The processes of a run."""

    num_processes: int
    """Processes on this machine."""
    reason: str
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    changes: Environment = field(default_factory=dict)
    """Additional environment variables for the processes."""

    @property
    def world_size(self) -> int:
        """Number of processes on all machines."""
        return self.num_processes * self.num_machines

    @property
    def first_rank(self) -> RankInfo:
        """Rank 0 of these processes, for what is predicted without starting them."""
        return RankInfo(0, self.world_size, 0, self.num_processes)


def run_train(
    arguments: TrainArguments,
    env: Environment = os.environ,
    *,
    starts_processes: bool = True,
    returns_result: bool = False,
) -> tuple[int, Result]:
    """Train on as many processes as the config and the machine say. Return the exit code and, if wanted, the result.

    Training runs in this process, and raises its exceptions here, if a launcher has started it (torchrun, accelerate
    launch, vembed itself) or if one process is all there is. `starts_processes=False`: without a requested number, a
    plain process stays single on any machine.
    """
    run_variables = {} if arguments.run_id is None else {RUN_ID: arguments.run_id}
    env = {START_TIME: str(time.time()), **env, **run_variables}
    run = arguments.resolve(env)
    config = run.config
    rank_info = _launched_rank(arguments, run, env)
    if rank_info is not None:
        launch = Launch(rank_info.world_size, "set by the launcher")
    else:
        launch = resolve_launch(run, arguments, env, starts_processes=starts_processes)
        if launch.world_size == 1:
            # Refuses some of torch's variables without the others, as the run itself would.
            read_rank_info(env)
    # Resuming compares the global batch with the checkpoint's, and keeps that one.
    if not config.run.resume:
        config.batch.examples_per_process(launch.world_size)
    require_trackers(config.logging.report_to)
    if arguments.is_dry_run:
        sys.stdout.write(describe_run(run, launch, arguments))
        # A mistake in the data is reported after what is known. No data are fetched for a dry run.
        sys.stdout.flush()
        require_output_folder(config.run.output_dir)
        # Data may be on the machine of the run alone, but a name like that of a file here is a typing error.
        for option, path in data_paths(config.data):
            problem = missing_path(option, path)
            if problem and similar_path(path):
                raise UserError(problem)
        if all(existing(path) for _, path in data_paths(config.data)):
            from vembed.data_tools.data_page import data_facts

            page = data_facts(config, launch.world_size)[0]
            sys.stdout.write(f"\n==== data\n{page}")
        return 0, {
            "is_dry_run": True,
            "processes": launch.world_size,
            "options": config.to_dict(),
        }
    require_earlier_stage(run)
    if rank_info is None:
        # A folder with an earlier run is refused before any process is started. Where a run has the lock, it may be going
        # on: training looks at the lock first, and at the checkpoints then.
        require_output_folder(config.run.output_dir)
        refuse_own_model(config.run, config.model)
        if not (Path(config.run.output_dir) / LOCK).exists():
            candidates(config.run)
    code = 0
    if rank_info is not None or launch.world_size == 1:
        from vembed.training.trainer import train_run

        os.environ.update({**launch.changes, **run_variables})
        train_run(run)
    else:
        environments = rank_environments(
            launch.num_processes,
            num_machines=launch.num_machines,
            machine_rank=launch.machine_rank,
            main_process_ip=launch.main_process_ip,
            main_process_port=launch.main_process_port,
            env={**env, **launch.changes},
        )
        module = [sys.executable, "-m", "vembed.entrypoints.train"]
        code = run_ranks([*module, *arguments.command_line()], environments)
    if code or not returns_result:
        return code, {}
    return code, result_of(config.run.output_dir)


def result_of(output_dir: str | Path) -> Result:
    """Return the result of a finished run as JSON values, from its folder."""
    from vembed.evaluation.report.record import read_run
    from vembed.evaluation.report.report import run_json

    folder = Path(output_dir)
    return {"model_dir": str(folder / "final"), **run_json(read_run(folder))}


def resolve_launch(
    run: ResolvedRun,
    arguments: TrainArguments = DRY_RUN,
    env: Environment = os.environ,
    *,
    starts_processes: bool = True,
    num_gpus: int | None = None,
) -> Launch:
    """Return the number of processes and machines, and the reason: as asked for, else one process per GPU.

    In a dry run the number of this machine need not be known. `num_gpus`: of another machine that is planned for.
    """
    accelerate_file = run.accelerate_file
    is_dry_run = arguments.is_dry_run
    changes = {}
    if accelerate_file is not None and accelerate_file.use_cpu:
        changes = {"CUDA_VISIBLE_DEVICES": ""}
    elif accelerate_file is not None and accelerate_file.gpu_ids is not None:
        changes = {"CUDA_VISIBLE_DEVICES": accelerate_file.gpu_ids}
    num_devices = num_gpus
    if num_devices is None:
        num_devices = num_visible_devices({**env, **changes}) if starts_processes else 0
    num_processes = num_devices or 1
    reason = "one per GPU" if num_devices else "no GPU here"
    if run.processes.value != "auto":
        num_processes = run.processes.value
        reason = run.processes.reason
    elif run.strategy.value == "single":
        num_processes = 1
        reason = "strategy: single"
    elif not starts_processes:
        num_processes = 1
        reason = "started as one"
    count = f"{num_processes} processes ({reason})"
    if num_gpus is not None and num_processes > num_gpus:
        raise UserError(
            f"{count} do not fit on --gpu with {num_gpus} GPU(s) per machine"
        )
    if num_devices and num_processes > num_devices and not is_dry_run:
        raise UserError(
            f"{count}, but this machine shows {num_devices} GPU(s): give --nproc "
            f"{num_devices}, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    num_machines = run.machines.value
    if run.strategy.value == "single" and num_processes * num_machines > 1:
        raise UserError(
            f"strategy: single is one process, but {num_processes * num_machines} were asked for ({reason}): "
            "leave strategy out, or the number"
        )
    if num_machines == 1:
        return Launch(num_processes, reason, num_machines, changes=changes)
    ip = arguments.main_process_ip or (
        accelerate_file.main_process_ip if accelerate_file else None
    )
    port = arguments.main_process_port or (
        accelerate_file.main_process_port if accelerate_file else None
    )
    rank = arguments.machine_rank
    flags = {"--machine-rank": rank, "--main-process-ip": ip}
    missing = [flag for flag, value in flags.items() if value is None]
    if missing and not is_dry_run:
        raise UserError(
            f"num_machines: {num_machines} needs {' and '.join(missing)}: start the same command on every "
            f"machine, with its number (0 to {num_machines - 1}) and the address of machine 0"
        )
    if rank is not None and rank >= num_machines:
        raise UserError(
            f"--machine-rank {rank} must be below num_machines: {num_machines}; machines count from 0"
        )
    return Launch(num_processes, reason, num_machines, rank or 0, ip, port, changes)


def describe_run(
    run: ResolvedRun,
    launch: Launch,
    arguments: TrainArguments,
) -> str:
    """Return the output of `--dry-run`: the merged config, the decisions, and the processes to launch."""
    batch = run.config.batch
    files = []
    for option, path in data_paths(run.config.data):
        state = "not here: a name on the Hub, or a path that is missing"
        if existing(path):
            state = "here"
        elif RESULT_SEPARATOR in run.origins.get(option, ""):
            state = "written by the stage before"
        files.append((option, path, state))
    words = ["python", "-m", "vembed.entrypoints.train"]
    command = shlex.join([*words, *arguments.command_line()])
    for name, value in launch.changes.items():
        command = f"{name}={value} {command}"
    config = config_yaml(run.config, run.origins, only_given=True)
    return render_page(
        "dry_run.txt.j2",
        run=run,
        launch=launch,
        config=config.rstrip(),
        batch=batch.global_batch_size or batch.batch_size * launch.world_size,
        files=files,
        command=command,
        default_port=DEFAULT_PORT,
    )


def _launched_rank(
    arguments: TrainArguments,
    run: ResolvedRun,
    env: Environment,
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
    flags = (arguments.machine_rank, arguments.main_process_ip)
    is_asked = flags != (None, None) or run.machines.value > 1
    # Cluster systems set some of these variables per machine with other meanings, so explicit flags are required.
    if is_asked or env.get("WORLD_SIZE", "1") == "1":
        return None
    if env.get("LOCAL_RANK") is None:
        raise UserError(
            f"WORLD_SIZE={env['WORLD_SIZE']} is set, but not LOCAL_RANK, so this is no process of torchrun or "
            f"accelerate launch: for {env['WORLD_SIZE']} machines give --num-machines, --machine-rank and "
            "--main-process-ip; for several processes here give --nproc; or unset WORLD_SIZE"
        )
    return read_rank_info(env)
