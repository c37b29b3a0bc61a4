"""Parsers of YAML, TOML and JSON into a tree with line numbers. Loading is safe and limited in size and depth."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vembed.errors import UserError

MAX_BYTES = 300_000
"""Largest config file in bytes."""
MAX_VALUES = 5_000
"""Most values after the expansion of anchors; protects against YAML bombs."""
MAX_FAILED = 20
"""Keys that may be looked for through the whole text in vain; later ones get the line of their table."""
MAX_DEPTH = 40

CORE_TAGS = ("str", "int", "float", "bool", "null", "seq", "map")
_TAG = "tag:yaml.org,2002:"
# Tag, pattern, and the first characters of a match, by which PyYAML looks patterns up; "" is an empty value.
_RESOLVERS = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
]


class CoreLoader(yaml.SafeLoader):
    """YAML loader with the YAML 1.2 rules for plain scalars: `2e-5` is a number, `no` and `12:30` are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML keeps its table in a class attribute


class CoreDumper(yaml.SafeDumper):
    """YAML dumper whose output `CoreLoader` reads back unchanged. Quotes every string that YAML 1.1 or 1.2 would
    parse as another type."""


# The first pattern that matches counts: that of floats takes whole numbers too, so it comes after that of integers.
for _name, _pattern, _first in _RESOLVERS:
    for _class in (CoreLoader, CoreDumper):
        _class.add_implicit_resolver(
            _TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first)
        )


@dataclass(frozen=True, slots=True)
class Node:
    """A value with its line. The values of a mapping are nodes; those of a list are plain."""

    value: Any
    line: int | None

    def plain(self) -> Any:
        """Return the value without line numbers."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return self.value


def read_tree(path: Path) -> Node:
    """Return the tree of a YAML, TOML or JSON file. Raise UserError with file and line if it cannot be read."""
    readers = {
        ".yaml": parse_yaml,
        ".yml": parse_yaml,
        ".toml": parse_toml,
        ".json": parse_json,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        is_data = path.suffix.lower() in (
            ".csv",
            ".tsv",
            ".jsonl",
            ".ndjson",
            ".parquet",
        )
        hint = f" Of data, `vembed init --data {path}` makes one." if is_data else ""
        if "=" in path.name:
            hint = " Give the config file first, and options as key=value behind it."
        raise UserError(
            f"{path}: a config file ends in .yaml, .yml, .toml or .json.{hint}"
        )
    return reader(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():
            raise UserError(
                f"{path}: there is no such config file."
                if not path.exists()
                else f"{path}: this is not a file."
            )
        if path.stat().st_size > MAX_BYTES:
            raise UserError(
                f"{path}: {path.stat().st_size:,d} bytes are too many for a config (at most {MAX_BYTES:,d})."
            )
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 text (byte {raw[error.start]:#04x}); save it as UTF-8."
        ) from None


def parse_yaml(text: str, name: str) -> Node:
    """Return the tree of YAML text. Raise UserError on tags other than YAML's core scalars, lists and mappings."""
    try:
        # Composed, not loaded: no tag makes an object, and the nodes know their lines.
        root = yaml.compose(text, Loader=CoreLoader)
    except yaml.YAMLError as error:
        raise UserError(
            f"{name}{_yaml_position(error, text)}: not valid YAML: {_yaml_problem(error)}."
        ) from None
    except RecursionError:
        raise UserError(f"{name}: nested deeper than {MAX_DEPTH} levels.") from None
    tree = Node(None, None) if root is None else _YamlTree(name).node(root, depth=0)
    if not isinstance(tree.value, dict) or not tree.value:
        problem = "is empty" if root is None else "has no options"
        if isinstance(tree.value, list):
            problem = f"is a list of {len(tree.value)} entries, not a config"
        raise UserError(f"{name}: {problem}; write one `key: value` per line.")
    return tree


