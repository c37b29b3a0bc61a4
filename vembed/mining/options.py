"""Options of mine, judge, audit and generate: from a file of their own, or from a training config, and key=value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from vembed.config.aliases import BLOCKS, known_names, target_of
from vembed.config.layers import (
    COMMAND_LINE,
    STAGES,
    USER_PRESETS,
    Layer,
    Level,
    OptionValue,
)
from vembed.config.loading import find_beside_file, one_line_yaml
from vembed.config.options import Option, all_options, field_option, nearest, quoted
from vembed.config.parsing import read_tree, tree_of_mapping
from vembed.config.spelling import value_of_text
from vembed.config.stages import STAGES as STAGE_LIST
from vembed.config.values import Frozen
from vembed.errors import UserError
from vembed.mining.config import CommandConfig

Config = TypeVar("Config", bound=CommandConfig)
Source = str | Path | Mapping[str, Any] | Frozen | None
PATH_OPTIONS = ("data_path", "corpus_path", "qrels_path", "image_root", "val_data_path")
"""Options whose relative paths are also looked for beside the config file."""
TRAINING_ONLY_KEYS = (STAGES, STAGE_LIST, USER_PRESETS, "stage")
"""Keys of a training config that are no options."""
EPOCH_MINING = "mine"
"""Option of training whose block holds options of `vembed mine`."""


def load_options(
    kind: type[Config], source: Source, overrides: Sequence[str] = ()
) -> Config:
    """Return the config of a file, a dict or a config, with `key=value` arguments on top.

    A training config serves too: the options that it shares with the command are taken, and its others are left.
    """
    if isinstance(source, Frozen):
        if not isinstance(source, kind):
            raise UserError(
                f"the config is a {type(source).__name__}, and a {kind.__name__} is needed"
            )
        if not overrides:
            return source
        source = source.model_dump(exclude_unset=True)
    reader = _OptionReader(kind, source)
    for argument in overrides:
        reader.take_argument(argument)
    config: Config = reader.result()
    return config


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


class _OptionReader:
    """Collects the options of one command from its sources."""

    def __init__(self, kind: type[CommandConfig], source: Any) -> None:
        self._kind = kind
        self._options = _options(kind)
        self._file = Path(source) if isinstance(source, str | Path) else None
        self._name = "the config" if self._file is None else str(source)
        self._values: dict[str, OptionValue] = {}
        self._training: Mapping[str, OptionValue] = {}
        self._problems: list[str] = []
        if source is not None:
            self._take_source(source)

    def _take_source(self, source: Any) -> None:
        tree = (
            read_tree(self._file)
            if self._file is not None
            else tree_of_mapping(_paths_as_text(source))
        )
        names = {key: key.replace("-", "_") for key in tree.value}
        is_training = any(
            name not in self._options and _is_training_key(name)
            for name in names.values()
        )
        training = Layer(self._name)
        for key, node in tree.value.items():
            name = names[key]
            place = f"{self._name}, line {node.line}" if node.line else self._name
            # An alias of training, such as output_path, is the command's option where it has one.
            is_command_option = name in self._options and name not in all_options()
            if is_training and not is_command_option and _is_training_key(name):
                if name not in TRAINING_ONLY_KEYS:
                    training.take(key.split("."), node, node.line or 0)
            elif name in self._options:
                self._values[name] = OptionValue(name, node.plain(), key, place)
            else:
                self._refuse_key(name, place)
        self._problems += [sentence for _, sentence in sorted(training.problems)]
        self._take_training(training.values)

    def _take_training(self, values: Mapping[str, OptionValue]) -> None:
        """Take the options that training shares with the command."""
        self._training = values
        shared = set(self._kind.training_options)
        for name, value in values.items():
            is_option = name in shared and name in self._options
            if is_option and value.value is not None:
                self._values.setdefault(name, value)
        # Options of the mining between epochs are options of `vembed mine` too.
        block = values.get(EPOCH_MINING)
        if EPOCH_MINING in shared and block is not None and block.value is not None:
            for name, entry in block.value.model_dump(exclude_unset=True).items():
                if name in self._options:
                    value = OptionValue(name, entry, f"{block.key}.{name}", block.place)
                    self._values.setdefault(name, value)

    def take_argument(self, argument: str) -> None:
        """Take `key=value` of the command line."""
        key, _, text = argument.partition("=")
        name = key.strip().replace("-", "_")
        option = self._options.get(name)
        if option is None:
            self._refuse_key(name, COMMAND_LINE)
            return
        value = value_of_text(option, text)
        is_list = "list" in option.kinds and "text" not in option.kinds
        if is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        self._values[name] = OptionValue(
            name, value, key, COMMAND_LINE, Level.COMMAND_LINE
        )

    def result(self) -> Any:
        """Return the config. Raise UserError with all problems."""
        # A training config has one model. The command's own list of models is instead of it.
        if "retrievers" in self._values and self._from_training("model_name"):
            del self._values["model_name"]
        if not self._problems:
            values = {name: value.value for name, value in self._values.items()}
            try:
                config = self._kind.model_validate(values)
            except ValidationError as error:
                self._problems = self._sentences(error)
            else:
                return self._with_paths(config)
        raise UserError("\nalso: ".join(self._problems))

    def _from_training(self, name: str) -> bool:
        value = self._training.get(name)
        return value is not None and self._values.get(name) is value

    def _with_paths(self, config: Frozen) -> Frozen:
        if self._file is None:
            return config
        paths: dict[str, OptionValue] = {}
        for name in PATH_OPTIONS:
            if name in self._values:
                value = self._values[name]
                paths[name] = OptionValue(
                    name, getattr(config, name), value.key, value.place, value.level
                )
        find_beside_file(paths, list(paths), self._file, [])
        changes = {name: value.value for name, value in paths.items()}
        return config.model_copy(update=changes)

    def _refuse_key(self, name: str, place: str) -> None:
        near = nearest(name, [*self._options, *known_names()])
        hint = f"; it has {', '.join(self._options)}"
        if near:
            hint = f", did you mean {near!r}?"
        self._problems.append(f"{place}: unknown key {quoted(name)}{hint}")

    def _sentences(self, error: ValidationError) -> list[str]:
        """Return each mistake as one sentence: where, which option, what it must be, what it is."""
        sentences: dict[str, str] = {}
        for problem in error.errors():
            path = [str(part) for part in problem["loc"]]
            name = path[0] if path else ""
            place = self._values[name].place if name in self._values else self._name
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "missing" and len(path) == 1:
                sentence = f"{name} is missing: add `{name}: ...`, or give {name}=..."
            elif problem["type"] == "extra_forbidden":
                sentence = f"{name} has the unknown key {quoted(path[-1])}"
            elif problem["type"] == "value_error":
                sentence = f"{name}: {message}" if name else message
            else:
                must = message.replace("Input should be", "must be")
                sentence = f"{name} {must}, but is {quoted(problem['input'])}"
                near = nearest(str(problem["input"]), self._options[name].choices)
                if near:
                    sentence += f"; did you mean {near!r}?"
            # Of a union pydantic lists the problems with each member: the first one says enough.
            sentences.setdefault(name or sentence, f"{place}: {sentence}")
        return list(sentences.values())


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
