"""Names and spellings that other libraries use: keys, flat or in a block, and words for values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vembed.config.options import Option, all_options
from vembed.config.parsing import parse_value
from vembed.models.poolings.table import POOLINGS
from vembed.training.optimizer_kinds import OPTIMIZERS
from vembed.training.trackers import TRACKERS

# ---- spellings of values


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
    "fsdp_reduce_dtype": _DTYPE,
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


# ---- names of options

Setting = tuple[str, Any]
"""An option and its value."""


class WeakDefault(str):
    """Option name in a `Setting` that applies only if nothing else sets the option: `bf16: false`."""

    __slots__ = ()


class NoEffect(str):
    """Target of a key that is understood and changes nothing: the reason."""

    __slots__ = ()


Target = str | Callable[[Any], list[Setting]]
"""Target of a key: an option, a `NoEffect`, or a function from the value to settings that raises ValueError if the value
is invalid."""

ALIASES: dict[str, str] = {
    # model
    "model_name": "model model_name_or_path pretrained_model_name_or_path model_path model_id base_model",
    "model_revision": "revision",
    "model_arguments": "model_config model_kwargs",
    "tokenizer_name": "tokenizer processor_name tokenizer_name_or_path",
    "auxiliary_losses": "auxiliary_weights aux_losses",
    "image_model_name": "image_model",
    "torch_dtype": "dtype",
    "max_length": "max_seq_length max_seq_len model_max_length max_len",
    "pooling": "pooling_mode pooling_method",
    "query_prompt": "query_instruction query_prefix query_instruction_for_retrieval",
    "document_prompt": "document_prefix document_instruction passage_prompt passage_prefix passage_instruction",
    "gradient_checkpointing": "use_gradient_checkpointing fsdp_activation_checkpointing activation_checkpointing",
    # head, adapters
    "mrl_dims": "matryoshka_dims",
    "mrl_weights": "matryoshka_weights",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    # data
    "data_path": "data train_data train_file train_path train_data_path train_dataset dataset dataset_name",
    "val_data_path": "val_data val_file val_path eval_data eval_file eval_data_path validation_data validation_file",
    "image_root": "image_dir image_folder",
    "num_workers": "dataloader_num_workers",
    # loss
    "loss": "loss_type",
    "similarity": "similarity_fct",
    "temperature": "tau",
    "bidirectional": "symmetric",
    "margin": "triplet_margin circle_margin",
    # batch and step
    "batch_size": "per_device_train_batch_size per_device_batch_size train_batch_size",
    "global_batch_size": "effective_batch_size",  # includes gradient accumulation: loading divides
    "gradient_accumulation_steps": "accumulate_grad_batches accumulation_steps",
    "use_gradient_cache": "gradient_cache grad_cache",
    # optimisation
    "epochs": "num_train_epochs num_epochs max_epochs",
    "max_steps": "max_train_steps",
    "learning_rate": "lr base_lr",
    "optim": "optimizer optimizer_type",
    "weight_decay": "wd",
    "adam_betas": "betas",
    "adam_epsilon": "adam_eps",
    "warmup_steps": "num_warmup_steps",
    "lr_scheduler_type": "scheduler lr_scheduler scheduler_type",
    "max_grad_norm": "grad_clip gradient_clip_norm gradient_clip_val clip_grad_norm",
    "seed": "random_seed",
    # distributed
    "accelerate_config": "fsdp_config",
    "num_processes": "devices nproc nproc_per_node num_gpus gpus",
    "num_machines": "num_nodes nnodes",
    "fsdp_sharding_strategy": "sharding_strategy",
    "fsdp_offload_params": "offload_params fsdp_cpu_offload cpu_offload",
    "fsdp_auto_wrap_policy": "auto_wrap_policy wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap fsdp_transformer_cls_to_wrap",
    "fsdp_forward_prefetch": "forward_prefetch",
    "fsdp_state_dict_type": "state_dict_type",
    "sync_batchnorm": "sync_bn",
    # evaluation, logging, saving
    "output_dir": "output output_path save_dir",
    "eval_steps": "evaluation_steps eval_every",
    "eval_metric": "metric_for_best_model",
    "save_steps": "save_every",
    "logging_steps": "log_every log_interval log_every_n_steps",
    "run_name": "wandb_name",
    "push_to_hub": "hub_model_id",
    "resume": "resume_from_checkpoint",
}
"""Map from an option to its aliases. They are valid at the top of a config, inside every block, and as flags."""


def _flag(
    option: str, when_true: Any, when_false: Any = None
) -> Callable[[Any], list[Setting]]:
    """Return the parser of a switch for one value of an option. Off sets `when_false` only if nothing else does."""

    def settings(value: Any) -> list[Setting]:
        if as_bool(value):
            return [(option, when_true)]
        return [] if when_false is None else [(WeakDefault(option), when_false)]

    return settings


def _precision(value: Any) -> list[Setting]:
    word = str(value).lower().replace("_", "-")
    if word in ("bf16-true", "16-true"):
        dtype = "pure_bfloat16" if word == "bf16-true" else "float16"
        return [("torch_dtype", dtype), ("mixed_precision", "no")]
    words = {
        "bf16": "bf16-mixed bf16",
        "fp16": "16-mixed fp16-mixed fp16 16",
        "no": "32-true fp32 32 no",
    }
    for precision, spellings in words.items():
        if word in spellings.split():
            return [("mixed_precision", precision)]
    raise ValueError("must be bf16-mixed, 16-mixed, bf16-true or 32-true")


def _param_dtype(value: Any) -> list[Setting]:
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
    for dtype, others in _DTYPE.items():
        if str(value).lower() in (dtype, *others.split()):
            return [("mixed_precision", precision[dtype])]
    raise ValueError("must be bfloat16, float16 or float32")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number above 0")
    if not 0 < value < 1e15:
        raise ValueError("must be a number above 0")
    return float(value)


def _warmup_ratio(value: Any) -> list[Setting]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ValueError("must be a number from 0 to 1")
    return [("warmup_steps", float(value))]


def _shard_switch(value: Any) -> list[Setting]:
    if as_bool(value):
        return [("strategy", "fsdp")]
    return [(WeakDefault("strategy"), "ddp")]


def _qlora(value: Any) -> list[Setting]:
    if as_bool(value):
        return [("quantize_weights", "nf4"), (WeakDefault("use_lora"), True)]
    return []


def _mrl_switch(value: Any) -> list[Setting]:
    return [("mrl_dims", "auto" if as_bool(value) else None)]


def _reshard(value: Any) -> list[Setting]:
    # Accelerate writes FSDP1's sharding strategies under this name too.
    if str(value).lower() in (
        "full_shard",
        "shard_grad_op",
        "no_shard",
        "hybrid_shard",
    ):
        return [("fsdp_sharding_strategy", value)]
    if as_bool(value):
        return [(WeakDefault("fsdp_sharding_strategy"), "FULL_SHARD")]
    return [("fsdp_sharding_strategy", "SHARD_GRAD_OP")]


def _fsdp_switch(value: Any) -> list[Setting]:
    """Parse `fsdp: true`, or Transformers' `fsdp: "full_shard auto_wrap offload"`."""
    if isinstance(value, bool) or str(value).lower() in ("", "true", "false"):
        return _shard_switch(value or False)
    words: dict[str, Setting] = {
        "full_shard": ("fsdp_sharding_strategy", "FULL_SHARD"),
        "shard_grad_op": ("fsdp_sharding_strategy", "SHARD_GRAD_OP"),
        "hybrid_shard": ("fsdp_sharding_strategy", "HYBRID_SHARD"),
        "no_shard": ("fsdp_sharding_strategy", "NO_SHARD"),
        "offload": ("fsdp_offload_params", True),
        "auto_wrap": ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    }
    settings = [("strategy", "fsdp")]
    for word in str(value).lower().split():
        if word not in words:
            raise ValueError(
                f"must be true, false, or some of the words {', '.join(words)}"
            )
        settings.append(words[word])
    return settings


