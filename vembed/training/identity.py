"""Identity of a run: what must be equal on all ranks, and what must stay when it is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vembed.config.ranks import BY_CONTENT, MAY_DIFFER
from vembed.config.resolved import ResolvedRun
from vembed.config.schema import TrainConfig
from vembed.config.terms import data_entries
from vembed.data.cache import add_content
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item
from vembed.evaluation.dataset import EvalData, RetrievalData
from vembed.parallel.launch_check import COMPARED, DERIVED, require_equal
from vembed.training.fingerprints import of_data, of_model
from vembed.training.setup import RunData

MOST_SAMPLED = 256
"""Examples whose image files are looked at; of more, a sample spread over all."""
IMAGE_PIECE_BYTES = 2**16
"""Files up to three pieces are read whole; of larger ones their first, middle and last piece is."""


def of_examples(examples: ExampleStore | Sequence[Example]) -> str | None:
    """Return the fingerprint of the image files of examples; None if they name none."""
    sampled = (examples[index] for index in _spread(len(examples)))
    return _of_items(
        item for one in sampled for item in (one.query, *one.positives, *one.negatives)
    )


def of_evaluation(data: EvalData | None) -> str | None:
    """Return the fingerprint of the image files of evaluation data; None if they name none."""
    if data is None:
        return None
    sides = (
        (data.queries, data.documents)
        if isinstance(data, RetrievalData)
        else (data.first, data.second)
    )
    return _of_items(side[index] for side in sides for index in _spread(len(side)))


def _of_items(items: Iterable[Item]) -> str | None:
    # Without their names: machines may keep the images in other folders.
    digests: dict[str, str] = {}
    for item in items:
        for image in item.images:
            if (
                image.path is not None
                and "://" not in image.path
                and image.path not in digests
            ):
                digests[image.path] = _image_content(Path(image.path))
    return (
        hashlib.blake2b("\n".join(digests.values()).encode(), digest_size=8).hexdigest()
        if digests
        else None
    )


def _image_content(path: Path) -> str:
    try:
        digest = hashlib.blake2b(str(path.stat().st_size).encode(), digest_size=16)
        add_content(
            digest,
            path,
            pieces=3,
            piece_bytes=IMAGE_PIECE_BYTES,
            whole_bytes=3 * IMAGE_PIECE_BYTES,
        )
        return digest.hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _spread(count: int) -> range:
    return range(0, count, max(-(-count // MOST_SAMPLED), 1))


OF_TASK = {"losses", "temperature", "batch_size", "global_batch_size"}
"""Options of a source that are no part of the data's fingerprint."""


def identity_of(config: TrainConfig, data: RunData) -> dict[str, Any]:
    """Return the identity. A model that is not on this machine yet (a Hub name) has no fingerprint."""
    models = {
        "model_files": config.model.model_name,
        "image_model_files": config.model.image_model_name,
    }
    prints = {
        name: of_model(one, config.model.model_revision)
        for name, one in models.items()
        if one is not None
    }
    tasks = [
        one.model_dump(mode="json", include=OF_TASK, exclude_none=True)
        for one in data_entries(config)
    ]
    prints["image_files"] = of_examples(data.examples)
    return {
        "data": data.examples.fingerprint,
        "tasks": tasks if any(tasks) else [],
        "global_batch_size": data.examples_per_step,
        **{name: found for name, found in prints.items() if found is not None},
    }


def require_same_data(identity: dict[str, Any], data: RunData) -> None:
    """Raise the same UserError on every rank unless all have read the same data, with the same images. Collective."""
    require_equal(
        "the data's content",
        data.examples.fingerprint,
        "give every machine the same data_path",
    )
    images = [identity.get("image_files"), of_evaluation(data.evaluation)]
    for name, found in zip(
        ("the data's", "the validation data's"), images, strict=True
    ):
        require_equal(
            f"the content of {name} image files",
            found,
            "give every machine the same images",
        )


def facts_of(run: ResolvedRun) -> dict[str, Any]:
    """Return the values by name. Reads the fingerprints of data and models, and nothing else of them."""
    config = run.config
    facts: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name == "resume":
            # Rank 0 chooses the checkpoint; the ranks compare it when they have found it.
            facts[name] = (
                value if isinstance(value, bool) or value == "auto" else "a path"
            )
        elif name in BY_CONTENT:
            facts[name] = content(
                value, _print_of(BY_CONTENT[name], config.model.model_revision)
            )
        elif name not in MAY_DIFFER:
            facts[name] = value
    facts |= {f"{name}{DERIVED}": value for name, value in _decisions(run).items()}
    return facts


def content(value: Any, print_of: Callable[[str], str | None]) -> Any:
    """Return what is compared of the value of an option that names files, and how a message shows it."""
    compared = by_content(value, print_of)
    return (
        compared
        if compared == value
        else {COMPARED: compared, "shown": f"{value} ({compared})"}
    )


def by_content(value: Any, print_of: Callable[[str], str | None]) -> Any:
    """Return a value with the names of files and folders replaced by their fingerprints, at any depth."""
    if isinstance(value, str):
        found = print_of(value)
        return value if found is None else f"content {found}"
    if isinstance(value, list):
        return [by_content(one, print_of) for one in value]
    if isinstance(value, Mapping):
        return {key: by_content(one, print_of) for key, one in value.items()}
    return value


def _print_of(kind: str, revision: str | None) -> Callable[[str], str | None]:
    return of_data if kind == "data" else lambda name: of_model(name, revision)


def _decisions(run: ResolvedRun) -> dict[str, Any]:
    """Return what follows from options, files and the environment together."""
    fsdp = (
        {}
        if run.fsdp is None
        else {f"fsdp {name}": value for name, value in asdict(run.fsdp).items()}
    )
    for name in ("fsdp source", "fsdp precision_reason"):
        fsdp.pop(name, None)
    return {
        "strategy": run.strategy.value,
        "gradient checkpointing": run.recomputation.value,
        "mixed precision": run.precision.value,
        "dist_timeout_minutes": run.timeout_minutes.value,
        **{name: str(value) for name, value in fsdp.items()},
    }
