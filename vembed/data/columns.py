"""Columns: assignment of column names to the parts of a record, by a fixed table or the user's column_mapping."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vembed.data.conversations import POSITIVE_MESSAGES, QUERY, fields_of
from vembed.data.messages import listed, printable
from vembed.errors import UserError

COLUMNS: dict[str, tuple[str, ...]] = {
    "query": ("query", "anchor", "question", "sentence1"),
    "query_image": ("query_image", "query_images"),
    "query_prompt": ("query_prompt",),
    "positive": (
        "positive",
        "positives",
        "pos",
        "positive_passages",
        "document",
        "passage",
        "answer",
        "response",
        "sentence2",
    ),
    "positive_image": ("positive_image", "positive_images", "document_image", "image"),
    "negative": (
        "negative",
        "negatives",
        "neg",
        "hard_negatives",
        "negative_passages",
        "rejected_response",
    ),
    "negative_image": ("negative_image", "negative_images"),
    "score": (
        "score",
        "scores",
        "similarity_score",
        "positive_scores",
        "pos_scores",
        "label",
    ),
    "negative_score": ("negative_score", "negative_scores", "neg_scores"),
}
"""Accepted column names of each part of a record. If a record has several columns for one part, the first is read; all
are read for negatives, and `negative_1`, `negative_2` ... are negatives too. `label` is a score beside sentence1 and
sentence2, a class beside a text or image without a pair, and not read elsewhere."""

GUESSES: dict[str, tuple[str, ...]] = {
    "query": (
        "instruction",
        "search",
        "title",
        "subject",
        "caption",
        "prompt",
        "source",
        "query_text",
        "text1",
        "premise",
        "input",
        "question_text",
        "q",
        "question1",
        "sentence_a",
        "text_a",
        "sent1",
    ),
    "positive": (
        "context",
        "text",
        "content",
        "body",
        "description",
        "resolution",
        "solution",
        "target",
        "text2",
        "hypothesis",
        "output",
        "completion",
        "doc",
        "a",
        "question2",
        "sentence_b",
        "text_b",
        "sent2",
    ),
    "positive_image": (
        "image_path",
        "image_file",
        "file_name",
        "filename",
        "img",
        "picture",
        "photo",
    ),
}
"""Likely column names that are not read automatically; used for advice and by `vembed init`."""

JUDGEMENTS = frozenset(
    {
        "label",
        "labels",
        "gold",
        "duplicate",
        "match",
        "relevance",
        "relevant",
        "relatedness",
        "rating",
        "similarity",
        "sim",
        "entailment",
        "paraphrase",
        "judgment",
        "judgement",
        "judgments",
        "judgements",
    }
)
"""Words in likely names of columns that say which pairs match. None of them is read beside a query and a positive."""
_NO_JUDGEMENTS = frozenset({"id", "ids", "text", "name", "names", "url", "date"})
"""Words in names of columns that only tell something about a judgement."""
_NEGATIVES = frozenset({"neg", "negs", "negative", "negatives", "rejected"})
"""Words in likely names of columns with negatives."""
_NO_NEGATIVES = _NO_JUDGEMENTS - {"text"} | {"is", "num", "count", "score", "scores"}
PROMPTS = frozenset({"prompt", "instruction", "query_instruction", "instruct"})
"""Likely names of columns with a prompt of the query, beside a query."""
INSIDE = " (inside of an item)"
"""Behind the name of a field that an object for a query or document has, in lists of what is not read."""

TEXT = "text"
"""Column of records that are one text, for runs without pairs and for labelled data."""
NUM_CLASSES = range(3, 11)
"""Numbers of different whole numbers that look like classes, not like scores."""
LABEL = "label"
"""Column of the class of a text or image."""
_NUMBERED_NEGATIVE = re.compile(r"(neg|negative)_(\d+)")
_LAYOUTS_KEPT = 1024
_ROLE_OF = {name: role for role, names in COLUMNS.items() for name in names} | {
    TEXT: TEXT
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of a record by part."""

    query: str | None
    query_image: str | None
    query_prompt: str | None
    positive: str | None
    positive_image: str | None
    negatives: tuple[str, ...]
    negative_image: str | None
    score: str | None
    negative_score: str | None
    are_sentences: bool
    problem: str | None
    label: str | None = None
    """Class of the query; there is no positive then."""

    def columns(self) -> list[str]:
        """Return all columns that are read."""
        single = (
            self.query,
            self.query_image,
            self.query_prompt,
            self.positive,
            self.positive_image,
            self.negative_image,
            self.score,
            self.negative_score,
            self.label,
        )
        return [name for name in (*single, *self.negatives) if name is not None]


