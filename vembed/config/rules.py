"""Rules across options: one function and one message per rule. No rule needs a model or a device."""

from __future__ import annotations

import re
from pathlib import PurePath

from vembed.config.contradictions import contradictions
from vembed.config.loss_rules import LOSS_RULES, loss_remarks
from vembed.config.own_files import data_are_kept, log_file_is_another, names_are_text
from vembed.config.schema import TrainConfig
from vembed.config.terms import data_entries, listed_guards
from vembed.config.violation import Rule, Violation, word
from vembed.errors import UserError


def violations(config: TrainConfig) -> list[Violation]:
    """Return all violations of a config."""
    found = [broken for rule in RULES if (broken := rule(config)) is not None]
    return [*found, *(Violation(*one) for one in contradictions(config))]


# ---- values that depend on the world size --------------------------------------------------------------------------


def batch_size_per_process(config: TrainConfig, world_size: int) -> int:
    """Return the rows per process and batch. Raise UserError if the global batch is not divisible."""
    if config.batch.global_batch_size is None:
        return config.batch.batch_size
    if config.batch.global_batch_size % world_size:
        below = config.batch.global_batch_size // world_size * world_size
        near = f"{below:,d} or {below + world_size:,d}" if below else f"{world_size:,d}"
        raise UserError(
            f"global_batch_size: {config.batch.global_batch_size:,d} cannot be divided among {world_size:,d} processes: "
            f"use {near}, or another number of processes"
        )
    return config.batch.global_batch_size // world_size


# ---- rules ---------------------------------------------------------------------------------------------------------


def _one_batch_size(config: TrainConfig) -> Violation | None:
    # Given, with whatever value: who writes both believes that both count.
    if config.batch.global_batch_size is None or "batch_size" not in config.given:
        return None
    return Violation(
        ("batch_size", "global_batch_size"),
        f"batch_size: {config.batch.batch_size:,d} (per process) and global_batch_size: {config.batch.global_batch_size:,d} (over "
        "all processes) are two ways to say one thing: keep one of them",
    )


def _one_warm_up(config: TrainConfig) -> Violation | None:
    if config.optimizer.warmup_steps is None or "warmup_ratio" not in config.given:
        return None
    return Violation(
        ("warmup_ratio", "warmup_steps"),
        f"warmup_ratio: {config.optimizer.warmup_ratio:g} and warmup_steps: {config.optimizer.warmup_steps:,d} are two ways to say one "
        "thing: keep one of them",
    )


def _warm_up_ends(config: TrainConfig) -> Violation | None:
    if (
        config.optimizer.warmup_steps is None
        or config.optimizer.max_steps is None
        or config.optimizer.warmup_steps <= config.optimizer.max_steps
    ):
        return None
    return Violation(
        ("warmup_steps", "max_steps"),
        f"warmup_steps: {config.optimizer.warmup_steps:,d} is more than max_steps: {config.optimizer.max_steps:,d}, so the learning rate "
        "would never reach its peak: use fewer warm-up steps",
    )


def _one_micro_batch_size(config: TrainConfig) -> Violation | None:
    if (
        config.batch.gradient_cache_chunk_size is None
        or config.batch.micro_batch_tokens == "auto"
    ):
        return None
    return Violation(
        ("micro_batch_tokens", "gradient_cache_chunk_size"),
        f"micro_batch_tokens: {config.batch.micro_batch_tokens:,d} and gradient_cache_chunk_size: "
        f"{config.batch.gradient_cache_chunk_size:,d} (rows) are two ways to say one thing: keep one of them",
    )


