"""`vembed mine`, `judge`, `audit` and `generate`: their arguments, several processes, and what a dry run prints."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vembed.data_tools.config import AuditConfig, GenerateConfig, JudgeConfig
from vembed.errors import UserError
from vembed.mining.config import BM25, CommandConfig, MineConfig
from vembed.mining.options import describe_options, load_options

CommandName = Literal["mine", "judge", "audit", "generate"]
OnResult = Callable[[Any], object]
PAIR = re.compile(r"[A-Za-z_][\w.-]*=")
WIDTH = 110
"""Columns of the help text."""
LAUNCH_FLAGS = {
    "nproc": "num_processes",
    "num-machines": "num_machines",
    "machine-rank": "machine_rank",
}


def ignore(result: Any) -> None:
    """Take a result that nobody asked for."""


@dataclass(frozen=True)
class CommandArguments:
    """Arguments after the command, sorted."""

    config: str | None
    overrides: tuple[str, ...]
    num_processes: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    is_dry_run: bool = False

    def again(self) -> list[str]:
        """The config and options as arguments, for the processes that are started."""
        return [*([self.config] if self.config else []), *self.overrides]


def parse_arguments(command_name: str, args: Sequence[str]) -> CommandArguments:
    """Sort the arguments: a config file, key=value, --key value, and what starts several processes."""
    config: str | None = None
    overrides: list[str] = []
    numbers: dict[str, int] = {}
    ip = None
    port = None
    is_dry_run = False
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if PAIR.match(word):
                overrides.append(word)
            elif config is None:
                config = word
            else:
                raise UserError(
                    f"unexpected {word} beside the config {config}: options are key=value or --key value"
                )
            continue
        name, has_value, value = word[2:].partition("=")
        if name == "dry-run":
            is_dry_run = True
            continue
        if not has_value:
            if not rest:
                raise UserError(f"{word} needs a value")
            value = rest.pop(0)
        if name in LAUNCH_FLAGS:
            numbers[LAUNCH_FLAGS[name]] = _whole(word, value)
        elif name == "main-process-ip":
            ip = value
        elif name == "main-process-port":
            port = _whole(word, value)
        else:
            overrides.append(f"{name.replace('-', '_')}={value}")
    if config is None and not overrides:
        raise UserError(
            f"which config? Give its file, or key=value: `vembed {command_name} --help` lists the options"
        )
    return CommandArguments(
        config,
        tuple(overrides),
        main_process_ip=ip,
        main_process_port=port,
        is_dry_run=is_dry_run,
        **numbers,
    )


def make_data(
    command_name: CommandName,
    about: str,
    args: Sequence[str],
    on_result: OnResult = ignore,
) -> int:
    """Run a command with its arguments, or print its help. `on_result` gets the result; nothing in a dry run."""
    kind, run = COMMANDS[command_name]
    if {"-h", "--help"} & set(args):
        sys.stdout.write(options_help(command_name, about, kind))
        return 0
    return run(args, on_result)


def options_help(command_name: str, about: str, kind: type[CommandConfig]) -> str:
    """Return the text of `--help`."""
    lines = [
        f"Usage: vembed {command_name} [CFG] [KEY=VALUE | --KEY VALUE] ...",
        "",
        about,
        "",
        "Flags: --dry-run, --json [FILE.json], --nproc N; on several machines also --num-machines N, --machine-rank R,",
        "--main-process-ip ADDRESS and --main-process-port PORT.",
        "",
        "Options, in the config file or as words:",
    ]
    for name, default, text in describe_options(kind):
        lines.append(f"  {name} ({default})")
        lines += textwrap.wrap(
            text, WIDTH, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines) + "\n"


def start_others(
    command_name: str, args: CommandArguments, on_result: OnResult
) -> int | None:
    """Start the command on several processes and return its exit code; None where this is one of them, or the only one.
    `on_result` gets the result of the first one."""
    # LOCAL_RANK: started by `run_ranks` below, with the same arguments.
    if os.environ.get("LOCAL_RANK") or (
        args.num_processes == 1 and args.num_machines == 1
    ):
        return None
    if args.num_machines > 1 and args.main_process_ip is None:
        raise UserError(
            f"--num-machines {args.num_machines} needs --main-process-ip, the address of machine 0, and a "
            "--machine-rank for each"
        )
    from vembed.parallel.launch import rank_environments, run_ranks

    environments = rank_environments(
        args.num_processes,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        main_process_ip=args.main_process_ip,
        main_process_port=args.main_process_port,
    )
    command = [sys.executable, "-m", "vembed", command_name, *args.again()]
    if on_result is ignore:
        return run_ranks(command, environments)
    # By a file: what the ranks print is for the user.
    with tempfile.TemporaryDirectory(prefix="vembed-json-") as folder:
        result = Path(folder) / "result.json"
        code = run_ranks([*command, "--json", str(result)], environments)
        if result.is_file():  # on the first machine
            on_result(json.loads(result.read_text(encoding="utf-8")))
        return code


def check_mine(args: Sequence[str]) -> None:
    """Raise UserError for arguments that `vembed mine` would refuse."""
    load_options(MineConfig, None, parse_arguments("mine", args).overrides)


def run_mine(args: Sequence[str], on_result: OnResult = ignore) -> int:
    """`vembed mine`."""
    parsed = parse_arguments("mine", args)
    config = load_options(MineConfig, parsed.config, parsed.overrides)
    if parsed.is_dry_run:
        sys.stdout.write(describe_mining(config, parsed))
        return 0
    from vembed.mining.mine import check_config

    check_config(config)
    if (code := start_others("mine", parsed, on_result)) is not None:
        return code
    from vembed.mining.mine import mine

    on_result(mine(config, log=speak))
    return 0


def run_judge(args: Sequence[str], on_result: OnResult = ignore) -> int:
    """`vembed judge`."""
    parsed = parse_arguments("judge", args)
    config = load_options(JudgeConfig, parsed.config, parsed.overrides)
    from vembed.mining.output import check_output

    target = check_output(config.output_path)
    if parsed.is_dry_run:
        from vembed.data_tools.judge import read_negatives

        _, pairs = read_negatives(config)
        lines = [pairs.summary()]
        for judge_config in config.judges:
            where = f" at {judge_config.base_url}" if judge_config.base_url else ""
            lines.append(f"judge {judge_config.model}{where}")
        lines.append(f"would write: {target}")
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    if (code := start_others("judge", parsed, on_result)) is not None:
        return code
    from vembed.data_tools.judge import judge

    on_result(judge(config, log=speak))
    return 0


def run_audit(args: Sequence[str], on_result: OnResult = ignore) -> int:
    """`vembed audit`."""
    parsed = parse_arguments("audit", args)
    config = load_options(AuditConfig, parsed.config, parsed.overrides)
    from vembed.data_tools.audit.run import check_audit, mining_config

    page = check_audit(config)
    if parsed.is_dry_run:
        from vembed.mining.mine import read_inputs

        sys.stdout.write(
            "\n".join(
                [*read_inputs(mining_config(config)).summary(), f"would write: {page}"]
            )
            + "\n"
        )
        return 0
    if (code := start_others("audit", parsed, on_result)) is not None:
        return code
    from vembed.data_tools.audit.run import audit

    on_result(audit(config, log=speak))
    return 0


def run_generate(args: Sequence[str], on_result: OnResult = ignore) -> int:
    """`vembed generate`."""
    parsed = parse_arguments("generate", args)
    config = load_options(GenerateConfig, parsed.config, parsed.overrides)
    from vembed.mining.output import check_output

    target = check_output(config.output_path)
    if parsed.is_dry_run:
        values = config.model_dump(mode="json", exclude_unset=True)
        lines = [
            *(f"{name}: {value}" for name, value in values.items()),
            f"would write: {target}",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    if (code := start_others("generate", parsed, on_result)) is not None:
        return code
    from vembed.data_tools.generate.run import generate

    on_result(generate(config, log=speak))
    return 0


def describe_mining(config: MineConfig, args: CommandArguments) -> str:
    """Return the output of a dry run: the options, what the data hold, and what would be done. No model is loaded."""
    from vembed.mining.mine import check_config, read_inputs, work_folder

    target = check_config(config)
    inputs = read_inputs(config)
    lines = [
        f"{name}: {value}"
        for name, value in config.model_dump(mode="json", exclude_unset=True).items()
    ]
    lines += ["", *inputs.summary()]
    for retriever in config.all_retrievers():
        what = "indexed" if retriever.model == BM25 else "encoded"
        lines.append(
            f"{retriever.model}: {len(inputs.documents):,d} documents and {inputs.known.num_queries:,d} queries {what}"
        )
    folder = work_folder(config)
    lines.append(
        f"{folder}: {'is there, and what fits is used again' if folder.exists() else 'would be made'}"
    )
    lines.append(f"processes: {args.num_processes * args.num_machines}")
    lines.append(f"would write: {target}")
    return "\n".join(lines) + "\n"


def speak(line: str) -> None:
    """Print a line of the log."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


COMMANDS: dict[
    CommandName, tuple[type[CommandConfig], Callable[[Sequence[str], OnResult], int]]
] = {
    "mine": (MineConfig, run_mine),
    "judge": (JudgeConfig, run_judge),
    "audit": (AuditConfig, run_audit),
    "generate": (GenerateConfig, run_generate),
}
"""Config and command of each command."""


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{flag} must be a whole number, but is {text}")
    return int(text)
