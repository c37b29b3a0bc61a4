"""Collections made of what an installation carries: docstrings, manual pages, package descriptions, names of
characters, rendered words. Each is a training set and a validation set without common modules, pages, packages,
characters or pictures."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from tests.tiny import WORDS
from vembed.cli.commands.demo import (
    FunctionPair,
    split_by_module,
    standard_library_pairs,
)

Row = dict[str, Any]
MANUAL = Path("/usr/share/man")
PACKAGES = Path("/var/lib/dpkg/status")
MOST_WORDS = 40
SIDE = 32
"""Pixels of a side of a rendered word."""
NUM_DESCRIBED = 20_000
"""Functions whose docstrings make the scored pairs."""
NUM_WORDS = 20
"""Rendered words."""


@dataclass(frozen=True)
class Collection:
    """Training and validation rows of one kind."""

    train: list[Row]
    val: list[Row]
    loss: str = "infonce"

    @property
    def metric(self) -> str:
        """Score that counts."""
        return "spearman" if self.loss == "cosent" else "ndcg@10"

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both sets as JSONL; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in (("train", self.train), ("val", self.val)):
            (folder / f"{name}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
        return folder / "train.jsonl", folder / "val.jsonl"


def docstrings(num_train: int, num_val: int) -> Collection:
    """The first paragraph of a docstring -> the function's source, by module."""
    train, val = split_by_module(standard_library_pairs(), num_train, num_val)
    return Collection(_rows(train), _rows(val))


def manual(num_train: int, num_val: int) -> Collection:
    """Return pairs of a manual page's line about its command and the first paragraph of its description."""
    return _pairs(_by_hash(_manual_pairs(), MANUAL), num_train, num_val)


def packages(num_train: int, num_val: int) -> Collection:
    """The one-line description of an installed package -> its description, of Debian and of Python packages."""
    return _pairs(_by_hash(_package_pairs(), PACKAGES), num_train, num_val)


def characters(num_train: int, num_val: int) -> Collection:
    """The Unicode names of two characters and how near these are: half for the script, half for the kind."""
    draw = random.Random(0)
    known = [
        (name, name.split()[0], unicodedata.category(character))
        for character, name in _named_characters()
    ]
    draw.shuffle(known)
    half = len(known) // 2  # no character is on both sides
    return Collection(
        _near(known[half:], num_train, draw),
        _near(known[:half], num_val, draw),
        "cosent",
    )


def libraries(num_train: int, num_val: int) -> Collection:
    """The first paragraph of a docstring -> the function's source, of the installed libraries, by library."""
    train, val = split_by_module(_library_pairs(), num_train, num_val)
    return Collection(_rows(train), _rows(val))


def modules(num_train: int, num_val: int) -> Collection:
    """Docstrings of two functions of the installed libraries and how near these are: half for the library, and half for
    the module. Libraries are on both sides, and no docstring is."""
    draw = random.Random(0)
    pairs, _ = split_by_module(_library_pairs(), NUM_DESCRIBED, 0)
    known = [
        (
            " ".join(pair.query.split()[:MOST_WORDS]),
            pair.module.split(".")[0],
            pair.module,
        )
        for pair in pairs
    ]
    draw.shuffle(known)
    half = len(known) // 2
    return Collection(
        _near(known[half:], num_train, draw),
        _near(known[:half], num_val, draw),
        "cosent",
    )


def pictures(num_train: int, num_val: int) -> Collection:
    """A word -> a picture of it, of another size, place and greys each time. The words are the same on both sides, and
    no two pictures are."""
    folder = Path(tempfile.mkdtemp())
    draw = random.Random(0)
    used: set[bytes] = set()

    def drawn(count: int, name: str) -> list[Row]:
        rows = []
        for number in range(count):
            word = rendered_words()[number % NUM_WORDS]
            while (picture := drawn_word(word, draw)).tobytes() in used:
                pass
            used.add(picture.tobytes())
            file = folder / f"{name}-{number}.png"
            picture.save(file)
            rows.append({"query": word, "positive": {"image": str(file)}})
        return rows

    return Collection(drawn(num_train, "train"), drawn(num_val, "val"))


def rendered_words() -> list[str]:
    """Return the words of the pictures: the first letters of known ones, all different."""
    return sorted({word[:5] for word in WORDS})[:NUM_WORDS]


def drawn_word(word: str, draw: random.Random) -> Image.Image:
    """Return a picture of a word, in one of hundreds of thousands of forms."""
    picture = Image.new("RGB", (SIDE, SIDE), (draw.randint(200, 255),) * 3)
    font = ImageFont.load_default(size=draw.randint(10, 12))
    place = (draw.randint(0, 2), draw.randint(6, 14))
    ImageDraw.Draw(picture).text(
        place, word, fill=(draw.randint(0, 80),) * 3, font=font
    )
    return picture


COLLECTIONS: dict[str, Callable[[int, int], Collection]] = {
    "docstrings": docstrings,
    "libraries": libraries,
    "manual": manual,
    "modules": modules,
    "packages": packages,
    "characters": characters,
    "pictures": pictures,
}


@cache
def _library_pairs() -> list[FunctionPair]:
    return standard_library_pairs(Path(torch.__file__).parents[1])


