"""Facts about a model while its description is built, with its text settings: prompts, maximum length, padding side."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig

from vembed.config.schema import ModelSection
from vembed.errors import UserError
from vembed.models.families import backbones
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription
from vembed.models.families.model_files import (
    SentenceTransformersFiles,
    files_of,
    tokenizer_folder,
)
from vembed.models.families.model_settings import TokenizerSettings, read_settings
from vembed.models.families.table import Family
from vembed.models.families.weight_files import read_object

_BGE_ZH = "\u4e3a\u8fd9\u4e2a\u53e5\u5b50\u751f\u6210\u8868\u793a\u4ee5\u7528\u4e8e\u68c0\u7d22\u76f8\u5173\u6587\u7ae0\uff1a"
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"

PUBLISHED: tuple[tuple[str, str, str, str], ...] = (
    (
        "multilingual-e5-large-instruct",
        _WEB_SEARCH + "Query: ",
        "",
        "instruction-tuned E5",
    ),
    ("e5-mistral-7b-instruct", _WEB_SEARCH + "Query: ", "", "instruction-tuned E5"),
    (
        r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?",
        "query: ",
        "passage: ",
        "E5",
    ),
    (
        r"bge-(small|base|large)-en(-v1\.5)?",
        "Represent this sentence for searching relevant passages: ",
        "",
        "BGE",
    ),
    (r"bge-(small|base|large)-zh(-v1\.5)?", _BGE_ZH, "", "BGE"),
    (r"nomic-embed-text-v1(\.5)?", "search_query: ", "search_document: ", "Nomic"),
    (r"qwen3-embedding-(0\.6b|4b|8b)", _WEB_SEARCH + "Query:", "", "Qwen3-Embedding"),
    (
        r"qwen3-vl-embedding-(2b|8b)",
        "Represent the user's input.",
        "Represent the user's input.",
        "Qwen3-VL-Embedding",
    ),
)
"""Pattern of the name's last part (lower case), query prompt, document prompt, model series."""
OF_QUERIES, OF_DOCUMENTS = ("query",), ("document", "passage", "corpus")
"""Names of the prompts of queries and documents in a model's files."""


@dataclass
class Facts:
    """Facts about one model while its description is built."""

    options: ModelSection
    files: SentenceTransformersFiles | None
    saved: ModelDescription | None
    backbone: Path
    adapter: Path | None
    model_config: PretrainedConfig
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Transformers' name for the architecture."""
        return str(self.model_config.model_type)

    def of_saved(self, name: str) -> Any:
        """Return a value of the description saved with the model; None without a saved description."""
        return None if self.saved is None else self.saved.to_dict()[name]

    def of_tokenizer(self, name: str) -> Any:
        """Return a setting of the tokenizer; None if it is not set."""
        folder = tokenizer_folder(self.backbone, self.adapter)
        settings = (
            read_settings(folder / "tokenizer_config.json", TokenizerSettings)
            or TokenizerSettings()
        )
        return dict(settings).get(name)


def gather(options: ModelSection, *, use_qlora: bool) -> Facts:
    """Locate the model's files and read the small ones."""
    found = files_of(options)
    saved = read_object(found.folder / DESCRIPTION_FILE)
    if found.adapter is not None and use_qlora:
        raise UserError(
            f"use_qlora: {options.model_name} is an adapter without the weights below it; "
            "merge it first with `vembed export --merge`, and train the result"
        )
    return Facts(
        options=options,
        files=found.sentence_transformers,
        saved=None
        if saved is None
        else ModelDescription.from_dict(saved, found.folder),
        backbone=found.backbone,
        adapter=found.adapter,
        model_config=backbones.read_config(
            found.backbone, trust_remote_code=options.trust_remote_code
        ),
    )


def is_causal(facts: Facts, family: Family) -> bool:
    """Return True if attention is causal by default, before the option bidirectional_attention is applied."""
    return (
        backbones.is_decoder_only(facts.model_config)
        if family.is_causal is None
        else family.is_causal
    )


# ---- text settings ---------------------------------------------------------------------------------------------


def prompts(facts: Facts) -> tuple[str, str]:
    """Return the prompts of queries and documents."""
    return _prompt(facts, "query", OF_QUERIES), _prompt(facts, "document", OF_DOCUMENTS)


def other_prompts(facts: Facts) -> dict[str, str]:
    """Return the prompts of the model's files that are neither for queries nor for documents, by name."""
    if facts.saved is not None:
        return facts.saved.other_prompts
    named = facts.files.prompts if facts.files is not None else {}
    return {
        name: text
        for name, text in named.items()
        if name not in (*OF_QUERIES, *OF_DOCUMENTS)
    }


