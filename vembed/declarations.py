"""Parts that declare themselves by class variables: losses, poolings, families, file formats, optimizers, trackers.

One check for all of them. A declaration that is missing, wrong or misspelt is a TypeError when vembed is imported.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from vembed.errors import nearest

Part = TypeVar("Part")
SIMILARITY_OF_A_MISSPELLING = 0.8
"""Of a new name to a declared one, by difflib."""
IDENTITY = frozenset(
    ["name", "title", "summary", "endings", "spellings", "modes", "servers"]
)
"""What says to users, files and other programs which part it is. No part takes it over from another one."""


def check_parts(
    kind: str,
    base: type,
    parts: Sequence[Part],
    names_of: Callable[[Part], Iterable[str]],
    *,
    needed: Sequence[str] = (),
    allowed: Mapping[str, Iterable[str]] | None = None,
    taken_names: Sequence[str] = (),
) -> dict[str, Part]:
    """Return the parts by each of their names. Raise TypeError for a declaration that is missing, wrong or misspelt.

    `parts`: classes of a base class, or records. `needed`: what each declares. `allowed`: declaration -> its values, or those that its
    sequence or mapping may hold. `taken_names`: names that no part may have.
    """
    by_name = {}
    owners: dict[str, str] = {}
    for part in parts:
        where = f"{kind} {getattr(part, 'name', '')}"  # of a record
        if isinstance(part, type):
            where = f"{kind} {part.__name__} of {part.__module__}"
            # Any value but an empty text or list: a number may be 0.
            missing = [
                name for name in needed if getattr(part, name, None) in (None, "", ())
            ]
            missing += sorted(getattr(part, "__abstractmethods__", ()))
            if missing:
                raise TypeError(f"{where} declares no `{'`, `'.join(missing)}`")
            check_attributes(where, part, base)
        for declaration, known in (allowed or {}).items():
            value = getattr(part, declaration)
            if isinstance(getattr(base, declaration, None), tuple):
                refuse_text(where, value)
            for entry in [value] if isinstance(value, str) else value:
                if entry not in known:
                    raise TypeError(
                        f"{where} has {entry!r} in its `{declaration}`: write one of {', '.join(known)}"
                    )
        names = names_of(part)
        refuse_text(where, names)
        for name in dict.fromkeys(names):
            if name in taken_names:
                raise TypeError(f"{where}: the name {name} is taken")
            if name in by_name:
                raise TypeError(f"{where}: the name {name} is that of {owners[name]}")
            by_name[name] = part
            owners[name] = where
    return by_name


def refuse_text(where: str, names: Iterable[str]) -> None:
    """Raise TypeError for a text in place of several names."""
    if isinstance(names, str):
        raise TypeError(
            f"{where} has the text {names!r} where several names belong: write a tuple, as ({names!r},)"
        )


def check_attributes(
    where: str,
    part: type,
    base: type,
) -> None:
    """Raise TypeError for what a class takes over from another part, and for a public attribute that its bases do not
    declare, unless it has a type and a name that is not similar to theirs.

    `base`: the base class of its kind, which has what it could declare, as have those between the two.
    """
    classes = inspect.getmro(part)
    num_new = classes.index(base)
    for name in sorted(IDENTITY):
        owners = [owner for owner in classes[:num_new] if name in vars(owner)]
        if owners and owners[0] is not part:
            raise TypeError(
                f"{where} takes `{name}` over from {owners[0].__name__}, which is another part: declare `{name}` in "
                f"{part.__name__}"
            )
    known = set()
    for inherited in classes[num_new:]:
        known |= names_in(inherited)
    for owner in reversed(classes[:num_new]):
        typed = inspect.get_annotations(owner)
        for name in sorted(vars(owner).keys() - known):
            if name.startswith("_"):
                continue
            near = nearest(name, known, SIMILARITY_OF_A_MISSPELLING)
            if near is not None:
                raise TypeError(
                    f"{where} has `{name}`, which nothing reads: write `{near}`, or a name that is less similar to it"
                )
            if name not in typed and not is_method(vars(owner)[name]):
                declared = [
                    other
                    for other in sorted(known)
                    if not (other.startswith("_") or is_method(getattr(part, other, 0)))
                ]
                raise TypeError(
                    f"{where} has `{name}`, which vembed does not read. It reads {', '.join(declared)}. If it is your "
                    f"own, give it a type: `{name}: ClassVar[...] = ...`"
                )
        known |= names_in(owner)


def names_in(owner: type) -> set[str]:
    """Return the names that a class itself has or annotates."""
    return vars(owner).keys() | inspect.get_annotations(owner).keys()


def is_method(value: object) -> bool:
    """Return whether an attribute of a class is a method, a property or a class, and no plain value."""
    return callable(value) or hasattr(value, "__get__")


def text_of_values(text: str, sentences: Mapping[str, str]) -> str:
    """Return the text of an option, with a line for each of its values. Docs make a list of the lines."""
    lines = [text]
    for name, sentence in sentences.items():
        lines.append(f"- `{name}`: {sentence.rstrip('.')}.")
    return "\n".join(lines)
