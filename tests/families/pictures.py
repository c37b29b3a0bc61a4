"""Data for training from scratch: words as pictures, characters as pictures, rows of text with none, one or two."""

import random

from PIL import Image, ImageDraw, ImageFont

from tests.data.files import write_jsonl
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


def picture_of(word, folder, name, draw):
    """A JSONL value: a new picture of a word, in the folder `images`."""
    path = folder / "images" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    render(word, path, draw)
    return {"image": f"images/{name}.png"}


def words_and_pictures(folder, words, copies, name, seed):
    """Rows (word, picture of it) of a JSONL; `copies` different pictures of each word."""
    draw = random.Random(seed)
    rows = []
    for number in range(copies):
        for word in words:
            picture = picture_of(word, folder, f"{name}-{word}-{number}", draw)
            rows.append({"query": word, "positive": picture})
    draw.shuffle(rows)
    return write_jsonl(folder / f"{name}.jsonl", rows)


def mixed_rows(folder, count, seed=0):
    """Rows of text alone, with one picture, with two."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        first, second = draw.sample(WORDS, 2)
        left = picture_of(first, folder, f"mixed-{number}-a", draw)
        right = picture_of(second, folder, f"mixed-{number}-b", draw)
        both = {"text": second, "images": [left["image"], right["image"]]}
        positives = [{"text": f"{first} {second}"}, left, both]
        positive = positives[number % 3]
        rows.append({"query": f"{first} and {second}", "positive": positive})
    return write_jsonl(folder / "mixed.jsonl", rows)


def words_of_pictures(count):
    """Words that differ in their first five letters, which are all that a picture shows."""
    recorded = {}
    for word in WORDS:
        recorded.setdefault(word[:5], word)
    return sorted(recorded.values())[::2][:count]
