"""Values for a starter config, from the records, their lengths with the tokenizer and the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vembed.config.decisions import epochs_for
from vembed.config.schema import ModelSection
from vembed.config.values import Task
from vembed.errors import UserError

SMALLEST_SPLIT = 50
"""Records from which a tenth can be held out."""
MOST_HELD_OUT = 2000
STEPS_PER_EPOCH = 20
"""Steps that an epoch should have: a larger batch is chosen only where the data fill it so often."""
FULL_SHARE = 0.99
"""Share of the texts that max_length should not cut."""
CHARACTERS_PER_TOKEN = 3.0
"""Cautious, for languages other than English."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the files of a model, read without its weights."""

    max_length: int
    tokens: Callable[[Sequence[str]], list[int]] | None
    """Lengths of texts in tokens, special ones included; None for a model without texts."""
    temperature: float | None
    """The learned temperature of CLIP and SigLIP."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the texts in tokens."""

    full: int
    """Length that 99 % of the texts do not exceed."""
    longest: int
    is_measured: bool
    """False: estimated from the characters, because the model's tokenizer is not on this machine."""


def local_model(name: str) -> Path | None:
    """Return the folder of a model that is on this machine: a folder, or in the Hub's cache. Uses no network."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                local_files_only=True,
                allow_patterns=["*.json", "*.txt", "*.model"],
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def model_facts(name: str, task: Task = "embed") -> ModelFacts | None:
    """Return the facts of a model that is on this machine, else None."""
    if local_model(name) is None:
        return None
    from vembed.models.families.description import (
        describe,  # imported late: transformers takes seconds
    )

    logging.getLogger("transformers").setLevel(logging.ERROR)
    description = describe(ModelSection(model_name=name, task=task))
    tokens = None
    if description.modalities != ("image",):
        from vembed.models.processors import load_tokenizer

        tokenizer = load_tokenizer(description)

        def tokens(texts: Sequence[str]) -> list[int]:
            encoded = tokenizer(list(texts), truncation=False, verbose=False)
            return list(map(len, encoded["input_ids"]))

    temperature = _learned_temperature(Path(description.source))
    return ModelFacts(description.max_length, tokens, temperature)


def measure(texts: Sequence[str], facts: ModelFacts | None) -> Lengths | None:
    """Return the lengths of texts; None without texts."""
    if not texts:
        return None
    tokens = None if facts is None else facts.tokens
    if tokens is not None:
        lengths = sorted(tokens(texts))
    else:
        sizes = sorted(map(len, texts))
        # And two special tokens.
        lengths = [math.ceil(size / CHARACTERS_PER_TOKEN) + 2 for size in sizes]
    full = lengths[math.ceil(FULL_SHARE * len(lengths)) - 1]
    return Lengths(full, lengths[-1], is_measured=tokens is not None)


def fitting_length(lengths: Lengths | None, limit: int | None, usual: int) -> int:
    """Return max_length: what 99 % of the texts need, in steps of 16, at most what the model can read."""
    most = usual if limit is None else limit
    if lengths is None:
        return most
    return min(max(16 * math.ceil(lengths.full / 16), 32), most)


def fitting_batch(num_records: int, usual: int) -> int:
    """Return the batch size: the usual one, or the power of two with which an epoch has enough steps."""
    if not num_records:
        return usual
    fits = max(num_records // STEPS_PER_EPOCH, 1)
    # Not above the number of records, since an incomplete batch is left out.
    return min(usual, max(1 << int(math.log2(fits)), 8), num_records)


def fitting_epochs(num_records: int, *, has_scale: bool = False) -> int:
    """Return the passes over the data: more where there are few records, and for CLIP and SigLIP."""
    return round(epochs_for(num_records, has_scale=has_scale)) if num_records else 1


def held_out_share(num_records: int) -> float | None:
    """Return val_split: a tenth, of large data less; None where there are too few records."""
    if num_records < SMALLEST_SPLIT:
        return None
    return min(0.1, float(f"{MOST_HELD_OUT / num_records:.1g}"))


def _learned_temperature(folder: Path) -> float | None:
    """Return the temperature that a CLIP or SigLIP model has learned, from its weights' file."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    if name.rpartition(".")[2] == "logit_scale":
                        # CLIP stores the log of the scale, which is 1 / temperature.
                        scale = float(file.get_tensor(name).reshape(-1)[0])
                        return float(f"{math.exp(-scale):.3g}")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    return None
