"""The sources of options, each as a layer of checked values: files, stages, the launcher, the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from vembed.config.accelerate_file import (
    AccelerateFile,
    file_options,
    launcher_options,
    preset_names,
)
from vembed.config.aliases import (
    BLOCKS,
    REFUSED,
    WANDB,
    WeakDefault,
    known_names,
    target_of,
)
from vembed.config.options import checked, nearest, quoted
from vembed.config.parsing import Node, parse_value, read_tree, tree_of_mapping
from vembed.config.schema import TrainConfig
from vembed.config.spelling import from_text, normalise
from vembed.config.stages import STAGES as STAGE_LIST
from vembed.config.stages import training_blocks
from vembed.errors import UserError

COMMAND_LINE = "command line"
LAUNCHER = "accelerate launch"
STAGES = "training_stages"
USER_PRESETS = "distributed_examples"
RESULT_OF = ", result of "
"""Between a file and a stage, in the origin of a model_name that is the result of that stage."""

SLOTS = {
    "global_batch_size": "batch_size",
    "max_steps": "epochs",
    "gradient_cache_chunk_size": "micro_batch_tokens",
}
"""Options that say one thing in another unit: a source that gives one of the two overrides both of a weaker source."""


def slot_of(option: str) -> str:
    """Return the name that an option shares with the other one for the same thing."""
    return SLOTS.get(option, option)


class Level(IntEnum):
    """Order of the sources, weakest first: a stronger one overrides a weaker one."""

    PRESET = 0
    """`configs/accelerate_fsdp.yaml`, where nobody has named a file."""
    FILE = 1
    """The Accelerate file or preset that the config or the command line names."""
    LAUNCHER = 2
    CONFIG = 3
    """The training config. A stage's block is part of it."""
    NAMED_FILE = 4
    """An Accelerate file named on the command line, over the block of the chosen stage."""
    COMMAND_LINE = 5


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
    """Value as written, in YAML."""

    @property
    def source(self) -> str:
        """`cfg.yaml:7`."""
        return self.place.replace(", line ", ":")

    def __str__(self) -> str:
        return f"{self.key}: {self.written or yaml_word(self.value)} ({self.place})"


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
        place = f"{self.name}, line {line}" if line else self.name
        written = prefix + key
        if name in BLOCKS and inner:
            self.take(inner, value, line, block=name, prefix=f"{written}.")
        elif (
            name in BLOCKS and isinstance(value, Node) and isinstance(value.value, dict)
        ):
            for inner_key, node in value.value.items():
                inner_path = inner_key.split(".")
                self.take(
                    inner_path, node, node.line or 0, block=name, prefix=f"{written}."
                )
        elif name == "column_mapping" and inner:
            # Its keys are the user's column names: `column_mapping.query=title`.
            earlier = self.values.pop(name, None)
            columns = dict(earlier.value) if earlier is not None else {}
            plain = value.plain() if isinstance(value, Node) else value
            columns[".".join(inner)] = plain
            self.enter(name, columns, written, place, line, is_logged=False)
        elif inner:
            self._unknown(key, block, place, line)
        else:
            self._take_option(key, value, block, written, place, line)

    def _take_option(
        self,
        key: str,
        value: Node | str,
        block: str | None,
        written: str,
        place: str,
        line: int,
    ) -> None:
        target = target_of(key, block)
        if target is None:
            self._unknown(key, block, place, line)
            return
        if isinstance(target, str):
            plain = (
                value.plain() if isinstance(value, Node) else from_text(target, value)
            )
            self.enter(target, plain, written, place, line)
            return
        plain = value.plain() if isinstance(value, Node) else parse_value(value)
        try:
            settings = target(plain)
        except ValueError as error:
            self.problems.append(
                (line, f"{place}: {written} {error}, but is {quoted(plain)}")
            )
            return
        results = []
        for option, setting in settings:
            if option == WANDB:
                self.values[WANDB] = OptionValue(
                    WANDB, setting, written, place, self.level
                )
                results.append(f"report_to {'with' if setting else 'without'} wandb")
            else:
                self.enter(
                    option,
                    setting,
                    written,
                    place,
                    line,
                    is_logged=False,
                    as_written=yaml_word(plain),
                )
                results.append(f"{option}: {yaml_word(setting)}")
        result = ", ".join(results) or "nothing to change"
        self.translated.append(f"{written}: {yaml_word(plain)} -> {result} ({place})")

    def merge_wandb(self) -> None:
        """Merge `use_wandb` into `report_to`. Call it after all keys were entered."""
        switch = self.values.pop(WANDB, None)
        trackers = self.values.get("report_to")
        if switch is None:
            return
        if trackers is None:
            value = ["tensorboard", "wandb"] if switch.value else ["tensorboard"]
            self.values["report_to"] = replace(switch, option="report_to", value=value)
        elif ("wandb" in trackers.value) != switch.value:
            self.problems.append(
                (
                    0,
                    f"{switch.place}: {switch.key}: {yaml_word(switch.value)} and "
                    f"{trackers.key}: {quoted(trackers.value)} ({trackers.place}) "
                    "contradict each other: keep one of them",
                )
            )

    def enter(
        self,
        option: str,
        value: Any,
        written: str,
        place: str,
        line: int,
        *,
        is_logged: bool = True,
        as_written: str = "",
    ) -> None:
        """Enter an option under its own name, with its canonical value.

        `written` is the key in the source. `is_logged`: record the translation of an alias.
        """
        name = str(option)
        try:
            final = checked(name, normalise(name, value))
        except ValueError as error:
            alias = "" if written == name else f"{written}: "
            self.problems.append((line, f"{place}: {alias}{error}"))
            self.refused.add(name)
            return
        # `strategy: auto` beside `fsdp: {enabled: true}` leaves the choice to the switch.
        is_weak = isinstance(option, WeakDefault) or final == "auto"
        new = OptionValue(name, final, written, place, self.level, is_weak, as_written)
        old = self.values.get(name)
        if old is not None and _contradict(old, new):
            self.problems.append(
                (line, f"{place}: {new} and {old} both set {name}: keep one of them")
            )
            return
        is_translated = isinstance(value, str) and str(final) != value
        if is_logged and (written != name or is_translated):
            self.translated.append(
                f"{written}: {yaml_word(value)} -> {name}: {yaml_word(final)} ({place})"
            )
        if old is None or not is_weak:
            self.values[name] = new

    def _unknown(self, key: str, block: str | None, place: str, line: int) -> None:
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


