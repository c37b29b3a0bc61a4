"""`vembed mine`, `judge`, `audit` and `generate`: training data from a config of their own."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import typer

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


def mine(args: ConfigArguments = None) -> Any:
    """Find hard negatives for training data in a corpus."""
    config, arguments = _read(MineConfig, "mine", mine.__doc__, args)
    from vembed.mining.known_positives import read_inputs
    from vembed.mining.mine import check_config, work_folder
    from vembed.mining.mine import mine as mine_negatives

    target = check_config(config)
    if arguments.is_dry_run:
        inputs = read_inputs(config)
        lines = [*_options(config), "", *inputs.summary()]
        for retriever in config.all_retrievers():
            what = "indexed" if retriever.model == BM25 else "encoded"
            lines.append(
                f"{retriever.model}: {len(inputs.documents):,d} documents and {inputs.known.num_queries:,d} queries {what}"
            )
        folder = work_folder(config)
        what = "would be made"
        if folder.exists():
            what = "is there, and what fits is used again"
        processes = arguments.processes
        count = processes.get("nproc", 1) * processes.get("num_machines", 1)
        return _print(lines, f"{folder}: {what}", f"processes: {count}", target=target)
    _share(arguments)
    return mine_negatives(config, log=log_line)


def judge(args: ConfigArguments = None) -> Any:
    """Judge the negatives of training data by rerankers or endpoints."""
    config, arguments = _read(JudgeConfig, "judge", judge.__doc__, args)
    from vembed.data_tools.judge import RowNegatives
    from vembed.data_tools.judge import judge as judge_negatives
    from vembed.mining.output import check_output

    target = check_output(config.output_path)
    if arguments.is_dry_run:
        lines = [RowNegatives(config).summary()]
        for judge_config in config.judges:
            where = f" at {judge_config.base_url}" if judge_config.base_url else ""
            lines.append(f"judge {judge_config.model}{where}")
        return _print(lines, target=target)
    _share(arguments)
    return judge_negatives(config, log=log_line)


def audit(args: ConfigArguments = None) -> Any:
    """Look at training data: duplicates, leakage, false negatives, weak positives."""
    config, arguments = _read(AuditConfig, "audit", audit.__doc__, args)
    from vembed.data_tools.audit import audit as audit_data
    from vembed.data_tools.audit import check_audit, mining_config
    from vembed.mining.known_positives import read_inputs

    page = check_audit(config)
    if arguments.is_dry_run:
        return _print(read_inputs(mining_config(config)).summary(), target=page)
    _share(arguments)
    return audit_data(config, log=log_line)


def generate(args: ConfigArguments = None) -> Any:
    """Make training pairs from documents, with or without a language model."""
    config, arguments = _read(GenerateConfig, "generate", generate.__doc__, args)
    from vembed.data_tools.generate import generate as generate_pairs
    from vembed.mining.output import check_output

    target = check_output(config.output_path)
    if arguments.is_dry_run:
        return _print(_options(config), target=target)
    _share(arguments)
    return generate_pairs(config, log=log_line)


def _read(
    kind: type[Config], command_name: str, about: str | None, args: list[str] | None
) -> tuple[Config, Arguments]:
    """Return the config and the sorted arguments of a command, or print its help and end it."""
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
        _print(lines)
        raise typer.Exit
    arguments = sort_arguments(command_name, args or [])
    if MODE.get() == "check":
        # The files that the config names may be made by an earlier step.
        load_options(kind, None, arguments.overrides)
        raise typer.Exit
    return load_options(kind, arguments.config, arguments.overrides), arguments


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


def _share(arguments: Arguments) -> None:
    processes = dict(arguments.processes)
    num_machines = processes.get("num_machines", 1)
    if num_machines > 1 and "main_process_ip" not in processes:
        raise UserError(
            f"--num-machines {num_machines} needs --main-process-ip, the address of machine 0, and a "
            "--machine-rank for each"
        )
    share(processes.pop("nproc", 1), **processes)


def _options(config: CommandConfig) -> list[str]:
    values = config.model_dump(mode="json", exclude_unset=True)
    return [f"{name}: {value}" for name, value in values.items()]


def _print(lines: Sequence[str], *more: str, target: Any = None) -> None:
    ending = [] if target is None else [f"would write: {target}"]
    sys.stdout.write("\n".join([*lines, *more, *ending]) + "\n")
