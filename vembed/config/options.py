"""Options: their metadata, names and spellings. Each source of their values (a file, the launcher, the command line) is a
Layer of checked values."""

import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vembed.config.parsing import Node, parse_value
from vembed.config.schema import Options, sections_and_fields
from vembed.config.values import ValueSyntax
from vembed.errors import did_you_mean, printable
from vembed.losses.table import LOSS_ENTRY_ONLY
from vembed.models.poolings.table import POOLINGS
from vembed.training.optimizer_kinds import OPTIMIZERS
from vembed.training.trackers.table import TRACKERS

COMMAND_LINE = "command line"
"""Name of the command line as a source of options, in messages."""
LONGEST_VALUE = 80
"""Characters of a value in a message."""

REPLACES = {
    "global_batch_size": "batch_size",
    "max_steps": "epochs",
}
"""Option -> the option that it replaces, which sets the same in another unit. A source that sets one of the two overrides
either of them in a weaker source."""


class Level(IntEnum):
    """Order of the sources, weakest first: a stronger one overrides a weaker one."""

    PRESET = 0
    """`configs/accelerate_fsdp.yaml`, if no Accelerate file is named."""
    ACCELERATE_FILE = 1
    """The Accelerate file or preset that the config or the command line names."""
    LAUNCHER = 2
    """What `accelerate launch` has set in the environment."""
    CONFIG = 3
    """The training config. A stage's block is part of it."""
    COMMAND_LINE = 4


@dataclass(frozen=True)
class OptionValue:
    """Value of an option in one source."""

    option: str
    value: Any
    key: str
    """Key as written: `fsdp.cpu_offload`."""
    place: str
    """`cfg.yaml, line 7`."""
    level: Level = Level.CONFIG
    is_weak_in_source: bool = False
    """True: another value of the option in the same source wins. `bf16: false` is weak beside `fp16: true`. A weak value
    still overrides weaker sources."""
    written_value: str = ""
    """Value as written, in YAML, where an alias has translated it."""

    @property
    def origin(self) -> str:
        """`cfg.yaml:7`."""
        return self.place.replace(", line ", ":")

    def __str__(self) -> str:
        return (
            f"{self.key}: {self.written_value or yaml_word(self.value)} ({self.place})"
        )


OptionValues = dict[str, OptionValue]
"""Values by option."""
OptionSettings = list[tuple[str, Any]]
"""Options with their values."""


class WeakInSource(str):
    """Option name in `OptionSettings` that applies only if its source does not set the option otherwise: `bf16: false`. The
    setting still overrides weaker sources."""

    __slots__ = ()


class NoEffect(str):
    """Target of a key that is understood and changes nothing: the reason."""

    __slots__ = ()


Translation = Callable[[Any], OptionSettings]
"""Function from a value to settings. It raises ValueError if the value is invalid."""