def _weights_fit_dims(config: TrainConfig) -> Violation | None:
    if config.matryoshka.mrl_weights is None:
        return None
    if config.matryoshka.mrl_dims is None:
        return Violation(
            ("mrl_weights",),
            f"mrl_weights: {config.matryoshka.mrl_weights} needs mrl_dims: say which sizes they are for",
        )
    if len(config.matryoshka.mrl_weights) == len(config.matryoshka.mrl_dims):
        return None
    return Violation(
        ("mrl_dims", "mrl_weights"),
        f"mrl_weights has {len(config.matryoshka.mrl_weights)} entries and mrl_dims has {len(config.matryoshka.mrl_dims)}: give one weight "
        "for each size, in the same order",
    )


def _dims_differ(config: TrainConfig) -> Violation | None:
    dims = config.matryoshka.mrl_dims
    if dims is None or (dims and len(set(dims)) == len(dims)):
        return None
    problem = (
        "names a size twice: keep it once"
        if dims
        else "is empty: give at least one size"
    )
    return Violation(("mrl_dims",), f"mrl_dims: {dims} {problem}")


def _projection_to_initialise(config: TrainConfig) -> Violation | None:
    if (
        config.matryoshka.mrl_projection_init != "pca"
        or config.matryoshka.mrl_projection is not False
    ):
        return None
    return Violation(
        ("mrl_projection", "mrl_projection_init"),
        "mrl_projection_init: pca needs a projection, and mrl_projection: false rules it out: set mrl_projection: true",
    )


def _kept_features_have_a_frozen_tower(config: TrainConfig) -> Violation | None:
    with_adapters = (
        config.adapters.use_lora or config.adapters.use_qlora
    ) and config.adapters.lora_towers != "all"
    if (
        not config.batch.cache_frozen_features
        or config.adapters.freeze
        or with_adapters
    ):
        return None
    return Violation(
        ("cache_frozen_features",),
        "cache_frozen_features: true needs a tower of which nothing is trained, and this run trains all: freeze one "
        "(freeze: [vision] or [text], or lora_towers: text with use_lora: true), or set it to false",
    )


def _qlora_has_adapters(config: TrainConfig) -> Violation | None:
    if not config.adapters.use_qlora or config.adapters.use_lora:
        return None
    return Violation(
        ("use_lora", "use_qlora"),
        "use_qlora: true trains adapters over 4-bit weights, and use_lora: false rules them out: leave use_lora out",
    )


def _composed_has_two_towers(config: TrainConfig) -> Violation | None:
    if (
        config.model.model_family == "composed"
        and config.model.image_model_name is None
    ):
        return Violation(
            ("model_family",),
            "model_family: composed needs a second tower: give image_model_name the model that encodes images",
        )
    if config.model.image_model_name is not None and config.model.model_family not in (
        "auto",
        "composed",
    ):
        return Violation(
            ("model_family", "image_model_name"),
            f"image_model_name: {config.model.image_model_name} makes a composed model, but model_family is "
            f"{config.model.model_family}: leave one of them out",
        )
    return None


def _pixels_in_order(config: TrainConfig) -> Violation | None:
    if (
        config.model.min_pixels is None
        or config.model.max_pixels is None
        or config.model.min_pixels <= config.model.max_pixels
    ):
        return None
    return Violation(
        ("min_pixels", "max_pixels"),
        f"min_pixels: {config.model.min_pixels:,d} is more than max_pixels: {config.model.max_pixels:,d}: exchange them",
    )


def _one_strategy(config: TrainConfig) -> Violation | None:
    said = "use_fsdp" in config.given
    if config.parallel.use_fsdp and config.parallel.strategy in ("single", "ddp"):
        return Violation(
            ("use_fsdp", "strategy"),
            f"use_fsdp: true and strategy: {config.parallel.strategy} contradict each other: keep one of them",
        )
    if (
        said
        and not config.parallel.use_fsdp
        and config.parallel.strategy == "fsdp"
        and "strategy" in config.given
    ):
        return Violation(
            ("use_fsdp", "strategy"),
            "use_fsdp: false and strategy: fsdp contradict each other: keep one of them",
        )
    return None


