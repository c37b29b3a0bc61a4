"""Reranker: a sequence classifier that scores a query and a document together; and batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from vembed.errors import UserError
from vembed.models.backbone_loading import quiet_transformers
from vembed.models.families.model_settings import check_attention
from vembed.models.families.weight_files import check_whole_weights
from vembed.models.processors import open_tokenizer

Agree = Callable[[int], int]
"""Returns the number of batches that all ranks run, from that of this rank: sharded models are run in step."""
BATCH_TOKENS = 8192
"""Padded tokens that go through the model at once."""


def of_one_rank(num_batches: int) -> int:
    """Return the number itself, for models of which each rank has a copy."""
    return num_batches


class Reranker:
    """A loaded reranker. `role` names it in messages, as "judges: NAME"."""

    def __init__(
        self,
        folder: Path,
        *,
        role: str,
        max_labels: int,
        dtype: torch.dtype | None,
        device: torch.device,
        trust_remote_code: bool,
        holds: torch.device | str | None = None,
    ) -> None:
        """`holds`: where the weights are put, for a model that will be sharded; by default `device`."""
        self.tokenizer = open_tokenizer(folder, trust_remote_code=trust_remote_code)
        model = read_weights(
            AutoModelForSequenceClassification, folder, dtype, trust_remote_code
        )
        if model.config.num_labels > max_labels:
            allowed = "1" if max_labels == 1 else f"1 to {max_labels}"
            raise UserError(
                f"{role} has {model.config.num_labels} outputs, and a reranker has {allowed} here: give another "
                "reranker; an embedding model is no reranker"
            )
        add_padding_token(self.tokenizer)
        # A decoder as classifier reads its score at the last token before padding, found by this number.
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        self.name = type(model).__name__
        self.model = model.eval().requires_grad_(False).to(holds or device)
        self._device = device

    def logits(
        self,
        pairs: Sequence[tuple[str, str]],
        max_length: int,
        agree: Agree = of_one_rank,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each pair of query and document, and its logits in float32 on the CPU, in any order."""
        if not pairs:
            return iter(())
        queries = [query for query, _ in pairs]
        documents = [document for _, document in pairs]
        encoded = self.tokenizer(
            queries, documents, truncation=True, max_length=max_length
        )
        return in_batches(
            encoded,
            self.tokenizer,
            self._device,
            lambda inputs: self.model(**inputs).logits,
            agree,
        )


def read_weights(
    kind: Any, folder: Path, dtype: torch.dtype | None, trust_remote_code: bool
) -> Any:
    """Return a model of an Auto class, from safetensors alone: reading pickled weights would run their code."""
    check_whole_weights(folder)
    check_attention(folder, trust_remote_code=trust_remote_code)
    stored = "auto" if dtype is None else dtype
    with quiet_transformers():
        return kind.from_pretrained(
            folder,
            dtype=stored,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )


def add_padding_token(tokenizer: Any) -> None:
    """Give a tokenizer without a padding token its end-of-text token for padding."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def in_batches(
    encoded: Mapping[str, Sequence[Sequence[int]]],
    tokenizer: Any,
    device: torch.device,
    compute: Callable[[dict[str, Tensor]], Tensor],
    agree: Agree = of_one_rank,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each text and its row of `compute`, in batches of similar length, the longest first."""
    lengths = [len(ids) for ids in encoded["input_ids"]]
    # The longest first: memory runs out in the first batch or never.
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batches: list[list[int]] = []
    first = 0
    while first < len(order):
        size = max(1, BATCH_TOKENS // max(1, lengths[order[first]]))
        batches.append(order[first : first + size])
        first += size
    for number in range(agree(len(batches))):
        # A rank that has done its own batches runs its shortest text again, for the collectives of a sharded model.
        batch = batches[number] if number < len(batches) else batches[-1][-1:]
        chosen = {
            name: [values[place] for place in batch] for name, values in encoded.items()
        }
        inputs = tokenizer.pad(chosen, return_tensors="pt").to(device)
        with torch.no_grad():
            rows = compute(dict(inputs)).float().cpu()
        if number < len(batches):
            yield from zip(batch, rows, strict=True)


# ---- a decoder that answers yes or no ------------------------------------------------


YES_NO_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
YES_NO_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The form that Qwen3-Reranker was trained on."""


class YesNoReranker:
    """A loaded decoder. `role` names it in messages, as "judges: NAME"."""

    def __init__(
        self,
        folder: Path,
        *,
        role: str,
        instruction: str,
        dtype: torch.dtype | None,
        device: torch.device,
        trust_remote_code: bool,
        holds: torch.device | str | None = None,
    ) -> None:
        """`holds`: where the weights are put, for a model that will be sharded; by default `device`."""
        self.tokenizer = open_tokenizer(
            folder, padding_side="left", trust_remote_code=trust_remote_code
        )
        add_padding_token(self.tokenizer)
        ids = [
            self.tokenizer.encode(word, add_special_tokens=False)
            for word in ("no", "yes")
        ]
        if any(len(id_) != 1 for id_ in ids):
            raise UserError(
                f"{role} has no single tokens for yes and no: give a sequence classifier, or its kind"
            )
        self.answers = torch.tensor([tokens[0] for tokens in ids], device=device)
        model = read_weights(AutoModelForCausalLM, folder, dtype, trust_remote_code)
        self.name = type(model).__name__
        self.model = model.eval().requires_grad_(False).to(holds or device)
        self.instruction = instruction
        self._device = device
        self._begin = self.tokenizer.encode(YES_NO_PROMPT, add_special_tokens=False)
        self._end = self.tokenizer.encode(YES_NO_END, add_special_tokens=False)

    def logits(
        self,
        pairs: Sequence[tuple[str, str]],
        max_length: int,
        agree: Agree = of_one_rank,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each pair of query and document, and the float32 logits of no and yes on the CPU, in any
        order. Of a pair that is longer than `max_length` tokens the document is cut."""
        if not pairs:
            return iter(())
        texts = [
            f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: {document}"
            for query, document in pairs
        ]
        room = max(max_length - len(self._begin) - len(self._end), 1)
        bodies = self.tokenizer(
            texts, add_special_tokens=False, truncation=True, max_length=room
        )["input_ids"]
        ids = [[*self._begin, *body, *self._end] for body in bodies]
        encoded = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
        return in_batches(encoded, self.tokenizer, self._device, self._answers, agree)

    def _answers(self, inputs: dict[str, Tensor]) -> Tensor:
        # Padding is on the left, so the last position is the answer's in every row; logits of the whole prompt would
        # take [batch, length, vocabulary].
        logits: Tensor = self.model(**inputs, logits_to_keep=1).logits[
            :, -1, self.answers
        ]
        return logits
