"""`vembed score`: a file of pairs in, the similarity of each pair out, in the order of the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

import numpy as np

from vembed.cli.commands.encode import session_config
from vembed.config.schema import TrainConfig
from vembed.data.example_store import open_examples
from vembed.errors import UserError
from vembed.inference.embedder import Embedder
from vembed.parallel.session import start_session
from vembed.saving.durability import replaced_file

CHUNK = 16_384
"""Records that are read, scored and written together; memory does not grow with the file."""


def run_score(
    model: str,
    pairs: str,
    output: str = "-",
    *,
    column_mapping: dict[str, str] | None = None,
    image_root: str | None = None,
    strategy: Literal["auto", "ddp", "fsdp"] = "ddp",
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    trust_remote_code: bool = False,
) -> int:
    """Write the similarity of every query with each of its positives, then with each of its negatives; return how many
    there are. Runs on as many processes as were started: the first one writes, all encode."""
    if output != "-" and Path(output).suffix not in (".npy", ".jsonl"):
        raise UserError(
            f"{output}: vembed score writes .npy, .jsonl, or to standard output (-)"
        )
    if output != "-" and not Path(output).absolute().parent.is_dir():
        raise UserError(
            f"{Path(output).absolute().parent} is not a folder, so {Path(output).name} cannot be written"
        )
    # As validation data: no loss is asked whether it could learn from the pairs.
    config = TrainConfig(
        model_name=model,
        data_path=pairs,
        column_mapping=column_mapping,
        image_root=image_root,
    )
    store = open_examples(config, pairs, role="validation")
    total = 0
    with (
        start_session(
            session_config(model, strategy, trust_remote_code=trust_remote_code)
        ) as session,
        _opened(output if session.is_main else None) as write,
    ):
        embedder = Embedder(
            model,
            torch_dtype=torch_dtype,
            trust_remote_code=trust_remote_code,
            session=session,
        )
        for start in range(0, len(store), CHUNK):
            query_items = []
            roles = []
            for number in range(start, min(start + CHUNK, len(store))):
                example = store[number]
                for item in example.positives:
                    query_items.append((example.query, item))
                    roles.append((number, "positive"))
                for item in example.negatives:
                    query_items.append((example.query, item))
                    roles.append((number, "negative"))
            write(roles, embedder.score(query_items))
            total += len(query_items)
    return total


class _Written:
    """Collects similarities, or writes them line by line."""

    def __init__(self, file: TextIO | None, *, as_json: bool) -> None:
        self.file = file
        self.as_json = as_json
        self.arrays: list[np.ndarray] = []

    def __call__(self, rows: list[tuple[int, str]], similarities: np.ndarray) -> None:
        """Take the similarities of some pairs: (number of the record, role of the item)."""
        if self.file is None:
            self.arrays.append(similarities)
            return
        for (number, role), value in zip(rows, similarities.tolist(), strict=True):
            line = (
                json.dumps({"record": number, "role": role, "similarity": value})
                if self.as_json
                else f"{value:.6f}"
            )
            self.file.write(line + "\n")


@contextmanager
def _opened(output: str | None) -> Iterator[_Written]:
    """Yield what takes the similarities, for a file or standard output (`-`); None: another process writes."""
    if output == "-":
        yield _Written(sys.stdout, as_json=False)
        sys.stdout.flush()
    elif output is None:
        yield _Written(None, as_json=False)
    else:
        with replaced_file(Path(output)) as partial:
            if output.endswith(".npy"):
                written = _Written(None, as_json=False)
                yield written
                with partial.open("wb") as array:
                    # The empty array, because concatenate takes no empty list.
                    np.save(
                        array,
                        np.concatenate([np.empty(0, np.float32), *written.arrays]),
                    )
            else:
                with partial.open("w", encoding="utf-8") as file:
                    yield _Written(file, as_json=True)