def _wandb_switch(value: Any) -> list[Setting]:
    trackers = ["tensorboard", "wandb"] if as_bool(value) else ["tensorboard"]
    return [(WeakDefault("report_to"), trackers)]


TRANSLATED: dict[str, Callable[[Any], list[Setting]]] = {
    "bf16": _flag("mixed_precision", "bf16", "no"),
    "fp16": _flag("mixed_precision", "fp16", "no"),
    "precision": _precision,
    "flash_attention": _flag("attn_implementation", "flash_attention_2"),
    "use_flash_attention_2": _flag("attn_implementation", "flash_attention_2"),
    "sampling_alpha": lambda value: [("sampling", f"temperature({value})")],
    "scale": lambda value: [("temperature", 1.0 / _number(value))],
    "ddp_timeout": lambda value: [("dist_timeout_minutes", _number(value) / 60)],
    "fsdp": _fsdp_switch,
    "use_fsdp": _shard_switch,
    "fsdp_mixed_precision": lambda value: [
        ("mixed_precision", "bf16" if as_bool(value) else "no")
    ],
    "fsdp_param_dtype": _param_dtype,
    "fsdp_reshard_after_forward": _reshard,
    "reshard_after_forward": _reshard,
    "use_mrl": _mrl_switch,
    "use_matryoshka": _mrl_switch,
    "use_qlora": _qlora,
    "load_in_4bit": _qlora,
    "use_rslora": _flag("lora_variant", "rslora", "lora"),
    "use_dora": _flag("lora_variant", "dora", "lora"),
    "warmup_ratio": _warmup_ratio,
    "use_wandb": _wandb_switch,
}
"""Aliases whose values must be converted."""

