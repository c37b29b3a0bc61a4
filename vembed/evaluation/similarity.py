"""Scored pairs: correlation between embedding similarities and the scores of the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vembed.inference.encoding import first_dims


def similarity_metrics(
    first_ND: np.ndarray,
    second_ND: np.ndarray,
    scores: Sequence[float],
    dims: Sequence[int] = (),
    *,
    normalize: bool = True,
) -> dict[str, float]:
    """Return `spearman` and `pearson` for the embeddings, and `dim<d>/spearman` for their first d coordinates."""
    metrics = _correlations(first_ND, second_ND, scores, first_ND.shape[1], normalize)
    for dim in dims:
        by_dim = _correlations(first_ND, second_ND, scores, dim, normalize)
        metrics.update({f"dim{dim}/{name}": value for name, value in by_dim.items()})
    return metrics


def _correlations(
    first_ND: np.ndarray,
    second_ND: np.ndarray,
    scores: Sequence[float],
    dim: int,
    normalize: bool,
) -> dict[str, float]:
    first, second = (
        first_dims(matrix, dim, normalize).astype(np.float64)
        for matrix in (first_ND, second_ND)
    )
    similarities = np.einsum("nd,nd->n", first, second)
    from scipy import stats  # takes a third of a second to import, and few runs need it

    if (
        np.ptp(similarities) == 0
    ):  # correlation is undefined for a constant; count it as 0
        return {"spearman": 0.0, "pearson": 0.0}
    return {
        "spearman": float(stats.spearmanr(similarities, scores).statistic),
        "pearson": float(stats.pearsonr(similarities, scores).statistic),
    }