@dataclass
class Layer:
    """Options of one source and the problems in them. `loading` merges the layers of all sources, stronger over weaker."""

    name: str
    level: Level = Level.CONFIG
    values: OptionValues = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Log lines for keys without effect."""

    def value(self, option: str, default: Any = None) -> Any:
        """Return the value of an option, or the default if this source does not set it."""
        option_value = self.values.get(option)
        return default if option_value is None else option_value.value

    def add_keys(
        self,
        keys: Mapping[str, Node],
        outer_keys: str = "",
        block: str | None = None,
    ) -> "Layer":
        """Add the keys of a file with their values. Return the layer.

        `outer_keys`, `block`: of the block that contains the keys, see `add_key`.
        """
        for key, node in keys.items():
            place = node.place(self.name)
            path = key.split(".")
            self.add_key(path, node, place, block=block, outer_keys=outer_keys)
        return self

    def add_key(
        self,
        path: Sequence[str],
        value: Node | str,
        place: str,
        *,
        block: str | None = None,
        outer_keys: str = "",
    ) -> None:
        """Add one key of the source: an option under its name or an alias, or a block of them, key by key.

        `path`: the key, split at its dots. `value`: a node of a file, or a string of the command line. `place`: file and
        line, for messages. `block`: name of the block that contains the key, which has aliases of its own. `outer_keys`:
        the keys of all enclosing blocks as written, with their dots, for messages.
        """
        key, *inner = path
        name = key.strip().replace("-", "_")
        written_key = outer_keys + key
        # A block: its keys one by one.
        if name in OPTION_BLOCKS and block not in EVALUATION_BLOCKS:
            outer_keys = f"{written_key}."
            if inner:
                self.add_key(inner, value, place, block=name, outer_keys=outer_keys)
                return
            if isinstance(value, Node) and isinstance(value.value, dict):
                self.add_keys(value.value, outer_keys, name)
                return
        # What the key stands for: None (unknown), an option's name, a NoEffect, or a Translation, which is a function from
        # the value to (option, value) pairs.
        target = target_of(key, block)
        option = None if callable(target) else all_options().get(str(target))
        if isinstance(value, Node):
            plain = value.plain()
        elif option is not None and not inner:
            plain = option.parse(value)
        else:
            plain = parse_value(value)
        written_value = yaml_word(plain)
        if target is None or (inner and target != "column_mapping"):
            self._refuse_key(name, block, place)
        elif isinstance(target, NoEffect):
            self.notes.append(
                f"{written_key}: {written_value} has no effect: {target} ({place})"
            )
        elif inner:
            # Its keys are the user's column names: `column_mapping.title=query`.
            earlier = self.values.pop(name, None)
            columns = dict(earlier.value or {}) if earlier is not None else {}
            columns[".".join(inner)] = plain
            self.add_option(name, columns, written_key, place)
        elif not callable(target):
            self.add_option(target, plain, written_key, place)
        else:
            try:
                settings = target(plain)
            except ValueError as error:
                self.problems.append(
                    f"{place}: {written_key} {error}, but is {quoted(plain)}"
                )
                return
            for target_name, target_value in settings:
                self.add_option(
                    target_name, target_value, written_key, place, written_value
                )

    def add_option(
        self,
        option: str,
        value: Any,
        key: str,
        place: str,
        written_value: str = "",
    ) -> None:
        """Add an option under its own name, with its canonical value, or record a problem.

        `option`: its name, or a WeakInSource. `key`, `written_value`: key and value as written.
        """
        name = str(option)
        try:
            final = canonical(name, value)
        except ValueError as error:
            reason = str(error)
            if key != name:
                # By the key that the user knows.
                reason = reason.replace(name, f"{key} ({name})", 1)
            self.problems.append(f"{place}: {reason}")
            return
        # `strategy: auto` beside `fsdp: {enabled: true}` leaves the choice to the switch.
        is_weak_in_source = isinstance(option, WeakInSource) or final == "auto"
        new = OptionValue(
            name, final, key, place, self.level, is_weak_in_source, written_value
        )
        old = self.values.get(name)
        if old is None:
            self.values[name] = new
            return
        is_conflict = (
            old.value != final and not is_weak_in_source and not old.is_weak_in_source
        )
        if name == "report_to" and (is_weak_in_source or old.is_weak_in_source):
            # `use_wandb` asks for one tracker, and agrees with a list of several.
            is_conflict = ("wandb" in old.value) != ("wandb" in final)
        # `use_fsdp: false` sets `strategy: ddp`, as a weak value. Beside `strategy: fsdp` it is refused nevertheless, and not
        # overridden silently. `reshard_after_forward: true` beside SHARD_GRAD_OP is a case of the same kind.
        both = {str(old.value), str(final)}
        if is_conflict or both in ({"ddp", "fsdp"}, {"FULL_SHARD", "SHARD_GRAD_OP"}):
            self.problems.append(
                f"{place}: {new} and {old} both set {name}: keep one of them"
            )
        elif not is_weak_in_source:
            self.values[name] = new

    def _refuse_key(
        self,
        name: str,
        block: str | None,
        place: str,
    ) -> None:
        """Record the problem of an unknown key, with the reason or the nearest name."""
        for names, reason in REFUSED.items():
            if name in names.split():
                self.problems.append(f"{place}: {name!r} is not used here: {reason}")
                return
        hint = did_you_mean(name, known_names(block))
        if block in EVALUATION_BLOCKS and target_of(name) is not None:
            hint = (
                ": it sets the training, and stands outside of this block. Evaluation uses the run's micro_batch_tokens "
                "and max_length"
            )
        elif name in OPTION_BLOCKS:
            hint = f": it is a block of options, as {name}.OPTION=..."
        elif not hint:
            hint = "; `vembed schema --format markdown` lists all options"
        inside = f" in {block}" if block else ""
        self.problems.append(f"{place}: unknown option {quoted(name)}{inside}{hint}")


def canonical_layer(
    name: str,
    level: Level,
    options: Options,
) -> Layer:
    """Return a layer of options whose values have been checked already, and are in their canonical spelling."""
    layer = Layer(name, level)
    for option, value in options.items():
        layer.values[option] = OptionValue(option, value, option, name, level)
    return layer


def command_line_layer(overrides: Sequence[str]) -> tuple[Layer, str | None]:
    """Return the layer of `key=value` arguments, and the stage that they choose."""
    layer = Layer(COMMAND_LINE, Level.COMMAND_LINE)
    stage = None
    for text in overrides:
        key, is_pair, value = text.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not is_pair or not all(path):
            layer.problems.append(
                f"{COMMAND_LINE}: {quoted(text)} is not of the form key=value"
            )
        elif path == ["stage"]:
            stage = value
        else:
            layer.add_key(path, value, COMMAND_LINE)
    return layer, stage


# ---- spellings of values


_DTYPE = {
    "bfloat16": "bf16 torch.bfloat16",
    "float16": "fp16 half torch.float16",
    "float32": "fp32 float torch.float32",
}
SPELLINGS: dict[str, dict[str, str]] = {
    "torch_dtype": {**_DTYPE, "pure_bfloat16": "pure_bf16 bf16_true"},
    "fsdp_reduce_dtype": _DTYPE,
    "mixed_precision": {
        "bf16": "bfloat16 torch.bfloat16 bf16_mixed true",
        "fp16": "float16 half torch.float16 16_mixed fp16_mixed 16",
        "no": "none float32 fp32 float torch.float32 32_true 32 false",
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
    "fsdp_auto_wrap_policy": {
        "TRANSFORMER_BASED_WRAP": "transformer_auto_wrap transformer_auto_wrap_policy transformer",
        "SIZE_BASED_WRAP": "size_based_auto_wrap size_based_auto_wrap_policy size_based",
        "NO_WRAP": "none",
    },
    "fsdp_state_dict_type": {
        "FULL_STATE_DICT": "full",
        "SHARDED_STATE_DICT": "sharded",
        "LOCAL_STATE_DICT": "local",
    },
    "report_to": {kind.name: kind.spellings for kind in TRACKERS.values()},
}
"""Option -> canonical value -> the value's synonyms. Case is ignored, and `-`, a space and `_` are equal."""

