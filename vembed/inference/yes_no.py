"""YesNoReranker: a decoder that is asked whether a document is relevant, and whose next token is yes or no."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from vembed.errors import UserError
from vembed.inference.reranker import (
    Agree,
    add_padding_token,
    in_batches,
    of_one_rank,
    read_weights,
)
from vembed.models.processors import open_tokenizer

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
        if any(len(one) != 1 for one in ids):
            raise UserError(
                f"{role} has no single tokens for yes and no: give a sequence classifier, or its kind"
            )
        self.answers = torch.tensor([one[0] for one in ids], device=device)
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
        encoded = {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}
        return in_batches(encoded, self.tokenizer, self._device, self._answers, agree)

    def _answers(self, inputs: dict[str, Tensor]) -> Tensor:
        # Padding is on the left, so the last position is the answer's in every row; logits of the whole prompt would
        # take [batch, length, vocabulary].
        found: Tensor = self.model(**inputs, logits_to_keep=1).logits[
            :, -1, self.answers
        ]
        return found
