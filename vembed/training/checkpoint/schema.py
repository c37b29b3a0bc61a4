"""Contents of a checkpoint, checked by a schema: state, index and the headers of its files. Reads no weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.files import read_state_bytes
from vembed.models.families.weight_files import WEIGHTS, Stored, read_header
from vembed.training.checkpoint import folder as integrity
from vembed.training.checkpoint.folder import STATE, irregular, step_of

INDEX = "index.json"
MAX_STEPS = 10**10
MAX_COMPARED_PAIRS = 10_000
"""Pairs of chunks of one tensor that are compared with each other."""
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a type -> that of safetensors."""

Step = Annotated[int, Field(ge=0, le=MAX_STEPS)]
Count = Annotated[int, Field(ge=0)]
Scores = dict[str, float]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ScaleSchema(_Schema):
    """The values of `GradientScale`."""

    value: Positive
    good_steps: Count
    is_started: bool


class LoopSchema(_Schema):
    """The values of `LoopState`: every one is there, and no other."""

    step: Step
    num_skipped: Count
    skipped_in_a_row: Count
    best: float | None
    best_step: Step | None
    best_scores: Scores
    held_step: Step | None
    held_scores: Scores
    fell: str | None
    scale: ScaleSchema
    before: Scores
    scores: Scores
    scored_step: Step | None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    hooks: dict[str, dict[str, Any]]


class IdentitySchema(BaseModel):
    """Facts that must match besides options; further keys are allowed."""

    model_config = ConfigDict(extra="allow", strict=True)

    global_batch_size: Annotated[int, Field(ge=1)] | None = None


class StateSchema(BaseModel):
    """The file state.json. More may be in it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    loop: LoopSchema
    config: dict[str, Any]
    identity: IdentitySchema
    optimizer: str
    strategy: str
    precision: str | None = None
    world_size: Annotated[int, Field(ge=1)]


class ChunkSchema(_Schema):
    """One piece of a tensor: where it begins in the tensor, its size, and where it is stored."""

    offsets: list[Count]
    sizes: list[Count]
    file: str
    key: str


class EntrySchema(_Schema):
    """One tensor of index.json."""

    dtype: str
    shape: list[Count]
    chunks: Annotated[list[ChunkSchema], Field(min_length=1)]


_INDEX = TypeAdapter(dict[str, EntrySchema])


def verify(directory: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return the problems of a checkpoint as messages; empty if it is whole and its contents make sense.

    With `num_parts`, each part compares some of the files with their checksums; the first looks at the contents too.
    """
    problems = integrity.verify(directory, part=part, num_parts=num_parts)
    if part == 0 and not problems:
        return problems_in(directory)
    return problems


def problems_in(directory: Path) -> list[str]:
    """Return what is wrong in a checkpoint whose files match their checksums."""
    unusable = [
        problem
        for name in (STATE, INDEX)
        if (problem := irregular(directory, name)) is not None
    ]
    if unusable:
        return unusable
    return [*_state_problems(directory), *_index_problems(directory)][:3]


# ---- state -----------------------------------------------------------------------------------------------------


def _state_problems(directory: Path) -> Iterator[str]:
    try:
        state = StateSchema.model_validate_json(read_state_bytes(directory / STATE))
        TrainConfig(**state.config)
    except ValidationError as error:
        yield f"{STATE}: {_said(error)}"
    except (ValueError, UserError) as error:
        yield f"{STATE}: {error}"
    else:
        step = state.loop.step
        named = step_of(directory.name)
        if named is not None and step != named:
            yield f"{STATE}: loop.step is {step}, and the folder is that of step {named}"
        for name, value in (
            ("best_step", state.loop.best_step),
            ("held_step", state.loop.held_step),
        ):
            if value is not None and value > step:
                yield f"{STATE}: loop.{name} is {value}, later than its step {step}"


