"""CachedTeacher: the answers of one teacher, read from disk where they are known and computed where not."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from vembed.data.row_store import RowStore
from vembed.errors import UserError
from vembed.files import cache_folder, read_json_object
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport, duration

log = logging.getLogger("vembed")

CHUNK = 2048
"""Questions per rank between two writes."""


Q = TypeVar("Q")


class CachedTeacher(Generic[Q]):
    """Answers by key. The first process of each machine writes what all have computed before the first step; what is
    asked for later is written by the rank that computes it."""

    def __init__(
        self,
        label: str,
        model: Any,
        identity: str,
        session: Session,
        folder: Path | None,
    ) -> None:
        """`model`: a VectorTeacher or a PairTeacher."""
        self.label = label
        self.model = model
        self.session = session
        store_folder = (folder or cache_folder()) / "teachers"
        self.store = RowStore(store_folder, identity, "teacher", ".answers")
        self.num_later = 0
        """Answers that were computed during the run."""

    def answers(self, keys: Sequence[bytes], questions: Sequence[Q]) -> np.ndarray:
        """Return [n, dim] float32. Collective: ranks may ask different things, and compute together what is missing."""
        stored = self.store.find_rows(keys)
        missing = [place for place in range(len(keys)) if place not in stored]
        rows = np.zeros((len(keys), self.model.dim), np.float32)
        # `compute` is collective: all ranks call it as soon as one of them misses an answer, the others with no
        # question.
        if collectives.max_ints([len(missing)])[0]:
            computed = self.model.compute([questions[place] for place in missing])
            self.store.add_rows([keys[place] for place in missing], computed)
            self.num_later += len(missing)
            if missing:
                rows[missing] = computed
        if stored:
            rows[list(stored)] = np.stack(list(stored.values()))
        return rows

    def is_complete(self, what: str) -> bool:
        """Return whether all answers for some data (by their fingerprint) were computed before. Collective."""
        is_complete = False
        if self.session.is_main:
            # Where the note is not there, or damaged, the data are gone through again.
            with suppress(UserError, KeyError, TypeError):
                note = read_json_object(self._note(what))
                num_noted = note["num_answers"]
                is_complete = len(self.store) >= num_noted
                if not is_complete:
                    log.warning(
                        "teacher %s: %s holds %s answers of %s: the others are computed anew",
                        self.label,
                        self.store.folder,
                        f"{len(self.store):,d}",
                        f"{num_noted:,d}",
                    )
        return bool(collectives.broadcast_object(is_complete))

    def complete(
        self, what: str, keys: Sequence[bytes], questions: Sequence[Q]
    ) -> None:
        """Compute what is missing of these answers. Collective: all ranks pass the same keys and questions."""
        session = self.session
        # Rank 0 decides for all: the files may change while the ranks look at them.
        mask = torch.zeros(len(keys), dtype=torch.uint8)
        if session.is_main:
            mask[self.store.missing(keys)] = 1
        mask = mask.to(session.device)
        collectives.broadcast_tensors([mask])
        missing = mask.nonzero().flatten().tolist()
        log.info(
            "teacher %s: %s of %s answers are missing",
            self.label,
            f"{len(missing):,d}",
            f"{len(keys):,d}",
        )
        began = time.perf_counter()
        with ProgressReport(
            f"teacher {self.label}", active=session.is_main, log=log.info
        ) as progress:
            for start in range(0, len(missing), CHUNK * session.world_size):
                chunk = missing[start : start + CHUNK * session.world_size]
                by_rank = [
                    chunk[rank :: session.world_size]
                    for rank in range(session.world_size)
                ]
                share = [questions[number] for number in by_rank[session.rank]]
                answers = torch.from_numpy(self.model.compute(share))
                rows = collectives.all_gather_rows(
                    answers.to(session.device), [len(numbers) for numbers in by_rank]
                )
                if session.local_rank == 0:
                    ordered = [keys[number] for share in by_rank for number in share]
                    self.store.add_rows(ordered, rows.cpu().numpy())
                progress(start + len(chunk), len(missing))
        if missing:
            log.info(
                "teacher %s: took %s", self.label, duration(time.perf_counter() - began)
            )
        # A machine may have a disk of its own, so one process of each machine writes.
        if session.local_rank == 0:
            note = self._note(what)
            # A full disk costs the next run a pass over the data.
            with suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                part = note.with_suffix(f".{session.rank}.part")
                part.write_text(json.dumps({"num_answers": len(keys)}))
                part.replace(note)
        self.model.release()

    def _note(self, what: str) -> Path:
        return self.store.folder / f"complete-{what}.json"