def parse_value(text: str, name: str = "command line") -> Any:
    """Parse a value of the command line as YAML; return the text itself if it is not valid YAML."""
    if len(text) > MAX_BYTES:
        raise UserError(f"{name}: a value of {len(text):,d} characters is too long.")
    try:
        root = yaml.compose(text, Loader=CoreLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    return None if root is None else _YamlTree(name).node(root, depth=0).plain()


class _YamlTree:
    """Converter from PyYAML nodes to `Node`, with a limit on their number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_values = 0

    def node(self, source: yaml.Node, depth: int) -> Node:
        line = source.start_mark.line + 1
        # compose() keeps an alias as the node it stands for, so each mention is converted and counted again.
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise UserError(
                f"{self.name}: its anchors expand to more than {MAX_VALUES:,d} values."
            )
        if depth > MAX_DEPTH:
            raise UserError(
                f"{self.name}, line {line}: nested deeper than {MAX_DEPTH} levels."
            )
        if source.tag.removeprefix(_TAG) not in CORE_TAGS or not source.tag.startswith(
            _TAG
        ):
            shown = source.tag.replace(_TAG, "!!")
            raise UserError(
                f"{self.name}, line {line}: the tag {shown} is not allowed in a config; write a plain value."
            )
        if isinstance(source, yaml.MappingNode):
            return Node(self._mapping(source, depth), line)
        if isinstance(source, yaml.SequenceNode):
            return Node(
                [self.node(entry, depth + 1).plain() for entry in source.value], line
            )
        return Node(self._scalar(source, line), line)

    def _mapping(self, source: yaml.MappingNode, depth: int) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in source.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(
                    f"{self.name}, line {line}: a key must be a word, not a list or a mapping."
                )
            key = str(key_node.value)
            value = self.node(value_node, depth + 1)
            # In quotes it is a key like others. Own keys win over merged ones, and earlier bases over later ones.
            if key == "<<" and key_node.style is None:
                for base in (
                    value.value if isinstance(value.value, list) else [value.plain()]
                ):
                    if not isinstance(base, dict):
                        raise UserError(
                            f"{self.name}, line {line}: `<<` merges mappings, not {base!r}."
                        )
                    merged = {
                        name: _at_line(inner, line) for name, inner in base.items()
                    } | merged
                continue
            if key in own:
                raise UserError(
                    f"{self.name}, line {line}: {key!r} is already given in line {own[key].line}; keep one of the two."
                )
            own[key] = Node(value.value, line)
        return merged | own

    def _scalar(self, source: yaml.Node, line: int) -> Any:
        text, kind = str(source.value), source.tag.removeprefix(_TAG)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                prefix = text.lower()[:2]
                return int(text.replace("_", ""), {"0o": 8, "0x": 16}.get(prefix, 10))
            if kind == "float":
                return float(
                    text.replace("_", "")
                    .lower()
                    .replace(".inf", "inf")
                    .replace(".nan", "nan")
                )
        except (ValueError, KeyError):
            raise UserError(
                f"{self.name}, line {line}: {text[:60]!r} is not a valid {kind}."
            ) from None
        return text


def parse_toml(text: str, name: str) -> Node:
    """The tree of TOML text."""
    # Before parsing: tomllib's time grows with the square of the parts of a dotted key.
    for piece in re.split(r"[=\n,{}\[\]]", text):
        if (
            piece.count(".") > MAX_DEPTH
            and sum(map(bool, map(str.strip, piece.split(".")))) > MAX_DEPTH
        ):
            raise UserError(f"{name}: a dotted key has more than {MAX_DEPTH} parts.")
    # Keys are counted before parsing, too, since that bounds the time.
    if len(re.findall(r"^[^#\n=]+=", text, re.MULTILINE)) > MAX_VALUES:
        raise UserError(
            f"{name}: more than {MAX_VALUES:,d} values, or nested deeper than {MAX_DEPTH} levels."
        )
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problem = (
            "nested too deeply" if isinstance(error, RecursionError) else str(error)
        )
        raise UserError(f"{name}: not valid TOML: {problem}.") from None
    return _located(
        data,
        text,
        name,
        r"^\s*\[\s*(?:[^\]\n]*\.)?['\"]?{key}['\"]?\s*\]|(?:^|[{{,.])\s*['\"]?{key}['\"]?\s*[.=]",
    )


def parse_json(text: str, name: str) -> Node:
    """The tree of JSON text; a key given twice is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(
                    f"{name}{_second_line(text, key)}: {key!r} is given twice; keep one of the two."
                )
            found[key] = value
        return found

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{name}, line {error.lineno}: not valid JSON: {error.msg}."
        ) from None
    except (ValueError, RecursionError) as error:
        problem = (
            "nested too deeply" if isinstance(error, RecursionError) else str(error)
        )
        raise UserError(f"{name}: not valid JSON: {problem}.") from None
    return _located(data, text, name, r'"{key}"\s*:')


