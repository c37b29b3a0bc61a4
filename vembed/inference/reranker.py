"""Reranker: a model that reads a query and a document together, and gives one score for the pair.

A pair takes the place of an input: `PairFeaturiser` turns it into token ids, and the common
encoding makes micro-batches of them, shares them over ranks and runs the model, which gives
one row [1] for each pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from vembed.data.examples import Item
from vembed.data.features import BaseFeaturiser, Features, input_key
from vembed.errors import UserError
from vembed.inference.encoding import encode_features
from vembed.models.embedding_model import ModalitySlice
from vembed.models.families.backbones import quiet_transformers
from vembed.models.families.family import Modality
from vembed.models.families.model_files import check_attention, check_whole_weights
from vembed.models.processors import open_tokenizer

Pair = tuple[Item, Item]
"""A query and a document."""
LONGEST = 512
"""Tokens of a pair where nothing says how many a model takes."""
YES_NO_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
YES_NO_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The form that Qwen3-Reranker was trained on."""


class PairFeaturiser(BaseFeaturiser[Pair]):
    """Converter from pairs of texts to token ids, and to the tensors of a forward pass."""

    modalities: tuple[Modality, ...] = ("text",)

    def __init__(
        self,
        tokenizer: Any,
        *,
        role: str,
        max_length: int | None,
        instruction: str | None,
        query_prompt: str | None,
        document_prompt: str | None,
    ) -> None:
        """`instruction`: of a decoder that is asked for yes or no; None for a classifier."""
        self.tokenizer = tokenizer
        self.role = role
        # model_max_length is 1e30 in tokenizers that have no limit.
        self.max_length = max_length or min(LONGEST, tokenizer.model_max_length)
        self.instruction = instruction
        self.query_prompt = query_prompt or ""
        self.document_prompt = document_prompt or ""

    def features(self, units: Sequence[Pair]) -> list[Features]:
        """See BaseFeaturiser. Of a pair that is longer than `max_length` the document is cut."""
        if not units:
            return []
        queries = [self.query_prompt + self._text(item) for item, _ in units]
        documents = [self.document_prompt + self._text(item) for _, item in units]
        if self.instruction is None:
            encoded = self.tokenizer(
                queries, documents, truncation=True, max_length=self.max_length
            )
            rows = encoded["input_ids"]
        else:
            begin = self.tokenizer.encode(YES_NO_PROMPT, add_special_tokens=False)
            end = self.tokenizer.encode(YES_NO_END, add_special_tokens=False)
            bodies = []
            for query, document in zip(queries, documents, strict=True):
                question = f"<Instruct>: {self.instruction}\n<Query>: {query}"
                bodies.append(f"{question}\n<Document>: {document}")
            encoded = self.tokenizer(
                bodies,
                add_special_tokens=False,
                truncation=True,
                max_length=max(self.max_length - len(begin) - len(end), 1),
            )
            rows = [[*begin, *body, *end] for body in encoded["input_ids"]]
        segments = [None] * len(rows)
        if self.instruction is None and "token_type_ids" in encoded:
            segments = encoded["token_type_ids"]
        features = []
        for (_, item), row, segment in zip(units, rows, segments, strict=True):
            token_ids = np.asarray(row, dtype=np.int32)
            features.append(
                Features(
                    modality="text",
                    length=len(row),
                    key=input_key("text", token_ids, ()),
                    content=item.key(),
                    token_ids=token_ids,
                    segments=None if segment is None else np.asarray(segment, np.int32),
                )
            )
        return features

    def joined(self, features: Sequence[Features]) -> dict[str, Tensor]:
        """See BaseFeaturiser."""
        rows: dict[str, list[Any]] = {"input_ids": [], "attention_mask": []}
        if features[0].segments is not None:
            rows["token_type_ids"] = []
        for feature in features:
            assert feature.token_ids is not None
            rows["input_ids"].append(feature.token_ids.tolist())
            rows["attention_mask"].append([1] * feature.length)
            if feature.segments is not None:
                rows["token_type_ids"].append(feature.segments.tolist())
        return dict(self.tokenizer.pad(rows, return_tensors="pt"))

    def dummy(self, modality: Modality) -> Features:
        """See BaseFeaturiser. Its texts have tokens: decoders' tokenizers make none of an empty text."""
        del modality
        return self.features([(Item(text="a"), Item(text="a"))])[0]

    def _text(self, item: Item) -> str:
        if item.text is None or item.images:
            raise UserError(
                f"{self.role} scores texts, and the data have images: use an embedding model"
            )
        return item.text


