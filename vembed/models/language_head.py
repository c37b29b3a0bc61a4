"""LanguageHead: the language-model head of a published text model, and its loss, causal or masked language modelling.

A decoder learns the next token of each text, an encoder the tokens that are hidden from it. The head's own code runs as
Transformers has it: it stands in its class, in which the base model is replaced by the hidden states of this forward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from vembed.config.schema import ObjectiveSection
from vembed.errors import UserError
from vembed.losses.table import LOSSES
from vembed.models.families.backbones import (
    is_decoder_only,
    language_class,
    read_config,
)
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import is_own, read_tensors
from vembed.models.processors import load_tokenizer

log = logging.getLogger(__name__)

NEXT_TOKEN = "next_token"
MASKED_TOKEN = "masked_token"
"""Names of the losses: in `auxiliary_losses`, the log and metrics.jsonl."""
IGNORED_TARGET = -100
TOKENS_AT_ONCE = 1024
"""Tokens whose logits are held at once: those of a large vocabulary would take more memory than the model."""
HIDDEN_SHARE = 0.15
"""Of an encoder's tokens: the share that is to be predicted."""
KEPT_SHARE = 0.1
REPLACED_SHARE = 0.1
"""Of the tokens to be predicted: the share that stays as it is, and the share that another token replaces."""


def has_language_head(
    objective: ObjectiveSection, description: ModelDescription
) -> bool:
    """Return True if the run trains by the language-model head. Raise UserError if it asks for what cannot be."""
    alone = objective.losses is None and LOSSES[objective.loss].is_of_model
    is_own_model = is_own(Path(description.source))
    names = {NEXT_TOKEN, MASKED_TOKEN}.intersection(objective.auxiliary_losses or {})
    has_weight = bool(names) and not is_own_model
    if not alone and not has_weight:
        return False
    problem = None
    if description.scores is not None:
        problem = "is a reranker"
    elif is_own_model:
        problem = "is an own model, which returns losses of its own"
    elif not description.traits.reads_only_text or description.traits.has_two_models:
        problem = f"is of the family {description.family}, and only text models have a language-model head here"
    elif description.bidirectional_attention:
        problem = "has bidirectional_attention: true, so that each token sees the next one, which it would predict"
    elif not alone and not is_decoder_only(
        read_config(
            Path(description.source), trust_remote_code=description.trust_remote_code
        )
    ):
        problem = "is an encoder, and tokens that are hidden from it would be hidden from the other loss too"
    elif description.quantized:
        problem = "has weights in 4 bits (use_qlora)"
    if problem is None:
        return True
    if not has_weight:
        return False
    name = names.pop()
    raise UserError(
        f"auxiliary_losses: {name} is not possible: {description.name} {problem}; leave it out"
    )