class Columns:
    """Assignment of a source's columns to the parts of a record, with a list of unused columns."""

    def __init__(
        self,
        mapping: Mapping[str, str] | None = None,
        *,
        may_miss: bool = False,
        texts_alone: bool = False,
    ) -> None:
        """`mapping`: column_mapping, names in the file -> names in COLUMNS. `may_miss`: the mapping serves several
        sources, and a table need not have all of its names. `texts_alone`: a record may be a single `text`, which is
        query and positive then."""
        self._mapping = _roles(mapping or {})
        self._labels = [
            name for name, target in (mapping or {}).items() if target == LABEL
        ]
        self._texts_alone = texts_alone
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._unused: dict[str, None] = {}
        self._may_miss = may_miss
        self._not_seen = set(self._mapping)

    @property
    def unused(self) -> list[str]:
        """Columns of records that are not read."""
        return sorted(self._unused)

    @property
    def mapped_but_missing(self) -> list[str]:
        """Names in column_mapping that no record has."""
        return sorted(self._not_seen)

    @property
    def layouts(self) -> list[tuple[str, ...]]:
        """The columns of the records that were seen, once each."""
        return list(self._layouts)

    def note(self, layouts: Iterable[tuple[str, ...]], unused: Iterable[str]) -> None:
        """Take in what another process has seen of the same source."""
        for columns in layouts:
            self.layout(columns)
        self._unused.update(dict.fromkeys(unused))

    def check(self, columns: Iterable[str]) -> None:
        """Raise UserError if a table's header lacks a required column."""
        names = tuple(dict.fromkeys(fields_of(columns).values()))
        layout = self.layout(names)
        if self._not_seen and not self._may_miss:
            near = self.nearest(names)
            raise UserError(
                f"column_mapping names {listed(sorted(self._not_seen))}, but the file has {listed(names)}{near}"
            )
        if layout.problem:
            raise UserError(layout.problem)

    def nearest(self, columns: Iterable[str] = ()) -> str:
        """Return a hint at the column that the first missing name of column_mapping may mean, or nothing."""
        names = [
            *columns,
            *dict.fromkeys(name for layout in self._layouts for name in layout),
        ]
        missing = min(self._not_seen, default="")
        near = difflib.get_close_matches(missing, names, n=1, cutoff=0.4)
        return f"; for {printable(missing)} did you mean {near[0]!r}?" if near else ""

    def needed(self, columns: Iterable[str]) -> list[str]:
        """Return the columns of a table that are read, in the table's order."""
        fields = fields_of(columns)
        read = set(self.layout(tuple(dict.fromkeys(fields.values()))).columns())
        return [name for name, field in fields.items() if field in read]

    def layout(self, columns: tuple[str, ...]) -> Layout:
        """Return the layout of a record with these columns (cached)."""
        return self._layouts.get(columns) or self._find(columns)

    def note_unused(self, name: str) -> None:
        """Record a name that is not read."""
        if len(self._unused) < _LAYOUTS_KEPT:
            self._unused[printable(name)] = None

    def _find(self, columns: tuple[str, ...]) -> Layout:
        mapped = {
            name: self._mapping[name] for name in columns if name in self._mapping
        }
        names_of: dict[str, list[str]] = {role: [] for role in (*COLUMNS, TEXT)}
        for name, role in mapped.items():
            names_of[role].append(name)
        are_sentences = (
            "sentence1" in columns and "sentence2" in columns and not names_of["query"]
        )
        present = set(columns)
        for role, names in COLUMNS.items():
            # A mapped column takes precedence over the table; of negatives all are read.
            if not names_of[role] or role == "negative":
                names_of[role] += [
                    name for name in names if name in present and name not in mapped
                ]
        names_of["negative"] += sorted(
            (
                name
                for name in columns
                if _NUMBERED_NEGATIVE.fullmatch(name) and name not in mapped
            ),
            key=_number_of,
        )
        # Many data sets have a column `label`; it is a score only beside sentence1 and sentence2.
        if not are_sentences and "label" not in mapped:
            names_of["score"] = [name for name in names_of["score"] if name != "label"]
        text = names_of.pop(TEXT) or [
            name for name in (TEXT,) if name in present and name not in mapped
        ]
        label = None if self._texts_alone else self._label(names_of, text, present)
        if label is not None:
            images = names_of["query_image"] or names_of["positive_image"]
            names_of = {role: [] for role in COLUMNS} | {
                "query": text or names_of["query"],
                "query_image": images,
                "query_prompt": names_of["query_prompt"],
            }
        if self._texts_alone:
            if not names_of["query"] and not names_of["query_image"]:
                names_of["query"] = text
            if not names_of["positive"] and not names_of["positive_image"]:
                names_of["positive"] = names_of["query"]
                names_of["positive_image"] = names_of["query_image"]
        layout = Layout(
            **{
                role: names_of[role][0] if names_of[role] else None
                for role in COLUMNS
                if role != "negative"
            },
            negatives=tuple(names_of["negative"]),
            are_sentences=are_sentences and names_of["query"] == ["sentence1"],
            problem=None if label is not None else _problem(names_of, columns),
            label=label,
        )
        self._not_seen.difference_update(mapped)
        read = set(layout.columns())
        # Of a record that cannot be read, nothing is called unused.
        if not layout.problem:
            for name in columns:
                if name not in read:
                    self.note_unused(name)
        # Bounded: in JSON every record may have other fields.
        if len(self._layouts) < _LAYOUTS_KEPT:
            self._layouts[columns] = layout
        return layout

    def _label(
        self, names_of: Mapping[str, list[str]], text: list[str], present: set[str]
    ) -> str | None:
        """Return the column with the class, of a record that has one and is no pair; None otherwise."""
        label = next((name for name in (*self._labels, LABEL) if name in present), None)
        queries = names_of["query"] + names_of["query_image"]
        is_pair = bool(names_of["positive"] or (queries and names_of["positive_image"]))
        return (
            None
            if is_pair or not (text or queries or names_of["positive_image"])
            else label
        )