BLOCKS: dict[str, dict[str, Target]] = {
    "model": {"name": "model_name", "path": "model_name"},
    "data": {
        "path": "data_path",
        "train": "data_path",
        "val": "val_data_path",
        "validation": "val_data_path",
    },
    "training": {},
    "train": {},
    "trainer": {},
    "optimizer": {"name": "optim", "type": "optim", "eps": "adam_epsilon"},
    "scheduler": {"name": "lr_scheduler_type", "type": "lr_scheduler_type"},
    "loss": {"name": "loss", "type": "loss"},
    "lora": {"enabled": "use_lora", "rank": "lora_r"},
    "peft": {
        "enabled": "use_lora",
        "r": "lora_r",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
    },
    "mrl": {"enabled": _mrl_switch},
    "matryoshka": {
        "enabled": _mrl_switch,
        "dims": "mrl_dims",
        "weights": "mrl_weights",
    },
    "distributed": {},
    "fsdp": {"enabled": _shard_switch, "config": "accelerate_config"},
    "fsdp_config": {},
    "evaluation": {"steps": "eval_steps", "metric": "eval_metric"},
    "eval": {"data": "val_data_path"},
    "logging": {"steps": "logging_steps", "file": "log_file"},
    "wandb": {"enabled": _wandb_switch, "name": "run_name"},
    "checkpoint": {"steps": "save_steps"},
}
"""Blocks that may hold options, with their short names. Option names and aliases are valid in every block."""

PREFIXES = {
    "fsdp": "fsdp_",
    "fsdp_config": "fsdp_",
    "lora": "lora_",
    "mrl": "mrl_",
    "wandb": "wandb_",
    "eval": "eval_",
}
"""Prefix added to keys of a block: inside `fsdp:`, `min_num_params` is `fsdp_min_num_params`."""

FIXED_IN_FSDP: dict[str, Any] = {
    "backward_prefetch": "BACKWARD_PRE",
    "limit_all_gathers": True,
    "use_orig_params": True,
    "buffer_dtype": "float32",
    "sync_module_states": True,
    "cpu_ram_efficient_loading": True,
}
"""FSDP options of other libraries, with or without `fsdp_`, that FSDP2 lacks since it always works in one way, and that
FSDP1 gets in the same way: the value. They are accepted, with a note."""

