"""Retrievers: BM25 by the package bm25s, models of vembed or Sentence Transformers, the fusion of rankings, and vectors on disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from vembed.config.decisions import Decision, Precision
from vembed.data.examples import Item, Kind
from vembed.data.features import Featuriser
from vembed.data.row_store import KEY_BYTES, RowStore
from vembed.errors import UserError
from vembed.evaluation.bm25 import best_keys, build_bm25_index, scores_of_query
from vembed.evaluation.top_k import Pairs, TopK, documents_of, products, scores_of
from vembed.files import short_hash
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import check_finite, encode_items
from vembed.mining.inputs import Documents, KnownPositives, MiningInputs
from vembed.mining.options import MineConfig, ModelOptions, Retriever
from vembed.models.families.model_files import (
    check_no_pickles,
    model_folder,
    read_model,
)
from vembed.models.precision import dtype_in_files
from vembed.parallel import collectives
from vembed.parallel.placement import precision_of_use
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

Ranking = tuple[np.ndarray, np.ndarray]
"""[Q, k] numbers of documents, best first, -1 where there are fewer; and their scores."""


@dataclass
class LexicalRetriever:
    """Words in common, weighted by how rare they are. Every rank holds the index in memory."""

    inputs: MiningInputs
    session: Session
    identity = ""
    """It depends on the documents and queries alone."""

    @cached_property
    def _index(self) -> Any:
        """The index, built when it is first asked: candidates may be on disk already."""
        documents = self.inputs.documents
        items = map(documents.item, range(len(documents)))
        return build_bm25_index(item.text for item in items)

    def search(
        self,
        first: int,
        last: int,
        k: int,
        excluded: Pairs,
    ) -> Ranking:
        """[Q, k] best candidates for queries first .. last - 1, and their scores, as `search` of dense vectors.

        `excluded` counts queries from `first`. Collective: the ranks share the queries.
        """
        # Every rank has the index, so that the queries are shared and not the documents.
        session = self.session
        queries = {}
        for query in range(session.rank, last - first, session.world_size):
            queries[query] = self.inputs.known.item(first + query).text
        best = best_keys(
            self._index,
            queries,
            self.inputs.documents.num_candidates,
            k,
            excluded,
        ).to(session.device)
        merged = collectives.all_gather_dealt(best, last - first).cpu()
        return documents_of(merged).numpy(), scores_of(merged).numpy()

    def pair_scores(
        self,
        first: int,
        pairs: Pairs,
    ) -> np.ndarray:
        """The score of each pair, whose queries count from `first`. Collective."""
        result = torch.zeros(len(pairs))
        for query in np.unique(pairs.queries).tolist():
            if query % self.session.world_size == self.session.rank:
                begin, end = np.searchsorted(pairs.queries, [query, query + 1])
                text = self.inputs.known.item(first + query).text
                scores = scores_of_query(self._index, text)
                documents = torch.from_numpy(pairs.documents[begin:end])
                result[begin:end] = scores[documents]
        return collectives.sum_tensor(result).numpy()


EncodeItems = Callable[[Sequence[Item], Kind], np.ndarray]
"""Gives [n, d] float32 vectors whose dot product is the model's similarity."""


def _load_vembed(
    retriever: Retriever,
    options: ModelOptions,
    device: torch.device,
    precision: Precision,
) -> EncodeItems:
    embedder = Embedder(
        retriever.model,
        device=device,
        torch_dtype=options.torch_dtype,
        mixed_precision="bf16" if precision == "bf16" else "no",
        truncate_dim=retriever.truncate_dim,
        trust_remote_code=options.trust_remote_code,
    )
    changes = {
        "query_prompt": retriever.query_prompt,
        "document_prompt": retriever.document_prompt,
        "max_length": options.max_length,
    }
    description = embedder.description.with_(
        **{name: value for name, value in changes.items() if value is not None}
    )
    featuriser = Featuriser(description)
    budget = None if options.batch_tokens == "auto" else options.batch_tokens

    def encode(items: Sequence[Item], kind: Kind) -> np.ndarray:
        vectors = encode_items(
            embedder.model, featuriser, items, kind, budget_tokens=budget
        )
        return embedder.finish(vectors, description.compares_unit_vectors)

    return encode


def _load_sentence_transformers(
    retriever: Retriever,
    options: ModelOptions,
    device: torch.device,
) -> EncodeItems:
    from sentence_transformers import SentenceTransformer

    folder = model_folder(retriever.model, option="model_name")
    check_no_pickles(folder)
    model_kwargs: dict[str, Any] = {"use_safetensors": True}
    if options.torch_dtype != "auto":
        model_kwargs["dtype"] = VECTOR_DTYPES[options.torch_dtype]
    model = SentenceTransformer(
        str(folder),
        device=str(device),
        truncate_dim=retriever.truncate_dim,
        trust_remote_code=options.trust_remote_code,
        model_kwargs=model_kwargs,
    )
    if options.max_length is not None:
        model.max_seq_length = options.max_length

    def encode(items: Sequence[Item], kind: Kind) -> np.ndarray:
        texts = [item.text for item in items]
        forms = {(item.prompt, item.max_length, item.images) for item in items}
        if None in texts or forms - {(None, None, ())}:
            raise UserError(
                "library: sentence_transformers is for texts alone: images, and prompts and lengths of records or of entries "
                "of data_path, need a model that vembed loads"
            )
        encode_texts = model.encode_document
        prompt = retriever.document_prompt
        if kind == "query":
            encode_texts = model.encode_query
            prompt = retriever.query_prompt
        vectors = encode_texts(
            texts,
            prompt=prompt,
            # Vectors of length 1, whose dot product is the cosine: the search knows dot products alone.
            normalize_embeddings=model.similarity_fn_name in (None, "cosine"),
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, np.float32)

    return encode


