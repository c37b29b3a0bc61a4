"""`vembed mine`, `judge`, `audit` and `generate`: training data from a config of their own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import typer

from vembed.cli.support import MODE, ConfigArguments, print_lines, print_progress, share
from vembed.config.arguments import KEY_VALUE
from vembed.errors import UserError
from vembed.mining.options import (
    BM25,
    AuditConfig,
    Config,
    GenerateConfig,
    JudgeConfig,
    MineConfig,
    describe_options,
    load_options,
)

HELP_WIDTH = 110
"""Columns of the help text."""
NUMBERS_OF_PROCESSES = ("nproc", "num_machines", "machine_rank", "main_process_port")
PROCESS_OPTIONS = (*NUMBERS_OF_PROCESSES, "main_process_ip")
HELP = """\
Usage: vembed {} [CFG] [KEY=VALUE | --KEY VALUE] ...

{}

Flags: --dry-run, --json [FILE.json], --nproc N; on several machines also --num-machines N, --machine-rank R,
--main-process-ip ADDRESS and --main-process-port PORT.

Options, in the config file or as words:
"""


@dataclass(frozen=True)
class Call(Generic[Config]):
    """One of these commands as it was called."""

    config: Config
    processes: dict[str, Any]
    is_dry_run: bool

    def options(self) -> list[str]:
        """Return the options that are set, for a dry run."""
        values = self.config.model_dump(mode="json", exclude_unset=True)
        return [f"{name}: {value}" for name, value in values.items()]

    def start_processes(self) -> None:
        """End the command here if other processes are to do its work."""
        processes = dict(self.processes)
        num_machines = processes.get("num_machines", 1)
        if num_machines > 1 and "main_process_ip" not in processes:
            raise UserError(
                f"--num-machines {num_machines} needs --main-process-ip, the address of machine 0, and a "
                "--machine-rank for each"
            )
        share(processes.pop("nproc", 1), **processes)


def mine(args: ConfigArguments = None) -> Any:
    """Find hard negatives for training data in a corpus."""
    call = read_call("mine", MineConfig, mine.__doc__, args)
    from vembed.mining.inputs import read_mining_inputs
    from vembed.mining.mine import check_mine_config
    from vembed.mining.mine import mine as run_mine

    target = check_mine_config(call.config)
    if not call.is_dry_run:
        call.start_processes()
        return run_mine(call.config, log=print_progress)
    inputs = read_mining_inputs(call.config)
    lines = [*call.options(), "", *inputs.summary()]
    counts = f"{len(inputs.documents):,d} documents and {inputs.known.num_queries:,d} queries"
    for retriever in call.config.all_retrievers():
        what = "indexed" if retriever.model == BM25 else "encoded"
        lines.append(f"{retriever.model}: {counts} {what}")
    print_lines(*lines, f"would write: {target}")
    return None


def judge(args: ConfigArguments = None) -> Any:
    """Judge the negatives of training data by rerankers or endpoints."""
    call = read_call("judge", JudgeConfig, judge.__doc__, args)
    from vembed.mining.judges import RowNegatives
    from vembed.mining.judges import judge as run_judge
    from vembed.mining.output import check_output

    target = check_output(call.config, call.config.output_path)
    if not call.is_dry_run:
        call.start_processes()
        return run_judge(call.config, log=print_progress)
    lines = [RowNegatives(call.config).summary()]
    for entry in call.config.judges:
        where = f" at {entry.base_url}" if entry.base_url else ""
        lines.append(f"judge {entry.model}{where}")
    print_lines(*lines, f"would write: {target}")
    return None


def audit(args: ConfigArguments = None) -> Any:
    """Look at training data: duplicates, leakage, false negatives, weak positives."""
    call = read_call("audit", AuditConfig, audit.__doc__, args)
    from vembed.data_tools.audit import audit as run_audit
    from vembed.data_tools.audit import check_audit, mining_config
    from vembed.mining.inputs import read_mining_inputs

    page = check_audit(call.config)
    if not call.is_dry_run:
        call.start_processes()
        return run_audit(call.config, log=print_progress)
    inputs = read_mining_inputs(mining_config(call.config))
    print_lines(*inputs.summary(), f"would write: {page}")
    return None


def generate(args: ConfigArguments = None) -> Any:
    """Make training pairs from documents, with or without a language model."""
    call = read_call("generate", GenerateConfig, generate.__doc__, args)
    from vembed.data_tools.generate import generate as run_generate
    from vembed.mining.output import check_output

    target = check_output(call.config, call.config.output_path)
    if not call.is_dry_run:
        call.start_processes()
        return run_generate(call.config, log=print_progress)
    print_lines(*call.options(), f"would write: {target}")
    return None


def read_call(
    command_name: str,
    kind: type[Config],
    about: str | None,
    args: Sequence[str] | None,
) -> Call[Config]:
    """Read the arguments: a config file, key=value, --key value, and what starts several processes. Print the help, or
    only check them, and end the command, where that is asked for."""
    if {"-h", "--help"} & set(args or []):
        sys.stdout.write(HELP.format(command_name, about))
        for name, default, text in describe_options(kind):
            indent = " " * 6
            lines = textwrap.wrap(
                text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent
            )
            print_lines(f"  {name} ({default})", *lines)
        raise typer.Exit
    file = None
    overrides = []
    processes = {}
    is_dry_run = False
    words_left = iter(args or [])
    for word in words_left:
        is_flag = word.startswith("--")
        if word == "--dry-run":
            is_dry_run = True
        elif is_flag or KEY_VALUE.match(word):
            name, has_value, value = word.removeprefix("--").partition("=")
            if not has_value:
                value = next(words_left, "")
            if not (has_value or value):
                raise UserError(f"{word} needs a value")
            key = name.replace("-", "_")
            if key in NUMBERS_OF_PROCESSES and not value.isdecimal():
                raise UserError(f"--{name} must be a whole number, but is {value}")
            if key in PROCESS_OPTIONS:
                processes[key] = int(value) if key in NUMBERS_OF_PROCESSES else value
            else:
                overrides.append(f"{key}={value}")
        elif file is not None:
            raise UserError(
                f"unexpected {word} beside the config {file}: options are key=value or --key value"
            )
        else:
            file = word
    if file is None and not overrides:
        raise UserError(
            f"which config? Give its file, or key=value: `vembed {command_name} --help` lists the options"
        )
    if MODE.get() == "check":
        # The files that the config names may be made by an earlier step.
        load_options(kind, None, overrides)
        raise typer.Exit
    config = load_options(kind, file, overrides)
    return Call(config, processes, is_dry_run)