def _rows(pairs: list[FunctionPair]) -> list[Row]:
    return [
        {"query": _short(pair.query), "positive": _short(pair.positive)}
        for pair in pairs
    ]


def _short(text: str) -> str:
    return " ".join(text.split(" ")[:MOST_WORDS])


def _by_hash(pairs: Iterator[tuple[str, str]], source: Path) -> list[Row]:
    """Return the pairs without repeated sides, in the order of their hashes."""
    used: set[str] = set()
    rows: list[Row] = []
    for short, long in pairs:
        query = " ".join(short.split())
        positive = " ".join(long.split()[:MOST_WORDS])
        is_long = len(query.split()) >= 3 and len(positive.split()) >= 8
        if (
            is_long
            and query.lower() not in positive.lower()
            and not {query, positive} & used
        ):
            used |= {query, positive}
            rows.append({"query": query, "positive": positive})
    if not rows:
        raise SystemExit(f"{source} holds nothing to make pairs of")
    return sorted(
        rows,
        key=lambda row: hashlib.blake2b(
            row["positive"].encode(), digest_size=8
        ).digest(),
    )


def _pairs(rows: list[Row], num_train: int, num_val: int) -> Collection:
    if len(rows) < num_train + num_val:
        raise SystemExit(
            f"{len(rows):,d} pairs here, and {num_train + num_val:,d} are asked for"
        )
    return Collection(rows[num_val : num_val + num_train], rows[:num_val])


_MACRO = re.compile(
    r"^[.\'].*|\\f(?:\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&|^/,]", re.MULTILINE
)


def _manual_pairs() -> Iterator[tuple[str, str]]:
    for path in sorted(MANUAL.glob("man[1-8]/*.gz")):
        if path.name.startswith(("gcloud", "docker")):  # thousands of pages of one form
            continue
        try:
            text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="ignore")
        except OSError:  # a link to a page that is not installed
            continue
        sections = re.split(r'^\.S[Hh]\s+"?([^"\n]*)"?\s*$', text, flags=re.MULTILINE)
        named = dict(
            zip(
                (name.strip().upper() for name in sections[1::2]),
                sections[2::2],
                strict=False,
            )
        )
        about = _plain(named.get("NAME", "")).partition(" - ")[2]
        paragraphs = [
            _plain(part)
            for part in re.split(
                r"^\.(?:PP|P|LP|Pp|sp|TP|IP)\b.*$|\n\n",
                named.get("DESCRIPTION", ""),
                flags=re.MULTILINE,
            )
        ]
        long = next((part for part in paragraphs if len(part.split()) >= 8), "")
        if about and long:
            yield about, long


def _plain(text: str) -> str:
    """Return troff source without its macros."""
    text = re.sub(
        r"^\.(?:B|I|BR|IR|RB|RI|SM|Nm|Nd|Fn|Em)\s+", "", text, flags=re.MULTILINE
    )
    text = (
        _MACRO.sub("", text).replace("\\-", "-").replace("\\(aq", "'").replace("\\", "")
    )
    return " ".join(text.split())


def _package_pairs() -> Iterator[tuple[str, str]]:
    if PACKAGES.is_file():
        for block in PACKAGES.read_text(encoding="utf-8").split("\n\n"):
            match = re.search(r"^Description: (.+)\n((?: .+\n?)+)", block, re.MULTILINE)
            if match is not None:
                yield (
                    match.group(1),
                    re.split(r"^ \.$", match.group(2), flags=re.MULTILINE)[0],
                )
    for package in metadata.distributions():
        text = package.metadata.get_payload()
        parts = [" ".join(part.split()) for part in str(text).split("\n\n")]
        long = next(
            (part for part in parts if len(part.split()) >= 12 and part[:1].isalpha()),
            "",
        )
        if package.metadata["Summary"] and long:
            yield package.metadata["Summary"], long


def _named_characters() -> list[tuple[str, str]]:
    characters = [chr(code) for code in range(0x20, 0x3000)]
    return [
        (character, unicodedata.name(character))
        for character in characters
        if unicodedata.name(character, "").count(" ") >= 2
    ]


def _near(
    known: list[tuple[str, str, str]], count: int, draw: random.Random
) -> list[Row]:
    """Return as many pairs of each score."""
    of_script: defaultdict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for first in known:
        of_script[first[1]].append(first)
    rows: dict[float, list[Row]] = {0.0: [], 0.5: [], 1.0: []}
    while min(map(len, rows.values())) < (count + 2) // 3:
        first = draw.choice(known)
        # Two of one script are rare among all, so that every other pair is drawn from one.
        near = of_script[first[1]] if draw.random() < 0.7 else known
        second = draw.choice(near)
        score = 0.5 * (first[1] == second[1]) + 0.5 * (first[2] == second[2])
        if first != second and len(rows[score]) < (count + 2) // 3:
            rows[score].append(
                {
                    "sentence1": first[0].lower(),
                    "sentence2": second[0].lower(),
                    "score": score,
                }
            )
    pairs = [row for same in rows.values() for row in same]
    draw.shuffle(pairs)
    return pairs[:count]