BOOLS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
"""Word, in lower case -> the boolean that it stands for."""


def as_bool(value: Any) -> bool:
    """Return the boolean that a word stands for. Raise ValueError for any other word."""
    if str(value).lower() not in BOOLS:
        raise ValueError("must be true or false")
    return BOOLS[str(value).lower()]


def canonical(name: str, value: Any) -> Any:
    """Return the value of an option in its canonical spelling, validated. Raise ValueError if it has none."""
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
        return option.checked(trackers)
    # YAML reads `num_processes: -1` and `mixed_precision: false` as other types than text.
    if isinstance(value, str | int) and _fold(value) in words:
        return option.checked(words[_fold(value)])
    is_single = value is not None and not isinstance(value, list | Mapping)
    if isinstance(value, str) and "bool" in option.kinds and not value.isdigit():
        # "1" stays a number where an option takes both.
        value = BOOLS.get(value.lower(), value)
    elif "list" in option.kinds and name != "data_path" and is_single:
        parts = [part.strip() for part in str(value).split(",")]
        if not isinstance(value, str):
            value = [value]
        elif "text" not in option.kinds:
            value = [parse_value(part) for part in parts]
        elif len(parts) > 1:
            value = parts
    return option.checked(value)


def _fold(value: Any) -> str:
    """Return a value in the form in which spellings are compared: in lower case, with `_` in place of `-` and spaces."""
    # Only behind a letter or digit: the sign of -1 stays.
    return re.sub(r"(?<=\w)[\s-]+", "_", str(value).strip().lower())


# ---- names of options

