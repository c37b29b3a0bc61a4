"""Normalisation of option values: synonyms, comma-separated lists and text from the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vembed.config.options import Option, all_options
from vembed.config.parsing import parse_value
from vembed.models.poolings.table import POOLINGS
from vembed.training.optimizers.table import OPTIMIZERS
from vembed.training.trackers.table import TRACKERS

_WRAP = {
    "TRANSFORMER_BASED_WRAP": "transformer_auto_wrap transformer_auto_wrap_policy transformer",
    "SIZE_BASED_WRAP": "size_based_auto_wrap size_based_auto_wrap_policy size_based",
    "NO_WRAP": "none",
}
_DTYPE = {
    "bfloat16": "bf16 torch.bfloat16",
    "float16": "fp16 half torch.float16",
    "float32": "fp32 float torch.float32",
}
SPELLINGS: dict[str, dict[str, str]] = {
    "torch_dtype": {**_DTYPE, "pure_bfloat16": "pure_bf16 bf16_true"},
    "fsdp_param_dtype": _DTYPE,
    "fsdp_reduce_dtype": _DTYPE,
    "fsdp_buffer_dtype": _DTYPE,
    "mixed_precision": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "no": "none float32 fp32 false",
    },
    "attn_implementation": {"flash_attention_2": "flash_attention flash_attn flash"},
    "pooling": {name: pooling.spellings for name, pooling in POOLINGS.items()},
    "loss": {
        "infonce": "info_nce mnrl multiple_negatives_ranking multiplenegativesrankingloss contrastive",
        "cosent": "cosentloss",
        "cosine": "cosine_similarity",
        "sigmoid": "siglip",
    },
    "similarity": {"cosine": "cos cos_sim", "dot": "dot_score inner_product"},
    "sampling": {
        "proportional": "proportional_to_size",
        "round_robin": "roundrobin",
        "weights": "weighted",
    },
    "optim": {kind.name: kind.spellings for kind in OPTIMIZERS.values()},
    "lr_scheduler_type": {"constant": "constant_with_warmup none"},
    "scale_learning_rate": {"none": "no false"},
    "num_processes": {"auto": "-1 gpu"},
    "fsdp_sharding_strategy": {
        "FULL_SHARD": "full",
        "HYBRID_SHARD": "hybrid",
        "NO_SHARD": "none",
    },
    "fsdp_auto_wrap_policy": _WRAP,
    "fsdp_backward_prefetch": {"NO_PREFETCH": "none false"},
    "fsdp_state_dict_type": {
        "FULL_STATE_DICT": "full",
        "SHARDED_STATE_DICT": "sharded",
        "LOCAL_STATE_DICT": "local",
    },
    "report_to": {kind.name: kind.spellings for kind in TRACKERS.values()},
}
"""Map from option and value to the value's synonyms. Case is ignored; `-`, a space and `_` are equal."""

BOOLS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def as_bool(value: Any) -> bool:
    """Return the boolean that a word stands for. Raise ValueError for any other word."""
    if str(value).lower() not in BOOLS:
        raise ValueError("must be true or false")
    return BOOLS[str(value).lower()]


def normalise(name: str, value: Any) -> Any:
    """Return the canonical form of a value. An unknown value is returned unchanged, and the schema refuses it."""
    option = all_options()[name]
    words = {_fold(choice): choice for choice in option.choices}
    for choice, others in SPELLINGS.get(name, {}).items():
        words |= dict.fromkeys([*others.split(), _fold(choice)], choice)
    if name == "report_to":
        entries = value.split(",") if isinstance(value, str) else value
        trackers = []
        for entry in entries if isinstance(entries, list) else [entries]:
            is_none = entry in (None, False) or _fold(entry) in ("none", "")
            if not is_none:
                trackers.append(words.get(_fold(entry), entry))
        return trackers
    # Small numbers are words too: YAML reads `num_processes: -1` as a number.
    is_word = isinstance(value, str) or (isinstance(value, int) and -10 < value < 100)
    if is_word and _fold(value) in words:
        return words[_fold(value)]
    if isinstance(value, str):
        # "1" stays a number where an option takes both.
        if "bool" in option.kinds and value.lower() in BOOLS and not value.isdigit():
            return as_bool(value)
        if name == "fsdp_version" and value.strip() in ("1", "2"):
            return int(value)
    is_single = value is not None and not isinstance(value, list | Mapping)
    if "list" not in option.kinds or name == "data_path" or not is_single:
        return value
    if not isinstance(value, str):
        return [value]
    parts = [part.strip() for part in value.split(",")]
    if "text" in option.kinds:
        return parts[0] if len(parts) == 1 else parts
    return [parse_value(part) for part in parts]


def from_text(name: str, text: str) -> Any:
    """Parse a value of the command line for an option of training."""
    return value_of_text(all_options()[name], text)


def value_of_text(option: Option, text: str) -> Any:
    """Parse a value of the command line: options of plain text take the text itself, others are parsed as YAML."""
    if option.is_plain_text:
        return None if text == "null" and "null" in option.kinds else text
    value = parse_value(text)
    if isinstance(value, Mapping):
        return _pairs(value) if "mapping" in option.kinds else text
    if "text" in option.kinds and not isinstance(value, bool | list):
        return text
    return value


def _pairs(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Split keys of the form `a:b`. YAML reads {a:b} without a space as a key without a value."""
    pairs = {}
    for key, entry in value.items():
        name, colon, target = str(key).partition(":")
        if entry is not None or not colon:
            return dict(value)
        pairs[name.strip()] = target.strip()
    return pairs


def _fold(value: Any) -> str:
    # Only behind a letter or digit: the sign of -1 stays.
    return re.sub(r"(?<=\w)[\s-]+", "_", str(value).strip().lower())
