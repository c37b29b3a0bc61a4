"""The sources of options (files, training stage, launcher, command line), each a layer of checked options."""

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
from vembed.config.aliases import BLOCKS, REFUSED, WANDB, Unsure, known_names, target_of
from vembed.config.options import checked, nearest, shown
from vembed.config.parsing import Node, parse_value, read_tree, tree_of_mapping
from vembed.config.schema import TrainConfig
from vembed.config.spelling import from_text, normalise
from vembed.config.stages import STAGES as ROAD
from vembed.config.stages import training_blocks
from vembed.errors import UserError

COMMAND_LINE = "command line"
LAUNCHER = "accelerate launch"
STAGES = "training_stages"
OWN_PRESETS = "distributed_examples"
RESULT_OF = ", result of "
"""Between a file and a stage, in the origin of a model_name that is the result of that stage."""

SAME_SWITCH = (
    ("batch_size", "global_batch_size"),
    ("warmup_ratio", "warmup_steps"),
    ("epochs", "max_steps"),
    ("micro_batch_tokens", "gradient_cache_chunk_size"),
    ("strategy", "use_fsdp"),
    ("fsdp_offload_params", "fsdp_cpu_offload"),
    ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"),
    ("gradient_checkpointing", "fsdp_activation_checkpointing"),
)
"""Options that say the same thing in two ways: a source that uses one way overrides the other way of a weaker one."""


class Level(IntEnum):
    """The order of sources, weakest first: what a stronger source says holds over a weaker one."""

    PRESET = 0
    """`configs/accelerate_fsdp.yaml`, which nobody has named."""
    FILE = 1
    """The Accelerate file or preset that the config or the command line names."""
    LAUNCHER = 2
    CONFIG = 3
    """The training config; a stage's block is part of it."""
    NAMED_FILE = 4
    """An Accelerate file named on the command line, over what the chosen stage's block says."""
    COMMAND_LINE = 5


@dataclass(frozen=True, slots=True)
class Given:
    """One option as a source gives it."""

    option: str
    value: Any
    key: str
    """Key as written: `fsdp.cpu_offload`."""
    where: str
    """`cfg.yaml, line 7`."""
    is_sure: bool = True
    """False: it counts only where its source says nothing else, as `bf16: false` beside `fp16: true`."""
    level: Level = Level.CONFIG

    @property
    def source(self) -> str:
        """`cfg.yaml:7`."""
        return self.where.replace(", line ", ":")

    def __str__(self) -> str:
        return f"{self.key}: {_yaml_word(self.value)} ({self.where})"