def _one_offload_switch(config: TrainConfig) -> Violation | None:
    params, cpu = config.parallel.fsdp_offload_params, config.parallel.fsdp_cpu_offload
    if params is None or cpu is None or params == cpu:
        return None
    return Violation(
        ("fsdp_offload_params", "fsdp_cpu_offload"),
        f"fsdp_offload_params: {word(params)} and fsdp_cpu_offload: {word(cpu)} are one switch (parameters, "
        "gradients and optimizer state): keep one of them",
    )


def _one_checkpointing_switch(config: TrainConfig) -> Violation | None:
    own, fsdp = (
        config.model.gradient_checkpointing,
        config.parallel.fsdp_activation_checkpointing,
    )
    if own is None or fsdp is None or own == fsdp:
        return None
    return Violation(
        ("gradient_checkpointing", "fsdp_activation_checkpointing"),
        f"gradient_checkpointing: {word(own)} and fsdp_activation_checkpointing: {word(fsdp)} are one switch: keep "
        "one of them",
    )


def _fsdp_precision(config: TrainConfig) -> Violation | None:
    if (
        config.parallel.fsdp_mixed_precision is False
        and config.parallel.fsdp_param_dtype is not None
    ):
        return Violation(
            ("fsdp_mixed_precision", "fsdp_param_dtype"),
            "fsdp_mixed_precision: false keeps the parameters' own dtype, and fsdp_param_dtype: "
            f"{config.parallel.fsdp_param_dtype} asks for another: keep one of them",
        )
    if config.parallel.fsdp_mixed_precision and config.model.mixed_precision == "no":
        return Violation(
            ("fsdp_mixed_precision", "mixed_precision"),
            "fsdp_mixed_precision: true and mixed_precision: no contradict each other: keep one of them",
        )
    return None


def _guards_have_checkpoints(config: TrainConfig) -> Violation | None:
    if not config.evaluation.guards:
        return None
    missing = _missing_for_best(config)
    if missing:
        return Violation(
            ("guards",),
            f"guards end a run with the last checkpoint that held: give {' and '.join(missing)} too",
        )
    return _checkpoints_are_evaluated(config, "guards need")


