"""Contents of a checkpoint, checked by a schema: state, index and the headers of its files. Reads no weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.files import read_state_bytes
from vembed.models.families.model_files import WEIGHTS, Stored, read_header
from vembed.training.checkpoint import folder as integrity
from vembed.training.checkpoint.folder import INDEX, STATE, irregular, step_of

MAX_STEPS = 10**10
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
    if problems or part > 0:
        return problems
    for name in (STATE, INDEX):
        problem = irregular(directory, name)
        if problem is not None:
            return [problem]
    try:
        return [*_state_problems(directory), *_index_problems(directory)][:3]
    except (ValueError, UserError) as error:
        return [str(error)]


def _state_problems(directory: Path) -> Iterator[str]:
    try:
        state = StateSchema.model_validate_json(read_state_bytes(directory / STATE))
        TrainConfig(**state.config)
    except ValidationError as error:
        yield f"{STATE}: {_first_problem(error)}"
        return
    except (ValueError, UserError) as error:
        yield f"{STATE}: {error}"
        return
    loop = state.loop
    named = step_of(directory.name)
    if named is not None and loop.step != named:
        yield f"{STATE}: loop.step is {loop.step}, and the folder is that of step {named}"
    for name, value in (("best_step", loop.best_step), ("held_step", loop.held_step)):
        if value is not None and value > loop.step:
            yield f"{STATE}: loop.{name} is {value}, later than its step {loop.step}"


def _first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found: where it is, what is wrong, and the value."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "its content"
    value = first["input"]
    is_simple = isinstance(value, str | int | float | None)
    value_text = f" ({value!r:.60})" if is_simple else ""
    return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}{value_text}"


def _index_problems(directory: Path) -> Iterator[str]:
    try:
        index = _INDEX.validate_json(read_state_bytes(directory / INDEX))
    except ValidationError as error:
        yield f"{INDEX}: {_first_problem(error)}"
        return
    unnamed: dict[tuple[str, str], Stored] = {}
    for path in sorted(directory.glob("rank*" + WEIGHTS)):
        for key, stored in read_header(path)[0].items():
            unnamed[path.name, key] = stored
    pieces = dict(unnamed)
    for name, entry in index.items():
        problem = _tensor_problem(entry, pieces)
        if problem is not None:
            yield f"{INDEX}: {name}: {problem}"
        for chunk in entry.chunks:
            unnamed.pop((chunk.file, chunk.key), None)
    if unnamed:
        file, key = min(unnamed)
        yield f"{INDEX} names none of {len(unnamed):,d} tensors in the files ({key} in {file})"


def _tensor_problem(
    entry: EntrySchema, pieces: Mapping[tuple[str, str], Stored]
) -> str | None:
    """Return why the chunks are not the tensor cut into pieces, each element once, in these files; None if they are."""
    if entry.dtype not in CODES:
        return f"{entry.dtype} is not the name of a type"
    shape = entry.shape
    num_stored = 0
    for chunk in entry.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return "offsets, sizes and shape have different lengths"
        for start, count, size in zip(chunk.offsets, chunk.sizes, shape, strict=True):
            if start + count > size:
                return f"a chunk of {chunk.sizes} at {chunk.offsets} is outside of the shape {shape}"
        num_stored += math.prod(chunk.sizes)
    # Equal numbers and no overlap together mean: every element once.
    if num_stored != math.prod(shape):
        return f"its chunks hold {num_stored:,d} of {math.prod(shape):,d} elements"
    # Pieces are cut along the first dimension. In order of their offsets they overlap only with their neighbours.
    chunks = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
    chunks.sort(key=lambda chunk: chunk.offsets)
    for left, right in itertools.pairwise(chunks):
        spans = zip(left.offsets, left.sizes, right.offsets, right.sizes, strict=True)
        if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans):
            return "two chunks overlap"
    for chunk in entry.chunks:
        stored = pieces.get((chunk.file, chunk.key))
        if stored is None:
            return f"{chunk.file!r} is no file of this folder that holds {chunk.key!r}"
        if stored.dtype != CODES[entry.dtype] or list(stored.shape) != chunk.sizes:
            return (
                f"{chunk.key} is {stored.dtype} of the shape {list(stored.shape)} in {chunk.file}, and "
                f"{CODES[entry.dtype]} of {chunk.sizes} in the index"
            )
    return None