def class_with_head(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the model class with the language-model head. Raise UserError if Transformers has none."""
    known = language_class(config)
    if known is None:
        raise UserError(
            f"Transformers has no language-model head for model_type {config.model_type!r}, by which loss: none would "
            "train; give a loss"
        )
    return known


class LanguageHead(nn.Module):
    """The layers behind the hidden states that give the logits of tokens."""

    def __init__(
        self,
        whole: PreTrainedModel,
        description: ModelDescription,
        *,
        from_scratch: bool,
    ) -> None:
        """`whole`: the model with its head, of the class that `language_class` names. Its base model is taken out.
        `from_scratch`: the weights are new."""
        super().__init__()
        prefix = f"{whole.base_model_prefix}."
        self.is_causal = is_decoder_only(whole.config)
        self.name = NEXT_TOKEN if self.is_causal else MASKED_TOKEN
        # A tied weight is one parameter under two names: it stays where its first name is, and is lent in the forward.
        self.tied: dict[str, str] = dict(whole.all_tied_weights_keys)
        setattr(whole, whole.base_model_prefix, GivenStates())
        self.whole = whole
        for target in self.tied:
            holder, name = _holder(whole, target)
            holder._parameters[name] = None
        self.prefix = prefix
        tokenizer = load_tokenizer(description)
        self.mask_token = tokenizer.mask_token_id
        self.special_tokens = torch.tensor(tokenizer.all_special_ids)
        self.vocab_size = len(tokenizer.get_vocab())
        if not self.is_causal and self.mask_token is None:
            raise UserError(
                f"loss: none hides tokens from {description.name}, an encoder, and its tokenizer has no mask token: "
                "add `mask_token` to it"
            )
        stored = read_tensors(Path(description.source))
        names = [name for name, _ in whole.named_parameters()]
        self.is_new = from_scratch or any(name not in stored for name in names)
        log.info(
            "language model: %s of %s, %s",
            self.name,
            type(whole).__name__,
            "whose head is new" if self.is_new else "with the head of its files",
        )

    def hide(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return texts as the model gets them, and [n, tokens] targets: what the hidden state of each place must tell,
        IGNORED_TARGET where nothing is asked. An encoder's hidden tokens are drawn with torch's default generator."""
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        is_token = (
            torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        )
        if self.is_causal:
            # The state at place i predicts token i + 1; the last one, and one before padding, predicts nothing.
            targets = torch.full_like(ids, IGNORED_TARGET)
            both = is_token[:, 1:] & is_token[:, :-1]
            targets[:, :-1] = torch.where(both, ids[:, 1:], IGNORED_TARGET)
            return inputs, targets
        is_eligible = is_token & ~torch.isin(ids, self.special_tokens.to(ids.device))
        chosen = is_eligible & (torch.rand(ids.shape, device=ids.device) < HIDDEN_SHARE)
        # As in BERT: 80% of the chosen tokens become the mask token, 10% another token, 10% stay and are predicted too.
        draw = torch.rand(ids.shape, device=ids.device)
        others = torch.randint(self.vocab_size, ids.shape, device=ids.device)
        replacements = torch.full_like(ids, int(self.mask_token or 0))
        replacements = torch.where(
            draw < KEPT_SHARE + REPLACED_SHARE, others, replacements
        )
        replacements = torch.where(draw < KEPT_SHARE, ids, replacements)
        targets = torch.where(chosen, ids, IGNORED_TARGET)
        return {**inputs, "input_ids": torch.where(chosen, replacements, ids)}, targets

    def forward(self, states: Tensor, targets: Tensor, base: nn.Module) -> Tensor:
        """Return [2, n]: for each text the sum of the tokens' cross-entropies and their number.

        `states` [n, tokens, dim]: hidden states of the base model `base`.
        """
        is_asked_for = targets != IGNORED_TARGET
        counts = is_asked_for.sum(1)
        if not bool(is_asked_for.any()):
            # A dummy: its backward must reach the same parameters as that of the other ranks.
            is_asked_for = torch.zeros_like(is_asked_for)
            is_asked_for[:, 0] = True
        rows = is_asked_for.nonzero()[:, 0]
        entropies = []
        for chunk, chunk_targets in zip(
            torch.split(states[is_asked_for], TOKENS_AT_ONCE),
            torch.split(targets[is_asked_for], TOKENS_AT_ONCE),
            strict=True,
        ):
            # Recomputed in the backward pass, so that the logits of all tokens are never held at once.
            recomputed = partial(checkpoint, self._entropy, use_reentrant=False)
            entropy = recomputed if torch.is_grad_enabled() else self._entropy
            entropies.append(entropy(chunk, chunk_targets, base))
        of_tokens = torch.cat(entropies)
        sums = of_tokens.new_zeros(len(states)).index_add(0, rows, of_tokens)
        return torch.stack([sums, counts.to(sums.dtype)])

    def _entropy(self, states: Tensor, targets: Tensor, base: nn.Module) -> Tensor:
        """Return the cross-entropy of each of [m, dim] states; 0 where nothing is asked."""
        stand_in: Any = getattr(self.whole, self.prefix[:-1])
        stand_in.states = states[None]
        lent = []
        try:
            # Tied weights are put where the head's code looks for them.
            for target, source in self.tied.items():
                origin, origin_name = self._origin(source, base)
                holder, name = _holder(self.whole, target)
                holder._parameters[name] = origin._parameters[origin_name]
                lent.append((holder, name))
            logits = self.whole(input_ids=targets[None].clamp(min=0)).logits[0]
        finally:
            for holder, name in lent:
                holder._parameters[name] = None
            stand_in.states = None
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(
            logits, targets, ignore_index=IGNORED_TARGET, reduction="none"
        )

    def _origin(self, source: str, base: nn.Module) -> tuple[nn.Module, str]:
        """Return the module that holds a tied weight, and the weight's name there."""
        if source.startswith(self.prefix):
            return _holder(base, source.removeprefix(self.prefix))
        return _holder(self.whole, source)

    def lends(self, module: nn.Module, base: nn.Module) -> bool:
        """Return True if a module of the base model holds a weight that the head uses too. Sharded, it must stay
        gathered while the head runs."""
        inner = set(map(id, module.modules()))
        sources = self.tied.values()
        return any(id(self._origin(source, base)[0]) in inner for source in sources)


class GivenStates(nn.Module):
    """Stands in the place of the base model and gives the hidden states that it was handed."""

    states: Tensor | None = None

    def __init__(self, pooler: nn.Module | None = None) -> None:
        """`pooler`: the base model's layer over the first token, which only classifiers use."""
        super().__init__()
        self.pooler = pooler

    def forward(
        self, *_: Any, **__: Any
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return them."""
        pooled = None
        if self.pooler is not None and self.states is not None:
            pooled = self.pooler(self.states)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=self.states, pooler_output=pooled
        )


def save_with_head(
    folder: Path,
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    state: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
) -> None:
    """Write a model with its head as Transformers does. `kind`: the class of both. `state`: the base model's full state
    dict. `head`: that of the head."""
    config = deepcopy(config)
    # Kernels of vembed, which Transformers does not know. The files name no kernel.
    config._attn_implementation = "eager"
    with torch.device("meta"):
        whole = kind(config)
    prefix = f"{whole.base_model_prefix}."
    weights = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    weights |= {name.removeprefix("whole."): tensor for name, tensor in head.items()}
    whole.save_pretrained(folder, state_dict=weights)


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds a parameter, and the parameter's name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
