"""compare(): an export in its own runtime against the model, on the same texts; what differs is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
from scipy.stats import spearmanr

from vembed.data.examples import Item, Kind
from vembed.evaluation.dataset import EvalData, RetrievalData
from vembed.evaluation.retrieval import retrieval_metrics
from vembed.export.formats import ExportReader, WeightPrecision
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import first_dims
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.poolings import MODEL_POOLING, POOLINGS

NUM_TEXTS = 200
TOLERANCE: dict[WeightPrecision, float] = {
    "float32": 1e-4,
    "float16": 1e-3,
    "bfloat16": 1e-2,
    "int8": 5e-2,
}
"""Largest allowed cosine distance by the precision of the weights."""
LENGTHS = 10
"""Times the tolerance that the lengths of two embeddings may differ, relatively: a length changes in proportion to an
error, a cosine distance with its square."""
STUDENT_TOLERANCE = 0.5
"""Largest 1 - Spearman's correlation of a student's similarities with the model's."""
NUM_QUERIES, NUM_DOCUMENTS = 500, 2_000
"""Most queries and documents for the nDCG of an export. Relevant documents are always among them."""
METRIC = "ndcg@10"
WORDS = (
    "the a of red green small bird garden sorted list returns house river music number city window open close "
    "value error file name 17 3.5 (x) data, model; query? document. Zurich naive tree between never always"
)
Texts = list[tuple[str, Kind]]
Encode = Callable[[list[str], Kind], np.ndarray]


@dataclass(frozen=True)
class ImageCheck:
    """Result of a comparison of images."""

    runtime: str
    num_images: int
    largest_distance: float
    """Largest cosine distance between the two embeddings of an image."""
    largest_length_error: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """True if the export may be used in the model's place."""
        return (
            self.largest_distance <= self.tolerance
            and self.largest_length_error <= LENGTHS * self.tolerance
        )

    def line(self) -> str:
        """Return what is printed and written into the card."""
        return (
            f"{self.num_images:,d} images through the model and through {self.runtime}: largest cosine distance "
            f"{self.largest_distance:.2g} (tolerance {self.tolerance:.2g})"
        )