ALIASES: dict[str, str] = {
    # model
    "model_name": "model model_name_or_path pretrained_model_name_or_path model_path model_id base_model",
    "model_revision": "revision",
    "model_arguments": "model_config model_kwargs",
    "tokenizer_name": "tokenizer processor_name tokenizer_name_or_path",
    "auxiliary_losses": "auxiliary_weights aux_losses",
    "image_model_name": "image_model",
    "torch_dtype": "dtype",
    "mixed_precision": "fsdp_param_dtype fsdp_mixed_precision",
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
    "patience": "early_stopping_patience",
    "eval_metric": "metric_for_best_model",
    "save_steps": "save_every",
    "logging_steps": "log_every log_interval log_every_n_steps",
    "run_name": "wandb_name",
    "push_to_hub": "hub_model_id",
    "resume": "resume_from_checkpoint",
}
"""Option -> its aliases. They are valid at the top of a config, inside every block, and as flags."""


def _flag(
    option: str,
    when_true: Any,
    when_false: Any = None,
) -> Translation:
    """Return the translation of a switch that stands for one value of an option.

    On sets `when_true`. Off sets `when_false`, if there is one, unless the same source sets the option otherwise.
    """

    def settings(value: Any) -> OptionSettings:
        if as_bool(value):
            return [(option, when_true)]
        return [] if when_false is None else [(WeakInSource(option), when_false)]

    return settings


def _precision(value: Any) -> OptionSettings:
    dtypes = {"bf16_true": "pure_bfloat16", "16_true": "float16"}
    dtype = dtypes.get(_fold(value))
    if dtype is None:
        return [("mixed_precision", value)]
    return [("torch_dtype", dtype), ("mixed_precision", "no")]


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e15:
        raise ValueError("must be a number above 0")
    return float(value)


def _warmup_share(value: Any) -> OptionSettings:
    # As a whole number, or above 1, it would count steps.
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(
            "must be from 0 to 1, and warmup_steps takes a number of steps"
        )
    return [("warmup_steps", float(value))]


_shard_switch = _flag("strategy", "fsdp", "ddp")


def _qlora(value: Any) -> OptionSettings:
    if as_bool(value):
        return [("quantize_weights", "nf4"), (WeakInSource("use_lora"), True)]
    return []


def _mrl_switch(value: Any) -> OptionSettings:
    return [("mrl_dims", "auto" if as_bool(value) else None)]


def _reshard(value: Any) -> OptionSettings:
    # Accelerate writes FSDP1's sharding strategies under this name too.
    if str(value).lower() not in BOOLS:
        return [("fsdp_sharding_strategy", value)]
    if as_bool(value):
        return [(WeakInSource("fsdp_sharding_strategy"), "FULL_SHARD")]
    return [("fsdp_sharding_strategy", "SHARD_GRAD_OP")]


def _fsdp_switch(value: Any) -> OptionSettings:
    """Parse `fsdp: true`, or Transformers' `fsdp: "full_shard auto_wrap offload"`."""
    if not value or str(value).lower() in BOOLS:
        return _shard_switch(value or False)
    words = {
        "offload": ("fsdp_offload_params", True),
        "auto_wrap": ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    }
    settings: OptionSettings = [("strategy", "fsdp")]
    for word in str(value).lower().split():
        settings.append(words.get(word, ("fsdp_sharding_strategy", word)))
    return settings


def _wandb_switch(value: Any) -> OptionSettings:
    trackers = ["tensorboard", "wandb"] if as_bool(value) else ["tensorboard"]
    return [(WeakInSource("report_to"), trackers)]


TRANSLATED: dict[str, Translation] = {
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
    "fsdp_reshard_after_forward": _reshard,
    "reshard_after_forward": _reshard,
    "use_mrl": _mrl_switch,
    "use_matryoshka": _mrl_switch,
    "use_qlora": _qlora,
    "load_in_4bit": _qlora,
    "use_rslora": _flag("lora_variant", "rslora", "lora"),
    "use_dora": _flag("lora_variant", "dora", "lora"),
    "warmup_ratio": _warmup_share,
    "use_wandb": _wandb_switch,
}
"""Alias -> the function that converts its value to settings of options."""

