"""Judges: models that read a query and a document together and say how likely it is that they belong together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from transformers import AutoConfig

from vembed.data.cache import short_hash
from vembed.errors import UserError
from vembed.inference.reranker import Reranker
from vembed.inference.yes_no import YES_NO_END, YES_NO_PROMPT, YesNoReranker
from vembed.mining.config import Judge, WeightOptions
from vembed.mining.encoders import files_identity
from vembed.mining.endpoint import ChatClient
from vembed.models.families.model_files import whole_model_folder

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Values of `torch_dtype`; `auto` is not among them, and means the file's own."""

ENDPOINT_PROMPT = (
    "{instruction}.\n\nQuery: {query}\n\nDocument: {document}\n\n"
    "Is the document relevant to the query? Answer with one word, yes or no."
)
ANSWER = re.compile(r"\b(yes|no|true|false|relevant|irrelevant|not)\b", re.IGNORECASE)
POSITIVE = frozenset({"yes", "true", "relevant"})

Pair = tuple[str, str]


class JudgeModel(Protocol):
    """A judge that is ready."""

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, float | None]]:
        """The number of each pair and how likely it is relevant, in any order; None where there is no usable answer."""
        ...


class CrossEncoder:
    """A reranker: one logit, or two of which the second one says relevant."""

    def __init__(
        self, judge: Judge, options: WeightOptions, device: torch.device
    ) -> None:
        self._reranker = Reranker(
            whole_model_folder(judge.model, option="judges"),
            role=f"judges: {judge.model}",
            max_labels=2,
            dtype=DTYPES.get(options.torch_dtype),
            device=device,
            trust_remote_code=options.trust_remote_code,
        )
        self._max_length = judge.max_length

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, float | None]]:
        """The number of each pair, and the sigmoid of its logit, or the second of two probabilities."""
        for number, logits in self._reranker.logits(pairs, self._max_length):
            shares = (
                torch.sigmoid(logits)
                if len(logits) == 1
                else torch.softmax(logits, dim=0)
            )
            yield number, float(shares[-1])


class YesNoDecoder:
    """A decoder that is asked, and whose next token is yes or no."""

    def __init__(
        self, judge: Judge, options: WeightOptions, device: torch.device
    ) -> None:
        self.reranker = YesNoReranker(
            whole_model_folder(judge.model, option="judges"),
            role=f"judges: {judge.model}",
            instruction=judge.instruction,
            dtype=DTYPES.get(options.torch_dtype),
            device=device,
            trust_remote_code=options.trust_remote_code,
        )
        self._max_length = judge.max_length

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, float | None]]:
        """The number of each pair, and the probability of yes among yes and no."""
        for number, logits in self.reranker.logits(pairs, self._max_length):
            yield number, float(torch.softmax(logits, dim=0)[1])


class EndpointJudge:
    """A model behind an OpenAI-compatible endpoint."""

    def __init__(self, judge: Judge) -> None:
        self._judge, self._client = judge, ChatClient(judge, judge.model)

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, float | None]]:
        """The number of each pair, and 1 for yes, 0 for no, None for another answer."""
        longest = 4 * self._judge.max_length  # about so many characters
        prompts = [
            ENDPOINT_PROMPT.format(
                instruction=self._judge.instruction,
                query=query,
                document=document[:longest],
            )
            for query, document in pairs
        ]
        return (
            (number, answer_of(text))
            for number, text in self._client.complete(prompts, max_tokens=8)
        )


def answer_of(text: str) -> float | None:
    """1.0 for an answer that says yes, 0.0 for no, None for one that says neither."""
    found = ANSWER.search(text)
    return None if found is None else float(found[1].lower() in POSITIVE)


def kind_of(judge: Judge, options: WeightOptions) -> str:
    """Return the kind of judge of a model if the config leaves it open."""
    if judge.kind != "auto":
        return judge.kind
    if judge.base_url is not None:
        return "endpoint"
    try:
        config = AutoConfig.from_pretrained(
            judge.model, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"judges: {judge.model} cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    architectures = " ".join(config.architectures or ())
    return "yes_no" if "ForCausalLM" in architectures else "cross_encoder"


def load_judge(
    judge: Judge, options: WeightOptions, device: torch.device
) -> JudgeModel:
    """The model of a judge."""
    kind = kind_of(judge, options)
    if kind == "endpoint":
        return EndpointJudge(judge)
    return (
        YesNoDecoder(judge, options, device)
        if kind == "yes_no"
        else CrossEncoder(judge, options, device)
    )


def judge_identity(judge: Judge, options: WeightOptions) -> str:
    """A short name for everything that a judgement depends on besides query and document."""
    model = judge.model if judge.base_url else files_identity(judge.model)
    prompt = [YES_NO_PROMPT, YES_NO_END, ENDPOINT_PROMPT]
    return short_hash(
        model,
        judge.base_url,
        judge.kind,
        judge.instruction,
        judge.max_length,
        options.torch_dtype,
        prompt,
    )
