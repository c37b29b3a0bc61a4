"""The sources of options, each as a layer of checked values: files, stages, the launcher, the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from vembed.config.aliases import (
    BLOCKS,
    FORMER_DEFAULTS,
    REFUSED,
    NoEffect,
    WeakDefault,
    known_names,
    normalise,
    target_of,
    value_of_text,
)
from vembed.config.options import all_options, checked, quoted
from vembed.config.parsing import Node, parse_value, source_tree
from vembed.config.schema import TrainConfig
from vembed.config.stages import STAGES as STAGE_LIST
from vembed.config.stages import training_blocks
from vembed.config.values import RESULT_OF
from vembed.errors import UserError
from vembed.names import nearest

COMMAND_LINE = "command line"
STAGES = "training_stages"
USER_PRESETS = "distributed_examples"

REPLACES = {
    "global_batch_size": "batch_size",
    "max_steps": "epochs",
}
"""Option -> the option that it replaces, which says the same in another unit. A source that gives one of the two overrides
both of a weaker source."""


class Level(IntEnum):
    """Order of the sources, weakest first: a stronger one overrides a weaker one."""

    PRESET = 0
    """`configs/accelerate_fsdp.yaml`, where nobody has named a file."""
    FILE = 1
    """The Accelerate file or preset that the config or the command line names."""
    LAUNCHER = 2
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
    """True: it counts only where its source says nothing else, as `bf16: false` beside `fp16: true`."""
    written: str = ""
    """Value as written, in YAML, where an alias has translated it."""

    @property
    def source(self) -> str:
        """`cfg.yaml:7`."""
        return self.place.replace(", line ", ":")

    def __str__(self) -> str:
        return f"{self.key}: {self.written or yaml_word(self.value)} ({self.place})"

    def contradicts(self, other: OptionValue) -> bool:
        """Return whether two values of one source cannot both be meant."""
        if self.option == "report_to" and (self.is_weak or other.is_weak):
            return ("wandb" in self.value) != ("wandb" in other.value)
        # Weak values too: `use_fsdp: false` does not lose silently to `strategy: fsdp`.
        for pair in (["ddp", "fsdp"], ["FULL_SHARD", "SHARD_GRAD_OP"]):
            if sorted([str(self.value), str(other.value)]) == pair:
                return True
        is_weak = self.is_weak or other.is_weak
        return self.value != other.value and not is_weak


@dataclass
class Layer:
    """Options of one source and the problems in them."""

    name: str
    level: Level = Level.CONFIG
    values: dict[str, OptionValue] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    """Pairs of line and sentence."""
    refused: set[str] = field(default_factory=set)
    """Options with an invalid value."""
    translated: list[str] = field(default_factory=list)

    def take_all(self, keys: Mapping[str, Node], prefix: str = "") -> Layer:
        """Enter the keys of a file; return the layer."""
        for key, node in keys.items():
            self.take(key.split("."), node, node.line or 0, prefix=prefix)
        return self

    def take(
        self,
        path: Sequence[str],
        value: Node | str,
        line: int = 0,
        *,
        block: str | None = None,
        prefix: str = "",
    ) -> None:
        """Enter one key: a block key by key, or an option under any of its names.

        A string as value comes from the command line.
        """
        key = path[0]
        inner = list(path[1:])
        name = key.strip().replace("-", "_")
        written = prefix + key
        if name in BLOCKS and inner:
            self.take(inner, value, line, block=name, prefix=f"{written}.")
            return
        if name in BLOCKS and isinstance(value, Node) and isinstance(value.value, dict):
            for inner_key, node in value.value.items():
                inner_path = inner_key.split(".")
                inner_line = node.line or 0
                self.take(
                    inner_path, node, inner_line, block=name, prefix=f"{written}."
                )
            return
        place = f"{self.name}, line {line}" if line else self.name
        target = target_of(key, block)
        if target is None or (inner and target != "column_mapping"):
            plain = parse_value(value) if isinstance(value, str) else value.plain()
            if name not in FORMER_DEFAULTS or plain != FORMER_DEFAULTS[name]:
                self._refuse_key(key, block, place, line)
            return
        is_option = isinstance(target, str) and not isinstance(target, NoEffect)
        if isinstance(value, Node):
            plain = value.plain()
        elif is_option and not inner:
            plain = value_of_text(all_options()[str(target)], value)
        else:
            plain = parse_value(value)
        if isinstance(target, NoEffect):
            self.translated.append(
                f"{written}: {yaml_word(plain)} has no effect: {target} ({place})"
            )
        elif inner:
            # Its keys are the user's column names: `column_mapping.query=title`.
            earlier = self.values.pop(name, None)
            columns = dict(earlier.value) if earlier is not None else {}
            columns[".".join(inner)] = plain
            self.enter(name, columns, written, place, line)
        elif isinstance(target, str):
            final = self.enter(target, plain, written, place, line)
            is_respelled = isinstance(plain, str) and str(final) != plain
            if final is not None and (written != target or is_respelled):
                self.translated.append(
                    f"{written}: {yaml_word(plain)} -> {target}: {yaml_word(final)} ({place})"
                )
        else:
            try:
                settings = target(plain)
            except ValueError as error:
                self.problems.append(
                    (line, f"{place}: {written} {error}, but is {quoted(plain)}")
                )
                return
            word = yaml_word(plain)
            results = []
            for option, setting in settings:
                final = self.enter(option, setting, written, place, line, word)
                results.append(f"{option}: {yaml_word(final)}")
            result = ", ".join(results) or "nothing to change"
            self.translated.append(f"{written}: {word} -> {result} ({place})")

    def enter(
        self,
        option: str,
        value: Any,
        key: str,
        place: str,
        line: int = 0,
        written: str = "",
    ) -> Any:
        """Enter an option under its own name; return its canonical value, None for an invalid one.

        `key`, `written`: key and value as written.
        """
        name = str(option)
        try:
            final = checked(name, normalise(name, value))
        except ValueError as error:
            alias = "" if key == name else f"{key}: "
            self.problems.append((line, f"{place}: {alias}{error}"))
            self.refused.add(name)
            return None
        # `strategy: auto` beside `fsdp: {enabled: true}` leaves the choice to the switch.
        is_weak = isinstance(option, WeakDefault) or final == "auto"
        new = OptionValue(name, final, key, place, self.level, is_weak, written)
        old = self.values.get(name)
        if old is not None and new.contradicts(old):
            self.problems.append(
                (line, f"{place}: {new} and {old} both set {name}: keep one of them")
            )
        elif old is None or not is_weak:
            self.values[name] = new
        return final

    def _refuse_key(self, key: str, block: str | None, place: str, line: int) -> None:
        if key in REFUSED:
            sentence = f"{place}: {key!r} is not used here: {REFUSED[key]}"
            self.problems.append((line, sentence))
            return
        near = nearest(key, known_names(block))
        hint = "; `vembed schema` lists all options"
        if near:
            target = target_of(near, block)
            is_alias = isinstance(target, str) and target != near
            meaning = f" ({target})" if is_alias else ""
            hint = f", did you mean {near!r}{meaning}?"
        inside = f" in {block}" if block else ""
        sentence = f"{place}: unknown option {quoted(key)}{inside}{hint}"
        self.problems.append((line, sentence))


def plain_layer(name: str, level: Level, options: Mapping[str, Any]) -> Layer:
    """Return a layer of options with their canonical values."""
    layer = Layer(name, level)
    for option, value in options.items():
        layer.values[option] = OptionValue(option, value, option, name, level)
    return layer


def source_layers(
    source: str | Path | Mapping[str, Any] | TrainConfig, stage: str | None
) -> tuple[list[Layer], Mapping[str, Node]]:
    """Return the layers of a file, a dict or a TrainConfig, and the user's own presets.

    With training stages these are the shared options, those implied by the order of the
    stages, and the stage's own.
    """
    if isinstance(source, TrainConfig):
        # Only what was set: defaults would win over the launcher and files.
        options = source.options()
        given_options = {
            name: options[name] for name in options if name in source.given
        }
        return [plain_layer("TrainConfig", Level.CONFIG, given_options)], {}
    tree, name = source_tree(source)
    keys: dict[str, Node] = dict(tree.value)
    presets = keys.pop(USER_PRESETS, Node({}, None))
    if not isinstance(presets.value, dict):
        raise UserError(
            f"{name}, line {presets.line}: {USER_PRESETS} must hold blocks like "
            "`distributed`, by name"
        )
    blocks = training_blocks(keys, name)
    if blocks is not None:
        # From here on both lists of stages are `training_stages`.
        keys.pop(STAGE_LIST)
        keys[STAGES] = blocks
    stages = keys.pop(STAGES, None)
    if stages is not None:
        asked = keys.pop("stage", None)
        if stage is None and asked is not None:
            stage = str(asked.plain())
        return _stage_layers(name, keys, stages, stage), presets.value
    if stage is not None:
        raise UserError(
            f"{name}: stage {stage!r} was asked for, but there is no {STAGES} block "
            "to choose it from"
        )
    return [Layer(name).take_all(keys)], presets.value


def shared_layer(source: str | Path | Mapping[str, Any]) -> Layer:
    """Return the layer of what stands outside of the stages of a file or dict."""
    tree, name = source_tree(source)
    keys = dict(tree.value)
    for key in (STAGE_LIST, STAGES, USER_PRESETS, "stage"):
        keys.pop(key, None)
    return Layer(name).take_all(keys)


def command_line_layer(overrides: Sequence[str]) -> tuple[Layer, str | None]:
    """Return the layer of `key=value` arguments, and the stage that they choose."""
    layer = Layer(COMMAND_LINE, Level.COMMAND_LINE)
    stage = None
    for text in overrides:
        key, is_pair, value = text.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not is_pair or not all(path):
            sentence = f"{COMMAND_LINE}: {quoted(text)} is not of the form key=value"
            layer.problems.append((0, sentence))
        elif path == ["stage"]:
            stage = value
        else:
            layer.take(path, value)
    return layer, stage


def _stage_layers(
    name: str, keys: Mapping[str, Node], stages: Node, stage: str | None
) -> list[Layer]:
    blocks: dict[str, Node] = stages.value if isinstance(stages.value, dict) else {}
    for known, block in blocks.items():
        if not isinstance(block.value, dict):
            raise UserError(
                f"{name}, line {block.line}: {STAGES}.{known} must hold options"
            )
    is_unclear = stage is None and len(blocks) > 1
    is_unknown = stage is not None and stage not in blocks
    if not blocks or is_unclear or is_unknown:
        problem = (
            f"there is no stage {stage!r}" if stage else "there are several stages"
        )
        names = ", ".join(blocks) or "none"
        raise UserError(
            f"{name}, line {stages.line}: {problem}: choose with --stage NAME: {names}"
        )
    chosen = stage or next(iter(blocks))
    shared = Layer(name).take_all(keys)
    chosen_layer = Layer(name).take_all(blocks[chosen].value, f"{STAGES}.{chosen}.")
    # The order of the stages implies a folder and a start model. The block's own win.
    implied = Layer(name)
    root = _output_dir(shared, "output")
    place = f"{name}, {STAGES}.{chosen}"
    implied.enter("output_dir", f"{root}/{chosen}", "output_dir", place)
    position = list(blocks).index(chosen)
    if position > 0:
        earlier = list(blocks)[position - 1]
        earlier_layer = Layer(name).take_all(blocks[earlier].value)
        folder = _output_dir(earlier_layer, f"{root}/{earlier}")
        place = f"{name}{RESULT_OF}{earlier}"
        implied.enter("model_name", f"{folder}/final", "model_name", place)
    return [shared, implied, chosen_layer]


def _output_dir(layer: Layer, default: str) -> str:
    folder = layer.values.get("output_dir")
    return default if folder is None else str(folder.value)


def yaml_word(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and len(value) <= 80 else quoted(value)
