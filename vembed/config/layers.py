"""The sources of options, each as a layer of checked values: files, the launcher, the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from vembed.config.aliases import (
    BLOCKS,
    FORMER_DEFAULTS,
    REFUSED,
    NoEffect,
    WeakDefault,
    canonical,
    known_names,
    target_of,
)
from vembed.config.options import all_options, quoted, yaml_word
from vembed.config.parsing import Node, parse_value
from vembed.names import nearest

COMMAND_LINE = "command line"

REPLACES = {
    "global_batch_size": "batch_size",
    "max_steps": "epochs",
}
"""Option -> the option that it replaces, which sets the same in another unit. A source that sets one of the two overrides
either of them in a weaker source."""


class Level(IntEnum):
    """Order of the sources, weakest first: a stronger one overrides a weaker one."""

    PRESET = 0
    """`configs/accelerate_fsdp.yaml`, if no Accelerate file is named."""
    FILE = 1
    """The Accelerate file or preset that the config or the command line names."""
    LAUNCHER = 2
    """What `accelerate launch` has set in the environment."""
    CONFIG = 3
    """The training config. A stage's block is part of it."""
    COMMAND_LINE = 4


@dataclass(frozen=True, slots=True)
class OptionValue:
    """Value of an option in one source."""

    option: str
    value: Any
    key: str
    """Key as written: `fsdp.cpu_offload`."""
    place: str
    """`cfg.yaml, line 7`."""
    level: Level = Level.CONFIG
    is_weak: bool = False
    """True: another value of the option in the same source wins. `bf16: false` is weak beside `fp16: true`."""
    written: str = ""
    """Value as written, in YAML, where an alias has translated it."""

    @property
    def source(self) -> str:
        """`cfg.yaml:7`."""
        return self.place.replace(", line ", ":")

    def __str__(self) -> str:
        return f"{self.key}: {self.written or yaml_word(self.value)} ({self.place})"

    def contradicts(self, other: OptionValue) -> bool:
        """Return whether two values of an option in one source contradict each other."""
        if self.option == "report_to" and (self.is_weak or other.is_weak):
            return ("wandb" in self.value) != ("wandb" in other.value)
        # These contradict each other even if one is weak: `use_fsdp: false` must not lose silently to `strategy: fsdp`.
        both = {str(self.value), str(other.value)}
        if both in ({"ddp", "fsdp"}, {"FULL_SHARD", "SHARD_GRAD_OP"}):
            return True
        is_weak = self.is_weak or other.is_weak
        return self.value != other.value and not is_weak