def _second_line(text: str, key: str) -> str:
    """Return the line of the second occurrence of a JSON key; an empty string if another object may hold it too."""
    places = list(re.finditer(re.escape(json.dumps(key)) + r"\s*:", text))
    return (
        f", line {text.count(chr(10), 0, places[1].start()) + 1}"
        if len(places) == 2
        else ""
    )


def tree_of_mapping(data: Mapping[Any, Any]) -> Node:
    """Return the tree of a Python dict, without line numbers."""
    return _at_line(dict(data), None)


def _located(data: Any, text: str, name: str, pattern: str) -> Node:
    if not isinstance(data, dict) or not data:
        raise UserError(
            f"{name}: {'has no options' if isinstance(data, dict) else 'must hold keys with values'}."
        )
    budget = iter(range(MAX_VALUES))
    failed = 0

    def convert(value: Any, start: int, depth: int) -> Node:
        nonlocal failed
        line = text.count("\n", 0, start) + 1
        if next(budget, None) is None or depth > MAX_DEPTH:
            raise UserError(
                f"{name}: more than {MAX_VALUES:,d} values, or nested deeper than {MAX_DEPTH} levels."
            )
        if not isinstance(value, dict):
            return Node(value, line)
        found = {}
        position = start
        for key, inner in value.items():
            # From the last key on, as several tables may have a key of this name. TOML may give a table in pieces.
            search = re.compile(
                pattern.format(key=re.escape(str(key))), re.MULTILINE
            ).search
            match = None
            if failed < MAX_FAILED:
                match = search(text, position) or search(text, start)
                failed += match is None
            # From the last character of the match on: in `a.b = 1` the pattern of b begins with the dot that ends that
            # of a.
            position = match.end() - 1 if match else start
            found[str(key)] = convert(inner, position, depth + 1)
        return Node(found, line)

    return convert(data, 0, 0)


def _at_line(value: Any, line: int | None) -> Node:
    if isinstance(value, Mapping):
        return Node(
            {str(key): _at_line(inner, line) for key, inner in value.items()}, line
        )
    return Node(value, line)


def _yaml_position(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f", line {error.problem_mark.line + 1}"
    if isinstance(error, yaml.reader.ReaderError):
        return f", line {text.count(chr(10), 0, error.position) + 1}"
    return ""


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        opened = (
            f"{error.context} begun in line {error.context_mark.line + 1}"
            if error.context_mark
            else error.context
        )
        spaces = (
            "YAML takes spaces, not tabs" if "'\\t'" in (error.problem or "") else ""
        )
        return ", ".join(part for part in (opened, error.problem, spaces) if part)
    if isinstance(error, yaml.reader.ReaderError):
        return (
            f"the character {error.character:#06x} is not allowed"
            if isinstance(error.character, int)
            else error.reason
        )
    return " ".join(str(error).split())