@dataclass(frozen=True)
class Check:
    """Result of a comparison. A model of images alone has no texts in it."""

    runtime: str
    num_texts: int
    largest_distance: float
    """Largest cosine distance between the two embeddings of a text."""
    tolerance: float
    worst_text: str
    worst_kind: Kind
    largest_length_error: float
    """Largest relative difference of the lengths of the two embeddings."""
    ndcg_model: float | None = None
    ndcg_export: float | None = None
    evaluation: str = ""
    rank_correlation: float | None = None
    """Of a student: Spearman's correlation of the similarities of all pairs. It has vectors of its own, so that
    distances to the model's say nothing."""
    images: ImageCheck | None = None

    @property
    def passes(self) -> bool:
        """True if the texts of the export may be used in the model's place."""
        if self.rank_correlation is not None:
            return 1 - self.rank_correlation <= self.tolerance
        return (
            self.largest_distance <= self.tolerance
            and self.largest_length_error <= LENGTHS * self.tolerance
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return what is printed and written into the card."""
        both = f"{self.num_texts:,d} texts through the model and through {self.runtime}"
        if self.rank_correlation is not None:
            found = [
                f"{both}: Spearman correlation {self.rank_correlation:.3f} of the similarities of all pairs (at least "
                f"{1 - self.tolerance:.2g})"
            ]
        else:
            one = f"{both}: largest cosine distance {self.largest_distance:.2g} (tolerance {self.tolerance:.2g})"
            found = [one] if self.num_texts else []
        if self.ndcg_model is not None and self.ndcg_export is not None:
            found.append(
                f"nDCG@10 of the model {self.ndcg_model:.4f}, of the export {self.ndcg_export:.4f} "
                f"(difference {self.ndcg_export - self.ndcg_model:+.4f}; {self.evaluation})"
            )
        return found if self.images is None else [*found, self.images.line()]


NO_TEXTS = Check("", 0, 0.0, 0.0, "", "document", 0.0)
"""Result of a model that embeds images only, to which the comparison of images is added."""


def texts_to_compare(data: EvalData | None, max_length: int) -> Texts:
    """Return NUM_TEXTS texts: half queries and half documents of the evaluation data, filled up with made ones."""
    found: Texts = []
    if data is not None:
        first, second = (
            (data.queries, data.documents)
            if isinstance(data, RetrievalData)
            else (data.first, data.second)
        )
        kinds: tuple[tuple[Sequence[Item], Kind], ...] = (
            (first, "query"),
            (second, "document"),
        )
        for items, kind in kinds:
            texts: dict[str, None] = {}
            for item in items:  # to the last one needed: a corpus may have millions
                if len(texts) == NUM_TEXTS // 2:
                    break
                if item.text and not item.images:
                    texts[item.text] = None
            found += [(text, kind) for text in texts]
    return found + made_texts(NUM_TEXTS - len(found), max_length)


def made_texts(count: int, max_length: int) -> Texts:
    """Return texts of one word up to more than `max_length` tokens; the same ones at every call."""
    draw = np.random.default_rng(0)
    words = WORDS.split()
    # One text is longer than the limit, so that the cut is compared too.
    longest = min(max_length, 512) + 8
    lengths = [1, 2, 3, longest] + [
        int(draw.integers(1, min(longest, 40))) for _ in range(max(count - 4, 0))
    ]
    kinds: tuple[Kind, Kind] = ("query", "document")
    return [
        (" ".join(draw.choice(words, length)), kinds[at % 2])
        for at, length in enumerate(lengths[:count])
    ]


def encode_all(encode: Encode, texts: Sequence[tuple[str, Kind]]) -> np.ndarray:
    """Return [n, d] embeddings in the order of the texts; each kind is encoded together."""
    found: list[Any] = [None] * len(texts)
    for kind in get_args(Kind):
        rows = [row for row, (_, own) in enumerate(texts) if own == kind]
        if rows:
            for row, vector in zip(
                rows, encode([texts[row][0] for row in rows], kind), strict=True
            ):
                found[row] = vector
    return np.stack(found)


def smaller(data: EvalData | None) -> RetrievalData | None:
    """Return retrieval data of texts with a bounded corpus; None for data without nDCG or with images in that part."""
    if not isinstance(data, RetrievalData):
        return None
    relevance = data.relevance[:NUM_QUERIES]
    # Relevant documents first, so that the bound leaves out none of them.
    kept = dict.fromkeys(document for grades in relevance for document in grades)
    for document in range(len(data.documents)):
        if len(kept) >= NUM_DOCUMENTS:
            break
        kept[document] = None
    place = {document: at for at, document in enumerate(kept)}
    queries, documents = (
        data.queries[:NUM_QUERIES],
        tuple(data.documents[document] for document in kept),
    )
    if any(item.images or not item.text for item in (*queries, *documents)):
        return None
    return RetrievalData(
        name=data.name,
        queries=queries,
        documents=documents,
        relevance=tuple(
            {place[document]: grade for document, grade in grades.items()}
            for grades in relevance
        ),
    )


def ndcg(encode: Encode, data: RetrievalData, *, normalize: bool) -> float:
    """Return nDCG@10 of an encoder."""
    asked = encode([item.text or "" for item in data.queries], "query")
    documents = encode([item.text or "" for item in data.documents], "document")
    return retrieval_metrics(asked, documents, data, [10], [], normalize=normalize)[
        METRIC
    ]


def distances(one_ND: np.ndarray, other_ND: np.ndarray) -> np.ndarray:
    """Return [n] cosine distances of rows, in float64; infinite where a value is not finite."""
    one, other = one_ND.astype(np.float64), other_ND.astype(np.float64)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    # A vector of zeros has the distance 1 to any other.
    found: np.ndarray = 1 - np.einsum("nd,nd->n", one, other) / np.maximum(
        lengths, 1e-300
    )
    return np.where(np.isfinite(found), np.maximum(found, 0.0), np.inf)


def length_error(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Return the largest difference between the lengths of two rows, relative to the first."""
    own, long = np.linalg.norm(one_ND, axis=1), np.linalg.norm(other_ND, axis=1)
    return float(np.max(np.abs(long - own) / np.maximum(own, 1e-12)))


def similarity_correlation(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Return Spearman's correlation of the cosine similarities of all pairs of rows."""
    above = np.triu_indices(len(one_ND), 1)
    found = []
    for vectors in (one_ND, other_ND):
        unit = first_dims(vectors, vectors.shape[1], True)
        found.append((unit @ unit.T)[above])
    return float(spearmanr(*found).statistic)


def compare(
    reader_name: str,
    model_ND: np.ndarray,
    export_ND: np.ndarray,
    texts: Texts,
    tolerance: float,
) -> Check:
    """Return the comparison of two sets of embeddings of the same texts."""
    if model_ND.shape == export_ND.shape:
        apart, lengths = (
            distances(model_ND, export_ND),
            length_error(model_ND, export_ND),
        )
    else:
        apart, lengths = np.full(len(model_ND), np.inf), np.inf
    worst = int(np.argmax(apart))
    return Check(
        runtime=reader_name,
        num_texts=len(texts),
        largest_distance=float(apart[worst]),
        tolerance=tolerance,
        worst_text=texts[worst][0],
        worst_kind=texts[worst][1],
        largest_length_error=lengths,
    )


def difference(
    check: Check,
    embedder: Embedder,
    reader: ExportReader,
    model_ND: np.ndarray,
    vectors: np.ndarray,
) -> str:
    """Return what differs, found on the text with the largest distance: sizes, token ids, lengths or pooling."""
    if model_ND.shape != vectors.shape:
        return f"embeddings of {vectors.shape[1]:,d} dimensions instead of {model_ND.shape[1]:,d} (Dense, truncate_dim)"
    text, kind = check.worst_text, check.worst_kind
    featuriser = embedder.featuriser
    (own,) = featuriser.features([(Item(text=text), kind)])
    ids = [] if own.token_ids is None else own.token_ids.tolist()
    theirs = reader.token_ids(text, kind)
    if ids != theirs:
        return (
            f"its {kind} tokens: {len(theirs):,d} instead of {len(ids):,d} for the text {text!r:.60} (prompt, "
            "tokenizer, special tokens or truncation)"
        )
    if check.largest_distance <= check.tolerance:
        return f"the lengths of its embeddings, by up to {check.largest_length_error:.2g} of them (normalisation)"
    exported = reader.encode([text], kind)
    description = embedder.description
    for pooling in POOLINGS.values():
        if pooling.is_trained or pooling.name == description.pooling:
            continue
        if description.pooling == MODEL_POOLING:
            break
        if pooling.width(1) != POOLINGS[description.pooling].width(1):
            continue
        other = EmbeddingModel(
            description.with_(pooling=pooling.name), embedder.backbone, embedder.head
        ).eval()
        (found,) = other([("text", featuriser.collate([own]))])
        cut = embedder.finish(
            found.detach().float().numpy(), embedder.truncate_dim, None
        )
        if distances(cut, exported)[0] <= check.tolerance:
            return f"its pooling: {pooling.name} instead of {description.pooling}"
    return "its arithmetic or weights: tokens, sizes and lengths agree"