def is_negative_name(name: str) -> bool:
    """Return True for the name of a field that holds negatives."""
    names = (*COLUMNS["negative"], *COLUMNS["negative_image"], "negatives")
    return name in names or _NUMBERED_NEGATIVE.fullmatch(name) is not None


def refuse_repeated(name: str, columns: Iterable[str]) -> None:
    """Raise UserError if two columns of a table have one name. Columns without a name are not read."""
    twice = [
        column for column, count in Counter(columns).items() if count > 1 and column
    ]
    if twice:
        raise UserError(f"{name} has more than one column named {listed(twice)}")


def judgement_column(unused: Iterable[str]) -> str | None:
    """Return the first column that probably says which pairs match; None without one."""
    return next(iter(_named(unused, JUDGEMENTS, _NO_JUDGEMENTS)), None)


def unread_judgement(unused: Iterable[str]) -> str | None:
    """Return what is wrong with pairs whose columns that are not read include a likely judgement; None without one."""
    name = judgement_column(unused)
    if name is None:
        return None
    return (
        f"{name} is not read, and every pair is taken for a match: if {name} says how well a pair matches, set "
        f"column_mapping: {{{name}: score}} and loss: cosent, or leave out the pairs that do not match"
    )


def classes_as_scores(values: Collection[float]) -> str | None:
    """Return a doubt about the values, once each, of a column `label` that is read as a score; None without one."""
    if len(values) not in NUM_CLASSES or not all(
        value >= 0 and float(value).is_integer() for value in values
    ):
        return None
    return (
        f"label ({', '.join(f'{value:.0f}' for value in sorted(values))}) is taken for a score, the higher the more "
        "similar; if its numbers are classes, such as those of entailment, keep the pairs that match alone and leave "
        "the column out"
    )


def unread_negatives(unused: Iterable[str]) -> str | None:
    """Return what is wrong where columns that are not read probably hold negatives; None without one."""
    names = _named(unused, _NEGATIVES, _NO_NEGATIVES)
    if not names:
        return None
    entries = ", ".join(f"{_quoted(name)}: negative" for name in names)
    are, hold = ("is", "it holds") if len(names) == 1 else ("are", "they hold")
    return f"{listed(names)} {are} not read: if {hold} negatives, set column_mapping: {{{entries}}}"


def unread_prompt(unused: Iterable[str]) -> str | None:
    """Return what is wrong where a column that is not read probably holds prompts; None without one."""
    name = next((column for column in unused if _plain(column) in PROMPTS), None)
    if name is None:
        return None
    return f"{name} is not read: if it goes before the query, set column_mapping: {{{_quoted(name)}: query_prompt}}"


def _named(
    names: Iterable[str], words: frozenset[str], others: frozenset[str]
) -> list[str]:
    """Return the names of columns with one of the words and none of the others. A number at the end does not count."""
    words_of_names = (
        (name, set(_plain(name).rstrip("0123456789").split("_")))
        for name in names
        if not name.endswith(INSIDE)
    )
    return [
        name
        for name, words_of_name in words_of_names
        if words_of_name & words and not words_of_name & others
    ]