def source_layers(
    source: str | Path | Mapping[str, Any] | TrainConfig, stage: str | None
) -> list[Layer]:
    """Return the layers of a file, a dict or a TrainConfig.

    With training stages these are the shared options, those implied by the order of the
    stages, and the stage's own.
    """
    if isinstance(source, TrainConfig):
        layer = Layer("TrainConfig")
        given_options = source.given
        for name, value in source.options().items():
            # Only what was set: defaults would win over the launcher and files.
            if name in given_options:
                layer.values[name] = OptionValue(name, value, name, "TrainConfig")
        return [layer]
    keys, name = _keys(source)
    blocks = training_blocks(keys, name)
    if blocks is not None:
        # From here on both lists of stages are `training_stages`.
        keys.pop(STAGE_LIST)
        keys[STAGES] = blocks
    stages = keys.pop(STAGES, None)
    if stages is None:
        if stage is not None:
            raise UserError(
                f"{name}: stage {stage!r} was asked for, but there is no {STAGES} block "
                "to choose it from"
            )
        return [_layer(name, keys)]
    asked = keys.pop("stage", None)
    if stage is None and asked is not None:
        stage = str(asked.plain())
    return _stage_layers(name, keys, stages, stage)


def shared_layer(source: str | Path | Mapping[str, Any]) -> Layer:
    """Return the layer of what stands outside of the stages of a file or dict."""
    keys, name = _keys(source)
    for key in (STAGE_LIST, STAGES, "stage"):
        keys.pop(key, None)
    return _layer(name, keys)


def user_preset_layers(
    source: str | Path | Mapping[str, Any] | TrainConfig, layers: Sequence[Layer]
) -> list[Layer]:
    """Return the layer of a block under `distributed_examples` that `accelerate_config` names, if one does.

    `layers` are searched in order, the strongest first. The name is taken out of its layer.
    """
    if isinstance(source, TrainConfig):
        return []
    if isinstance(source, Mapping):
        tree = tree_of_mapping(source)
        name = "the config"
    else:
        tree = read_tree(Path(source))
        name = str(source)
    presets = tree.value.get(USER_PRESETS)
    if presets is None:
        return []
    if not isinstance(presets.value, dict):
        raise UserError(
            f"{name}, line {presets.line}: {USER_PRESETS} must hold blocks like "
            "`distributed`, by name"
        )
    for layer in layers:
        named = layer.values.get("accelerate_config")
        if named is None:
            continue
        if named.value in presets.value:
            del layer.values["accelerate_config"]
            keys = {"distributed": presets.value[named.value]}
            return [_layer(name, keys, f"{USER_PRESETS}.{named.value}.")]
        if named.value in preset_names() or Path(str(named.value)).exists():
            return []
        known = ", ".join([*presets.value, *preset_names()])
        raise UserError(
            f"accelerate_config: {named.value!r} ({named.place}) is neither a file nor "
            f"a preset ({known})"
        )
    return []


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
    layer.merge_wandb()
    return layer, stage


