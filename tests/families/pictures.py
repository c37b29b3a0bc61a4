"""Data for training from scratch: words as pictures, characters as pictures, rows of text with none, one or two."""

import json
import random

from PIL import Image, ImageDraw, ImageFont

from tests.tiny import WORDS

SIZE = 32


def render(word, path, draw, *, size=SIZE):
    """A word in black on white, a little moved, so that no two pictures are the same."""
    picture = Image.new("RGB", (size, size), "white")
    font = ImageFont.load_default(size=11)
    place = (draw.randint(0, 2), draw.randint(size // 4, size // 3))
    ImageDraw.Draw(picture).text(
        place, word[:5], fill=(draw.randint(0, 80),) * 3, font=font
    )
    picture.save(path)


def words_and_pictures(folder, words, copies, name, seed):
    """Rows (word, picture of it) of a JSONL; `copies` different pictures of each word."""
    draw = random.Random(seed)
    (folder / "images").mkdir(exist_ok=True)
    rows = []
    for number in range(copies):
        for word in words:
            file = f"images/{name}-{word}-{number}.png"
            render(word, folder / file, draw)
            rows.append({"query": word, "positive": {"image": file}})
    draw.shuffle(rows)
    return _write(folder / f"{name}.jsonl", rows)


def picture_pairs(folder, words, copies, name, seed):
    """Rows (picture, another picture of the same word)."""
    draw = random.Random(seed)
    (folder / "images").mkdir(exist_ok=True)
    rows = []
    for number in range(copies):
        for word in words:
            files = [f"images/{name}-{word}-{number}-{side}.png" for side in "ab"]
            for file in files:
                render(word, folder / file, draw)
            rows.append({"query": {"image": files[0]}, "positive": {"image": files[1]}})
    draw.shuffle(rows)
    return _write(folder / f"{name}.jsonl", rows)


def mixed_rows(folder, count, seed=0):
    """Rows of text alone, with one picture, with two."""
    draw = random.Random(seed)
    (folder / "images").mkdir(exist_ok=True)
    rows = []
    for number in range(count):
        first, second = draw.sample(WORDS, 2)
        files = [f"images/mixed-{number}-{side}.png" for side in "ab"]
        for word, file in zip((first, second), files, strict=True):
            render(word, folder / file, draw)
        positives = [
            {"text": f"{first} {second}"},
            {"image": files[0]},
            {"text": second, "images": files},
        ]
        rows.append(
            {"query": f"{first} and {second}", "positive": positives[number % 3]}
        )
    return _write(folder / "mixed.jsonl", rows)


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def halves(copies=1):
    """Words to train on, and words that are only looked at afterwards; all differ in their first five letters."""
    recorded = {}
    for word in WORDS * copies:
        recorded.setdefault(word[:5], word)
    words = sorted(recorded.values())
    return words[::2], words[1::2]