def _roles(mapping: Mapping[str, str]) -> dict[str, str]:
    """Return the column mapping with each target name replaced by its part of a record."""
    roles: dict[str, str] = {}
    for name, target in mapping.items():
        role = _ROLE_OF.get(target)
        if role is None:
            is_ours = (
                name in _ROLE_OF
            )  # then only a typing error speaks against a mapping that is turned round
            near = difflib.get_close_matches(
                target, _ROLE_OF, n=1, cutoff=0.8 if is_ours else 0.6
            )
            if is_ours and not near:
                raise UserError(
                    f"column_mapping: {{{name}: {target}}} is the wrong way round: the name in the file comes first, "
                    f"{{{_quoted(target)}: {name}}}"
                )
            raise UserError(
                f"column_mapping: {{{name}: {target}}} leads to a name that vembed does not read"
                + (
                    f"; did you mean '{near[0]}'?"
                    if near
                    else f" (it reads {listed(COLUMNS)})"
                )
            )
        other = next(
            (
                earlier
                for earlier, known in roles.items()
                if known == role and role != "negative"
            ),
            None,
        )
        if other is not None:
            raise UserError(
                f"column_mapping: {other} and {name} both become {role}, which can be one column alone"
            )
        roles[name] = role
    return roles


def _problem(names_of: dict[str, list[str]], columns: tuple[str, ...]) -> str | None:
    missing = [
        role
        for role in ("query", "positive")
        if not names_of[role] and not names_of[f"{role}_image"]
    ]
    if not missing:
        return None
    if QUERY in columns and "query" in missing:
        return (
            f"{QUERY} without {POSITIVE_MESSAGES} (it has {listed(columns)}): a record of messages needs both, "
            "or write query and positive"
        )
    free = [
        name
        for name in columns
        if not any(name in names for names in names_of.values())
    ]
    images = names_of["positive_image"]
    if missing == ["query"] and names_of["positive"] and images:
        example = {
            images[0]: "query_image"
        }  # two columns of documents, of which one must be the query
    elif missing == ["query"] and TEXT in free:
        example = {TEXT: "query"}
    else:
        example = guess_mapping(free, missing)
    for role in missing:
        if not any(target.startswith(role) for target in example.values()):
            example[f"your_{role}"] = (
                role  # any other column would be a guess by its position alone
            )
    shown_example = ", ".join(
        f"{_quoted(name)}: {role}" for name, role in example.items()
    )
    return (
        f"no {' and no '.join(missing)} (it has {listed(columns) or 'no fields'}): say which column it is with "
        f"column_mapping: {{{shown_example}}}{_otherwise(columns, missing, has_images=bool(images))}"
    )


def _otherwise(
    columns: tuple[str, ...], missing: Sequence[str], *, has_images: bool
) -> str:
    """Return what a record without a query may be instead: a text with a class, or a text alone."""
    if "query" not in missing or has_images:
        return ""
    if len(columns) == 1 and _plain(columns[0]) in (
        *COLUMNS["positive"],
        *GUESSES["positive"],
    ):
        return ", or make pairs of texts alone with `vembed generate`"
    ours = next((name for name in (TEXT, LABEL) if name in columns), None)
    if ours is None or len(columns) != 2:
        return ""
    other = next(name for name in columns if name != ours)
    entry = f"{_quoted(other)}: {LABEL if ours == TEXT else TEXT}"
    which = other if ours == TEXT else LABEL
    return f", or, if {printable(which)} is the class of a text, with column_mapping: {{{entry}}}"


def guess_mapping(columns: Iterable[str], missing: Iterable[str]) -> dict[str, str]:
    """Return a column mapping for the missing parts (query, positive), guessed from the column names."""
    free = list(columns)
    mapping = dict[str, str]()
    for role in missing:
        targets = [target for target in (role, f"{role}_image") if target in GUESSES]
        # The names of the table too: `Question`, ` Answer ` and `sentence1` without its partner are near misses.
        guesses = (
            (name, target)
            for target in targets
            for name in free
            if _plain(name) in GUESSES[target] or _plain(name) in COLUMNS[target]
        )
        name, target = next(guesses, ("", ""))
        if name:
            mapping[name] = target
            free.remove(name)
    return mapping


def _quoted(name: str) -> str:
    """Return a column's name for YAML: in quotes if spaces around it would get lost."""
    return repr(name) if name != name.strip() else printable(name)


def _plain(name: str) -> str:
    """Return a column's name as the tables of names write it."""
    return "_".join(name.strip(" \"'").lower().replace("-", " ").split())


def _number_of(name: str) -> int:
    match = _NUMBERED_NEGATIVE.fullmatch(name)
    return int(match[2]) if match else 0