def default_prompt_name(facts: Facts) -> str | None:
    """Return the name under which the saved model has the default prompt of the model's files, if they name one."""
    if facts.saved is not None:
        return facts.saved.default_prompt_name
    own = facts.files.default_prompt_name if facts.files is not None else None
    # Other names for the prompt of documents are not saved.
    return "document" if own in OF_DOCUMENTS else own


def _prompt(
    facts: Facts, kind: Literal["query", "document"], names: tuple[str, ...]
) -> str:
    key = f"{kind}_prompt"
    asked = (
        facts.options.query_prompt if kind == "query" else facts.options.document_prompt
    )
    if asked is not None:
        facts.reasons[key] = f"{key} in the config"
        return asked
    if facts.saved is not None:
        facts.reasons[key] = f"from {DESCRIPTION_FILE}"
        return (
            facts.saved.query_prompt if kind == "query" else facts.saved.document_prompt
        )
    if facts.files is not None:
        for name in names:
            if name in facts.files.prompts:
                facts.reasons[key] = (
                    f"prompt {name!r} in config_sentence_transformers.json"
                )
                return facts.files.prompts[name]
        if facts.files.default_prompt is not None:
            facts.reasons[key] = "default prompt in config_sentence_transformers.json"
            return facts.files.default_prompt
    # A model whose files name any prompts is taken at its word; the table is for those published without.
    published = (
        None
        if facts.files is not None and facts.files.prompts
        else published_prompts(facts.options.model_name)
    )
    if published is None:
        return ""
    facts.reasons[key] = published[2]
    return published[0] if kind == "query" else published[1]


def max_length(facts: Facts, family: Family, *, for_use: bool) -> int:
    """Return the maximum text length in tokens. `for_use`: a length that the model's own files name is not limited by
    the family's default, which bounds the time and memory of training."""
    asked = facts.options.max_length
    text = facts.model_config.get_text_config()
    positions = text.to_dict().get("max_position_embeddings")
    if (
        positions is not None
        and positions > 0
        and facts.model_type in backbones.POSITIONS_AFTER_PADDING
    ):
        positions -= int(text.pad_token_id) + 1
    if not family.reads_text:
        facts.reasons["max_length"] = "an image encoder reads no text"
        return asked or family.longest_by_default
    if family.has_fixed_length:
        if asked not in (None, positions):
            raise UserError(
                f"max_length: {asked} does not fit {facts.options.model_name}: SigLIP pads every text to the "
                f"{positions} tokens it was trained with; leave max_length out"
            )
        facts.reasons["max_length"] = (
            "SigLIP pads every text to its number of positions"
        )
        return int(positions)
    if asked is not None:
        if positions is not None and asked > positions:
            raise UserError(
                f"max_length: {asked} is more than the {positions} positions of {facts.options.model_name}; "
                f"set it to {positions} or less"
            )
        facts.reasons["max_length"] = "max_length in the config"
        return asked
    longest = family.longest_by_default
    limits = {
        "positions in config.json": positions,
        f"default limit of {longest}; set max_length to change it": longest,
    }
    if facts.saved is not None:
        limits = {f"from {DESCRIPTION_FILE}": facts.saved.max_length}
    elif facts.files is not None and facts.files.max_length is not None:
        own = {"sentence_bert_config.json": facts.files.max_length}
        limits = (
            {"positions in config.json": positions, **own} if for_use else limits | own
        )
    else:
        limits["model_max_length in tokenizer_config.json"] = facts.of_tokenizer(
            "model_max_length"
        )
    # The smallest limit holds, and its reason is logged. Tokenizers without a limit say 1e30.
    known = {
        why: int(limit)
        for why, limit in limits.items()
        if limit is not None and limit > 0
    }
    reason = min(known, key=lambda why: known[why])
    facts.reasons["max_length"] = reason
    return known[reason]


def padding_side(facts: Facts, family: Family) -> Literal["left", "right"]:
    """Return the padding side: the tokenizer's for decoders with rotary positions, otherwise right.

    Absolute positions count from the first token, so left padding would shift them.
    """
    if facts.of_tokenizer("padding_side") != "left":
        return "right"
    if (
        is_causal(facts, family)
        and "rope_parameters" in facts.model_config.get_text_config().to_dict()
    ):
        return "left"
    facts.reasons["padding_side"] = (
        "its positions count from the first token, although the tokenizer pads on the left"
    )
    return "right"


def published_prompts(name: str) -> tuple[str, str, str] | None:
    """Return query prompt, document prompt and reason for a model known by name; otherwise None."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    for pattern, query, document, what in PUBLISHED:
        if re.fullmatch(pattern, last):
            return (
                query,
                document,
                f"{what} models were trained with it; recognised by the name {last}",
            )
    return None