def load_encoder(
    retriever: Retriever,
    options: ModelOptions,
    device: torch.device,
    precision: Precision = "no",
) -> EncodeItems:
    """The model of a retriever, by the library that its options name."""
    if retriever.library == "sentence_transformers":
        return _load_sentence_transformers(retriever, options, device)
    try:
        return _load_vembed(retriever, options, device, precision)
    except UserError:
        # A folder with modules.json may hold modules that only Sentence Transformers knows.
        is_theirs = (Path(retriever.model) / "modules.json").is_file()
        is_installed = find_spec("sentence_transformers") is not None
        if retriever.library == "vembed" or not (is_theirs and is_installed):
            raise
        return _load_sentence_transformers(retriever, options, device)


def files_identity(model: str) -> list[list[object]]:
    """Return an identity of a model's version: the files of its folder, or its commit in the Hub's cache."""
    folder = Path(model)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, "config.json") if "/" in model else None
        return [[model, str(cached)]]
    # Size and time instead of content: gigabytes would be read at every start.
    identity = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            name = str(path.relative_to(folder))
            identity.append([name, stat.st_size, stat.st_mtime_ns])
    return identity


@dataclass
class DenseRetriever:
    """Vectors of queries and documents on disk. Methods are collective."""

    folder: Path
    identity: str
    """Of the model that encodes."""
    corpus: Documents
    known: KnownPositives
    session: Session
    dtype: str = "float32"
    summary: str = ""
    """One line for the log."""
    num_encoded: int = 0
    """Vectors that were computed now, and not found on disk."""

    def __post_init__(self) -> None:
        self.documents = self._open("document", self.corpus.exact)
        self.queries = self._open("query", self.known.exact)

    def _open(
        self,
        name: str,
        keys: np.ndarray,
    ) -> "VectorStore":
        return VectorStore(
            self.folder / name,
            self.identity,
            keys,
            self.dtype,
            self.session,
        )

    def encode(
        self,
        encode: EncodeItems,
        **options: Any,
    ) -> None:
        """Compute the vectors that are not there yet. `options`: of `VectorStore.encode`."""

        def encode_queries(numbers: np.ndarray) -> np.ndarray:
            return encode(list(map(self.known.item, numbers.tolist())), "query")

        def encode_documents(numbers: np.ndarray) -> np.ndarray:
            return encode(list(map(self.corpus.item, numbers.tolist())), "document")

        self.num_encoded = self.queries.encode(encode_queries, **options)
        self.num_encoded += self.documents.encode(encode_documents, **options)

    def search(
        self,
        first: int,
        last: int,
        k: int,
        excluded: Pairs,
    ) -> Ranking:
        """[Q, k] best candidates for queries first .. last - 1 and their scores. `excluded` counts from `first`."""
        queries = self.queries.take(np.arange(first, last))
        return self.documents.search(
            queries,
            self.corpus.num_candidates,
            k,
            excluded,
        )

    def pair_scores(
        self,
        first: int,
        pairs: Pairs,
    ) -> np.ndarray:
        """The score of each pair, whose queries count from `first`."""
        if not len(pairs):
            return np.zeros(0, np.float32)
        last = first + int(pairs.queries.max()) + 1
        queries = self.queries.take(np.arange(first, last))
        return self.documents.pair_scores(queries, pairs)

    def sums_of(self, pairs: Pairs) -> "VectorStore":
        """Return the sums of the vectors of query and document of each pair, without normalising."""
        queries = self.known.exact[pairs.queries]
        documents = self.corpus.exact[pairs.documents]
        sums = self._open("sum", np.stack([queries, documents], axis=1))

        def add(numbers: np.ndarray) -> np.ndarray:
            queries = self.queries.take(pairs.queries[numbers])
            documents = self.documents.take(pairs.documents[numbers])
            return (queries + documents).numpy()

        sums.encode(add)
        return sums