@dataclass
class Layer:
    """Options of one source and the problems found in them."""

    name: str
    level: Level = Level.CONFIG
    given: dict[str, Given] = field(default_factory=dict)
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
        """Enter one key: a block key by key, an option under any of its names. A string comes from the command line."""
        key, *inner = path
        name = key.strip().replace("-", "_")
        where = f"{self.name}, line {line}" if line else self.name
        if name in BLOCKS and inner:
            self.take(inner, value, line, block=name, prefix=f"{prefix}{key}.")
        elif (
            name in BLOCKS and isinstance(value, Node) and isinstance(value.value, dict)
        ):
            for inner_key, node in value.value.items():
                self.take(
                    inner_key.split("."),
                    node,
                    node.line or 0,
                    block=name,
                    prefix=f"{prefix}{key}.",
                )
        # Its keys are the user's own column names, so `column_mapping.query=title` adds an entry and is no option.
        elif name == "column_mapping" and inner:
            earlier = dict(self.given.pop(name).value) if name in self.given else {}
            plain = value.plain() if isinstance(value, Node) else value
            self.enter(
                name,
                earlier | {".".join(inner): plain},
                f"{prefix}{key}",
                where,
                line,
                is_as_written=True,
            )
        elif inner:
            self._unknown(key, block, where, line)
        else:
            self._take_option(
                key, value, block, written=prefix + key, where=where, line=line
            )

    def _take_option(
        self,
        key: str,
        value: Node | str,
        block: str | None,
        *,
        written: str,
        where: str,
        line: int,
    ) -> None:
        target = target_of(key, block)
        if target is None:
            self._unknown(key, block, where, line)
        elif isinstance(target, str):
            plain = (
                value.plain() if isinstance(value, Node) else from_text(target, value)
            )
            self.enter(target, plain, written, where, line)
        else:
            plain = value.plain() if isinstance(value, Node) else parse_value(value)
            try:
                settings = target(plain)
            except ValueError as error:
                self.problems.append(
                    (line, f"{where}: {written} {error}, but is {shown(plain)}")
                )
                return
            said = ", ".join(
                f"report_to {'with' if setting else 'without'} wandb"
                if option == WANDB
                else f"{option}: {_yaml_word(setting)}"
                for option, setting in settings
            )
            self.translated.append(
                f"{written}: {_yaml_word(plain)} -> {said or 'nothing to change'} ({where})"
            )
            for option, setting in settings:
                if option == WANDB:
                    self.given[WANDB] = Given(
                        WANDB, setting, written, where, level=self.level
                    )
                else:
                    self.enter(
                        option, setting, written, where, line, is_as_written=True
                    )

    def settle(self) -> None:
        """Merge `use_wandb` into `report_to`, or record the contradiction. Call it after all keys were entered."""
        switch, trackers = self.given.pop(WANDB, None), self.given.get("report_to")
        if switch is None:
            return
        if trackers is None:
            value = ["tensorboard", "wandb"] if switch.value else ["tensorboard"]
            self.given["report_to"] = replace(switch, option="report_to", value=value)
        elif ("wandb" in trackers.value) != switch.value:
            both = f"{switch.key}: {_yaml_word(switch.value)} and {trackers.key}: {shown(trackers.value)}"
            self.problems.append(
                (
                    0,
                    f"{switch.where}: {both} ({trackers.where}) contradict each other: keep one of them",
                )
            )

    def enter(
        self,
        option: str,
        value: Any,
        written: str,
        where: str,
        line: int,
        *,
        is_as_written: bool = False,
    ) -> None:
        """Enter an option under its own name and canonical value; record invalid, duplicate and translated entries.

        `written`: the key as it stands in the source. `is_as_written`: no line on the translation is recorded, since
        the caller has recorded one.
        """
        name = str(option)
        try:
            final = checked(name, normalise(name, value))
        except ValueError as error:
            alias = "" if written == name else f"{written}: "
            self.problems.append((line, f"{where}: {alias}{error}"))
            self.refused.add(name)
            return
        new = Given(
            name,
            final,
            written,
            where,
            is_sure=not isinstance(option, Unsure),
            level=self.level,
        )
        old = self.given.get(name)
        if old is not None and old.is_sure and new.is_sure and old.value != final:
            both = f"{written}: {_yaml_word(final)} and {old.key}: {_yaml_word(old.value)} ({old.where})"
            self.problems.append(
                (line, f"{where}: {both} both set {name}: keep one of them")
            )
            return
        if not is_as_written and (
            written != name or (isinstance(value, str) and str(final) != value)
        ):
            self.translated.append(
                f"{written}: {_yaml_word(value)} -> {name}: {_yaml_word(final)} ({where})"
            )
        if old is None or new.is_sure:
            self.given[name] = new

    def _unknown(self, key: str, block: str | None, where: str, line: int) -> None:
        if key in REFUSED:
            self.problems.append(
                (line, f"{where}: {key!r} is not used here: {REFUSED[key]}")
            )
            return
        near = nearest(key, known_names(block))
        target = target_of(near, block) if near else None
        meant = f" ({target})" if isinstance(target, str) and target != near else ""
        hint = (
            f", did you mean {near!r}{meant}?"
            if near
            else "; `vembed schema` lists all options"
        )
        inside = f" in {block}" if block else ""
        self.problems.append(
            (line, f"{where}: unknown option {shown(key)}{inside}{hint}")
        )


