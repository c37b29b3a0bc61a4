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

from vembed.config.user_folders import cache_folder
from vembed.data.row_store import RowStore, StoreKind
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport, duration

log = logging.getLogger("vembed")

KIND = StoreKind("teacher", "answers of this teacher", ".answers", b"vembed answers 1")
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
        self.store = RowStore((folder or cache_folder()) / "teachers", identity, KIND)
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
        return bool(
            collectives.broadcast_json(
                self._is_complete(what) if self.session.is_main else None
            )
        )

    def _is_complete(self, what: str) -> bool:
        try:
            noted = json.loads(self._note(what).read_text(encoding="utf-8"))[
                "num_answers"
            ]
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # not there, or damaged: the data are gone through again
            return False
        if len(self.store) >= noted:
            return True
        log.warning(
            "teacher %s: %s holds %s answers of %s: the others are computed anew",
            self.label,
            self.store.folder,
            f"{len(self.store):,d}",
            f"{noted:,d}",
        )
        return False

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
                self._compute_together(chunk, keys, questions)
                progress(start + len(chunk), len(missing))
        if missing:
            log.info(
                "teacher %s: took %s", self.label, duration(time.perf_counter() - began)
            )
        # A machine may have a disk of its own, so one process of each machine writes.
        if session.local_rank == 0:
            self._write_note(what, len(keys))
        self.model.release()

    def _compute_together(
        self, chunk: Sequence[int], keys: Sequence[bytes], questions: Sequence[Q]
    ) -> None:
        rank = self.session.rank
        world_size = self.session.world_size
        by_rank = [chunk[start::world_size] for start in range(world_size)]
        answers = self.model.compute([questions[place] for place in by_rank[rank]])
        rows = collectives.all_gather_rows(
            torch.from_numpy(answers).to(self.session.device),
            [len(share) for share in by_rank],
        )
        if self.session.local_rank == 0:
            places = [place for share in by_rank for place in share]
            self.store.add_rows([keys[place] for place in places], rows.cpu().numpy())

    def _note(self, what: str) -> Path:
        return self.store.folder / f"complete-{what}.json"

    def _write_note(self, what: str, num_answers: int) -> None:
        note = self._note(what)
        with suppress(OSError):  # a full disk costs the next run a pass over the data
            note.parent.mkdir(parents=True, exist_ok=True)
            part = note.with_suffix(f".{self.session.rank}.part")
            part.write_text(json.dumps({"num_answers": num_answers}), encoding="utf-8")
            part.replace(note)