OPTION_BLOCKS: dict[str, dict[str, str]] = {
    "model": {},
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
    "lora": {"enabled": "use_lora"},
    "peft": {"enabled": "use_lora"},
    "mrl": {"enabled": "use_mrl"},
    "matryoshka": {"enabled": "use_mrl"},
    "distributed": {},
    "fsdp": {"enabled": "use_fsdp"},
    "fsdp_config": {},
    "evaluation": {},
    "eval": {},
    "logging": {"steps": "logging_steps", "file": "log_file"},
    "wandb": {"enabled": "use_wandb"},
    "checkpoint": {"steps": "save_steps"},
}
"""Block that may hold options -> the short names that are valid only inside it, each with the option, or key of TRANSLATED,
that it stands for. Full names and aliases of all options are valid in every block but EVALUATION_BLOCKS."""
EVALUATION_BLOCKS = frozenset({"evaluation", "eval"})
"""Blocks of evaluation's options and the validation data alone: a batch size or length in them would set the training."""

BLOCK_PREFIXES = {
    "model": "model_",
    "fsdp": "fsdp_",
    "fsdp_config": "fsdp_",
    "lora": "lora_",
    "peft": "lora_",
    "mrl": "mrl_",
    "matryoshka": "matryoshka_",
    "wandb": "wandb_",
    "eval": "eval_",
    "evaluation": "eval_",
}
"""Block -> the beginning of options' names and aliases that its keys may leave out: inside `fsdp:`, `min_num_params` is
`fsdp_min_num_params`."""

FIXED_IN_FSDP: dict[str, Any] = {
    "backward_prefetch": "BACKWARD_PRE",
    "limit_all_gathers": True,
    "use_orig_params": True,
    "buffer_dtype": "float32",
    "sync_module_states": True,
    "cpu_ram_efficient_loading": True,
}
"""FSDP options of other libraries, with or without `fsdp_` -> their fixed value here. FSDP2 always works so, and FSDP1 is
set so. They change nothing, and the log says so."""

REFUSED = {
    "early_stopping": "patience: 3 ends a run after three evaluations without a better score",
    "deepspeed": "DeepSpeed is not supported: use_fsdp: true shards the model",
    "save_strategy": "checkpoints are written every save_steps steps; save_steps: null for none before the end",
    "eval_strategy": "evaluation runs every eval_steps steps; eval_steps: null for none during training",
    "train_group_size train_n_passages": "all negatives of a record are read: for groups of 8 passages write max_negatives: 7",
    "batch_sampler": "no_duplicates: true keeps equal texts out of one batch; homogeneous_batches: true takes each "
    "batch from one source",
    "query_max_len passage_max_len document_max_len query_max_length passage_max_length": "max_length limits queries "
    "and documents; texts are not padded to it, so short ones cost nothing more",
    "normalize normalize_embeddings": "similarity: cosine, the default, brings embeddings to length 1; similarity: dot leaves their length",
    "adam_beta1 adam_beta2": "adam_betas: [0.9, 0.999] gives both",
    "drop_last": "the last incomplete batch of an epoch is left out, unless it is the only one",
    " ".join(
        LOSS_ENTRY_ONLY
    ): "it stands in an entry of losses, as losses: [{loss: infonce, focal_gamma: 2.0}] or [{loss: kl, distill_candidates: batch}]",
    "gradient_cache_chunk_size gc_chunk_size mini_batch_size": "micro_batch_tokens bounds a micro-batch by its padded "
    "tokens, so that its memory is the same for short and long "
    "texts: for 8 rows of at most 512 tokens write micro_batch_tokens: 4096",
    "negatives_from negatives_cross_device gather_across_devices": "candidates are always those of the whole "
    "global batch, so that the loss is the same on any number of processes",
    "stage": "it chooses one of the blocks under training_stages, and this config has none",
}
"""Keys of other libraries, one or several with spaces between, for features that vembed does not have, or has under another
name -> what to write instead."""
_OPTION_OF_ALIAS: dict[str, str] = {
    name: option for option, names in ALIASES.items() for name in names.split()
}


