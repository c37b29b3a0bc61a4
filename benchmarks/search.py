"""python -m benchmarks.search: time and memory of the exact search, beside the bare matrix product."""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vembed.evaluation.top_k import NO_PAIRS
from vembed.mining.inputs import open_command_session
from vembed.mining.retrievers import VectorStore

K = 100
DOCUMENT_TILE = 1024
QUERY_TILE = 512
"""Tiles of the bare product, the fastest of those tried: its scores stay in the cache."""


def bare_product(queries_QD: torch.Tensor, store: VectorStore, number: int) -> None:
    """Multiply all vectors in float32 in tiles, and drop the scores."""
    room = torch.empty(DOCUMENT_TILE * QUERY_TILE)
    for numbers in np.array_split(np.arange(number), -(-number // 16_384)):
        for documents in store.take(numbers).split(DOCUMENT_TILE):
            for queries in queries_QD.split(QUERY_TILE):
                scores = room[: len(queries) * len(documents)]
                torch.mm(documents, queries.T, out=scores.view(len(documents), -1))


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Time both in turns and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    queries = torch.nn.functional.normalize(
        torch.randn(arguments.queries, arguments.dim), dim=1
    )
    number = arguments.documents
    random = np.random.default_rng(0)

    def draw(numbers: np.ndarray) -> np.ndarray:
        vectors = random.standard_normal((len(numbers), arguments.dim), np.float32)
        lengths: np.ndarray = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / lengths

    figures: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_command_session(None) as (session, _),
    ):
        keys = np.arange(number)
        store = VectorStore(Path(folder), "random", keys, "float32", session)
        store.encode(draw)
        for _ in range(arguments.rounds):
            bare = seconds(lambda: bare_product(queries, store, number))
            whole = seconds(lambda: store.search(queries, number, K, NO_PAIRS))
            figures.append({"product": bare, "search": whole, "ratio": whole / bare})
            print(json.dumps(figures[-1]), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"best of {arguments.rounds}: search {min(run['search'] for run in figures):.1f} s, product "
        f"{min(run['product'] for run in figures):.1f} s; peak memory {peak / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