def _guards_have_names(config: TrainConfig) -> Violation | None:
    labels = [one.label for one in listed_guards(config)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is None:
        return None
    return Violation(
        ("guards",),
        f"guards: {twice} is named twice: keep it once, or give each entry a name",
    )


def _best_model_is_known(config: TrainConfig) -> Violation | None:
    if config.run.load_best_model_at_end is not True:
        return None
    missing = _missing_for_best(config)
    if missing:
        return Violation(
            ("load_best_model_at_end",),
            "load_best_model_at_end: true takes the best of the checkpoints that were evaluated: "
            f"give {' and '.join(missing)} too",
        )
    return _checkpoints_are_evaluated(config, "load_best_model_at_end: true needs")


def _missing_for_best(config: TrainConfig) -> list[str]:
    """Return the options without which no checkpoint is evaluated."""
    given = config.options() | {
        "val_data_path": config.data.val_data_path or config.data.val_split
    }
    return [
        name
        for name in ("val_data_path", "eval_steps", "save_steps")
        if given[name] is None
    ]


def _checkpoints_are_evaluated(config: TrainConfig, needs: str) -> Violation | None:
    if not isinstance(config.evaluation.eval_steps, int) or not isinstance(
        config.run.save_steps, int
    ):
        return None
    if config.run.save_steps % config.evaluation.eval_steps == 0:
        return None
    return Violation(
        ("eval_steps", "save_steps"),
        f"{needs} an evaluation at every checkpoint: save_steps: {config.run.save_steps:,d} must be a multiple of "
        f"eval_steps: {config.evaluation.eval_steps:,d}",
    )


def _metric_is_computed(config: TrainConfig) -> Violation | None:
    cutoff = re.fullmatch(
        r"(?:dim\d+/)?(?:ndcg|mrr|recall|map)@(\d+)", config.evaluation.eval_metric
    )
    if cutoff is None or int(cutoff.group(1)) in config.evaluation.eval_ks:
        return None
    return Violation(
        ("eval_metric", "eval_ks"),
        f"eval_metric: {config.evaluation.eval_metric} is not computed, since {cutoff.group(1)} is not among eval_ks: "
        f"{config.evaluation.eval_ks}: add it",
    )


def _profiled_steps(config: TrainConfig) -> Violation | None:
    steps = config.logging.profile_steps
    if steps is None or (len(steps) == 2 and steps[0] <= steps[1]):
        return None
    return Violation(
        ("profile_steps",),
        f"profile_steps: {steps} must be two numbers, the first and the last step: [10, 12]",
    )


def _log_file_inside(config: TrainConfig) -> Violation | None:
    if (
        config.logging.log_file.strip(". ")
        and PurePath(config.logging.log_file).name == config.logging.log_file
    ):
        return None
    return Violation(
        ("log_file",),
        f"log_file: {config.logging.log_file!r} must be the name of a file in output_dir, as training_log.txt",
    )


def _names_are_not_empty(config: TrainConfig) -> Violation | None:
    for name in ("model_name", "data_path", "output_dir"):
        if config.options()[name] in ("", []):
            return Violation((name,), f"{name} is empty: give it a value")
    return None


RULES: tuple[Rule, ...] = (
    _names_are_not_empty,
    _one_batch_size,
    _one_warm_up,
    _warm_up_ends,
    _one_micro_batch_size,
    _weights_fit_dims,
    _dims_differ,
    _projection_to_initialise,
    _kept_features_have_a_frozen_tower,
    _qlora_has_adapters,
    _composed_has_two_towers,
    _pixels_in_order,
    *LOSS_RULES,
    _one_strategy,
    _one_offload_switch,
    _one_checkpointing_switch,
    _fsdp_precision,
    _best_model_is_known,
    _guards_have_checkpoints,
    _guards_have_names,
    _metric_is_computed,
    _profiled_steps,
    _log_file_inside,
    log_file_is_another,
    data_are_kept,
    names_are_text,
)


# ---- remarks: options without effect -------------------------------------------------------------------------------

LORA = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_towers",
    "use_rslora",
    "use_dora",
)
NEEDED_BY: dict[str, tuple[str, ...]] = {
    "use_mrl": ("mrl_dims", "mrl_weights", "mrl_projection", "mrl_projection_init"),
    "use_lora": (*LORA, "save_merged"),
    "model_class": ("model_arguments", "tokenizer_name"),
    "save_steps": ("async_save",),
    "image_model_name": ("composed_dim",),
    "push_to_hub": ("push_public",),
}
"""Map from an option to the options that have no effect without it."""


LEAST_OF_ADAPTERS = 1e-4
"""Learning rate below which adapters hardly learn in a usual run."""


def _prompts_without_line_breaks(config: TrainConfig) -> list[str]:
    """Return one sentence per prompt that holds a backslash and an n, which shells and plain YAML leave as they are."""
    prompts = {
        "query_prompt": config.model.query_prompt,
        "document_prompt": config.model.document_prompt,
    }
    for source in data_entries(config):
        prompts |= {
            f"data_path, {source.path}: query_prompt": source.query_prompt,
            f"data_path, {source.path}: document_prompt": source.document_prompt,
        }
    return [
        f"{name}: {prompt} holds a backslash and an n where a line break is usual, and the model reads them so: "
        "a line break is \"\\n\" in double quotes in a YAML file, and $'\\n' in a shell"
        for name, prompt in prompts.items()
        if prompt is not None and "\\n" in prompt
    ]


