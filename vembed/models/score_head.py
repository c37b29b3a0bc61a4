"""ScoreHead: what gives a reranker its score, behind the pooled state of a pair.

A reranker is an embedding model of pairs whose embedding has one dimension, the score. Tower, pooling, adapters,
sharding and saving are those of embedding models. Only the head differs, and runs as Transformers has it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from vembed.errors import UserError
from vembed.models.families.backbones import language_class
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import read_tensors
from vembed.models.language_head import GivenStates, save_with_head
from vembed.models.processors import load_tokenizer

log = logging.getLogger(__name__)


def class_with_scores(
    description: ModelDescription, config: PretrainedConfig
) -> type[PreTrainedModel]:
    """Return the class of the model with its head. A model that was no classifier gets one label."""
    if description.scores == "answer":
        chosen = language_class(config)
        needed = "language-model head"
    else:
        chosen = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config))
        needed = "sequence classifier"
        if config.num_labels > 2 and "SequenceClassification" in str(
            config.architectures
        ):
            raise UserError(
                f"{description.name} has {config.num_labels} outputs, and a reranker has 1 or 2: give another reranker"
            )
        if "SequenceClassification" not in str(config.architectures):
            config.num_labels = 1
    if chosen is None:
        raise UserError(
            f"Transformers has no {needed} for model_type {config.model_type!r}: use another model as reranker"
        )
    return chosen


class ScoreHead(nn.Module):
    """The layers of a sequence classifier behind its base model."""

    def __init__(self, whole: PreTrainedModel, pad_token: int | None) -> None:
        """`whole`: the classifier. Its base model is taken out of it."""
        super().__init__()
        name = whole.base_model_prefix
        base: Any = whole.base_model
        pooler = getattr(base, "pooler", None)
        if pooler is not None:
            base.pooler = None
        setattr(whole, name, GivenStates(pooler))
        self.whole = whole
        self.is_new = False
        """True: its weights are not those of files."""
        self.base_name = name
        if whole.config.pad_token_id is None:
            whole.config.pad_token_id = pad_token
        # Decoders look for the last token that is no padding.
        self.token = 0 if whole.config.pad_token_id else 1

    def forward(self, states: Tensor, *, skips_last: bool = False) -> Tensor:
        """Map pooled states [n, width] to scores [n, 1]."""
        del skips_last
        stand_in: Any = getattr(self.whole, self.base_name)
        weight = next(self.whole.parameters())
        stand_in.states = states.to(weight.dtype)[:, None]
        ids = torch.full((len(states), 1), self.token, device=states.device)
        try:
            with torch.autocast(states.device.type, enabled=False):
                logits: Tensor = self.whole(input_ids=ids).logits
        finally:
            stand_in.states = None
        # Of two labels the sigmoid of the difference is the second one's probability.
        if logits.shape[1] == 2:
            return logits[:, 1:] - logits[:, :1]
        return logits


class AnswerHead(nn.Module):
    """The logit of `yes` less that of `no`, of a decoder's language-model head.

    Two rows of the head's weight are read, so that logits of the whole vocabulary are never made. They stay as they
    are: where they are tied to the input embeddings, as in Qwen3-Reranker, those stay too.
    """

    def __init__(self, whole: Any, answers: tuple[int, int]) -> None:
        """`answers`: the tokens of no and yes."""
        super().__init__()
        rows = whole.get_output_embeddings().weight.detach()
        difference = rows[answers[1]].float() - rows[answers[0]].float()
        self.difference = nn.Parameter(difference, requires_grad=False)

    def forward(self, states: Tensor, *, skips_last: bool = False) -> Tensor:
        """Map pooled states [n, width] to scores [n, 1]."""
        del skips_last
        with torch.autocast(states.device.type, enabled=False):
            wide = states.to(self.difference.dtype)
            return (wide * self.difference).sum(1, keepdim=True)


def build_score_head(
    description: ModelDescription, whole: PreTrainedModel
) -> ScoreHead | AnswerHead:
    """Return the head of a whole model. Its base model, whose states the head takes, is to be taken before."""
    tokenizer = load_tokenizer(description)
    if description.scores == "answer":
        if whole.config.tie_word_embeddings:
            whole.get_input_embeddings().requires_grad_(False)
        return AnswerHead(whole, answer_tokens(tokenizer, description.name))
    stored = read_tensors(Path(description.source))
    head = ScoreHead(whole, tokenizer.pad_token_id or tokenizer.eos_token_id)
    names = [name for name, _ in head.whole.named_parameters()]
    head.is_new = any(name not in stored for name in names)
    log.info(
        "score: of %s, whose head is %s",
        type(whole).__name__,
        "new" if head.is_new else "that of its files",
    )
    return head


def answer_tokens(tokenizer: Any, name: str) -> tuple[int, int]:
    """Return the tokens of the answers no and yes."""
    no = tokenizer.encode("no", add_special_tokens=False)
    yes = tokenizer.encode("yes", add_special_tokens=False)
    if len(no) != 1 or len(yes) != 1:
        raise UserError(
            f"{name} has no single tokens for yes and no: give a sequence classifier, or its kind"
        )
    return no[0], yes[0]


def save_reranker(
    folder: Path,
    description: ModelDescription,
    backbone: Any,
    state: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
) -> None:
    """Write the whole model as Transformers does: base model and head. `state`, `head`: their full state dicts."""
    config = backbone.config
    kind = class_with_scores(description, config)
    if description.scores == "answer":
        # The language-model head is not trained: that of the files, of which training reads two rows.
        head = {}
        name = "lm_head.weight"
        files = sorted(Path(description.source).glob("*.safetensors"))
        for path in files if not config.tie_word_embeddings else ():
            with safe_open(path, framework="pt") as file:
                if name in set(file.keys()):
                    head[name] = file.get_tensor(name)
    save_with_head(folder, kind, config, state, head)
