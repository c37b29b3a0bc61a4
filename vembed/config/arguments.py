"""Command-line arguments of `vembed train`: config file, key=value pairs, option flags and launcher flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vembed.config.options import (
    BLOCKS,
    BOOLS,
    all_options,
    quoted,
    target_of,
)
from vembed.errors import UserError, nearest

CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
KEY_VALUE = re.compile(r"[A-Za-z_][\w.-]*=")
LAUNCH_FLAGS = {
    "config": ("FILE", "The config file, where it is not the first word."),
    "set": ("KEY=VALUE", "An option, as key=value alone."),
    "stage": (
        "NAME",
        "Run this one of the config's stages alone. Without it all are run, in order.",
    ),
    "from": ("NAME", "Run the stages from this one on."),
    "until": ("NAME", "Run the stages up to this one."),
    "nproc": ("N", "Processes on this machine. Default: one per GPU, 1 without."),
    "num-machines": ("N", "Machines that take part. Start the same command on each."),
    "machine-rank": ("R", "Number of this machine, from 0."),
    "main-process-ip": ("ADDRESS", "Address of machine 0."),
    "main-process-port": (
        "PORT",
        "A free port of machine 0. Default: 29500, or any free one on a single machine.",
    ),
    "run-id": (
        "WORD",
        "The same word on every machine: machines of another run are refused.",
    ),
    "accelerate-config": (
        "FILE|PRESET",
        "An Accelerate config, or the name of one that vembed brings.",
    ),
    "resume": (
        "[PATH]",
        "Go on from the newest checkpoint, or from this one. force: with other settings too.",
    ),
    "overwrite": ("", "Replace the earlier run in output_dir."),
    "verbose": ("", "All lines of the log file on the console too."),
    "quiet": ("", "Only warnings and errors on the console."),
    "debug": ("", "A detailed log per process in output_dir/logs/."),
    "dry-run": (
        "",
        "Print what would be trained and launched, and the data, without loading a model.",
    ),
    "json": (
        "[FILE.json]",
        "The result as JSON: alone on standard output, or in this file.",
    ),
}
"""Flags that `--help` lists. Every option of the config is a flag as well."""

LAUNCH_FIELDS = {
    "stage": "stage",
    "from": "first_stage",
    "until": "last_stage",
    "machine_rank": "machine_rank",
    "main_process_ip": "main_process_ip",
    "main_process_port": "main_process_port",
    "run_id": "run_id",
}
"""Flags with a value that are no options -> fields of TrainArguments."""

_JSON = {"json": LAUNCH_FLAGS["json"]}
COMMAND_FLAGS = {
    "plan": {
        "gpu": (
            "NxNAME",
            "Plan for other GPUs, as 2xA100-80GB, with an estimate of the hours.",
        ),
        "memory": ("GB", "Plan for GPUs of this memory each."),
        **_JSON,
    },
    "config": _JSON,
    "data": _JSON,
}
"""Flags of the other commands that take the arguments of train."""


@dataclass(frozen=True, slots=True)
class TrainArguments:
    """Parsed arguments of `vembed train`."""

    config: str | None
    """Config file; None: all options are on the command line."""
    overrides: tuple[str, ...] = ()
    """`key=value` pairs in the order of the command line."""
    stage: str | None = None
    first_stage: str | None = None
    last_stage: str | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    run_id: str | None = None
    is_dry_run: bool = False
    mapping: Mapping[str, Any] | None = None
    """The config as a dict, in place of a file; from Python alone."""

    @property
    def source(self) -> str | Mapping[str, Any]:
        """Input of `resolve_run`."""
        if self.mapping is not None:
            return self.mapping
        return {} if self.config is None else self.config

    def command_line(self) -> list[str]:
        """Return the config and options as command-line arguments, for the processes that are started."""
        # With `=`: no value can be taken for a flag or for the config.
        config = [] if self.config is None else [f"--config={self.config}"]
        stage = [f"--stage={self.stage}"] if self.stage else []
        return [*config, *stage, *(f"--set={override}" for override in self.overrides)]


def parse_train_arguments(args: Sequence[str]) -> TrainArguments:
    """Parse the arguments. Raise UserError for anything that is not a config, option or flag."""
    return _Parser(args).parse()


def train_help() -> str:
    """Return the text of `vembed train --help`."""
    lines = [
        "Usage: vembed train CFG [KEY=VALUE | --OPTION VALUE] ...",
        "",
        "Train a model as a config file (YAML, TOML or JSON) says, on all local devices.",
        "",
        "Every option of the config is a word here too: batch_size=16, --batch-size 16, --use-fsdp true;",
        "`vembed schema --format markdown` lists them. The command line wins over the file.",
        "",
        "Flags:",
    ]
    lines += _flag_lines(LAUNCH_FLAGS)
    lines += [
        "",
        "Exit codes: 0 done, 1 failed, 2 bad usage, config or data, 130 or 143 stopped by a signal, and saved.",
    ]
    return "\n".join(lines) + "\n"


def command_help(command_name: str, about: str) -> str:
    """Return the text of `--help` of a command that takes the arguments of train."""
    lines = [
        f"Usage: vembed {command_name} CFG [KEY=VALUE | --OPTION VALUE] ...",
        "",
        about.strip(),
        "",
        "The config, its options and the flags are those of `vembed train` (`vembed train --help`). Further flags:",
    ]
    lines += _flag_lines(COMMAND_FLAGS[command_name])
    return "\n".join(lines) + "\n"


def _flag_lines(flags: Mapping[str, tuple[str, str]]) -> list[str]:
    lines = []
    for flag, (value, text) in flags.items():
        lines.append(f"  {f'--{flag} {value}'.rstrip():<34}{text}")
    return lines


class _Parser:
    def __init__(self, args: Sequence[str]) -> None:
        self.args = list(args)
        self.config: str | None = None
        self.overrides: list[str] = []
        self.launch: dict[str, Any] = {}

    def parse(self) -> TrainArguments:
        while self.args:
            word = self.args.pop(0)
            # A letter must follow: `-1` and `--` are no flags.
            if re.match(r"--?[A-Za-z]", word):
                self._flag(word)
            elif KEY_VALUE.match(word):
                self.overrides.append(word)
            else:
                self._take_config(word)
        if self.config is None and not self.overrides:
            raise UserError(
                "which config? Give its file: `vembed train cfg.yaml` (`vembed init` writes one)"
            )
        return TrainArguments(self.config, tuple(self.overrides), **self.launch)

    def _flag(self, word: str) -> None:
        name, has_value, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if key == "dry_run":
            self.launch["is_dry_run"] = not has_value or BOOLS.get(value.lower(), True)
        elif key in ("verbose", "quiet") and not has_value:
            self.overrides.append(f"console={key}")
        elif key == "set":
            pair = value if has_value else self._value(word)
            if not KEY_VALUE.match(pair):
                raise UserError(
                    f"--set {quoted(pair)}: it sets an option, as --set batch_size=16"
                )
            self.overrides.append(pair)
        elif key == "config":
            self._take_config(value if has_value else self._value(word))
        elif key in LAUNCH_FIELDS:
            text = value if has_value else self._value(word)
            self.launch[LAUNCH_FIELDS[key]] = text
            if key in ("machine_rank", "main_process_port"):
                if not text.isdecimal() or len(text) > 5:
                    raise UserError(
                        f"--{name} must be a whole number, but is {quoted(text)}"
                    )
                self.launch[key] = int(text)
        else:
            if not has_value:
                value = self._option_value(key, word)
            self.overrides.append(f"{key}={value}")

    def _option_value(self, key: str, word: str) -> str:
        """Return the value of an option's flag. A switch takes the next word unless that is a flag, a pair or the
        config."""
        *blocks, last = key.split(".")
        block = blocks[-1] if blocks and blocks[-1] in BLOCKS else None
        target = target_of(last, block)
        if target is None:
            names = [name.replace("_", "-") for name in all_options()]
            near = nearest(word.lstrip("-"), [*LAUNCH_FLAGS, *names])
            hint = "; `vembed train --help` and `vembed schema` list what there is"
            if near:
                hint = f", did you mean --{near}?"
            raise UserError(f"unknown option {word}{hint}")
        option = None if callable(target) else all_options().get(target)
        if option is not None and "bool" not in option.kinds:
            return self._value(word)
        follower = self.args[0] if self.args else "-"
        is_file = follower.lower().endswith(CONFIG_SUFFIXES)
        is_config = is_file and self.config is None
        if follower.startswith("-") or KEY_VALUE.match(follower) or is_config:
            return "true"
        return self.args.pop(0)

    def _value(self, word: str) -> str:
        # Values may begin with one dash: `--num-processes -1`.
        if not self.args or re.match(r"--[A-Za-z]", self.args[0]):
            raise UserError(f"{word} needs a value")
        return self.args.pop(0)

    def _take_config(self, word: str) -> None:
        if self.config is not None:
            raise UserError(
                f"unexpected {quoted(word)} beside the config {quoted(self.config)}: options are key=value or --key value"
            )
        self.config = word