def launcher_layer(env: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """Return the layer of what `accelerate launch` has set, and notes for the log."""
    options, notes = launcher_options(env)
    return _plain_layer(LAUNCHER, Level.LAUNCHER, options), notes


def file_layer(file: AccelerateFile, level: Level) -> Layer:
    """Return the layer of an Accelerate file."""
    options = file.fsdp if level is Level.PRESET else file_options(file)
    return _plain_layer(file.source, level, options)


def over_the_stage(named: Layer, stage: Layer) -> Layer:
    """Move options of an Accelerate file that the stage's block gives too into a layer above it.

    The command line named the file for this launch. The block is for any launch.
    """
    slots = {slot_of(name) for name in stage.values}
    moved = {}
    for name in list(named.values):
        if slot_of(name) in slots:
            moved[name] = named.values.pop(name).value
    place = f"{named.name}, named on the command line"
    return _plain_layer(place, Level.NAMED_FILE, moved)


def _keys(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Node], str]:
    """Return the keys of a file or dict, and its name in messages."""
    if isinstance(source, Mapping):
        tree = tree_of_mapping(source)
        name = "the config"
    elif isinstance(source, str | Path):
        tree = read_tree(Path(source))
        name = str(source)
    else:
        raise UserError(
            f"the config is {source!r:.80}: give a path, a dict or a TrainConfig"
        )
    keys: dict[str, Node] = dict(tree.value)
    keys.pop(USER_PRESETS, None)  # `user_preset_layers` takes the one that is named
    return keys, name


def _plain_layer(name: str, level: Level, options: Mapping[str, Any]) -> Layer:
    layer = Layer(name, level)
    for option, value in options.items():
        layer.values[option] = OptionValue(option, value, option, name, level)
    return layer


def _layer(name: str, keys: Mapping[str, Node], prefix: str = "") -> Layer:
    layer = Layer(name)
    for key, node in keys.items():
        layer.take(key.split("."), node, node.line or 0, prefix=prefix)
    layer.merge_wandb()
    return layer


def _stage_layers(
    name: str, keys: dict[str, Node], stages: Node, stage: str | None
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
    shared = _layer(name, keys)
    chosen_layer = _layer(name, blocks[chosen].value, f"{STAGES}.{chosen}.")
    # The order of the stages implies a folder and a start model. The block's own win.
    implied = Layer(name)
    root = _text_value(shared, "output_dir", "output")
    place = f"{name}, {STAGES}.{chosen}"
    implied.values["output_dir"] = OptionValue(
        "output_dir", f"{root}/{chosen}", "output_dir", place
    )
    position = list(blocks).index(chosen)
    if position > 0:
        earlier = list(blocks)[position - 1]
        folder = _text_value(
            _layer(name, blocks[earlier].value), "output_dir", f"{root}/{earlier}"
        )
        place = f"{name}{RESULT_OF}{earlier}"
        implied.values["model_name"] = OptionValue(
            "model_name", f"{folder}/final", "model_name", place
        )
    return [shared, implied, chosen_layer]


def _contradict(old: OptionValue, new: OptionValue) -> bool:
    """Return whether two values of one source cannot both be meant."""
    # Weak values too: `use_fsdp: false` does not lose silently to `strategy: fsdp`.
    for values in (["ddp", "fsdp"], ["FULL_SHARD", "SHARD_GRAD_OP"]):
        if old.value in values and new.value in values and old.value != new.value:
            return True
    return old.value != new.value and not old.is_weak and not new.is_weak


def _text_value(layer: Layer, option: str, default: str) -> str:
    return str(layer.values[option].value) if option in layer.values else default


def yaml_word(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and len(value) <= 80 else quoted(value)
