"""Arguments of the commands that take a config: its file, its options as words, and the flags beside them."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from typer import Option

from vembed.config.decisions import ResolvedRun
from vembed.config.loading import resolve_run
from vembed.config.options import OPTION_BLOCKS, all_options, quoted, target_of
from vembed.config.values import Environment
from vembed.errors import UserError

CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
KEY_VALUE = re.compile(r"[A-Za-z_][\w.-]*=")
FLAG = re.compile(r"--?[A-Za-z]")
"""Beginning of a flag. A letter must follow: `-1` and `--` are none."""


@dataclass(frozen=True)
class MachineFlags:
    """Flags of all commands that may run on several machines."""

    machine_rank: Annotated[
        int | None, Option(min=0, help="Number of this machine, from 0.")
    ] = None
    main_process_ip: Annotated[str | None, Option(help="Address of machine 0.")] = None
    main_process_port: Annotated[
        int | None,
        Option(
            help="A free port of machine 0. Default: 29500, or any free one on a single machine."
        ),
    ] = None
    is_dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Print what would be run, and the data, without loading a model.",
        ),
    ] = False


@dataclass(frozen=True)
class LaunchFlags(MachineFlags):
    """Flags of the commands that take a training config, beside its options."""

    stage: Annotated[
        str | None,
        Option(
            help="Run this one of the config's stages alone. Without it all are run, in order."
        ),
    ] = None
    first_stage: Annotated[
        str | None, Option("--from", help="Run the stages from this one on.")
    ] = None
    last_stage: Annotated[
        str | None, Option("--until", help="Run the stages up to this one.")
    ] = None
    run_id: Annotated[
        str | None,
        Option(
            help="The same word on every machine: machines of another run are refused."
        ),
    ] = None

    def with_words(self, words: Sequence[str] | None) -> "TrainArguments":
        """Return the arguments of a command with these flags. Raise UserError for words that are no config or option."""
        config, overrides = parse_words(words or (), is_switch)
        return TrainArguments(
            **vars(self),
            source={} if config is None else config,
            overrides=tuple(overrides),
        )


NO_FLAGS = LaunchFlags()


@dataclass(frozen=True)
class TrainArguments(LaunchFlags):
    """Parsed arguments of `vembed train`."""

    source: str | Mapping[str, Any] = field(default_factory=dict)
    """Config file. Empty: all options are on the command line. From Python also the config as a dict."""
    overrides: tuple[str, ...] = ()
    """`key=value` pairs in the order of the command line."""

    def resolve(self, env: Environment = os.environ) -> ResolvedRun:
        """Return the run that these arguments stand for."""
        return resolve_run(self.source, self.overrides, stage=self.stage, env=env)

    def command_line(self) -> list[str]:
        """Return the config and options as command-line arguments, for the processes that are started."""
        # With `=`: no value can be taken for a flag or for the config.
        config = [f"--config={self.source}"] if isinstance(self.source, str) else []
        stage = [f"--stage={self.stage}"] if self.stage else []
        return [*config, *stage, *(f"--set={override}" for override in self.overrides)]


def parse_words(
    words: Sequence[str],
    is_switch: Callable[[str], bool],
) -> tuple[str | None, list[str]]:
    """Return the config file and the `key=value` pairs of the words of a command line: key=value, --key value and
    --key=value. `is_switch`: a key whose flag may stand without a value, which is `true` then."""
    words_left = list(words)
    config = None
    overrides = []
    while words_left:
        word = words_left.pop(0)
        follower = words_left[0] if words_left else "--end"
        flag, has_value, value = word.partition("=")
        key = flag.lstrip("-").replace("-", "_")
        if not FLAG.match(word):
            is_pair = KEY_VALUE.match(word)
            key = "set" if is_pair else "config"
            value = word
        elif has_value:
            pass
        elif key in ("verbose", "quiet"):
            value = key
            key = "console"
        elif is_switch(key) and (
            follower.startswith("-")
            or KEY_VALUE.match(follower)
            or (config is None and follower.lower().endswith(CONFIG_SUFFIXES))
        ):
            value = "true"
        # Values may begin with one dash: `--num-processes -1`.
        elif re.match("--[A-Za-z]", follower):
            raise UserError(f"{word} needs a value")
        else:
            value = words_left.pop(0)
        if key == "config":
            if config is not None:
                raise UserError(
                    f"unexpected {quoted(value)} beside the config {quoted(config)}: options are key=value or --key value"
                )
            config = value
        elif key != "set":
            overrides.append(f"{key}={value}")
        elif KEY_VALUE.match(value):
            overrides.append(value)
        else:
            raise UserError(
                f"--set {quoted(value)}: it sets an option, as --set batch_size=16"
            )
    if config is None and not overrides:
        raise UserError(
            "which config? Give its file: `vembed train cfg.yaml` (`vembed init` writes one)"
        )
    return config, overrides


def is_switch(key: str) -> bool:
    """Return whether the flag of an option may stand without a value."""
    *blocks, name = key.split(".")
    block = blocks[-1] if blocks and blocks[-1] in OPTION_BLOCKS else None
    target = target_of(name, block)
    if isinstance(target, str) and target in all_options():
        return "bool" in all_options()[target].kinds
    return target is not None
