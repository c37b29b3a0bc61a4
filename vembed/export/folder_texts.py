"""FolderTexts: prompts, tokenizer and maximum length of an exported folder, read from its files alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from vembed.data.examples import Kind
from vembed.data.processing import CHARACTERS_PER_TOKEN, cut_words
from vembed.models.families.weight_files import read_object

PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"


class FolderTexts:
    """The text side of an exported folder."""

    def __init__(self, folder: Path) -> None:
        prompts = (read_object(folder / PROMPTS_FILE) or {}).get("prompts") or {}
        self.prompts: dict[str, str] = {
            name: text or "" for name, text in prompts.items()
        }
        self.max_length = int(
            (read_object(folder / LENGTH_FILE) or {})["max_seq_length"]
        )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def token_ids(self, text: str, kind: Kind | None) -> list[int]:
        """Return the token ids of a text with its prompt."""
        return self.all_token_ids([text], kind)[0]

    def all_token_ids(self, texts: Sequence[str], kind: Kind | None) -> list[list[int]]:
        """Return the token ids of each text with its prompt."""
        prompt = self.prompts.get(kind or "", "")
        longest = CHARACTERS_PER_TOKEN * self.max_length
        from_left = self.tokenizer.truncation_side == "left"
        given = [
            cut_words(prompt + text, longest, from_left=from_left) for text in texts
        ]
        ids: list[list[int]] = self.tokenizer(
            given, truncation=True, max_length=self.max_length
        ).input_ids
        return ids

    def padded(
        self, ids: Sequence[Sequence[int]], length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return int64 `input_ids` and `attention_mask` [n, tokens] of a batch, padded to its longest text or to
        `length`, on the side that the tokenizer names."""
        shape = (len(ids), length or max(len(one) for one in ids))
        padded, mask = (
            np.full(shape, self.tokenizer.pad_token_id, np.int64),
            np.zeros(shape, np.int64),
        )
        for row, one in enumerate(ids):
            place = (
                slice(shape[1] - len(one), None)
                if self.tokenizer.padding_side == "left"
                else slice(len(one))
            )
            padded[row, place], mask[row, place] = one, 1
        return {"input_ids": padded, "attention_mask": mask}


def write_texts(
    folder: Path,
    query_prompt: str,
    document_prompt: str,
    max_length: int,
    similarity: str,
) -> None:
    """Write the files that FolderTexts and Sentence Transformers read, beside the tokenizer's own."""
    settings = {
        "model_type": "SentenceTransformer",
        "prompts": {"query": query_prompt, "document": document_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": similarity,
    }
    (folder / PROMPTS_FILE).write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    lengths = {"max_seq_length": max_length, "do_lower_case": False}
    (folder / LENGTH_FILE).write_text(
        json.dumps(lengths, indent=2) + "\n", encoding="utf-8"
    )
