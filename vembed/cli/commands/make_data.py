"""`vembed mine`, `judge`, `audit` and `generate`: training data from a config of their own."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vembed.cli.support import MODE, ConfigArguments, log_line, share
from vembed.data_tools.config import AuditConfig, GenerateConfig, JudgeConfig
from vembed.errors import UserError
from vembed.mining.config import BM25, CommandConfig, MineConfig
from vembed.mining.options import describe_options, load_options

PAIR = re.compile(r"[A-Za-z_][\w.-]*=")
HELP_WIDTH = 110
"""Columns of the help text."""
PROCESS_FLAGS = {
    "nproc": int,
    "num-machines": int,
    "machine-rank": int,
    "main-process-ip": str,
    "main-process-port": int,
}
Config = TypeVar("Config", bound=CommandConfig)


class Arguments(NamedTuple):
    """Arguments of one of these commands, sorted."""

    config: str | None
    overrides: list[str]
    processes: dict[str, Any]
    is_dry_run: bool

    def num_processes(self) -> int:
        """Return the number of processes on all machines."""
        num_machines = int(self.processes.get("num_machines", 1))
        return int(self.processes.get("nproc", 1)) * num_machines


class Work(NamedTuple):
    """What a command does with a config that has been checked."""

    target: Path | None
    """File that is written."""
    describe: Callable[[], list[str]]
    """Reads the input and returns the lines of a dry run."""
    run: Callable[..., Any]


def mine(args: ConfigArguments = None) -> Any:
    """Find hard negatives for training data in a corpus."""

    def prepare(config: MineConfig, arguments: Arguments) -> Work:
        from vembed.mining.known_positives import read_inputs
        from vembed.mining.mine import check_config, work_folder
        from vembed.mining.mine import mine as run_mine

        def describe() -> list[str]:
            inputs = read_inputs(config)
            lines = [*_options(config), "", *inputs.summary()]
            counts = f"{len(inputs.documents):,d} documents and {inputs.known.num_queries:,d} queries"
            for retriever in config.all_retrievers():
                what = "indexed" if retriever.model == BM25 else "encoded"
                lines.append(f"{retriever.model}: {counts} {what}")
            folder = work_folder(config)
            state = "would be made"
            if folder.exists():
                state = "is there, and what fits is used again"
            lines.append(f"{folder}: {state}")
            return [*lines, f"processes: {arguments.num_processes()}"]

        return Work(check_config(config), describe, run_mine)

    return _run_tool(MineConfig, "mine", mine.__doc__, args, prepare)


def judge(args: ConfigArguments = None) -> Any:
    """Judge the negatives of training data by rerankers or endpoints."""

    def prepare(config: JudgeConfig, _: Arguments) -> Work:
        from vembed.data_tools.judge import RowNegatives
        from vembed.data_tools.judge import judge as run_judge
        from vembed.mining.output import check_output

        def describe() -> list[str]:
            lines = [RowNegatives(config).summary()]
            for entry in config.judges:
                where = f" at {entry.base_url}" if entry.base_url else ""
                lines.append(f"judge {entry.model}{where}")
            return lines

        return Work(check_output(config.output_path), describe, run_judge)

    return _run_tool(JudgeConfig, "judge", judge.__doc__, args, prepare)


def audit(args: ConfigArguments = None) -> Any:
    """Look at training data: duplicates, leakage, false negatives, weak positives."""

    def prepare(config: AuditConfig, _: Arguments) -> Work:
        from vembed.data_tools.audit import audit as run_audit
        from vembed.data_tools.audit import check_audit, mining_config
        from vembed.mining.known_positives import read_inputs

        page = check_audit(config)
        return Work(
            page, lambda: read_inputs(mining_config(config)).summary(), run_audit
        )

    return _run_tool(AuditConfig, "audit", audit.__doc__, args, prepare)


def generate(args: ConfigArguments = None) -> Any:
    """Make training pairs from documents, with or without a language model."""

    def prepare(config: GenerateConfig, _: Arguments) -> Work:
        from vembed.data_tools.generate import generate as run_generate
        from vembed.mining.output import check_output

        target = check_output(config.output_path)
        return Work(target, lambda: _options(config), run_generate)

    return _run_tool(GenerateConfig, "generate", generate.__doc__, args, prepare)


def _run_tool(
    kind: type[Config],
    command_name: str,
    about: str | None,
    args: list[str] | None,
    prepare: Callable[[Config, Arguments], Work],
) -> Any:
    """Print the help of a command, or what it would do, or do it."""
    if {"-h", "--help"} & set(args or []):
        lines = [
            f"Usage: vembed {command_name} [CFG] [KEY=VALUE | --KEY VALUE] ...",
            "",
            str(about),
            "",
            "Flags: --dry-run, --json [FILE.json], --nproc N; on several machines also --num-machines N, --machine-rank R,",
            "--main-process-ip ADDRESS and --main-process-port PORT.",
            "",
            "Options, in the config file or as words:",
        ]
        for name, default, text in describe_options(kind):
            indent = " " * 6
            lines.append(f"  {name} ({default})")
            lines += textwrap.wrap(
                text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent
            )
        sys.stdout.write("\n".join(lines) + "\n")
        return None
    arguments = sort_arguments(command_name, args or [])
    if MODE.get() == "check":
        # The files that the config names may be made by an earlier step.
        load_options(kind, None, arguments.overrides)
        return None
    config = load_options(kind, arguments.config, arguments.overrides)
    work = prepare(config, arguments)
    if arguments.is_dry_run:
        lines = work.describe()
        if work.target is not None:
            lines.append(f"would write: {work.target}")
        sys.stdout.write("\n".join(lines) + "\n")
        return None
    processes = dict(arguments.processes)
    num_machines = processes.get("num_machines", 1)
    if num_machines > 1 and "main_process_ip" not in processes:
        raise UserError(
            f"--num-machines {num_machines} needs --main-process-ip, the address of machine 0, and a "
            "--machine-rank for each"
        )
    share(processes.pop("nproc", 1), **processes)
    return work.run(config, log=log_line)


def sort_arguments(command_name: str, args: Sequence[str]) -> Arguments:
    """Sort the arguments: a config file, key=value, --key value, and what starts several processes."""
    config: str | None = None
    overrides: list[str] = []
    processes: dict[str, Any] = {}
    is_dry_run = False
    rest = iter(args)
    for word in rest:
        if PAIR.match(word):
            overrides.append(word)
        elif not word.startswith("--"):
            if config is not None:
                raise UserError(
                    f"unexpected {word} beside the config {config}: options are key=value or --key value"
                )
            config = word
        elif word == "--dry-run":
            is_dry_run = True
        else:
            flag, has_value, value = word.removeprefix("--").partition("=")
            if not has_value:
                value = next(rest, "")
            if not (has_value or value):
                raise UserError(f"{word} needs a value")
            key = flag.replace("-", "_")
            if flag not in PROCESS_FLAGS:
                overrides.append(f"{key}={value}")
            elif PROCESS_FLAGS[flag] is str:
                processes[key] = value
            elif value.isdecimal():
                processes[key] = int(value)
            else:
                raise UserError(f"--{flag} must be a whole number, but is {value}")
    if config is None and not overrides:
        raise UserError(
            f"which config? Give its file, or key=value: `vembed {command_name} --help` lists the options"
        )
    return Arguments(config, overrides, processes, is_dry_run)


def _options(config: CommandConfig) -> list[str]:
    values = config.model_dump(mode="json", exclude_unset=True)
    return [f"{name}: {value}" for name, value in values.items()]
