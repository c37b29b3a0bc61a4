"""Parsers of YAML, TOML and JSON into a tree, with line numbers but for TOML. Loading is safe and limited in size."""

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vembed.errors import UserError

MAX_CONFIG_BYTES = 300_000
"""Largest config file in bytes."""
MAX_VALUES = 5_000
"""Most values after the expansion of anchors; protects against YAML bombs."""
MAX_DEPTH = 40
PLAIN_PROBLEMS = (
    (r"'\t'", "there is a tab. Indent by spaces", False),
    ("end of stream", "the quote that begins here is not closed", True),
    (
        "could not find expected ':'",
        "there is no colon. Write `key: value`",
        True,
    ),
    (
        "mapping values are not allowed",
        "this colon is inside the value of another key. Indent both keys alike, or put a value with a colon in quotes",
        False,
    ),
    (
        "cannot start any token",
        "a value cannot begin with this character. Put it in quotes",
        False,
    ),
)
"""Part of a sentence of PyYAML, the same in plain words, and whether the mistake is where the parser began what it could
not finish."""

_TAG = "tag:yaml.org,2002:"
CORE_TAGS = ("str", "int", "float", "bool", "null", "seq", "map")
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


@dataclass(frozen=True)
class Node:
    """A value with its line. The values of a mapping are nodes; those of a list are plain."""

    value: Any
    line: int | None

    def plain(self) -> Any:
        """Return the value without line numbers."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return self.value

    def place(self, source: str) -> str:
        """Return where the value stands, for messages: `cfg.yaml, line 7`; the source alone where there are no lines."""
        return f"{source}, line {self.line}" if self.line else source


def read_tree(path: Path) -> Node:
    """Return the tree of a YAML, TOML or JSON file. Raise UserError with file and line if it cannot be read."""
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml", ".json"):
        hint = ""
        if suffix in (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"):
            hint = f" Of data, `vembed init --data {path}` makes one."
        if "=" in path.name:
            hint = " Give the config file first, and options as key=value behind it."
        raise UserError(
            f"{path}: a config file ends in .yaml, .yml, .toml or .json.{hint}"
        )
    try:
        if not path.is_file():
            raise UserError(f"{path}: there is no such config file.")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise UserError(
            f"{path}: {len(raw):,d} bytes are too many for a config (at most {MAX_CONFIG_BYTES:,d})."
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 text; save it as UTF-8."
        ) from None
    kind = "TOML" if suffix == ".toml" else "JSON" if suffix == ".json" else "YAML"
    tree = Node({}, None)
    try:
        if suffix == ".toml":
            tree = tree_of_mapping(tomllib.loads(text))  # tomllib gives no lines
        else:
            if suffix == ".json":
                # JSON is YAML, except that it may be indented with tabs.
                text = text.replace("\t", " ")
            # Composed, not loaded: no tag makes an object, and the nodes know their lines.
            root = yaml.compose(text, Loader=CoreLoader)
            if root is not None:
                tree = _tree(root, str(path), itertools.count(1))
    except yaml.MarkedYAMLError as error:
        place, problem = _yaml_problem(error, text)
        raise UserError(f"{path}, {place}: not valid {kind}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid {kind}: {error}.") from None
    if not isinstance(tree.value, dict) or not tree.value:
        raise UserError(f"{path}: has no options; write one `key: value` per line.")
    return tree


def _yaml_problem(error: yaml.MarkedYAMLError, text: str) -> tuple[str, str]:
    """Return the place, and what is wrong in plain words, with the line of the file."""
    mark = error.problem_mark
    begin = error.context_mark
    problem = str(error.problem)
    for part, words, is_at_begin in PLAIN_PROBLEMS:
        if part in problem:
            problem = words
            mark = begin if is_at_begin else mark
            break
    else:
        if begin is not None:
            problem += f" ({error.context} that begins in line {begin.line + 1})"
    assert mark is not None, "the parser knows where it stopped"
    # Behind the last line where the file ended too early.
    lines = [*text.splitlines(), ""]
    wrong_line = lines[min(mark.line, len(lines) - 1)]
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    return place, f"{problem}.\n  {wrong_line}"


def parse_value(text: str) -> Any:
    """Parse a value of the command line as YAML; return the text itself if it is not valid YAML."""
    try:
        root = yaml.compose(text, Loader=CoreLoader)
        if root is None:
            return None
        return _tree(root, "command line", itertools.count(1)).plain()
    except (yaml.YAMLError, RecursionError, UserError):
        return text


def _tree(
    source: yaml.Node,
    name: str,
    numbers: Iterator[int],
    depth: int = 0,
) -> Node:
    """Return the tree of a PyYAML node. `numbers` counts the values, which are limited."""
    line = source.start_mark.line + 1
    where = f"{name}, line {line}"
    # compose() keeps an alias as the node it stands for, so each mention is converted and counted again.
    if next(numbers) > MAX_VALUES:
        raise UserError(
            f"{name}: its anchors expand to more than {MAX_VALUES:,d} values."
        )
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: nested deeper than {MAX_DEPTH} levels.")
    kind = source.tag.removeprefix(_TAG)
    if kind not in CORE_TAGS:
        tag = source.tag.replace(_TAG, "!!")
        raise UserError(
            f"{where}: the tag {tag} is not allowed in a config; write a plain value."
        )
    if isinstance(source, yaml.SequenceNode):
        entries = [
            _tree(entry, name, numbers, depth + 1).plain() for entry in source.value
        ]
        return Node(entries, line)
    if isinstance(source, yaml.ScalarNode):
        text = str(source.value)
        try:
            return Node(_scalar(text, kind), line)
        except (ValueError, KeyError):
            raise UserError(f"{where}: {text[:60]!r} is not a valid {kind}.") from None
    pairs: dict[str, Node] = {}
    merged: dict[str, Node] = {}
    for key_node, value_node in source.value:
        key_line = key_node.start_mark.line + 1
        where = f"{name}, line {key_line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{where}: a key must be a word, not a list or a mapping.")
        key = str(key_node.value)
        value = _tree(value_node, name, numbers, depth + 1)
        # In quotes it is a key like others. Own keys win over merged ones, and earlier bases over later ones.
        if key == "<<" and key_node.style is None:
            bases = value.plain()
            for base in bases if isinstance(bases, list) else [bases]:
                if not isinstance(base, dict):
                    raise UserError(f"{where}: `<<` merges mappings, not {base!r}.")
                merged = {**tree_of_mapping(base, key_line).value, **merged}
        elif key in pairs:
            raise UserError(
                f"{where}: {key!r} is already given in line {pairs[key].line}; keep one of the two."
            )
        else:
            pairs[key] = Node(value.value, key_line)
    return Node(merged | pairs, line)


def _scalar(text: str, kind: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return {"true": True, "false": False}[text.lower()]
    number = text.replace("_", "").lower()
    if kind == "int":
        base = {"0o": 8, "0x": 16}.get(number[:2], 10)
        return int(number, base)
    if kind == "float":
        return float(number.replace(".inf", "inf").replace(".nan", "nan"))
    # JSON writes characters beyond U+FFFF as two escapes.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def source_tree(source: str | Path | Mapping[Any, Any]) -> tuple[Node, str]:
    """Return the tree of a config file or dict, and its name in messages."""
    if isinstance(source, Mapping):
        return tree_of_mapping(source), "the config"
    if not isinstance(source, str | Path):
        raise UserError(
            f"the config is {source!r:.80}: give a path, a dict or a TrainConfig"
        )
    return read_tree(Path(source)), str(source)


def tree_of_mapping(value: Any, line: int | None = None) -> Node:
    """Return the tree of a Python dict, with one line number for all of it."""
    if not isinstance(value, Mapping):
        return Node(value, line)
    nodes = {}
    for key, inner in value.items():
        nodes[str(key)] = tree_of_mapping(inner, line)
    return Node(nodes, line)