class Reranker(nn.Module):
    """A sequence classifier, or a decoder that answers yes or no, from a model folder."""

    def __init__(
        self,
        folder: Path,
        *,
        role: str,
        device: torch.device,
        kind: Literal["reranker", "yes_no"] = "reranker",
        max_labels: int = 1,
        instruction: str = "",
        max_length: int | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
        holds: torch.device | str | None = None,
    ) -> None:
        """`role` names it in messages, as "judges: NAME". `holds`: where the weights are put, for a model that will be
        sharded; by default `device`."""
        super().__init__()
        answers_yes_no = kind == "yes_no"
        options = {"padding_side": "left"} if answers_yes_no else {}
        tokenizer = open_tokenizer(
            folder, trust_remote_code=trust_remote_code, **options
        )
        add_padding_token(tokenizer)
        self.answers: list[int] = []
        """Token ids of no and yes. Empty for a classifier."""
        if answers_yes_no:
            for word in ("no", "yes"):
                self.answers += tokenizer.encode(word, add_special_tokens=False)
            if len(self.answers) != 2:
                raise UserError(
                    f"{role} has no single tokens for yes and no: give a sequence classifier, or its kind"
                )
        model = read_weights(
            AutoModelForCausalLM
            if answers_yes_no
            else AutoModelForSequenceClassification,
            folder,
            dtype,
            trust_remote_code,
        )
        if not answers_yes_no and model.config.num_labels > max_labels:
            allowed = "1" if max_labels == 1 else f"1 to {max_labels}"
            raise UserError(
                f"{role} has {model.config.num_labels} outputs, and a reranker has {allowed} here: give another "
                "reranker; an embedding model is no reranker"
            )
        # A decoder as classifier reads its score at the last token before padding, found by this number.
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self.model = model.eval().requires_grad_(False).to(holds or device)
        self.device = device
        self.featuriser = PairFeaturiser(
            tokenizer,
            role=role,
            max_length=max_length,
            instruction=instruction if answers_yes_no else None,
            query_prompt=query_prompt,
            document_prompt=document_prompt,
        )

    def forward(self, parts: list[ModalitySlice]) -> list[Tensor]:
        """Return the score [n, 1] of the pairs of each part, in at least float32.

        It is the logit of a classifier with one label. With two labels, or the answers no and
        yes, it is the logit of the second less that of the first, whose sigmoid is the second
        of two probabilities.
        """
        scores = []
        for _, inputs in parts:
            names = self.featuriser.tokenizer.model_input_names
            model_inputs = {name: inputs[name] for name in names if name in inputs}
            if self.answers:
                # Padding is on the left, so the last position is the answer's in every row. Logits of the whole
                # prompt would take [n, length, vocabulary].
                logits = self.model(**model_inputs, logits_to_keep=1).logits
                logits = logits[:, -1, self.answers]
            else:
                logits = self.model(**model_inputs).logits
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            first = logits[:, :1] if logits.shape[1] == 2 else 0.0
            scores.append(logits[:, -1:] - first)
        return scores

    def score(self, pairs: Sequence[Pair], world_size: int = 1) -> np.ndarray:
        """Return [n, 1] float32 scores of this rank's pairs.

        With `world_size` > 1 it is collective: ranks pass pairs of their own, and all run
        equally many forward passes, as sharded models need.
        """
        if not pairs and world_size == 1:
            return np.empty((0, 1), np.float32)
        features = self.featuriser.features(pairs)
        return encode_features(
            self, self.featuriser, features, self.device, world_size=world_size
        )


def read_weights(
    kind: Any, folder: Path, dtype: torch.dtype | None, trust_remote_code: bool
) -> Any:
    """Return a model of an Auto class, from safetensors alone: reading pickled weights would run their code."""
    check_whole_weights(folder)
    check_attention(folder, trust_remote_code=trust_remote_code)
    with quiet_transformers():
        return kind.from_pretrained(
            folder,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )


def add_padding_token(tokenizer: Any) -> None:
    """Give a tokenizer without a padding token its end-of-text token for padding."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