def source_layers(
    source: str | Path | Mapping[str, Any] | TrainConfig, stage: str | None
) -> list[Layer]:
    """Return the layers of a file, a dict or a TrainConfig; with training_stages the shared options, then the stage."""
    if isinstance(source, TrainConfig):
        layer = Layer("TrainConfig")
        for name, value in source.options().items():
            # What was set. Defaults are no layer: they would win over the launcher and files.
            if name in source.given:
                layer.given[name] = Given(name, value, name, "TrainConfig")
        return [layer]
    keys, name = _keys(source)
    in_order = training_blocks(keys, name)
    # From here on both lists of stages are `training_stages`.
    if in_order is not None:
        keys.pop(ROAD)
        keys[STAGES] = in_order
    stages = keys.pop(STAGES, None)
    if stages is None:
        if stage is not None:
            raise UserError(
                f"{name}: stage {stage!r} was asked for, but there is no {STAGES} block to choose it from"
            )
        return [_layer(name, keys)]
    asked = keys.pop("stage", None)
    return _stage_layers(
        name, keys, stages, stage or (str(asked.plain()) if asked else None)
    )


def shared_layer(source: str | Path | Mapping[str, Any]) -> Layer:
    """Return the layer of what stands outside of the stages of a file or dict."""
    keys, name = _keys(source)
    return _layer(
        name,
        {key: node for key, node in keys.items() if key not in (ROAD, STAGES, "stage")},
    )


def own_preset(
    source: str | Path | Mapping[str, Any] | TrainConfig, layers: Sequence[Layer]
) -> list[Layer]:
    """Return the layer of a block under `distributed_examples` that `accelerate_config` names in one of `layers`, the
    strongest first; none where it names a preset of vembed or a file. The name is taken out of its layer."""
    if isinstance(source, TrainConfig):
        return []
    tree = (
        tree_of_mapping(source)
        if isinstance(source, Mapping)
        else read_tree(Path(source))
    )
    name = "the config" if isinstance(source, Mapping) else str(source)
    presets = tree.value.get(OWN_PRESETS)
    if presets is None:
        return []
    if not isinstance(presets.value, dict):
        raise UserError(
            f"{name}, line {presets.line}: {OWN_PRESETS} must hold blocks like `distributed`, by name"
        )
    for layer in layers:
        named = layer.given.get("accelerate_config")
        if named is None:
            continue
        if named.value not in presets.value:
            if named.value in preset_names() or Path(str(named.value)).exists():
                return []
            known = ", ".join([*presets.value, *preset_names()])
            raise UserError(
                f"accelerate_config: {named.value!r} ({named.where}) is neither a file nor a preset ({known})"
            )
        del layer.given["accelerate_config"]
        return [
            _layer(
                name,
                {"distributed": presets.value[named.value]},
                f"{OWN_PRESETS}.{named.value}.",
            )
        ]
    return []


def command_line_layer(overrides: Sequence[str]) -> tuple[Layer, str | None]:
    """The layer of `key=value` words, and the training stage where they name one."""
    layer, stage = Layer(COMMAND_LINE, Level.COMMAND_LINE), None
    for text in overrides:
        key, is_pair, value = text.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not is_pair or not all(path):
            layer.problems.append(
                (0, f"{COMMAND_LINE}: {shown(text)} is not of the form key=value")
            )
        elif path == ["stage"]:
            stage = value
        else:
            layer.take(path, value)
    layer.settle()
    return layer, stage


