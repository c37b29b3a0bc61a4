"""Metadata of the options: sections, accepted values and validation of single values."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vembed.config.entries import DataSource, EpochMining, LossTerm, Teacher
from vembed.config.schema import option_fields, section_title
from vembed.config.values import Form, Immutable
from vembed.losses.table import with_constraints
from vembed.names import nearest

LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class Option:
    """Metadata of one option, for messages, the command line and the documentation."""

    name: str
    section: str
    text: str
    """Documentation of the option."""
    default: Any
    is_required: bool
    accepts: str
    """Accepted values, in words."""
    choices: tuple[str, ...]
    """Accepted words, if the option is an enumeration."""
    kinds: frozenset[str]
    """Accepted types besides the choices: "bool", "int", "float", "text", "list", "mapping", "null"."""

    @property
    def is_plain_text(self) -> bool:
        """True if the option accepts any text."""
        return (
            "text" in self.kinds and not self.choices and self.kinds <= {"text", "null"}
        )


@cache
def all_options() -> dict[str, Option]:
    """Return every option by name, in the order of the schema."""
    return {
        name: field_option(name, field, section_title(name))
        for name, field in option_fields().items()
    }


def field_option(name: str, field: FieldInfo, section: str = "") -> Option:
    """Return the metadata of an option from its field."""
    words, choices, kinds = _accepted(field.annotation, field.metadata)
    default = field.get_default(call_default_factory=True)
    return Option(
        name=name,
        section=section,
        text=field.description or "",
        default=None if default is PydanticUndefined else default,
        is_required=field.is_required(),
        accepts=join_words(words),
        choices=tuple(choices),
        kinds=frozenset(kinds),
    )


def checked(name: str, value: Any) -> Any:
    """Return the validated value. Raise ValueError with the accepted values and the given one."""
    try:
        return _adapter(name).validate_python(value)
    except ValidationError as error:
        raise ValueError(_refusal(all_options()[name], value, error)) from None


def quoted(value: Any) -> str:
    """Return a short representation of a value for messages, with strings in quotes."""
    if isinstance(value, int) and value.bit_length() > 300:
        return f"a number of {value.bit_length():,d} bits"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


_BLOCKS: dict[str, type[Immutable]] = {"mine": EpochMining}
"""Models of options that hold options of their own."""
_ENTRIES: dict[str, type[Immutable]] = {
    "losses": LossTerm,
    "teachers": Teacher,
    **_BLOCKS,
}
"""The same, and models of the entries of options that are lists; `data_path` has DataSource."""


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    annotation = with_constraints(option_fields()[name])
    return TypeAdapter(annotation, config={"coerce_numbers_to_str": True})


def _refusal(option: Option, value: Any, error: ValidationError) -> str:
    name = option.name
    # Of a union pydantic lists the problems with each member; an unknown key says more than that the value is no text.
    for problem in error.errors():
        *inside, key = problem["loc"] or ("",)
        if problem["type"] == "extra_forbidden":
            keys = list(_ENTRIES.get(name, DataSource).model_fields)
            near = nearest(str(key), keys)
            hint = f", did you mean {near!r}?" if near else ""
            numbers = [
                f", entry {part + 1}" for part in inside if isinstance(part, int)
            ]
            place = name + "".join(numbers)
            return f"{place}: unknown key {key!r}{hint}; an entry may have {', '.join(keys)}"
    if name in _BLOCKS and isinstance(value, Mapping):
        problem = error.errors()[0]
        if problem["type"] == "value_error":
            return f"{name}: {problem['msg'].removeprefix('Value error, ')}"
        key = next(
            (part for part in problem["loc"] if part in _BLOCKS[name].model_fields), ""
        )
        message = problem["msg"].replace("Input should be", "must be")
        return f"{name}: {key} {message}, but is {quoted(problem['input'])}"
    if value is None:
        return f"{name} has no value; give {option.accepts}, or leave the line out for {quoted(option.default)}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # 2^63 as a float too: YAML and JSON give 1e30.
    is_whole = is_number and value == value // 1
    if is_whole and "whole number" in option.accepts and abs(value) >= LARGEST:
        return (
            f"{name}: {quoted(value)} is too large; a whole number must be below 2^63"
        )
    near = nearest(str(value), option.choices) if isinstance(value, str) else None
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{name} must be {option.accepts}, but is {quoted(value)}{hint}"


def join_words(words: Sequence[str]) -> str:
    """Return the words as `a, b or c`."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " or " + words[-1]


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
            if isinstance(bound, Gt):
                limits.append(f"above {bound.gt:g}")
            elif isinstance(bound, Ge):
                limits.append(f"{bound.ge:g} or above")
            elif isinstance(bound, Le):
                limits.append(f"at most {bound.le:g}")
            elif isinstance(bound, Lt) and bound.lt != LARGEST:
                limits.append(f"below {bound.lt:g}")
    range_text = f" ({', '.join(limits)})" if limits else ""
    if annotation is int:
        return [f"a whole number{range_text}"], [], {"int"}
    return [f"a number{range_text}"], [], {"float"}
