"""Identity of a run: what must be equal on all ranks, and what must stay when it is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vembed.config.ranks import FILE_OPTIONS, MAY_DIFFER
from vembed.config.resolved import ResolvedRun
from vembed.config.schema import TrainConfig
from vembed.config.terms import compares_own_rank, run_terms
from vembed.data.cache import add_content
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item
from vembed.evaluation.dataset import EvalData, RetrievalData
from vembed.parallel.launch_check import COMPARED, DERIVED, require_equal
from vembed.training.fingerprints import of_code, of_data, of_model
from vembed.training.setup import RunData

MAX_SAMPLED_EXAMPLES = 256
"""Examples whose image files are looked at; of more, a sample spread over all."""
IMAGE_PIECE_BYTES = 2**16
"""Files up to three pieces are read whole; of larger ones their first, middle and last piece is."""
TASK_OPTIONS = {"losses", "temperature", "batch_size", "global_batch_size"}
"""Options of a source that are no part of the data's fingerprint."""


# ---- between the run and its checkpoint --------------------------------------


def identity_of(config: TrainConfig, data: RunData, world_size: int) -> dict[str, Any]:
    """Return what besides the options must stay when the run is resumed.

    The content of every file and folder that an option names is part of it. A model that is not on this machine yet
    (a Hub name) has no fingerprint.
    """
    tasks = []
    for source in config.data.sources():
        tasks.append(
            source.model_dump(mode="json", include=TASK_OPTIONS, exclude_none=True)
        )
    identity = {
        "data": data.examples.fingerprint,
        "tasks": tasks if any(tasks) else [],
        "global_batch_size": data.examples_per_step,
    }
    terms = run_terms(config.objective, config.data, config.model.model_name)
    if compares_own_rank(terms):
        identity["world_size"] = world_size
    images = of_examples(data.examples)
    if images is not None:
        identity["image_files"] = images
    options = config.to_dict()
    for name, kind in FILE_OPTIONS.items():
        if kind == "data":
            continue  # the examples have a fingerprint of their own
        print_of = _print_of(kind, config.model.model_revision)
        contents = by_content(options[name], print_of)
        if contents != options[name]:
            identity[f"{name}_files"] = contents
    return identity


def require_same_data(identity: Mapping[str, Any], data: RunData) -> None:
    """Raise the same UserError on every rank unless all have read the same data, with the same images. Collective."""
    require_equal(
        "the data's content",
        data.examples.fingerprint,
        "give every machine the same data_path",
    )
    advice = "give every machine the same images"
    require_equal(
        "the content of the data's image files", identity.get("image_files"), advice
    )
    require_equal(
        "the content of the validation data's image files",
        of_evaluation(data.evaluation),
        advice,
    )


# ---- between the ranks -------------------------------------------------------


def facts_of(run: ResolvedRun) -> dict[str, Any]:
    """Return what must be equal on all ranks, by name: the options, the decisions behind them, and their files."""
    config = run.config
    facts: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name == "resume":
            # Rank 0 chooses the checkpoint; the ranks compare it when they have found it.
            is_switch = isinstance(value, bool) or value == "auto"
            facts[name] = value if is_switch else "a path"
        elif name in FILE_OPTIONS:
            print_of = _print_of(FILE_OPTIONS[name], config.model.model_revision)
            facts[name] = compared_content(value, print_of)
        elif name not in MAY_DIFFER:
            facts[name] = value
    # What follows from options, files and the environment together.
    decisions: dict[str, Any] = {
        "strategy": run.strategy.value,
        "gradient checkpointing": run.recomputation.value,
        "mixed precision": run.precision.value,
        "dist_timeout_minutes": run.timeout_minutes.value,
    }
    if run.fsdp is not None:
        for name, value in asdict(run.fsdp).items():
            if name not in ("source", "precision_reason"):
                decisions[f"fsdp {name}"] = str(value)
    for name, value in decisions.items():
        facts[f"{name}{DERIVED}"] = value
    return facts


def compared_content(value: Any, print_of: Callable[[str], str | None]) -> Any:
    """Return what is compared of the value of an option that names files, and how a message shows it."""
    compared = by_content(value, print_of)
    if compared == value:
        return compared
    return {COMPARED: compared, "shown": f"{value} ({compared})"}


def by_content(value: Any, print_of: Callable[[str], str | None]) -> Any:
    """Return a value with the names of files and folders replaced by their fingerprints, at any depth."""
    if isinstance(value, str):
        fingerprint = print_of(value)
        return value if fingerprint is None else f"content {fingerprint}"
    if isinstance(value, list):
        return [by_content(entry, print_of) for entry in value]
    if isinstance(value, Mapping):
        return {key: by_content(entry, print_of) for key, entry in value.items()}
    return value


def _print_of(kind: str, revision: str | None) -> Callable[[str], str | None]:
    if kind == "data":
        return of_data
    if kind == "code":
        return of_code
    return lambda name: of_model(name, revision)


# ---- image files -------------------------------------------------------------


def of_examples(examples: ExampleStore | Sequence[Example]) -> str | None:
    """Return the fingerprint of the image files of examples, from a sample; None if they name none."""
    items: list[Item] = []
    for index in _sample(len(examples)):
        example = examples[index]
        items += (example.query, *example.positives, *example.negatives)
    return _of_items(items)


def of_evaluation(data: EvalData | None) -> str | None:
    """Return the fingerprint of the image files of evaluation data; None if they name none."""
    if data is None:
        return None
    sides = (
        (data.queries, data.documents)
        if isinstance(data, RetrievalData)
        else (data.first, data.second)
    )
    items: list[Item] = []
    for side in sides:
        items += [side[index] for index in _sample(len(side))]
    return _of_items(items)


def _of_items(items: Iterable[Item]) -> str | None:
    # Without their names: machines may keep the images in other folders.
    digests: dict[str, str] = {}
    for item in items:
        for image in item.images:
            path = image.path
            if path is not None and "://" not in path and path not in digests:
                digests[path] = _image_content(Path(path))
    if not digests:
        return None
    content = "\n".join(digests.values())
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


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


def _sample(count: int) -> range:
    return range(0, count, max(-(-count // MAX_SAMPLED_EXAMPLES), 1))
