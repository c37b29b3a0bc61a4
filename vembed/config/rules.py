"""Rules between options: each is one check with one sentence. None needs a model or a device.

The rules of a section take the section. Rules between sections take the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from vembed.config.entries import DataSource
from vembed.config.loss_rules import loss_remarks, loss_violations
from vembed.config.schema import (
    AdapterSection,
    BatchSection,
    DataSection,
    EvaluationSection,
    LoggingSection,
    MatryoshkaSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    TrainConfig,
)
from vembed.config.violation import Violation, word
from vembed.training.optimizers.table import OPTIMIZERS
from vembed.training.trackers.table import TRACKERS

RUN_FILES = frozenset(
    {
        "config.yaml",
        "metrics.jsonl",
        "run.json",
        "report.html",
        "report.md",
        "final",
        "tensorboard",
        "logs",
    }
)
"""Files and folders of output_dir that a run writes, replaces or cuts."""
# Also their temporary neighbours: checkpoint-100.partial, .final.new, .hub, .probe-0.
RUN_FILE_PATTERN = re.compile(r"checkpoint-\d+.*|\.(final|hub|probe-\d+).*")
LORA_OPTIONS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_variant",
    "save_merged",
)
MATRYOSHKA_OPTIONS = (
    "mrl_dims",
    "mrl_weights",
    "mrl_projection",
)
NEEDED_BY: dict[str, tuple[str, ...]] = {
    "use_mrl": MATRYOSHKA_OPTIONS,
    "use_lora": LORA_OPTIONS,
    "model_class": ("model_arguments", "tokenizer_name"),
    "save_steps": ("async_save",),
    "image_model_name": ("composed_dim",),
}
"""Map from an option to the options that have no effect without it."""
LOWEST_USUAL_ADAPTER_RATE = 1e-4
"""Learning rate below which adapters hardly learn in a usual run."""


def violations(config: TrainConfig) -> list[Violation]:
    """Return all violations of a config."""
    broken = list(_required_names(config))
    broken += _batch_rules(config.batch, config.given)
    broken += _matryoshka_rules(config.matryoshka)
    broken += _model_rules(config.model)
    broken += _adapter_rules(config.adapters)
    broken += loss_violations(
        config.objective,
        config.matryoshka,
        config.data,
        config.batch,
        config.model.model_name,
    )
    broken += _evaluation_rules(config.evaluation, config.run, config.data)
    broken += _logging_rules(config.logging)
    broken += _run_rules(config.run)
    broken += _data_rules(config.data, config.run, config.logging)
    broken += _rules_between_sections(
        config.optimizer, config.adapters, config.batch, config.model
    )
    return broken


def is_run_file(log_file: str, name: str) -> bool:
    """Return whether a run writes a file or folder of this name into its output_dir."""
    is_fixed = name in RUN_FILES or name == log_file
    return is_fixed or RUN_FILE_PATTERN.fullmatch(name) is not None


def _required_names(config: TrainConfig) -> Iterator[Violation]:
    values = {
        "model_name": config.model.model_name,
        "data_path": config.data.data_path,
        "output_dir": config.run.output_dir,
    }
    for name, value in values.items():
        if value in ("", []):
            yield Violation((name,), f"{name} is empty: give it a value")
    for option, value in config.options().items():
        for text in _texts_in(value):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                quoted = text.encode(errors="replace").decode()
                yield Violation(
                    (option,),
                    f"{option}: {quoted!r:.200} has a lone surrogate at character "
                    f"{error.start + 1}, which no file can hold: write it as UTF-8",
                )


def _batch_rules(batch: BatchSection, given_options: set[str]) -> Iterator[Violation]:
    # Given, with whatever value: whoever writes both believes that both count.
    if batch.global_batch_size is not None and "batch_size" in given_options:
        yield Violation(
            ("batch_size", "global_batch_size"),
            f"batch_size: {batch.batch_size:,d} (per process) and global_batch_size: "
            f"{batch.global_batch_size:,d} (over all processes) are two ways to say "
            "one thing: keep one of them",
        )
    rows = batch.gradient_cache_chunk_size
    if rows is not None and batch.micro_batch_tokens != "auto":
        yield Violation(
            ("micro_batch_tokens", "gradient_cache_chunk_size"),
            f"micro_batch_tokens: {batch.micro_batch_tokens:,d} and "
            f"gradient_cache_chunk_size: {rows:,d} (rows) are two ways to say one "
            "thing: keep one of them",
        )


def _matryoshka_rules(section: MatryoshkaSection) -> Iterator[Violation]:
    dims = section.mrl_dims
    weights = section.mrl_weights
    if weights is not None and dims is None:
        yield Violation(
            ("mrl_weights",),
            f"mrl_weights: {weights} needs mrl_dims: say which sizes they are for",
        )
    if weights is not None and dims is not None and len(weights) != len(dims):
        yield Violation(
            ("mrl_dims", "mrl_weights"),
            f"mrl_weights has {len(weights)} entries and mrl_dims has {len(dims)}: "
            "give one weight for each size, in the same order",
        )
    if dims is not None and not dims:
        yield Violation(("mrl_dims",), "mrl_dims: [] is empty: give at least one size")
    if dims is not None and len(set(dims)) < len(dims):
        yield Violation(
            ("mrl_dims",), f"mrl_dims: {dims} names a size twice: keep it once"
        )


def _model_rules(model: ModelSection) -> Iterator[Violation]:
    if model.model_family == "composed" and model.image_model_name is None:
        yield Violation(
            ("model_family",),
            "model_family: composed needs a second tower: give image_model_name the "
            "model that encodes images",
        )
    has_other_family = model.model_family not in ("auto", "composed")
    if model.image_model_name is not None and has_other_family:
        yield Violation(
            ("model_family", "image_model_name"),
            f"image_model_name: {model.image_model_name} makes a composed model, but "
            f"model_family is {model.model_family}: leave one of them out",
        )
    smallest = model.min_pixels
    largest = model.max_pixels
    if smallest is not None and largest is not None and smallest > largest:
        yield Violation(
            ("min_pixels", "max_pixels"),
            f"min_pixels: {smallest:,d} is more than max_pixels: {largest:,d}: "
            "exchange them",
        )


def _adapter_rules(adapters: AdapterSection) -> Iterator[Violation]:
    if adapters.use_qlora and not adapters.use_lora:
        yield Violation(
            ("use_lora", "use_qlora"),
            "use_qlora: true trains adapters over 4-bit weights, and use_lora: false "
            "rules them out: leave use_lora out",
        )


def _evaluation_rules(
    evaluation: EvaluationSection, run: RunSection, data: DataSection
) -> Iterator[Violation]:
    asks_for_best = run.load_best_model_at_end is True
    if evaluation.guards or asks_for_best:
        missing = []
        if data.val_data_path is None and data.val_split is None:
            missing.append("val_data_path")
        if evaluation.eval_steps is None:
            missing.append("eval_steps")
        if run.save_steps is None:
            missing.append("save_steps")
        needed = " and ".join(missing)
        if missing and asks_for_best:
            yield Violation(
                ("load_best_model_at_end",),
                "load_best_model_at_end: true takes the best of the checkpoints that "
                f"were evaluated: give {needed} too",
            )
        elif missing:
            yield Violation(
                ("guards",),
                f"guards end a run with the last checkpoint that held: give {needed} "
                "too",
            )
        elif (
            isinstance(evaluation.eval_steps, int)
            and isinstance(run.save_steps, int)
            and run.save_steps % evaluation.eval_steps
        ):
            who = (
                "load_best_model_at_end: true needs" if asks_for_best else "guards need"
            )
            yield Violation(
                ("eval_steps", "save_steps"),
                f"{who} an evaluation at every checkpoint: save_steps: "
                f"{run.save_steps:,d} must be a multiple of eval_steps: "
                f"{evaluation.eval_steps:,d}",
            )
    labels = [guard.label for guard in evaluation.listed_guards()]
    for label in sorted(set(labels)):
        if labels.count(label) > 1:
            yield Violation(
                ("guards",),
                f"guards: {label} is named twice: keep it once, or give each entry a "
                "name",
            )
    cutoff = re.fullmatch(
        r"(?:dim\d+/)?(?:ndcg|mrr|recall|map)@(\d+)", evaluation.eval_metric
    )
    if cutoff is not None and int(cutoff[1]) not in evaluation.eval_ks:
        yield Violation(
            ("eval_metric", "eval_ks"),
            f"eval_metric: {evaluation.eval_metric} is not computed, since "
            f"{cutoff[1]} is not among eval_ks: {evaluation.eval_ks}: add it",
        )


def _logging_rules(logging: LoggingSection) -> Iterator[Violation]:
    steps = logging.profile_steps
    if steps is not None and (len(steps) != 2 or steps[0] > steps[1]):
        yield Violation(
            ("profile_steps",),
            f"profile_steps: {steps} must be two numbers, the first and the last "
            "step: [10, 12]",
        )
    name = logging.log_file
    if not name.strip(". ") or PurePath(name).name != name:
        yield Violation(
            ("log_file",),
            f"log_file: {name!r} must be the name of a file in output_dir, as "
            "training_log.txt",
        )
    if name in RUN_FILES or RUN_FILE_PATTERN.fullmatch(name):
        yield Violation(
            ("log_file",),
            f"log_file: {name} is a file or folder that the run writes itself: give "
            "another name",
        )


def _run_rules(run: RunSection) -> Iterator[Violation]:
    if run.resume is not False and run.overwrite:
        yield Violation(
            ("resume", "overwrite"),
            f"resume: {word(run.resume)} continues the run in output_dir and "
            "overwrite: true replaces it: keep one of them",
        )


def _data_rules(
    data: DataSection, run: RunSection, logging: LoggingSection
) -> Iterator[Violation]:
    if data.val_split is not None and data.val_data_path is not None:
        yield Violation(
            ("val_split", "val_data_path"),
            f"val_split: {data.val_split:g} and val_data_path: {data.val_data_path} "
            "both give validation data: keep one of them",
        )
    # A run replaces or cuts its own files, so data must not be among them.
    output = Path(run.output_dir).absolute()
    for option in ("data_path", "val_data_path"):
        for name in _paths_in(dict(data)[option]):
            path = Path(name).absolute()
            if not path.is_relative_to(output) or not path.exists():
                continue
            inside = path.relative_to(output).parts[:1]
            if inside and is_run_file(logging.log_file, inside[0]):
                yield Violation(
                    (option, "output_dir"),
                    f"{option}: {name} is in output_dir under a name that the run "
                    f"writes itself ({inside[0]}), and would be lost: move the data, "
                    "or choose another output_dir",
                )


def _rules_between_sections(
    optimizer: OptimizerSection,
    adapters: AdapterSection,
    batch: BatchSection,
    model: ModelSection,
) -> Iterator[Violation]:
    steps = optimizer.warmup_steps
    is_number = isinstance(steps, int)
    if is_number and steps > (optimizer.max_steps or steps):
        yield Violation(
            ("warmup_steps", "max_steps"),
            f"warmup_steps: {steps:,d} is more than max_steps: "
            f"{optimizer.max_steps:,d}, so the learning rate would never reach its "
            "peak: use fewer warm-up steps",
        )
    trains_adapters = adapters.use_lora or adapters.use_qlora
    if batch.cache_frozen_features and not adapters.freeze:
        yield Violation(
            ("cache_frozen_features",),
            "cache_frozen_features: true needs a tower of which nothing is trained, "
            "and this run trains all: freeze one (freeze: [vision] or [text]), "
            "or set it to false",
        )
    if model.quantize_weights is not None and trains_adapters:
        switch = "use_lora" if adapters.use_lora else "use_qlora"
        yield Violation(
            ("quantize_weights", switch),
            f"quantize_weights: {model.quantize_weights} rounds the weights "
            f"that are trained, and {switch}: true trains adapters beside weights "
            "that are not: keep one of them",
        )


# ---- remarks: options without effect, or that are easily misunderstood


def remarks(config: TrainConfig) -> list[str]:
    """Return one sentence per option that has no effect or may be misunderstood."""
    values = config.options()
    defaults = TrainConfig(model_name="-", data_path="-").options()
    # By value: an option that is given as its default changes nothing.
    changed = {}
    for name, value in values.items():
        if value != defaults[name]:
            changed[name] = value
    lines = loss_remarks(config.objective, config.data, config.model, changed)

    def without_effect(names: tuple[str, ...], reason: str) -> None:
        for name in names:
            if name in changed:
                lines.append(f"{name}: {word(values[name])} has no effect {reason}")

    for switch, names in NEEDED_BY.items():
        if not values[switch]:
            without_effect(names, f"without {switch}")
    optimizer = config.optimizer
    of_optimizers = {name for kind in OPTIMIZERS.values() for name in kind.options}
    unread_options = of_optimizers - OPTIMIZERS[optimizer.optim].options
    without_effect(tuple(sorted(unread_options)), f"with optim: {optimizer.optim}")
    if config.data.val_data_path is None and config.data.val_split is None:
        unread = ["eval_before", "eval_metric", "eval_ks"]
        for name in ("eval_steps", "patience"):
            if isinstance(values[name], int):
                unread.insert(0, name)
        without_effect(tuple(unread), "without val_data_path or val_split")
    is_length_given_twice = optimizer.epochs != "auto" and "epochs" in config.given
    if optimizer.max_steps is not None and is_length_given_twice:
        lines.append(
            f"max_steps: {optimizer.max_steps:,d} decides the length of the run, "
            f"epochs: {optimizer.epochs:g} does not"
        )
    lines += _data_remarks(config.data)
    of_trackers = {name for kind in TRACKERS.values() for name in kind.options}
    for name in config.logging.report_to:
        of_trackers -= TRACKERS[name].options
    trackers = ", ".join(config.logging.report_to) or "none"
    without_effect(tuple(sorted(of_trackers)), f"with report_to: {trackers}")
    rate = optimizer.learning_rate
    if (
        (config.adapters.use_lora or config.adapters.use_qlora)
        and rate != "auto"
        and rate < LOWEST_USUAL_ADAPTER_RATE
    ):
        lines.append(
            f"learning_rate: {rate:g} is a rate for training all weights, and "
            "adapters learn little with it: leave it out (auto), or give about ten "
            "times that"
        )
    lines += _prompt_remarks(config.model, config.data)
    if (
        config.model.image_model_name is not None
        and optimizer.head_learning_rate is None
        and rate != "auto"
    ):
        lines.append(
            "head_learning_rate is not set: the projections of two towers that were "
            "not trained together are new, and learn little at learning_rate: "
            f"{rate:g}; 1e-3 is usual for them"
        )
    return lines


def _data_remarks(data: DataSection) -> Iterator[str]:
    entries = data.sources()
    if data.homogeneous_batches and not isinstance(data.data_path, list):
        yield (
            f"homogeneous_batches: {word(data.homogeneous_batches)} has no effect "
            "with a single source in data_path"
        )
    if data.sampling != "proportional" and len(entries) < 2:
        yield (
            f"sampling: {data.sampling} has no effect with a single source in data_path"
        )
    has_weights = any(entry.weight != 1.0 for entry in entries)
    if data.sampling == "round_robin" and has_weights:
        yield (
            "data_path: the weights of the sources have no effect with sampling: "
            "round_robin"
        )
    if data.val_data_path is not None and data.val_data_path == data.data_path:
        yield (
            "val_data_path is the training data: its scores will not say how the "
            "model does on new data"
        )


def _prompt_remarks(model: ModelSection, data: DataSection) -> Iterator[str]:
    """Yield a sentence per prompt with a backslash and an n instead of a line break."""
    prompts = {
        "query_prompt": model.query_prompt,
        "document_prompt": model.document_prompt,
    }
    for entry in data.sources():
        prefix = f"data_path, {entry.path}: "
        prompts[f"{prefix}query_prompt"] = entry.query_prompt
        prompts[f"{prefix}document_prompt"] = entry.document_prompt
    for name, prompt in prompts.items():
        if prompt is not None and "\\n" in prompt:
            yield (
                f"{name}: {prompt} holds a backslash and an n where a line break is "
                'usual, and the model reads them so: a line break is "\\n" in double '
                "quotes in a YAML file, and $'\\n' in a shell"
            )


def _paths_in(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    paths = []
    for entry in entries:
        if isinstance(entry, DataSource):
            paths.append(entry.path)
        elif entry is not None:
            paths.append(str(entry))
    return paths


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, DataSource):
        value = value.model_dump()
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts_in(key)
            yield from _texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_in(inner)