@dataclass
class Layer:
    """Options of one source and the problems in them."""

    name: str
    level: Level = Level.CONFIG
    values: dict[str, OptionValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    """Options with an invalid value. They are not reported as missing, too."""
    translated: list[str] = field(default_factory=list)
    """Log lines for aliases: the key as written, and the option that it stands for."""

    def value(self, option: str, default: Any = None) -> Any:
        """Return the value of an option, or the default if this source does not set it."""
        option_value = self.values.get(option)
        return default if option_value is None else option_value.value

    def take_all(
        self, keys: Mapping[str, Node], prefix: str = "", block: str | None = None
    ) -> Layer:
        """Add the keys of a file with their values. Return the layer.

        `prefix`, `block`: those of the block that contains the keys, see `take`.
        """
        for key, node in keys.items():
            place = f"{self.name}, line {node.line}" if node.line else self.name
            self.take(key.split("."), node, place, block=block, prefix=prefix)
        return self

    def take(
        self,
        path: Sequence[str],
        value: Node | str,
        place: str,
        *,
        block: str | None = None,
        prefix: str = "",
    ) -> None:
        """Add one key of the source: an option under its name or an alias, or a block of them, key by key.

        `path`: the key, split at its dots. `value`: a node of a file, or a string of the command line. `place`: file and
        line, for messages. `block`: name of the block that contains the key, which has aliases of its own. `prefix`: the
        keys of the enclosing blocks as written, for messages.
        """
        key, *inner = path
        name = key.strip().replace("-", "_")
        written = prefix + key
        # A block: its keys one by one.
        if name in BLOCKS:
            if inner:
                self.take(inner, value, place, block=name, prefix=f"{written}.")
                return
            if isinstance(value, Node) and isinstance(value.value, dict):
                self.take_all(value.value, f"{written}.", name)
                return
        # What the key stands for: None (unknown), an option's name, a NoEffect, or a function from the value to several
        # (option, value) pairs.
        target = target_of(key, block)
        option = None if callable(target) else all_options().get(str(target))
        if isinstance(value, Node):
            plain = value.plain()
        elif option is not None and not inner:
            plain = option.parse(value)
        else:
            plain = parse_value(value)
        word = yaml_word(plain)  # the value as messages show it
        if target is None or (inner and target != "column_mapping"):
            if name not in FORMER_DEFAULTS or plain != FORMER_DEFAULTS[name]:
                self._refuse_key(name, block, place)
        elif isinstance(target, NoEffect):
            self.translated.append(
                f"{written}: {word} has no effect: {target} ({place})"
            )
        elif inner:
            # Its keys are the user's column names: `column_mapping.query=title`.
            earlier = self.values.pop(name, None)
            columns = dict(earlier.value) if earlier is not None else {}
            columns[".".join(inner)] = plain
            self.enter(name, columns, written, place)
        elif not callable(target):
            final = self.enter(target, plain, written, place)
            is_respelled = isinstance(plain, str) and str(final) != plain
            if final is not None and (written != target or is_respelled):
                self.translated.append(
                    f"{written}: {word} -> {target}: {yaml_word(final)} ({place})"
                )
        else:
            try:
                settings = target(plain)
            except ValueError as error:
                self.problems.append(
                    f"{place}: {written} {error}, but is {quoted(plain)}"
                )
                return
            results = []
            for target_name, setting in settings:
                final = self.enter(target_name, setting, written, place, word)
                results.append(f"{target_name}: {yaml_word(final)}")
            result = ", ".join(results) or "nothing to change"
            self.translated.append(f"{written}: {word} -> {result} ({place})")

    def enter(
        self, option: str, value: Any, key: str, place: str, written: str = ""
    ) -> Any:
        """Add an option under its own name. Return its canonical value, or None after recording a problem.

        `key`, `written`: key and value as written.
        """
        name = str(option)  # a WeakDefault is a str
        try:
            final = canonical(name, value)
        except ValueError as error:
            alias = "" if key == name else f"{key}: "
            self.problems.append(f"{place}: {alias}{error}")
            self.refused.add(name)
            return None
        # `strategy: auto` beside `fsdp: {enabled: true}` leaves the choice to the switch.
        is_weak = isinstance(option, WeakDefault) or final == "auto"
        new = OptionValue(name, final, key, place, self.level, is_weak, written)
        old = self.values.get(name)
        if old is not None and new.contradicts(old):
            self.problems.append(
                f"{place}: {new} and {old} both set {name}: keep one of them"
            )
        elif old is None or not is_weak:
            self.values[name] = new
        return final

    def _refuse_key(self, name: str, block: str | None, place: str) -> None:
        """Record the problem of an unknown key, with the reason or the nearest name."""
        for names, reason in REFUSED.items():
            if name in names.split():
                self.problems.append(f"{place}: {name!r} is not used here: {reason}")
                return
        near = nearest(name, known_names(block))
        hint = "; `vembed schema` lists all options"
        if near:
            target = target_of(near, block)
            is_alias = isinstance(target, str) and target != near
            meaning = f" ({target})" if is_alias else ""
            hint = f", did you mean {near!r}{meaning}?"
        inside = f" in {block}" if block else ""
        self.problems.append(f"{place}: unknown option {quoted(name)}{inside}{hint}")


def plain_layer(name: str, level: Level, options: Mapping[str, Any]) -> Layer:
    """Return a layer of options with their canonical values."""
    layer = Layer(name, level)
    for option, value in options.items():
        layer.values[option] = OptionValue(option, value, option, name, level)
    return layer


def command_line_layer(overrides: Sequence[str]) -> tuple[Layer, str | None]:
    """Return the layer of `key=value` arguments, and the stage that they choose."""
    layer = Layer(COMMAND_LINE, Level.COMMAND_LINE)
    stage = None
    for text in overrides:
        key, is_pair, value = text.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not is_pair or not all(path):
            layer.problems.append(
                f"{COMMAND_LINE}: {quoted(text)} is not of the form key=value"
            )
        elif path == ["stage"]:
            stage = value
        else:
            layer.take(path, value, COMMAND_LINE)
    return layer, stage