REFUSED = {
    "deepspeed": "DeepSpeed is not supported: use_fsdp: true shards the model",
    "save_strategy": "checkpoints are written every save_steps steps; save_steps: null for none before the end",
    "eval_strategy": "evaluation runs every eval_steps steps; eval_steps: null for none during training",
    **dict.fromkeys(
        ("train_group_size", "train_n_passages"),
        "all negatives of a record are read: for groups of 8 passages write max_negatives: 7",
    ),
    "batch_sampler": "no_duplicates: true keeps equal texts out of one batch; homogeneous_batches: true takes each "
    "batch from one source",
    **dict.fromkeys(
        (
            "query_max_len",
            "passage_max_len",
            "document_max_len",
            "query_max_length",
            "passage_max_length",
        ),
        "max_length limits queries and documents; texts are not padded to it, so short ones cost nothing more",
    ),
    **dict.fromkeys(
        ("normalize", "normalize_embeddings"),
        "similarity: cosine, the default, brings embeddings to length 1; similarity: dot leaves their length",
    ),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2"), "adam_betas: [0.9, 0.999] gives both"
    ),
    "lora_towers": "freeze: [vision] (or [text]) keeps adapters out of a tower",
    "anchor_weight": "losses: [{loss: infonce}, {loss: anchor, weight: 1.0}] adds the term",
    "drop_last": "the last incomplete batch of an epoch is left out, unless it is the only one",
    "layer_lr_decay": "freeze: [first_n_layers=6] or head_learning_rate treats parts of a model differently",
    "guide_margin_kind": "guide_margin: 5% is a share of the score, guide_margin: 0.05 a difference",
    **dict.fromkeys(
        ("eval_ks", "ks"),
        "evaluations have the cut-offs 1, 5, 10, 100 and that of eval_metric, such as ndcg@20; `vembed eval --ks` takes others",
    ),
    **dict.fromkeys(
        ("gradient_cache_chunk_size", "gc_chunk_size", "mini_batch_size"),
        "micro_batch_tokens bounds a micro-batch by its padded tokens, so that its memory is the same for short and long "
        "texts: for 8 rows of at most 512 tokens write micro_batch_tokens: 4096",
    ),
    "save_dtype": "torch_dtype is the dtype of final/ too: torch_dtype: bfloat16 stores it in bfloat16",
    **dict.fromkeys(
        ("negatives_from", "negatives_cross_device", "gather_across_devices"),
        "candidates are always those of the whole global batch, so that the loss is the same on any number of processes",
    ),
    "mask_duplicates": "candidates that equal the row's query or one of its positives are always left out",
    **dict.fromkeys(
        ("query_query_negatives", "document_document_negatives"),
        "write same_side_negatives: queries, documents or both",
    ),
    "language_modelling": "loss: none trains by the language-model head, and auxiliary_losses: {next_token: 0.1} beside a loss",
    "composed_dim": "mrl_dims: [512] gives the shared space of a composed model 512 dimensions",
    "stage": "it chooses one of the blocks under training_stages, and this config has none",
}
"""Known keys for features that vembed does not have, with the message."""
FORMER_DEFAULTS = {
    "drop_last": True,
    "language_modelling": "auto",
    "negatives_from": "all_ranks",
    "negatives_cross_device": True,
    "gather_across_devices": True,
    "mask_duplicates": True,
    "query_query_negatives": False,
    "document_document_negatives": False,
    "save_dtype": "auto",
    "eval_ks": [1, 5, 10, 100],
    "layer_lr_decay": 1.0,
    "guide_margin_kind": "absolute",
}
"""The values of refused keys that say what happens in any case. They are accepted."""

_FLAT: dict[str, str] = {
    name: option for option, names in ALIASES.items() for name in names.split()
}


def target_of(key: str, block: str | None = None) -> Target | None:
    """Return the target of a key, inside a block or flat; None if the key is unknown."""
    name = key.strip().replace("-", "_")
    options = all_options()
    if block is not None and name in BLOCKS[block]:
        return BLOCKS[block][name]
    # With the prefix first: `offload_params` inside `fsdp:` is FSDP's, whatever the name means at the top.
    for candidate in (PREFIXES.get(block or "", "") + name, name):
        if candidate in options:
            return candidate
        if candidate in _FLAT:
            return _FLAT[candidate]
        if candidate in TRANSLATED:
            return TRANSLATED[candidate]
        fixed = FIXED_IN_FSDP.get(candidate.removeprefix("fsdp_"))
        if fixed is not None:
            word = str(fixed).lower() if fixed is True else fixed
            return NoEffect(f"FSDP2 always works as with {word}, and FSDP1 does here")
    return None


def option_of(key: str) -> str | None:
    """Return the option that a key of a config or of the command line names, also inside a block (`model.name`). None
    for an unknown key, and for one that stands for several options."""
    *outer, name = key.split(".")
    block = outer[0].strip().replace("-", "_") if outer else None
    if len(outer) > 1 or (block is not None and block not in BLOCKS):
        return None
    target = target_of(name, block)
    if isinstance(target, NoEffect) or not isinstance(target, str):
        return None
    return str(target)


def known_names(block: str | None = None) -> list[str]:
    """Return every key that is valid in a block or at the top, for suggestions after a typing error."""
    names = [*all_options(), *_FLAT, *TRANSLATED, *BLOCKS]
    if block is None:
        return names
    prefix = PREFIXES.get(block, "")
    short_names = []
    for name in all_options():
        if name.startswith(prefix):
            short_names.append(name.removeprefix(prefix))
    return [*BLOCKS[block], *short_names, *names]
