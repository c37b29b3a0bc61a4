"""`vembed mine`, `judge`, `audit` and `generate`: training data from a config of their own."""

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from vembed.cli.arguments import MachineFlags, parse_words
from vembed.cli.support import (
    MODE,
    ConfigArguments,
    Nproc,
    PositiveNumber,
    print_lines,
    print_progress,
    share,
)
from vembed.errors import UserError
from vembed.mining.options import (
    BM25,
    AuditConfig,
    CommandConfig,
    Config,
    GenerateConfig,
    JudgeConfig,
    MineConfig,
    describe_options,
    load_options,
)

HELP_WIDTH = 110
"""Columns of the help text."""
HELP = """\
Usage: vembed {} [CFG] [KEY=VALUE | --KEY VALUE] ...

{}

Flags: --dry-run, --json [FILE.json], --nproc N; on several machines also --num-machines N, --machine-rank R,
--main-process-ip ADDRESS and --main-process-port PORT.

Options, in the config file or as words:
"""


@dataclass(frozen=True)
class DataFlags(MachineFlags):
    """Flags of these commands, beside the options of their configs."""

    nproc: Nproc = 1
    num_machines: PositiveNumber = 1

    def run(self, work: Callable[..., Any], config: CommandConfig) -> Any:
        """Do the work of a command and return its result. With several processes, the command ends here."""
        num_machines = self.num_machines or 1
        if num_machines > 1 and self.main_process_ip is None:
            raise UserError(
                f"--num-machines {num_machines} needs --main-process-ip, the address of machine 0, and a "
                "--machine-rank for each"
            )
        share(
            self.nproc,
            num_machines=num_machines,
            machine_rank=self.machine_rank or 0,
            main_process_ip=self.main_process_ip,
            main_process_port=self.main_process_port,
        )
        return work(config, log=print_progress)


NO_FLAGS = DataFlags()


def mine(args: ConfigArguments = None, use: DataFlags = NO_FLAGS) -> Any:
    """Find hard negatives for training data in a corpus."""
    config = command_config(mine, MineConfig, args)
    from vembed.mining.inputs import read_mining_inputs
    from vembed.mining.mine import check_mine_config
    from vembed.mining.mine import mine as run_mine

    target = check_mine_config(config)
    if not use.is_dry_run:
        return use.run(run_mine, config)
    inputs = read_mining_inputs(config)
    lines = [*options_of(config), "", *inputs.summary()]
    counts = f"{len(inputs.documents):,d} documents and {inputs.known.num_queries:,d} queries"
    for retriever in config.all_retrievers():
        what = "indexed" if retriever.model == BM25 else "encoded"
        lines.append(f"{retriever.model}: {counts} {what}")
    print_lines(*lines, f"would write: {target}")
    return None


def judge(args: ConfigArguments = None, use: DataFlags = NO_FLAGS) -> Any:
    """Judge the negatives of training data by rerankers or endpoints."""
    config = command_config(judge, JudgeConfig, args)
    from vembed.mining.judges import RowNegatives
    from vembed.mining.judges import judge as run_judge
    from vembed.mining.output import check_output

    target = check_output(config, config.output_path)
    if not use.is_dry_run:
        return use.run(run_judge, config)
    lines = [RowNegatives(config).summary()]
    for entry in config.judges:
        where = f" at {entry.base_url}" if entry.base_url else ""
        lines.append(f"judge {entry.model}{where}")
    print_lines(*lines, f"would write: {target}")
    return None


def audit(args: ConfigArguments = None, use: DataFlags = NO_FLAGS) -> Any:
    """Look at training data: duplicates, leakage, false negatives, weak positives."""
    config = command_config(audit, AuditConfig, args)
    from vembed.data_tools.audit import audit as run_audit
    from vembed.data_tools.audit import check_audit, mining_config
    from vembed.mining.inputs import read_mining_inputs

    page = check_audit(config)
    if not use.is_dry_run:
        return use.run(run_audit, config)
    inputs = read_mining_inputs(mining_config(config))
    print_lines(*inputs.summary(), f"would write: {page}")
    return None


def generate(args: ConfigArguments = None, use: DataFlags = NO_FLAGS) -> Any:
    """Make training pairs from documents, with or without a language model."""
    config = command_config(generate, GenerateConfig, args)
    from vembed.data_tools.generate import generate as run_generate
    from vembed.mining.output import check_output

    target = check_output(config, config.output_path)
    if not use.is_dry_run:
        return use.run(run_generate, config)
    print_lines(*options_of(config), f"would write: {target}")
    return None


def options_of(config: CommandConfig) -> list[str]:
    """Return the options that are set, for a dry run."""
    values = config.model_dump(mode="json", exclude_unset=True)
    return [f"{name}: {value}" for name, value in values.items()]


def command_config(
    command: Callable[..., Any],
    kind: type[Config],
    args: Sequence[str] | None,
) -> Config:
    """Read the words: a config file, key=value and --key value. Print the help, or only check them, and end the command,
    where that is asked for."""
    if {"-h", "--help"} & set(args or []):
        sys.stdout.write(HELP.format(command.__name__, command.__doc__))
        for name, default, text in describe_options(kind):
            indent = " " * 6
            lines = textwrap.wrap(
                text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent
            )
            print_lines(f"  {name} ({default})", *lines)
        raise typer.Exit
    # Every flag has a value.
    file, overrides = parse_words(args or (), lambda _: False)
    if MODE.get() == "check":
        # The files that the config names may be made by an earlier step.
        load_options(kind, None, overrides)
        raise typer.Exit
    return load_options(kind, file, overrides)
