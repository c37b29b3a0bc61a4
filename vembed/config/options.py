"""Metadata of the options: sections, accepted values, and parsing and validation of single values."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vembed.config.parsing import parse_value
from vembed.config.schema import sections_by_option
from vembed.config.values import Form
from vembed.losses.table import with_constraints
from vembed.names import nearest


@dataclass(frozen=True)
class Option:
    """Metadata of one option, for messages, the command line and the documentation."""

    name: str
    section: str
    field: FieldInfo
    accepts: str
    """Accepted values, in words."""
    choices: tuple[str, ...]
    """Accepted words, if the option is an enumeration."""
    kinds: frozenset[str]
    """Accepted types besides the choices: "bool", "int", "float", "text", "list", "mapping", "null"."""
    entry: type[BaseModel] | None
    """Model of a mapping, or of the entries of a list, that has keys of its own."""

    @property
    def text(self) -> str:
        """Documentation of the option."""
        return self.field.description or ""

    @property
    def is_required(self) -> bool:
        """True if the option has no default."""
        return self.field.is_required()

    @cached_property
    def default(self) -> Any:
        """Value where none is given."""
        default = self.field.get_default(call_default_factory=True)
        return None if default is PydanticUndefined else default

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        annotation = with_constraints(self.field)
        return TypeAdapter(annotation, config={"coerce_numbers_to_str": True})

    @property
    def is_plain_text(self) -> bool:
        """True if the option accepts any text."""
        is_text = "text" in self.kinds and not self.choices
        return is_text and self.kinds <= {"text", "null"}

    def parse(self, text: str) -> Any:
        """Parse a value of the command line: options of plain text take the text itself, others are parsed as YAML."""
        if self.is_plain_text:
            return None if text == "null" and "null" in self.kinds else text
        value = parse_value(text)
        if isinstance(value, Mapping):
            return _pairs(value) if "mapping" in self.kinds else text
        if "text" in self.kinds and not isinstance(value, bool | list):
            return text
        return value

    def checked(self, value: Any) -> Any:
        """Return the validated value. Raise ValueError with the accepted values and the given one."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(self._refusal(value, error)) from None

    def _refusal(self, value: Any, error: ValidationError) -> str:
        # Of a union pydantic lists the problems with each member. The one furthest inside says most.
        problem = max(error.errors(), key=lambda entry: len(entry["loc"]))
        place = self.name
        key = ""
        keys: list[str] = [] if self.entry is None else list(self.entry.model_fields)
        for part in problem["loc"]:
            if isinstance(part, int):
                place += f", entry {part + 1}"
            elif part in keys or problem["type"] == "extra_forbidden":
                key = part
        if problem["type"] == "extra_forbidden":
            near = nearest(key, keys)
            hint = f", did you mean {near!r}?" if near else ""
            return f"{place}: unknown key {key!r}{hint}; an entry may have {', '.join(keys)}"
        if problem["type"] == "value_error" and isinstance(value, Mapping | list):
            return f"{place}: {problem['msg'].removeprefix('Value error, ')}"
        if key:
            message = problem["msg"].replace("Input should be", "must be")
            return f"{place}: {key} {message}, but is {quoted(problem['input'])}"
        if problem["type"] in ("too_short", "too_long"):
            message = problem["msg"].replace("List should", "must")
            return f"{self.name} {message}"
        if value is None:
            return f"{self.name} has no value; give {self.accepts}, or leave the line out for {quoted(self.default)}"
        near = nearest(str(value), self.choices) if isinstance(value, str) else None
        hint = f"; did you mean {near!r}?" if near else ""
        return f"{self.name} must be {self.accepts}, but is {quoted(value)}{hint}"


@cache
def all_options() -> dict[str, Option]:
    """Return every option by name, in the order of the schema."""
    options = {}
    for name, (_, section, field) in sections_by_option().items():
        title = str(section.model_config["title"])
        options[name] = field_option(name, field, title)
    return options


def field_option(
    name: str,
    field: FieldInfo,
    section: str = "",
) -> Option:
    """Return the metadata of an option from its field."""
    words, choices, kinds = _accepted(field.annotation, field.metadata)
    return Option(
        name=name,
        section=section,
        field=field,
        accepts=join_words(words),
        choices=tuple(choices),
        kinds=frozenset(kinds),
        entry=_entry_model(field.annotation),
    )


def quoted(value: Any) -> str:
    """Return a short representation of a value for messages, with strings in quotes."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def yaml_word(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and len(value) <= 80 else quoted(value)


def join_words(words: Sequence[str]) -> str:
    """Return the words as `a, b or c`."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " or " + words[-1]


def _pairs(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Split keys of the form `a:b`. YAML reads {a:b} without a space as a key without a value."""
    pairs = {}
    for key, entry in value.items():
        name, colon, target = str(key).partition(":")
        if entry is not None or not colon:
            return dict(value)
        pairs[name.strip()] = target.strip()
    return pairs


def _entry_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside a type annotation, as DataSource in `str | list[str | DataSource]`."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for member in get_args(annotation):
        model = _entry_model(member)
        if model is not None:
            return model
    return None


_LIMITS: dict[type, str] = {
    Gt: "above {0.gt:g}",
    Ge: "{0.ge:g} or above",
    Le: "at most {0.le:g}",
    Lt: "below {0.lt:g}",
}


def _accepted(
    annotation: Any, metadata: Iterable[Any] = ()
) -> tuple[list[str], list[str], set[str]]:
    """Return (alternatives in words, accepted words, kinds of other values) of a type annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _accepted(inner, [*metadata, *extra])
    if origin in (Union, types.UnionType):
        words: list[str] = []
        choices: list[str] = []
        kinds: set[str] = set()
        for member in get_args(annotation):
            member_words, member_choices, member_kinds = _accepted(member, metadata)
            words += member_words
            choices += member_choices
            kinds |= member_kinds
        return words, choices, kinds
    if origin is Literal:
        values = get_args(annotation)
        texts = [value for value in values if isinstance(value, str)]
        return [str(value) for value in values], texts, set() if texts else {"int"}
    if origin is list:
        words, _, _ = _accepted(get_args(annotation)[0])
        return [f"a list, each entry {join_words(words)}"], [], {"list"}
    if origin is dict:
        return ["names in the form {yours: ours}"], [], {"mapping"}
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return ["{" + ", ".join(annotation.model_fields) + "}"], [], {"mapping"}
    if annotation is bool:
        return ["true", "false"], [], {"bool"}
    if annotation is str:
        forms = [str(item) for item in metadata if isinstance(item, Form)]
        return forms[:1] or ["text"], [], {"text"}
    if annotation is type(None):
        return [], [], {"null"}
    # The limits of a number, without the technical one of 64-bit integers.
    limits = []
    for item in metadata:
        for bound in item.metadata if isinstance(item, FieldInfo) else [item]:
            if type(bound) in _LIMITS and bound != Lt(2**63):
                limits.append(_LIMITS[type(bound)].format(bound))
    range_text = f" ({', '.join(limits)})" if limits else ""
    if annotation is int:
        return [f"a whole number{range_text}"], [], {"int"}
    return [f"a number{range_text}"], [], {"float"}