def target_of(key: str, block: str | None = None) -> str | Translation | None:
    """Return what a key stands for, inside a block or flat: an option, a `NoEffect`, or a translation; None if the key
    is unknown."""
    name = key.strip().replace("-", "_")
    block_prefix = ""
    if block is not None:
        name = OPTION_BLOCKS[block].get(name, name)
        block_prefix = BLOCK_PREFIXES.get(block, "")
    # With the prefix first: `offload_params` inside `fsdp:` is FSDP's, whatever the name means at the top.
    for candidate in (block_prefix + name, name):
        option = all_options().get(_OPTION_OF_ALIAS.get(candidate, candidate))
        if block in EVALUATION_BLOCKS:
            if option is not None and is_of_evaluation(option):
                return option.name
            continue
        if option is not None:
            return option.name
        if candidate in TRANSLATED:
            return TRANSLATED[candidate]
        fixed = FIXED_IN_FSDP.get(candidate.removeprefix("fsdp_"))
        if fixed is not None:
            word = yaml_word(fixed)
            return NoEffect(f"FSDP2 always works as with {word}, and FSDP1 does here")
    return None


def is_of_evaluation(option: "Option") -> bool:
    """Return whether an option may stand in a block of evaluation."""
    others = ("val_data_path", "val_split", "load_best_model_at_end")
    return option.section == "evaluation" or option.name in others


def known_names(block: str | None = None) -> list[str]:
    """Return every key that is valid in a block or at the top, for suggestions after a typing error."""
    names = [*all_options(), *_OPTION_OF_ALIAS, *TRANSLATED, *OPTION_BLOCKS]
    if block is None:
        return names
    block_prefix = BLOCK_PREFIXES.get(block, "")
    short_names = [name.removeprefix(block_prefix) for name in names]
    names = [*OPTION_BLOCKS[block], *short_names, *names]
    if block in EVALUATION_BLOCKS:
        names = [name for name in names if target_of(name, block) is not None]
    return names


@dataclass(frozen=True)
class Option:
    """Metadata of one option, for messages, the command line and the documentation."""

    name: str
    section: str
    field: FieldInfo
    accepts: str
    """Accepted values, in words."""
    choices: tuple[str, ...]
    """Accepted words, if the option is an enumeration."""
    kinds: frozenset[str]
    """Accepted types besides the choices: "bool", "int", "float", "text", "list", "mapping", "null"."""
    entry: type[BaseModel] | None
    """Model of a mapping, or of the entries of a list, that has keys of its own."""

    @property
    def text(self) -> str:
        """Documentation of the option."""
        return self.field.description or ""

    @property
    def is_required(self) -> bool:
        """True if the option has no default."""
        return self.field.is_required()

    @cached_property
    def default(self) -> Any:
        """Value where none is given."""
        default = self.field.get_default(call_default_factory=True)
        return None if default is PydanticUndefined else default

    @property
    def is_plain_text(self) -> bool:
        """True if the option accepts any text."""
        return not self.choices and self.kinds in ({"text"}, {"text", "null"})

    def parse(self, text: str) -> Any:
        """Parse a value of the command line: options of plain text take the text itself, others are parsed as YAML."""
        if self.is_plain_text:
            return None if text == "null" and "null" in self.kinds else text
        value = parse_value(text)
        if isinstance(value, Mapping):
            return dict(value) if "mapping" in self.kinds else text
        if "text" in self.kinds and not isinstance(value, bool | list):
            return text
        return value

    def checked(self, value: Any) -> Any:
        """Return the validated value. Raise ValueError with the accepted values and the given one."""
        annotation = self.field.rebuild_annotation()
        adapter = TypeAdapter(annotation, config={"coerce_numbers_to_str": True})
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(self._refusal(value, error)) from None

    def _refusal(self, value: Any, error: ValidationError) -> str:
        # Of a union pydantic lists the problems with each member. The one furthest inside says most.
        problem = max(error.errors(), key=lambda entry: len(entry["loc"]))
        place = self.name
        key = ""
        keys = [] if self.entry is None else list(self.entry.model_fields)
        for part in problem["loc"]:
            if isinstance(part, int):
                place += f", entry {part + 1}"
            elif part in keys or problem["type"] == "extra_forbidden":
                key = part
        entry = problem["input"]  # of a list, the one that is refused
        if problem["type"] == "extra_forbidden":
            hint = did_you_mean(key, keys)
            return f"{place}: unknown key {key!r}{hint}; an entry may have {', '.join(keys)}"
        is_value_error = problem["type"] == "value_error"
        if is_value_error and isinstance(value, Mapping | list):
            return f"{place}: {problem['msg'].removeprefix('Value error, ')}"
        if key or problem["type"] in ("too_short", "too_long"):
            message = problem["msg"].replace("Input should", "must")
            message = message.replace("List should", "must")
            where = f"{place}: {key}" if key else place
            return f"{where} {message}, but is {quoted(entry)}"
        hint = did_you_mean(entry, self.choices) if isinstance(entry, str) else ""
        return f"{self.name} must be {self.accepts}, but is {quoted(value)}{hint}"


