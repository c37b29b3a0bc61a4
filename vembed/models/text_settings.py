"""Text settings of a model: prompts, maximum length and padding side."""

from __future__ import annotations

from typing import Literal

from vembed.errors import UserError
from vembed.models.description import DESCRIPTION_FILE, Family
from vembed.models.facts import Facts, is_causal
from vembed.models.prompts import published_prompts

LONGEST_BY_DEFAULT = 512
LONGEST_BY_DEFAULT_WITH_IMAGES = 8192
"""Default for vision-language models. Image tokens count too and must not be truncated."""
_OFFSET_POSITIONS = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "roberta-prelayernorm"}
)
"""Model types whose positions start after the padding token's id, which leaves fewer for the text."""


def prompts(facts: Facts) -> tuple[str, str]:
    """Return the prompts of queries and documents."""
    return _prompt(facts, "query", ("query",)), _prompt(facts, "document", ("document", "passage", "corpus"))


def _prompt(facts: Facts, kind: Literal["query", "document"], names: tuple[str, ...]) -> str:
    key = f"{kind}_prompt"
    asked = facts.config.query_prompt if kind == "query" else facts.config.document_prompt
    if asked is not None:
        facts.reasons[key] = f"{key} in the config"
        return asked
    if facts.saved is not None:
        facts.reasons[key] = f"from {DESCRIPTION_FILE}"
        return facts.saved.query_prompt if kind == "query" else facts.saved.document_prompt
    if facts.files is not None:
        for name in names:
            if name in facts.files.prompts:
                facts.reasons[key] = f"prompt {name!r} in config_sentence_transformers.json"
                return facts.files.prompts[name]
        if facts.files.default_prompt is not None:
            facts.reasons[key] = "default prompt in config_sentence_transformers.json"
            return facts.files.default_prompt
    published = None if facts.files is not None and facts.files.prompts else published_prompts(facts.config.model_name)
    if published is None:
        return ""
    facts.reasons[key] = published[2]
    return published[0] if kind == "query" else published[1]


def max_length(facts: Facts, family: Family) -> int:
    """Return the maximum text length in tokens."""
    asked = facts.config.max_length
    text = facts.model_config.get_text_config()
    positions = text.to_dict().get("max_position_embeddings")
    if positions is not None and positions > 0 and facts.model_type in _OFFSET_POSITIONS:
        positions -= int(text.pad_token_id) + 1
    if family == "image_encoder":
        facts.reasons["max_length"] = "an image encoder reads no text"
        return asked or LONGEST_BY_DEFAULT
    if family == "siglip":
        if asked not in (None, positions):
            raise UserError(
                f"max_length: {asked} does not fit {facts.config.model_name}: SigLIP pads every text to the "
                f"{positions} tokens it was trained with; leave max_length out"
            )
        facts.reasons["max_length"] = "SigLIP pads every text to its number of positions"
        return int(positions)
    if asked is not None:
        if positions is not None and asked > positions:
            raise UserError(
                f"max_length: {asked} is more than the {positions} positions of {facts.config.model_name}; "
                f"set it to {positions} or less"
            )
        facts.reasons["max_length"] = "max_length in the config"
        return asked
    longest = LONGEST_BY_DEFAULT_WITH_IMAGES if family == "vision_language" else LONGEST_BY_DEFAULT
    limits = {
        "positions in config.json": positions,
        f"default limit of {longest}; set max_length to change it": longest,
    }
    if facts.saved is not None:
        limits = {f"from {DESCRIPTION_FILE}": facts.saved.max_length}
    elif facts.files is not None and facts.files.max_length is not None:
        limits["sentence_bert_config.json"] = facts.files.max_length
    else:
        limits["model_max_length in tokenizer_config.json"] = facts.of_tokenizer("model_max_length")
    known = {why: int(limit) for why, limit in limits.items() if limit is not None and limit > 0}
    reason = min(known, key=lambda why: known[why])
    facts.reasons["max_length"] = reason
    return known[reason]


def padding_side(facts: Facts, family: Family) -> Literal["left", "right"]:
    """Return the padding side: the tokenizer's for decoders with rotary positions, otherwise right.

    Absolute positions count from the first token, so left padding would shift them.
    """
    if facts.of_tokenizer("padding_side") != "left":
        return "right"
    if is_causal(facts, family) and "rope_parameters" in facts.model_config.get_text_config().to_dict():
        return "left"
    facts.reasons["padding_side"] = "its positions count from the first token, although the tokenizer pads on the left"
    return "right"
