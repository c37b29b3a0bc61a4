"""Options of mine, judge, audit and generate: from a file of their own, or from a training config, and key=value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from vembed.config.layers import (
    BLOCKS,
    COMMAND_LINE,
    Layer,
    Level,
    OptionValue,
    known_names,
    target_of,
)
from vembed.config.loading import one_line_yaml, resolve_paths
from vembed.config.options import Option, all_options, field_option, quoted
from vembed.config.parsing import read_tree, tree_of_mapping
from vembed.config.stages import STAGES, TRAINING_STAGES, USER_PRESETS
from vembed.config.values import Immutable
from vembed.errors import UserError
from vembed.files import nearest
from vembed.mining.config import CommandConfig

Config = TypeVar("Config", bound=CommandConfig)
Source = str | Path | Mapping[str, Any] | Immutable | None
PATH_OPTIONS = ("data_path", "corpus_path", "qrels_path", "image_root", "val_data_path")
"""Options whose relative paths are also looked for beside the config file."""
TRAINING_ONLY_KEYS = (STAGES, TRAINING_STAGES, USER_PRESETS, "stage")
"""Keys of a training config that are no options."""
EPOCH_MINING = "mine"
"""Option of training whose block holds options of `vembed mine`."""


def load_options(
    kind: type[Config], source: Source, overrides: Sequence[str] = ()
) -> Config:
    """Return the config of a file, a dict or a config, with `key=value` arguments on top.

    A training config serves too: the options that it shares with the command are taken, and its others are left.
    """
    if isinstance(source, Immutable):
        if not isinstance(source, kind):
            raise UserError(
                f"the config is a {type(source).__name__}, and a {kind.__name__} is needed"
            )
        if not overrides:
            return source
        source = source.model_dump(exclude_unset=True)
    options = _options(kind)
    file = Path(source) if isinstance(source, str | Path) else None
    source_name = "the config" if file is None else str(source)
    problems: list[str] = []
    values: dict[str, OptionValue] = {}

    def refuse_key(name: str, place: str) -> None:
        near = nearest(name, [*options, *known_names()])
        hint = f"; it has {', '.join(options)}"
        if near:
            hint = f", did you mean {near!r}?"
        problems.append(f"{place}: unknown key {quoted(name)}{hint}")

    training = Layer(source_name)
    if source is not None:
        tree = (
            tree_of_mapping(_paths_as_text(source)) if file is None else read_tree(file)
        )
        nodes = {key: key.replace("-", "_") for key in tree.value}
        is_training = any(
            name not in options and _is_training_key(name) for name in nodes.values()
        )
        for key, name in nodes.items():
            node = tree.value[key]
            place = f"{source_name}, line {node.line}" if node.line else source_name
            # An alias of training, such as output_path, is the command's option where it has one.
            is_command_option = name in options and name not in all_options()
            if is_training and not is_command_option and _is_training_key(name):
                if name not in TRAINING_ONLY_KEYS:
                    training.take(key.split("."), node, place)
            elif name in options:
                values[name] = OptionValue(name, node.plain(), key, place)
            else:
                refuse_key(name, place)
        problems += training.problems
    for name, value in training.values.items():
        if name not in kind.training_options or value.value is None:
            continue
        if name in options:
            values.setdefault(name, value)
        elif name == EPOCH_MINING:
            # Options of the mining between epochs are options of `vembed mine` too.
            for inner, entry in value.value.model_dump(exclude_unset=True).items():
                if inner in options:
                    key = f"{value.key}.{inner}"
                    mined = OptionValue(inner, entry, key, value.place)
                    values.setdefault(inner, mined)

    for argument in overrides:
        key, _, text = argument.partition("=")
        name = key.strip().replace("-", "_")
        if name not in options:
            refuse_key(name, COMMAND_LINE)
            continue
        parsed = options[name].parse(text)
        kinds = options[name].kinds
        if isinstance(parsed, str) and "list" in kinds and "text" not in kinds:
            parsed = [part.strip() for part in parsed.split(",")]
        level = Level.COMMAND_LINE
        values[name] = OptionValue(name, parsed, key, COMMAND_LINE, level)

    # A training config has one model. The command's own list of models is instead of it.
    model = training.values.get("model_name")
    if "retrievers" in values and model and values.get("model_name") is model:
        del values["model_name"]
    for name, option in options.items():
        if name in values:
            try:
                option.checked(values[name].value)
            except ValueError as error:
                problems.append(f"{values[name].place}: {error}")
        elif option.is_required:
            problems.append(
                f"{source_name}: {name} is missing: add `{name}: ...`, or give {name}=..."
            )
    if problems:
        raise UserError("\nalso: ".join(problems))
    try:
        config = kind.model_validate(
            {name: each.value for name, each in values.items()}
        )
    except ValidationError as error:
        # What is left are rules between the options.
        messages = [problem["msg"] for problem in error.errors()]
        rules = [message.removeprefix("Value error, ") for message in messages]
        raise UserError(f"{source_name}: " + "\nalso: ".join(rules)) from error
    if file is None:
        return config
    paths = {
        name: replace(values[name], value=getattr(config, name))
        for name in PATH_OPTIONS
        if name in values
    }
    resolve_paths(paths, list(paths), file, [])
    changes = {name: each.value for name, each in paths.items()}
    return config.model_copy(update=changes)


def describe_options(kind: type[CommandConfig]) -> list[tuple[str, str, str]]:
    """Return name, default and documentation of every option, in the order of the schema."""
    rows = []
    for name, option in _options(kind).items():
        default = "required" if option.is_required else one_line_yaml(option.default)
        rows.append((name, default, " ".join(option.text.split())))
    return rows


def _options(kind: type[CommandConfig]) -> dict[str, Option]:
    return {
        name: field_option(name, field) for name, field in kind.model_fields.items()
    }


def _is_training_key(name: str) -> bool:
    first = name.split(".", maxsplit=1)[0]
    return name in TRAINING_ONLY_KEYS or first in BLOCKS or target_of(first) is not None


def _paths_as_text(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _paths_as_text(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_paths_as_text(entry) for entry in value]
    return value