@cache
def all_options() -> dict[str, Option]:
    """Return every option by name, in the order of the schema."""
    options = {}
    for name, (section, option_field) in sections_and_fields().items():
        options[name] = field_option(name, option_field, section)
    return options


def field_option(
    name: str,
    field: FieldInfo,
    section: str = "",
) -> Option:
    """Return the metadata of an option from its field."""
    words, choices, kinds = _accepted(field.annotation, field.metadata)
    return Option(
        name=name,
        section=section,
        field=field,
        accepts=join_words(words),
        choices=tuple(choices),
        kinds=frozenset(kinds),
        entry=_entry_model(field.annotation),
    )


def quoted(value: Any) -> str:
    """Return a short representation of a value for messages, with strings in quotes."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return printable(text, LONGEST_VALUE)


def yaml_word(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, str) and len(value) <= LONGEST_VALUE:
        return value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | Mapping | BaseModel):
        # Of an entry, the options that are given.
        text = json.dumps(
            value,
            ensure_ascii=False,
            default=lambda entry: entry.model_dump(exclude_unset=True),
        )
        return printable(text, LONGEST_VALUE)
    return quoted(value)


def join_words(words: Sequence[str]) -> str:
    """Return the words as `a, b or c`."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " or " + words[-1]


def _entry_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside a type annotation, as DataSource in `str | list[str | DataSource]`."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for member in get_args(annotation):
        model = _entry_model(member)
        if model is not None:
            return model
    return None


_LIMITS: dict[type, str] = {
    Gt: "above {0.gt:g}",
    Ge: "{0.ge:g} or above",
    Le: "at most {0.le:g}",
    Lt: "below {0.lt:g}",
}


def _accepted(
    annotation: Any, metadata: Iterable[Any] = ()
) -> tuple[list[str], list[str], set[str]]:
    """Return (alternatives in words, accepted words, kinds of other values) of a type annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _accepted(inner, [*metadata, *extra])
    if origin in (Union, types.UnionType):
        words = []
        choices = []
        kinds = set()
        for member in get_args(annotation):
            member_words, member_choices, member_kinds = _accepted(member, metadata)
            words += member_words
            choices += member_choices
            kinds |= member_kinds
        return words, choices, kinds
    if origin is Literal:
        values = get_args(annotation)
        texts = [value for value in values if isinstance(value, str)]
        kinds = set() if texts else {"int"}
        return [str(value) for value in values], texts, kinds
    if origin is list:
        words, choices, _ = _accepted(get_args(annotation)[0])
        return [f"a list, each entry {join_words(words)}"], choices, {"list"}
    if origin is dict:
        return ["names in the form {yours: ours}"], [], {"mapping"}
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return ["{" + ", ".join(annotation.model_fields) + "}"], [], {"mapping"}
    if annotation is bool:
        return ["true", "false"], [], {"bool"}
    if annotation is str:
        forms = [str(item) for item in metadata if isinstance(item, ValueSyntax)]
        return forms[:1] or ["text"], [], {"text"}
    if annotation is type(None):
        return [], [], {"null"}
    # The limits of a number, without the technical one of 64-bit integers.
    limits = []
    for item in metadata:
        for bound in item.metadata if isinstance(item, FieldInfo) else [item]:
            if type(bound) in _LIMITS and bound != Lt(2**63):
                limits.append(_LIMITS[type(bound)].format(bound))
    range_text = f" ({', '.join(limits)})" if limits else ""
    if annotation is int:
        return [f"a whole number{range_text}"], [], {"int"}
    return [f"a number{range_text}"], [], {"float"}
