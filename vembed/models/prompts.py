"""Prompts of published models whose own files do not contain them, by model name."""

from __future__ import annotations

import re

_BGE_ZH = (
    "\u4e3a\u8fd9\u4e2a\u53e5\u5b50\u751f\u6210\u8868\u793a\u4ee5\u7528\u4e8e\u68c0\u7d22\u76f8\u5173\u6587\u7ae0\uff1a"
)
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"

PUBLISHED: tuple[tuple[str, str, str, str], ...] = (
    ("multilingual-e5-large-instruct", _WEB_SEARCH + "Query: ", "", "instruction-tuned E5"),
    ("e5-mistral-7b-instruct", _WEB_SEARCH + "Query: ", "", "instruction-tuned E5"),
    (r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?", "query: ", "passage: ", "E5"),
    (r"bge-(small|base|large)-en(-v1\.5)?", "Represent this sentence for searching relevant passages: ", "", "BGE"),
    (r"bge-(small|base|large)-zh(-v1\.5)?", _BGE_ZH, "", "BGE"),
    (r"nomic-embed-text-v1(\.5)?", "search_query: ", "search_document: ", "Nomic"),
    (r"qwen3-embedding-(0\.6b|4b|8b)", _WEB_SEARCH + "Query:", "", "Qwen3-Embedding"),
    (r"qwen3-vl-embedding-(2b|8b)", "Represent the user's input.", "Represent the user's input.", "Qwen3-VL-Embedding"),
)
"""Pattern of the name's last part (lower case), query prompt, document prompt, model series."""


def published_prompts(name: str) -> tuple[str, str, str] | None:
    """Return query prompt, document prompt and reason for a model known by name; otherwise None."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    for pattern, query, document, what in PUBLISHED:
        if re.fullmatch(pattern, last):
            return query, document, f"{what} models were trained with it; recognised by the name {last}"
    return None
