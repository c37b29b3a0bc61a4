"""A YAML file and key=value arguments as the config of mine, judge, audit or generate."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from vembed.config.entries import Frozen
from vembed.config.loading import one_line_yaml
from vembed.config.options import nearest, quoted
from vembed.config.parsing import Node, parse_value, read_tree
from vembed.errors import UserError

COMMAND_LINE = "command line"

Config = TypeVar("Config", bound=Frozen)
Source = str | Path | Mapping[str, Any] | Frozen | None
PATHS = ("data_path", "corpus_path", "qrels_path", "image_root", "val_data_path")
"""Options whose relative paths are looked for beside the config file too."""


def load_options(
    kind: type[Config], source: Source, overrides: Sequence[str] = ()
) -> Config:
    """The config of a file, a dict or a config, with `key=value` words on top; UserError on anything wrong."""
    if isinstance(source, Frozen):
        if not isinstance(source, kind):
            raise UserError(
                f"the config is a {type(source).__name__}, and a {kind.__name__} is needed"
            )
        if not overrides:
            return source
        source = source.model_dump(exclude_unset=True)
    given: dict[str, Any] = {}
    where: dict[str, str] = {}
    problems: list[str] = []
    if isinstance(source, str | Path):
        for key, node in _file(Path(source)).items():
            _enter(
                kind,
                key.replace("-", "_"),
                node.plain(),
                f"{source}, line {node.line}",
                given,
                where,
                problems,
            )
        _beside_the_file(given, Path(source))
    elif source is not None:
        for key, value in source.items():
            _enter(kind, key, _without_paths(value), "config", given, where, problems)
    for word in overrides:
        key, _, text = word.partition("=")
        name = key.strip().replace("-", "_")
        _enter(
            kind,
            name,
            _from_text(kind, name, text),
            COMMAND_LINE,
            given,
            where,
            problems,
        )
    if problems:
        raise UserError("\nalso: ".join(problems))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        place = str(source) if isinstance(source, str | Path) else "the config"
        raise UserError(
            "\nalso: ".join(_sentences(kind, error, where, place))
        ) from None


def describe_options(kind: type[Frozen]) -> list[tuple[str, str, str]]:
    """Name, default and documentation of every option, in the order of the schema."""
    found = []
    for name, field in kind.model_fields.items():
        default = (
            "required"
            if field.is_required()
            else one_line_yaml(field.get_default(call_default_factory=True))
        )
        found.append((name, default, " ".join((field.description or "").split())))
    return found


def _without_paths(value: Any) -> Any:
    """The value with its `Path`s as text."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_paths(entry) for key, entry in value.items()}
    return (
        [_without_paths(entry) for entry in value] if isinstance(value, list) else value
    )


def _file(path: Path) -> dict[str, Node]:
    tree: dict[str, Node] = read_tree(path).value
    return tree


def _enter(
    kind: type[Frozen],
    name: str,
    value: Any,
    place: str,
    given: dict[str, Any],
    where: dict[str, str],
    problems: list[str],
) -> None:
    if name not in kind.model_fields:
        near = nearest(name, kind.model_fields)
        hint = (
            f", did you mean {near!r}?"
            if near
            else f"; it has {', '.join(kind.model_fields)}"
        )
        problems.append(f"{place}: unknown key {quoted(name)}{hint}")
        return
    given[name] = value
    where[name] = place


def _from_text(kind: type[Frozen], name: str, text: str) -> Any:
    """A value of the command line: the text itself where the option takes any text, otherwise as YAML."""
    if name not in kind.model_fields:
        return text
    kinds = _kinds(kind.model_fields[name].annotation)
    if str in kinds and not kinds & {list, dict}:
        return None if text == "null" and type(None) in kinds else text
    value = parse_value(text)
    if isinstance(value, str) and list in kinds and str not in kinds:
        return [part.strip() for part in text.split(",")]
    if (
        isinstance(value, dict)
        and dict in kinds
        and all(entry is None for entry in value.values())
    ):
        pairs = [
            str(key).partition(":") for key in value
        ]  # {a:b} without a space, which shells need no quotes for
        return {key.strip(): entry.strip() for key, _, entry in pairs}
    return value


def _kinds(annotation: Any) -> set[Any]:
    """The Python types that an annotation takes; a config model counts as a dict."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return set().union(*(_kinds(member) for member in get_args(annotation)))
    if origin is Literal:
        return {Literal}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {dict}
    return {origin or annotation}


def _sentences(
    kind: type[Frozen], error: ValidationError, where: Mapping[str, str], place: str
) -> list[str]:
    """Each mistake as one sentence: where, which option, what it must be, what it is."""
    found: dict[str, str] = {}
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        name = location[0] if location else ""
        at = where.get(name, place)
        if problem["type"] == "missing" and len(location) == 1:
            text = f"{place}: {name} is missing: add `{name}: ...`, or give {name}=..."
        elif problem["type"] == "extra_forbidden":
            text = f"{at}: {name} has the unknown key {quoted(location[-1])}"
        elif problem["type"] == "value_error":
            text = f"{at}: {'' if not name else name + ': '}{problem['msg'].removeprefix('Value error, ')}"
        else:
            must = problem["msg"].replace("Input should be", "must be")
            near = _near_choice(kind, name, problem["input"])
            text = f"{at}: {name} {must}, but is {quoted(problem['input'])}{near}"
        found.setdefault(name or text, text)
    return list(found.values())


def _near_choice(kind: type[Frozen], name: str, value: Any) -> str:
    if not isinstance(value, str) or name not in kind.model_fields:
        return ""
    near = nearest(
        value,
        [
            one
            for one in _choices(kind.model_fields[name].annotation)
            if isinstance(one, str)
        ],
    )
    return f"; did you mean {near!r}?" if near else ""


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for member in get_args(annotation) for choice in _choices(member)]


def _beside_the_file(given: dict[str, Any], file: Path) -> None:
    """Relative paths start in the current directory; where nothing is there, beside the config file."""

    def found(path: Any) -> Any:
        if isinstance(path, list):
            return [found(one) for one in path]
        if isinstance(path, dict):
            return {**path, "path": found(path["path"])} if "path" in path else path
        try:
            is_beside = (
                not Path(path).is_absolute()
                and not Path(path).exists()
                and (file.parent / path).exists()
            )
        except (
            OSError,
            ValueError,
            TypeError,
        ):  # a name that no file can have: for the reader to say
            return path
        return str(file.parent / path) if is_beside else path

    for name in PATHS:
        if given.get(name) is not None:
            given[name] = found(given[name])
