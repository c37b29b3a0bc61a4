"""Vectors of a list of items on disk: encoded once, kept for later runs, read and searched by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vembed.data.row_store import KEY_BYTES, RowStore
from vembed.errors import UserError
from vembed.evaluation.top_k import Pairs, TopK, documents_of, products, scores_of
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

SMALLEST_BLOCK = 128
LARGEST_BLOCK = 16_384
NUM_BLOCKS_WANTED = 64
"""Blocks of items are small enough that every rank has some, and that a kill loses little. Their size depends on the
number of items alone, so that any number of ranks encodes the same blocks."""
PAIRS = 4096
"""Documents whose vectors are held at once for scores of pairs."""
GATHERED_QUERIES = 8192
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class VectorStore:
    """The vectors of a list of items, by their contents, in a folder that all ranks see."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        keys: np.ndarray,
        dtype: str,
        session: Session,
    ) -> None:
        """`keys`: the contents of the items, [N] or [N, 2] int64. `identity`: all else that the vectors depend on."""
        self._keys = keys.reshape(len(keys), -1)
        self._rows = RowStore(folder, identity, "mine", ".vectors")
        self._dtype = DTYPES[dtype]
        self._session = session
        size = SMALLEST_BLOCK
        # Doubling: a few more items leave the blocks as they are.
        while size < LARGEST_BLOCK and size * NUM_BLOCKS_WANTED < len(keys):
            size *= 2
        starts = range(0, len(keys), size)
        self._blocks = [np.arange(i, min(i + size, len(keys))) for i in starts]

    def encode(
        self,
        compute: Callable[[np.ndarray], np.ndarray],
        title: str | None = None,
        *,
        together: bool = False,
    ) -> int:
        """Compute and store the vectors that are not there yet, each rank those of its blocks. Collective.

        `compute` gets the numbers of items. `together`: all ranks call it equally often, some without numbers, as
        models with sharded weights need. Return how many vectors all ranks have computed.
        """
        session = self._session
        todo: list[np.ndarray] = []
        for first in range(0, len(self._blocks), session.world_size):
            numbers = np.zeros(0, np.int64)
            # Behind the last block the rank only takes part.
            if first + session.rank < len(self._blocks):
                block = self._blocks[first + session.rank]
                numbers = block[self._rows.missing(self._keys_of(block))]
            if len(numbers) or together:
                todo.append(numbers)
        total = sum(map(len, todo))
        done = 0
        is_shown = session.is_main and title is not None
        with ProgressReport(title or "", active=is_shown) as progress:
            for numbers in todo:
                vectors = compute(numbers)
                broken = int((~np.isfinite(vectors).all(axis=1)).sum())
                if broken:
                    raise UserError(
                        f"the model gives vectors that are not numbers for {broken:,d} of {len(vectors):,d} inputs: its "
                        "weights are broken, or overflow in their dtype (try torch_dtype: float32)"
                    )
                values = torch.from_numpy(np.ascontiguousarray(vectors)).to(self._dtype)
                if values.itemsize == 2:
                    values = values.view(torch.uint16)
                keys = self._keys_of(numbers)
                if len(keys) and not self._rows.add_rows(keys, values.numpy()):
                    raise UserError(
                        f"{self._rows.folder} cannot be written: free some space, name another work_dir, or set "
                        "vector_dtype: float16"
                    )
                done += len(numbers)
                progress(done, total)
        session.barrier()
        # After the barrier every rank has written. What is not here lies on another machine's disk.
        for block in self._blocks:
            if self._rows.missing(self._keys_of(block)):
                raise UserError(
                    f"{self._rows.folder} lacks vectors that another rank has written: work_dir must be a folder that "
                    "all machines see"
                )
        return sum(collectives.sum_ints([total]))

    def take(self, numbers: np.ndarray) -> Tensor:
        """[n, D] the float32 vectors of some items."""
        rows = torch.from_numpy(self._rows.read_rows(self._keys_of(numbers)))
        return rows.view(self._dtype).to(torch.float32)

    def search(
        self, queries_QD: Tensor, num_candidates: int, k: int, excluded: Pairs
    ) -> tuple[np.ndarray, np.ndarray]:
        """[Q, k] numbers of the best among the first `num_candidates` items, and their scores; best first, of equal
        scores the lower number first; -1 and -inf where there are fewer.

        Collective: every rank searches its blocks for all queries and gets the same result as one rank alone would.
        """
        session = self._session
        best = TopK(queries_QD.to(session.device), k, excluded)
        for block in self._blocks[session.rank :: session.world_size]:
            numbers = block[block < num_candidates]
            if len(numbers):
                best.add(self.take(numbers), torch.from_numpy(numbers))
        keys = best.keys()
        if session.world_size > 1:
            parts = [keys[:0]]
            for part in torch.split(keys, GATHERED_QUERIES):
                gathered = collectives.all_gather_rows(part)
                of_ranks = gathered.view(session.world_size, *part.shape)
                joined = torch.cat(of_ranks.unbind(), dim=1)
                parts.append(joined.topk(k, dim=1).values)
            keys = torch.cat(parts)
        keys = keys.cpu()
        return documents_of(keys).numpy(), scores_of(keys).numpy()

    def pair_scores(self, queries_QD: Tensor, pairs: Pairs) -> np.ndarray:
        """The score of each pair (row of the query, number of the item). Collective: the ranks share the items."""
        session = self._session
        scores = torch.zeros(len(pairs))
        items, which = np.unique(pairs.documents, return_inverse=True)
        order = np.argsort(which, kind="stable")
        for first in range(
            session.rank * PAIRS, len(items), session.world_size * PAIRS
        ):
            begin, end = np.searchsorted(which[order], [first, first + PAIRS])
            chosen = torch.from_numpy(order[begin:end])
            scores[chosen] = products(
                queries_QD,
                torch.from_numpy(pairs.queries)[chosen],
                self.take(items[first : first + PAIRS]),
                torch.from_numpy(which)[chosen] - first,
            )
        # Each item is of one rank, so all other ranks add 0.
        return collectives.sum_tensor(scores).numpy()

    def _keys_of(self, numbers: np.ndarray) -> Sequence[bytes]:
        """The keys of some items in the store: their one or two numbers, filled up with zeros."""
        keys = np.zeros((len(numbers), 2), np.int64)
        keys[:, : self._keys.shape[1]] = self._keys[numbers]
        joined = keys.tobytes()
        return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
