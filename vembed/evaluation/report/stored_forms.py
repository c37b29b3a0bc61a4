"""Stored forms of embeddings in the report: nDCG@10 of float, int8 and binary documents against their bytes."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = {
    "float32": "float32",
    "int8": "int8",
    "binary": "binary",
    "binary_rescored": "binary, rescored",
}
"""Stored forms of documents, and their names on pages."""
Points = dict[str, list[tuple[int, int, float]]]
"""Form -> (size, bytes per document, nDCG@10), smallest size first."""


def bytes_per_document(form: str, dim: int) -> int:
    """Return the bytes of one stored document."""
    return {"float32": 4 * dim, "int8": dim}.get(form, -(-dim // 8))


def points(scores: Mapping[str, float]) -> Points:
    """Return the scores of the stored forms among all scores of an evaluation."""
    found: Points = {form: [] for form in NAMES}
    for key, value in scores.items():
        if key.startswith("compressed/"):
            _, form, dim, _ = key.split("/")
            found[form].append((int(dim), bytes_per_document(form, int(dim)), value))
    return {form: sorted(rows) for form, rows in found.items()}


def rows_of(scores: Mapping[str, float]) -> list[tuple[str, str, str, str, str]]:
    """Return (name, size, bytes, score, share of the float score at full size) of each form and size, as text."""
    found = points(scores)
    whole = {dim: value for dim, _, value in found["float32"]}
    best = whole[max(whole)] if whole else 0.0
    return [
        (
            NAMES[form],
            str(dim),
            f"{size:,d}",
            f"{value:.4f}",
            f"{value / best:.3f}" if best else "-",
        )
        for form, rows in found.items()
        for dim, size, value in reversed(rows)
    ]
