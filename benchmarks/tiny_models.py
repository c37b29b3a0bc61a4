"""Models of the benchmark of defaults: all-MiniLM-L6-v2, and a decoder and a CLIP with initial weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.families.scratch import small_clip
from tests.tiny import tiny_qwen3
from vembed.tools.demo import demo_model


def encoder(_: Path) -> Path:
    """Return all-MiniLM-L6-v2."""
    return demo_model()


MODELS: dict[str, Callable[[Path], Path]] = {"encoder": encoder, "decoder": tiny_qwen3, "clip": small_clip}
"""Family -> function that returns a model's folder, made in the folder that it is given."""