def open_dense(
    retriever: Retriever,
    options: ModelOptions,
    folder: Path,
    inputs: MiningInputs,
    session: Session,
) -> DenseRetriever:
    """Encode what is not on disk yet with the model of a retriever. Collective."""
    # The same precision on all ranks.
    if retriever.library == "sentence_transformers":
        precision: Decision[Precision] = Decision(
            "no", "library: sentence_transformers"
        )
    elif options.torch_dtype != "auto":
        precision = Decision("no", f"torch_dtype: {options.torch_dtype}")
    else:
        precision = precision_of_use(
            retriever.model,
            session.device,
            session.instructions,
            trust_remote_code=options.trust_remote_code,
        )
    dtype: str = options.torch_dtype
    if precision.value == "bf16":
        dtype = "bfloat16"
    if dtype == "auto":
        try:
            stored = dtype_in_files(read_model(retriever.model).backbone)
            dtype = str(stored).removeprefix("torch.")
        except UserError:
            dtype = "the dtype of its files"
    # Everything that the vectors depend on besides the items, known before the model is loaded.
    identity = short_hash(
        files_identity(retriever.model),
        retriever.model_dump(exclude={"weight", "model"}),
        options.torch_dtype,
        options.max_length,
        options.vector_dtype,
        precision.value,
    )
    dense = DenseRetriever(
        folder / "vectors",
        identity,
        inputs.documents,
        inputs.known,
        session,
        options.vector_dtype,
    )
    dense.summary = f"{retriever.model}: vectors are computed in {dtype} ({precision.reason}) and stored as {options.vector_dtype}"

    # Loaded at most once, and only where vectors are missing.
    encoder = cache(
        partial(
            load_encoder,
            retriever,
            options,
            session.device,
            precision.value,
        )
    )

    def encode(items: Sequence[Item], kind: Kind) -> np.ndarray:
        return encoder()(items, kind)

    dense.encode(encode, title=f"{retriever.model}: encoding")
    return dense


def fuse(
    rankings: Sequence[Ranking],
    config: MineConfig,
) -> np.ndarray:
    """[Q, top_k] documents of the rankings of all retrievers as one, -1 where there are fewer."""
    gains = []
    retrievers = config.all_retrievers()
    for (documents, scores), retriever in zip(rankings, retrievers, strict=True):
        weight = retriever.weight
        if config.fusion == "rrf":
            gain = weight / (config.rrf_k + 1.0 + np.arange(documents.shape[1]))
            gain = np.broadcast_to(gain, documents.shape)
        else:
            # In standard deviations above the lowest of the query, so that a document that is missing has 0.
            valid = np.ma.masked_invalid(scores.astype(np.float64))
            above = valid - valid.min(axis=1, keepdims=True)
            deviation = np.maximum(valid.std(axis=1, keepdims=True), 1e-12)
            gain = weight * np.ma.filled(above / deviation, 0.0)
        gains.append(gain)
    all_gains = np.concatenate(gains, axis=1)
    all_documents = np.concatenate([documents for documents, _ in rankings], axis=1)
    fused = np.full((len(all_gains), config.top_k), -1, np.int64)
    for row, documents in enumerate(all_documents):
        is_candidate = documents >= 0
        numbers, which = np.unique(documents[is_candidate], return_inverse=True)
        totals = np.bincount(which, all_gains[row, is_candidate])
        # Of equal ones the lower number first.
        best = numbers[np.argsort(-totals, kind="stable")][: config.top_k]
        fused[row, : len(best)] = best
    return fused


SMALLEST_BLOCK = 128
LARGEST_BLOCK = 16_384
NUM_BLOCKS_WANTED = 64
"""Blocks of items are small enough that every rank has some, and that a kill loses little. Their size depends on the
number of items alone, so that any number of ranks encodes the same blocks."""
PAIRS = 4096
"""Documents whose vectors are held at once for scores of pairs."""
GATHERED_QUERIES = 8192
VECTOR_DTYPES = {
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
        self._rows = RowStore(
            folder,
            identity,
            "mine",
            ".vectors",
        )
        self._dtype = VECTOR_DTYPES[dtype]
        self._session = session
        size = SMALLEST_BLOCK
        # Doubling: a few more items leave the blocks as they are.
        while size < LARGEST_BLOCK and size * NUM_BLOCKS_WANTED < len(keys):
            size *= 2
        starts = range(0, len(keys), size)
        self._blocks = [
            np.arange(start, min(start + size, len(keys))) for start in starts
        ]

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
        todo = []
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
                check_finite(vectors, "vectors")
                values = torch.from_numpy(np.ascontiguousarray(vectors)).to(self._dtype)
                if values.itemsize == 2:
                    values = values.view(torch.uint16)
                keys = self._keys_of(numbers)
                if not self._rows.add_rows(keys, values.numpy()):
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
        self,
        queries_QD: Tensor,
        num_candidates: int,
        k: int,
        excluded: Pairs,
    ) -> tuple[np.ndarray, np.ndarray]:
        """[Q, k] numbers of the best among the first `num_candidates` items, and their scores; best first; -1 and
        -inf where there are fewer.

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
                gathered = collectives.all_gather_parts(part)
                of_ranks = gathered.view(session.world_size, *part.shape)
                joined = torch.cat(of_ranks.unbind(), dim=1)
                parts.append(joined.topk(k, dim=1).values)
            keys = torch.cat(parts)
        keys = keys.cpu()
        return documents_of(keys).numpy(), scores_of(keys).numpy()

    def pair_scores(
        self,
        queries_QD: Tensor,
        pairs: Pairs,
    ) -> np.ndarray:
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
        rows: list[bytes] = keys.view(f"V{KEY_BYTES}").ravel().tolist()
        return rows