def remarks(config: TrainConfig) -> list[str]:
    """Return one sentence per option that has no effect or may be misunderstood."""
    values, defaults = config.options(), TrainConfig(model_name="-", data_path="-")
    usual = defaults.options()
    # By value: an option that is given as its default changes nothing, with or without effect.
    set_apart = {name for name, value in values.items() if value != usual[name]}
    found = loss_remarks(config, set_apart)
    for needed, names in NEEDED_BY.items():
        if not values[needed]:
            found += [
                f"{name}: {word(values[name])} has no effect without {needed}"
                for name in names
                if name in set_apart
            ]
    if config.optimizer.optim in ("sgd", "adafactor"):
        adam = ("adam_beta1", "adam_beta2", "adam_epsilon")
        found += [
            f"{name}: {word(values[name])} has no effect with optim: {config.optimizer.optim}"
            for name in adam
            if name in set_apart
        ]
    if (
        config.optimizer.base_batch_size != defaults.optimizer.base_batch_size
        and config.optimizer.scale_learning_rate == "none"
    ):
        found.append(
            f"base_batch_size: {config.optimizer.base_batch_size:,d} has no effect with scale_learning_rate: none"
        )
    if config.data.val_data_path is None and config.data.val_split is None:
        unread = [
            name for name in ("eval_steps", "patience") if isinstance(values[name], int)
        ]
        unread += [
            name
            for name in ("eval_before", "eval_metric", "eval_ks", "eval_batch_tokens")
            if name in set_apart
        ]
        found += [
            f"{name}: {word(values[name])} has no effect without val_data_path or val_split"
            for name in unread
        ]
    if (
        config.optimizer.max_steps is not None
        and config.optimizer.epochs != "auto"
        and "epochs" in config.given
    ):
        found.append(
            f"max_steps: {config.optimizer.max_steps:,d} decides the length of the run, epochs: {config.optimizer.epochs:g} does not"
        )
    if config.data.homogeneous_batches and not isinstance(config.data.data_path, list):
        found.append(
            f"homogeneous_batches: {word(config.data.homogeneous_batches)} has no effect with a single source in data_path"
        )
    if config.data.sampling != "proportional" and len(data_entries(config)) < 2:
        found.append(
            f"sampling: {config.data.sampling} has no effect with a single source in data_path"
        )
    if config.data.sampling == "round_robin" and any(
        one.weight != 1.0 for one in data_entries(config)
    ):
        found.append(
            "data_path: the weights of the sources have no effect with sampling: round_robin"
        )
    if config.model.pure_dtype and config.model.torch_dtype in ("auto", "float32"):
        found.append(
            f"pure_dtype: true has no effect with torch_dtype: {config.model.torch_dtype}"
        )
    if config.run.resume_anyway and not config.run.resume:
        found.append("resume_anyway: true has no effect without resume")
    if set_apart & {"wandb_project", "wandb_tags"} and not {
        "wandb",
        "trackio",
        "mlflow",
    } & set(config.logging.report_to):
        found.append(
            f"wandb_project and wandb_tags have no effect with report_to: {config.logging.report_to or 'none'}"
        )
    if (
        config.data.val_data_path is not None
        and config.data.val_data_path == config.data.data_path
    ):
        found.append(
            "val_data_path is the training data: its scores will not say how the model does on new data"
        )
    given = config.optimizer.learning_rate
    if (
        (config.adapters.use_lora or config.adapters.use_qlora)
        and given != "auto"
        and given < LEAST_OF_ADAPTERS
    ):
        found.append(
            f"learning_rate: {given:g} is a rate for training all weights, and adapters learn little with it: leave it "
            "out (auto), or give about ten times that"
        )
    found += _prompts_without_line_breaks(config)
    if (
        config.model.image_model_name is not None
        and config.optimizer.head_learning_rate is None
        and given != "auto"
    ):
        found.append(
            "head_learning_rate is not set: the projections of two towers that never met are new, and learn little at "
            f"learning_rate: {given:g}; 1e-3 is usual for them"
        )
    return found