def _said(error: ValidationError) -> str:
    """Return the first problem that pydantic found: where it is, what is wrong, and the value."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "its content"
    value = first["input"]
    value_text = (
        f" ({value!r:.60})" if isinstance(value, str | int | float | None) else ""
    )
    return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}{value_text}"


# ---- tensors ---------------------------------------------------------------------------------------------------


def _index_problems(directory: Path) -> Iterator[str]:
    try:
        index = _INDEX.validate_json(read_state_bytes(directory / INDEX))
    except UserError as error:
        yield f"{INDEX}: {error}"
        return
    except ValidationError as error:
        yield f"{INDEX}: {_said(error)}"
        return
    files: dict[str, dict[str, Stored]] = {}
    for path in sorted(directory.glob("rank*" + WEIGHTS)):
        try:
            files[path.name] = read_header(path)[0]
        except UserError as error:
            yield str(error)
            return
    for name, entry in index.items():
        problems = [_coverage_problem(entry)]
        if problems == [None]:
            problems = [_piece_problem(entry, chunk, files) for chunk in entry.chunks]
        yield from (
            f"{INDEX}: {name}: {problem}" for problem in problems if problem is not None
        )
    named = set()
    for entry in index.values():
        named |= {(chunk.file, chunk.key) for chunk in entry.chunks}
    left = sorted({(file, key) for file, held in files.items() for key in held} - named)
    if left:
        yield f"{INDEX} names none of {len(left):,d} tensors in the files ({left[0][1]} in {left[0][0]})"


def _coverage_problem(entry: EntrySchema) -> str | None:
    """Return why the chunks are not the tensor cut into pieces, each element once; None if they are."""
    if entry.dtype not in CODES:
        return f"{entry.dtype} is not the name of a type"
    num_dims = {len(entry.shape)}
    for chunk in entry.chunks:
        num_dims |= {len(chunk.offsets), len(chunk.sizes)}
    if len(num_dims) > 1:
        return "offsets, sizes and shape have different lengths"
    for chunk in entry.chunks:
        ends = [
            start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        ]
        if any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            return f"a chunk ends at {ends}, outside of the shape {entry.shape}"
    num_stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    num_elements = math.prod(entry.shape)
    # Equal numbers and no overlap together mean: every element once.
    if num_stored != num_elements:
        return f"its chunks hold {num_stored:,d} of {num_elements:,d} elements"
    # In order of their offsets, pieces along the first dimension overlap only with their neighbours.
    chunks = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
    chunks.sort(key=lambda chunk: chunk.offsets)
    are_rows = all(chunk.sizes[1:] == entry.shape[1:] for chunk in chunks)
    pairs: Iterable[tuple[ChunkSchema, ChunkSchema]]
    if are_rows or len(chunks) ** 2 > MAX_COMPARED_PAIRS:
        pairs = itertools.pairwise(chunks)
    else:
        pairs = itertools.combinations(chunks, 2)
    for left, right in pairs:
        if _overlap(left, right):
            return "two chunks overlap"
    return None


def _overlap(left: ChunkSchema, right: ChunkSchema) -> bool:
    for start, size, other_start, other_size in zip(
        left.offsets, left.sizes, right.offsets, right.sizes, strict=True
    ):
        if start >= other_start + other_size or other_start >= start + size:
            return False
    return True


def _piece_problem(
    entry: EntrySchema, chunk: ChunkSchema, files: Mapping[str, Mapping[str, Stored]]
) -> str | None:
    stored = files.get(chunk.file, {}).get(chunk.key)
    if stored is None:
        return f"{chunk.file!r} is no file of this folder that holds {chunk.key!r}"
    if stored.dtype != CODES[entry.dtype] or list(stored.shape) != chunk.sizes:
        return (
            f"{chunk.key} is {stored.dtype} of the shape {list(stored.shape)} in {chunk.file}, and "
            f"{CODES[entry.dtype]} of {chunk.sizes} in the index"
        )
    return None
