"""Command-line arguments of `vembed train`: config file, key=value pairs, option flags and launcher flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vembed.config.aliases import BLOCKS, target_of
from vembed.config.options import all_options, nearest, quoted
from vembed.config.spelling import BOOLS
from vembed.errors import UserError

CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
PAIR = re.compile(r"[A-Za-z_][\w.-]*=")
VALUED_NAMES = frozenset({"precision", "scale", "ddp_timeout", "sampling_alpha"})
"""Translated names that are not switches; as flags they need a value."""
COUNTED_OTHERWISE = frozenset({"effective_batch_size"})
"""Aliases whose number has another meaning than the option's own."""

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
    "all": ("", "With --dry-run: the options that have their default too."),
}
"""Flags that `--help` lists. Every option of the config is a flag as well."""

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
    shows_all: bool = False
    """A dry run lists the options that have their default too."""
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

    def shown_command_line(self) -> list[str]:
        """Return `words` for display, with aliases replaced by the option names."""
        return replace(
            self, overrides=tuple(map(_under_its_own_name, self.overrides))
        ).command_line()


def parse_train_arguments(args: Sequence[str]) -> TrainArguments:
    """Parse the arguments. Raise UserError for anything that is not a config, option or flag."""
    return _Parser(args).result()


def _under_its_own_name(override: str) -> str:
    """Replace an alias: `nproc=8` -> `num_processes=8`. Aliases whose value has another meaning are kept."""
    key, _, value = override.partition("=")
    *blocks, last = key.split(".")
    if blocks and blocks[-1] not in BLOCKS:
        return override
    target = target_of(last, blocks[-1] if blocks else None)
    return (
        f"{target}={value}"
        if isinstance(target, str) and last not in COUNTED_OTHERWISE
        else override
    )


def _takes(translation: Callable[[Any], Any], word: str) -> bool:
    """Return whether a word is a value of a translated name, as `full_shard auto_wrap` is one of `fsdp`."""
    try:
        translation(word)
    except ValueError:
        return False
    return bool(word)


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
    for flag, (value, text) in LAUNCH_FLAGS.items():
        lines.append(f"  {f'--{flag} {value}'.rstrip():<34}{text}")
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
    lines += [
        f"  {f'--{flag} {value}':<34}{text}"
        for flag, (value, text) in COMMAND_FLAGS[command_name].items()
    ]
    return "\n".join(lines) + "\n"


class _Parser:
    def __init__(self, args: Sequence[str]) -> None:
        self.words = list(args)
        self.position = 0
        self.config: str | None = None
        self.overrides: list[str] = []
        self.launch: dict[str, str] = {}
        self.is_dry_run = False
        self.shows_all = False

    def result(self) -> TrainArguments:
        while self.position < len(self.words):
            word = self._take()
            # A letter must follow: `-1` and `--` are no flags.
            if re.match(r"--?[A-Za-z]", word):
                self._flag(word)
            elif PAIR.match(word):
                self.overrides.append(word)
            else:
                self._take_config(word)
        if self.config is None and not self.overrides:
            raise UserError(
                "which config? Give its file: `vembed train cfg.yaml` (`vembed init` writes one)"
            )
        if self.shows_all and not self.is_dry_run:
            raise UserError(
                "--all belongs to --dry-run: it lists the options that have their default too"
            )
        return TrainArguments(
            config=self.config,
            overrides=tuple(self.overrides),
            stage=self.launch.get("stage"),
            first_stage=self.launch.get("from"),
            last_stage=self.launch.get("until"),
            machine_rank=self._number("machine_rank"),
            main_process_ip=self.launch.get("main_process_ip"),
            main_process_port=self._number("main_process_port"),
            run_id=self.launch.get("run_id"),
            is_dry_run=self.is_dry_run,
            shows_all=self.shows_all,
        )

    def _flag(self, word: str) -> None:
        name, has_value, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if key == "dry_run":
            self.is_dry_run = not has_value or BOOLS.get(value.lower(), True)
        elif key == "all" and not has_value:
            self.shows_all = True
        elif key in ("verbose", "quiet") and not has_value:
            self.overrides.append(f"console={key}")
        elif key == "set":
            pair = value if has_value else self._value(word)
            if not PAIR.match(pair):
                raise UserError(
                    f"--set {quoted(pair)}: it sets an option, as --set batch_size=16"
                )
            self.overrides.append(pair)
        elif key == "config":
            self._take_config(value if has_value else self._value(word))
        elif key in (
            "stage",
            "from",
            "until",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "run_id",
        ):
            self.launch[key] = value if has_value else self._value(word)
        else:
            self.overrides.append(
                f"{key}={value if has_value else self._option_value(key, word)}"
            )

    def _option_value(self, key: str, word: str) -> str:
        """Return the value of an option's flag. A switch takes the next word only if that word is a valid value."""
        *blocks, last = key.split(".")
        block = blocks[-1] if blocks and blocks[-1] in BLOCKS else None
        target = target_of(last, block)
        option = all_options().get(target) if isinstance(target, str) else None
        if target is None:
            return self._value_of_unknown(word)
        needs_value = (
            last in VALUED_NAMES if option is None else "bool" not in option.kinds
        )
        if needs_value:
            return self._value(word)
        follower = self.words[self.position] if self.position < len(self.words) else "-"
        is_value = follower.lower() in BOOLS or (
            option is not None and follower.lower() in option.choices
        )
        if not isinstance(target, str):
            is_value = is_value or _takes(target, follower)
        if (
            option is not None
            and "text" in option.kinds
            and not follower.startswith("-")
        ):
            is_config = self.config is None and follower.lower().endswith(
                CONFIG_SUFFIXES
            )
            is_value = is_value or not (PAIR.match(follower) or is_config)
        return self._take() if is_value else "true"

    def _value_of_unknown(self, word: str) -> str:
        near = nearest(
            word.lstrip("-").partition("=")[0],
            [*LAUNCH_FLAGS, *(name.replace("_", "-") for name in all_options())],
        )
        hint = (
            f", did you mean --{near}?"
            if near
            else "; `vembed train --help` and `vembed schema` list what there is"
        )
        raise UserError(f"unknown option {word}{hint}")

    def _value(self, word: str) -> str:
        # Values may begin with one dash: `--num-processes -1`.
        if self.position >= len(self.words) or re.match(
            r"--[A-Za-z]", self.words[self.position]
        ):
            raise UserError(f"{word} needs a value")
        return self._take()

    def _take(self) -> str:
        self.position += 1
        return self.words[self.position - 1]

    def _take_config(self, word: str) -> None:
        if self.config is not None:
            raise UserError(
                f"unexpected {quoted(word)} beside the config {quoted(self.config)}: options are key=value or --key value"
            )
        self.config = word

    def _number(self, key: str) -> int | None:
        text = self.launch.get(key)
        if text is None:
            return None
        if not text.isdecimal() or len(text) > 5:
            raise UserError(
                f"--{key.replace('_', '-')} must be a whole number, but is {quoted(text)}"
            )
        return int(text)
