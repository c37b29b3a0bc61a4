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
    by_form: Points = {form: [] for form in NAMES}
    for key, value in scores.items():
        if key.startswith("compressed/"):
            _, form, dim, _ = key.split("/")
            num_bytes = bytes_per_document(form, int(dim))
            by_form[form].append((int(dim), num_bytes, value))
    return {form: sorted(rows) for form, rows in by_form.items()}


def rows_of(scores: Mapping[str, float]) -> list[tuple[str, str, str, str, str]]:
    """Return (name, size, bytes, score, share of the float score at full size) of each form and size, as text."""
    by_form = points(scores)
    full_score = by_form["float32"][-1][2] if by_form["float32"] else 0.0
    texts = []
    for form, rows in by_form.items():
        for dim, num_bytes, value in reversed(rows):
            share = f"{value / full_score:.3f}" if full_score else "-"
            row = (NAMES[form], str(dim), f"{num_bytes:,d}", f"{value:.4f}", share)
            texts.append(row)
    return texts