def launcher_layer(env: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """Return the layer of what `accelerate launch` has set, and notes for the log."""
    options, notes = launcher_options(env)
    return _plain_layer(LAUNCHER, Level.LAUNCHER, options, LAUNCHER), notes


def file_layer(file: AccelerateFile, level: Level) -> Layer:
    """Return the layer of an Accelerate file."""
    options = file.fsdp if level is Level.PRESET else file_options(file)
    return _plain_layer(file.source, level, options, file.source)


def over_the_stage(named: Layer, stage: Layer) -> Layer:
    """Take out of the layer of an Accelerate file that the command line names the options that the stage's block gives
    too, and return them as a layer above it: the file was chosen for this launch, the block for any."""
    where = f"{named.name}, named on the command line"
    # With the other spelling of each switch that the block uses.
    spoken = set(stage.given) | {
        other for pair in SAME_SWITCH for other in pair if set(pair) & set(stage.given)
    }
    moved = {name: named.given.pop(name).value for name in spoken & set(named.given)}
    return _plain_layer(where, Level.NAMED_FILE, moved, where)


def _keys(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Node], str]:
    """Return the keys of a file or dict, and its name in messages."""
    if isinstance(source, Mapping):
        tree, name = tree_of_mapping(source), "the config"
    elif not isinstance(source, str | Path):
        raise UserError(
            f"the config is {source!r:.80}: give a path, a dict or a TrainConfig"
        )
    else:
        tree, name = read_tree(Path(source)), str(source)
    keys: dict[str, Node] = dict(tree.value)
    keys.pop(OWN_PRESETS, None)  # `own_preset` takes the one that is named
    return keys, name


def _plain_layer(
    name: str, level: Level, options: Mapping[str, Any], where: str
) -> Layer:
    layer = Layer(name, level)
    layer.given |= {
        option: Given(option, value, option, where, level=level)
        for option, value in options.items()
    }
    return layer


def _layer(name: str, keys: Mapping[str, Node], prefix: str = "") -> Layer:
    layer = Layer(name)
    for key, node in keys.items():
        layer.take(key.split("."), node, node.line or 0, prefix=prefix)
    layer.settle()
    return layer


def _stage_layers(
    name: str, keys: dict[str, Node], stages: Node, stage: str | None
) -> list[Layer]:
    """Return three layers: options shared by all stages, those implied by the order (output_dir, model_name), and the
    stage's own."""
    blocks: dict[str, Node] = stages.value if isinstance(stages.value, dict) else {}
    for known, block in blocks.items():
        if not isinstance(block.value, dict):
            raise UserError(
                f"{name}, line {block.line}: {STAGES}.{known} must hold options"
            )
    if (
        not blocks
        or (stage is None and len(blocks) > 1)
        or (stage is not None and stage not in blocks)
    ):
        asked = f"there is no stage {stage!r}" if stage else "there are several stages"
        raise UserError(
            f"{name}, line {stages.line}: {asked}: choose with --stage NAME: {', '.join(blocks) or 'none'}"
        )
    chosen = stage or next(iter(blocks))
    # Three layers, so that the block's own output_dir and model_name win over what the order of stages implies.
    base = _layer(name, keys)
    own = _layer(name, blocks[chosen].value, f"{STAGES}.{chosen}.")
    root = base.given["output_dir"].value if "output_dir" in base.given else "output"
    implied = Layer(name)
    where = f"{name}, {STAGES}.{chosen}"
    implied.given["output_dir"] = Given(
        "output_dir", f"{root}/{chosen}", "output_dir", where
    )
    earlier = list(blocks)[: list(blocks).index(chosen)]
    if earlier:
        before = _layer(name, blocks[earlier[-1]].value)
        folder = (
            before.given["output_dir"].value
            if "output_dir" in before.given
            else f"{root}/{earlier[-1]}"
        )
        where = f"{name}{RESULT_OF}{earlier[-1]}"
        implied.given["model_name"] = Given(
            "model_name", f"{folder}/final", "model_name", where
        )
    return [base, implied, own]


def _yaml_word(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) and len(value) <= 80 else shown(value)
