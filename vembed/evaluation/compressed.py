"""compressed_scores(): nDCG@10 of documents in float, int8 and binary, each embedding size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.retrieval import excluded_pairs, score_rankings
from vembed.evaluation.top_k import top_k
from vembed.inference.encoding import first_dims
from vembed.inference.quantization import quantized, ranges_of

K = 10
OVERSAMPLING = 4
"""Binary with rescoring: so many times K documents are found by bits and then ordered."""
FORMS = ("float32", "int8", "binary", "binary_rescored")


def compressed_scores(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    data: RetrievalData,
    dims: Sequence[int] = (),
    *,
    normalize: bool = True,
) -> dict[str, float]:
    """Return `compressed/<form>/<size>/ndcg@10` for each form of the stored documents and each size.

    int8: queries stay float, documents are levels of each coordinate. binary: signs of both. binary_rescored: the first
    documents by signs, ordered by the float query and the documents' signs, so that only bits are stored.
    """
    excluded = excluded_pairs(data, range(len(data.queries)))
    scores: dict[str, float] = {}
    for dim in dict.fromkeys([documents_ND.shape[1], *dims]):
        asked, documents = (
            first_dims(vectors, dim, normalize)
            for vectors in (queries_QD, documents_ND)
        )
        # As packed bits are read: 0 and below are -1.
        signs = np.where(documents > 0, 1, -1).astype(np.float32)
        query_signs = np.where(asked > 0, 1, -1).astype(np.float32)
        ranked = {
            "float32": top_k(asked, documents, K, excluded),
            # The query keeps its floats: only what is stored loses precision.
            "int8": top_k(asked, _restored(documents), K, excluded),
            "binary": top_k(query_signs, signs, K, excluded),
            "binary_rescored": _rescored(
                asked,
                signs,
                top_k(query_signs, signs, K * OVERSAMPLING, excluded),
            ),
        }
        for form, rankings in ranked.items():
            _, values = score_rankings(rankings, data.relevance, [K])
            scores[compressed_name(form, dim)] = float(values[:, 0].mean())
    return scores


def compressed_name(form: str, dim: int) -> str:
    """Return the name of the score of a stored form at a size."""
    return f"compressed/{form}/{dim}/ndcg@{K}"


def _restored(documents_ND: np.ndarray) -> np.ndarray:
    """Return float values of the documents' int8 levels: the middle of each level."""
    ranges = ranges_of(documents_ND)
    steps = np.where(ranges[1] > ranges[0], (ranges[1] - ranges[0]) / 255, 1)
    levels = quantized(documents_ND, "uint8", ranges).astype(np.float32)
    restored: np.ndarray = (ranges[0] + (levels + 0.5) * steps).astype(np.float32)
    return restored


def _rescored(
    queries_QD: np.ndarray, signs_ND: np.ndarray, candidates_QC: np.ndarray
) -> np.ndarray:
    """Return [Q, K] candidates ordered by the dot product of the float query with the document's signs."""
    scores = np.einsum("qd,qcd->qc", queries_QD, signs_ND[candidates_QC])
    scores = np.where(candidates_QC >= 0, scores, -np.inf)
    # Stable: equal scores keep the order by bits, which already breaks ties by number.
    order = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    ranked: np.ndarray = np.take_along_axis(candidates_QC, order, axis=1)
    return ranked
