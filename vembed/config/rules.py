"""Rules between options, remarks on options without effect, and paths that are missing. None needs a model or a device.

A rule yields one sentence: what is wrong, the values, what to do. The places of the options
that it names are added to it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from vembed.config.decisions import ResolvedRun, has_initial_weights
from vembed.config.options import all_options, yaml_word
from vembed.config.schema import (
    BatchSection,
    DataSection,
    ObjectiveSection,
    Options,
    TrainConfig,
)
from vembed.config.terms import (
    ResolvedTerm,
    listed_teachers,
    loss_names,
    losses_differ,
    needed_teachers,
    run_terms,
)
from vembed.config.values import RESULT_SEPARATOR
from vembed.errors import UserError
from vembed.files import existing, is_address, is_hub_model, is_pattern, similar_path
from vembed.losses.declaration import (
    HIGHEST_TEMPERATURE,
    LABEL_SCORES,
    LOWEST_TEMPERATURE,
)
from vembed.losses.table import LOSS_OPTIONS, LOSSES, read_options
from vembed.training.optimizer_kinds import OPTIMIZERS
from vembed.training.trackers.table import TRACKERS

# Also their temporary neighbours: checkpoint-100.partial, .final.new, .hub, .probe-0.
RUN_FILE_PATTERN = re.compile(
    r"config\.yaml|metrics\.jsonl|run\.json|report\.html|report\.md|final|tensorboard|logs"
    r"|checkpoint-\d+.*|\.(final|hub|probe-\d+).*"
)
"""Files and folders of output_dir that a run writes, replaces or cuts."""
NEEDED_BY = {
    "mrl_dims": "mrl_weights mrl_projection",
    "use_lora": "lora_r lora_alpha lora_dropout lora_target_modules lora_variant save_merged",
    "model_class": "tokenizer_name",
    "save_steps": "async_save",
}
"""Map from an option to the options that have no effect without it."""
RERANKER_OPTIONS = "reranker_head in_batch_negatives first_stage rerank_top_k"
"""Options that only task: rerank reads."""
EMBEDDER_OPTIONS = (
    "mrl_dims quantize_embeddings similarity pooling image_model_name min_pixels max_pixels model_class auxiliary_losses "
    "mine"
)
"""Options that are about vectors, images or classes of the user's, which rerankers do not have."""
EMBEDDER_LOSS_OPTIONS = (
    "bidirectional hard_negatives_scope same_side_negatives mix_negatives guide hardness_alpha hardness_scope "
    "focal_gamma false_negative_margin distill_candidates"
)
"""Options of losses that need a matrix of scores."""
LOWEST_USUAL_ADAPTER_RATE = 1e-4
"""Learning rate below which adapters hardly learn in a usual run."""


def violations(config: TrainConfig, places: Mapping[str, str]) -> list[str]:
    """Return a sentence for each rule that a config breaks, with the places where its options were set."""
    terms = run_terms(config.objective, config.data, config.model.model_name)
    sentences = []
    for rules in (
        _model_rules(config),
        _loss_rules(config, terms),
        _source_rules(config.data, config.batch, config.model.task),
        _task_rules(config.option_values(), terms),
        _run_rules(config),
    ):
        # Sources of one loss break its rules alike.
        for sentence in dict.fromkeys(rules):
            # A rule names the options that it is about. A word that is an option's name by chance, such as `loss`, only
            # adds one more place.
            names = set(re.findall(r"\w+", sentence))
            if names & {"loss", *LOSS_OPTIONS}:
                names.add("losses")  # an entry may have set it
            where = [f"{name}: {places[name]}" for name in places if name in names]
            sentences.append(f"{sentence} ({'; '.join(where)})" if where else sentence)
    return sentences


def _model_rules(config: TrainConfig) -> Iterator[str]:
    """Rules on the model, what of it is trained, its sizes, the batch and the warm-up."""
    model = config.model
    adapters = config.adapters
    batch = config.batch
    image_model = model.image_model_name
    is_composed = model.model_family == "composed"
    if model.model_family != "auto" and is_composed != (image_model is not None):
        yield (
            f"model_family: {model.model_family} and image_model_name: {yaml_word(image_model)}: a composed model has both, and "
            "others have no image_model_name"
        )
    quantized = adapters.quantize_weights
    if quantized == "nf4" and not adapters.use_lora:
        yield "quantize_weights: nf4 (use_qlora: true) holds weights that are not trained: set use_lora: true"
    if quantized == "int8" and adapters.use_lora:
        yield (
            "quantize_weights: int8 rounds weights that are trained, and use_lora: true trains adapters beside weights "
            "that are not: keep one of them"
        )
    if model.from_scratch and not adapters.save_merged:
        yield (
            "save_merged: false keeps the adapter alone, and the initial weights of from_scratch: true would be lost: leave "
            "save_merged out"
        )
    if batch.cache_frozen_features and not adapters.freeze:
        yield (
            "cache_frozen_features: true needs a tower of which nothing is trained, and this run trains all: freeze one "
            "(freeze: [vision] or [text]), or set it to false"
        )
    # Also if one of them has its default value: a user who writes both expects both to count.
    if batch.global_batch_size is not None and "batch_size" in batch.model_fields_set:
        yield (
            f"batch_size: {batch.batch_size:,d} (per process) and global_batch_size: {batch.global_batch_size:,d} (over "
            "all processes) are two ways to say one thing: keep one of them"
        )
    warmup = config.optimizer.warmup_steps
    max_steps = config.optimizer.max_steps
    if isinstance(warmup, int) and max_steps is not None and warmup > max_steps:
        yield (
            f"warmup_steps: {warmup:,d} is more than max_steps: {max_steps:,d}, so the learning rate would never reach "
            "its peak: use fewer warm-up steps"
        )
    dims = config.matryoshka.mrl_dims
    weights = config.matryoshka.mrl_weights
    if not isinstance(dims, list):
        if weights is not None:
            yield f"mrl_weights: {weights} needs mrl_dims: say which sizes they are for"
        return
    if weights is not None and len(weights) != len(dims):
        yield (
            f"mrl_weights has {len(weights)} entries and mrl_dims has {len(dims)}: give one weight for each size, in the "
            "same order"
        )


def _loss_rules(config: TrainConfig, terms: Sequence[ResolvedTerm]) -> Iterator[str]:
    objective = config.objective
    data = config.data
    dims = config.matryoshka.mrl_dims
    # A config that a run has written names every option, and `loss` with its default.
    if objective.losses and objective.loss != "infonce":
        yield f"losses and loss: {objective.loss} are two ways to say one thing: keep one of them"
    teachers = [teacher.label for teacher in listed_teachers(objective)]
    guards = [guard.label for guard in config.evaluation.listed_guards()]
    for option, labels in (("teachers", teachers), ("guards", guards)):
        for label, count in sorted(Counter(labels).items()):
            if count > 1:
                yield f"{option}: {label} is named twice: keep it once, or give each entry a name"
    if LABEL_SCORES in teachers:
        yield f"teachers: the name {LABEL_SCORES!r} stands for scores in the data: choose another"
    # Without those of single sources.
    run_losses = [entry.loss for entry in objective.losses or []]
    for name in dict.fromkeys(run_losses or [objective.loss]):
        if data.max_negatives == 0 and LOSSES[name].negatives == "each":
            yield f"loss: {name} needs hard negatives in every record, and max_negatives: 0 leaves none: raise it"
    reads_negatives = any(term.loss.negatives != "unread" for term in terms)
    if data.mine is not None and not reads_negatives:
        yield f"mine adds hard negatives, and {_names(objective, terms)} reads none: use loss: infonce, or leave mine out"
    for term in terms:
        loss = term.loss
        for option in ("mine", "in_batch_negatives"):
            needs_scores = term.follows_data and not loss.counts_unscored
            if needs_scores and getattr(data, option):
                yield (
                    f"{option} adds negatives that have no scores in the data, and loss: {loss.name} follows these: name a "
                    f"model as teacher, or leave {option} out"
                )
        refusal = loss.refusal(dims if isinstance(dims, list) else [])
        if refusal is not None:
            yield refusal
        start = term.temperature
        is_inside = start is None or LOWEST_TEMPERATURE <= start <= HIGHEST_TEMPERATURE
        if loss.learns_temperature() and not is_inside:
            yield (
                f"temperature: {start:g} is where a learned temperature starts, and it is kept from "
                f"{LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}: start inside"
            )
        if loss.follows in ("teacher", "vectors") and term.teacher is None:
            yield (
                f"loss: {loss.name} follows a teacher, and the config names none: give teacher a model, or scores where "
                "the data have them"
            )
        if term.teacher == LABEL_SCORES and loss.needs_vectors():
            yield (
                f"loss: {loss.name} needs vectors here, and teacher: {LABEL_SCORES} has scores of listed pairs alone: name a "
                "model"
            )
        if loss.follows == "start_model":
            if has_initial_weights(config.model):
                yield f"loss: {loss.name} keeps what the start model knows, and random weights know nothing: leave it out"
            if config.matryoshka.mrl_projection == "pca":
                yield (
                    f"loss: {loss.name} keeps the embeddings of the start model, and mrl_projection: pca turns them before the "
                    "first step: leave one of them out"
                )
        if term.guide == LABEL_SCORES:
            yield f"guide: {LABEL_SCORES} scores only the pairs that are listed for it: give guide an embedding model"


def _source_rules(data: DataSection, batch: BatchSection, task: str) -> Iterator[str]:
    """Rules on sources with prompts, losses, a temperature, a batch size or validation data of their own."""
    sources = data.sources()
    wrong_option = "global_batch_size"
    run_option = "batch_size"
    if batch.global_batch_size is not None:
        wrong_option = "batch_size"
        run_option = "global_batch_size"
    is_sized = False
    for source in sources:
        name = source.name or source.path
        is_sized |= bool(source.batch_size or source.global_batch_size)
        size = getattr(source, wrong_option)
        if size is not None:
            yield (
                f"data_path: {name} has {wrong_option}: {size:,d}, and the run counts by {run_option}: give the source "
                f"{run_option} too"
            )
        for option in ("query_prompt", "document_prompt", "max_length"):
            if task == "rerank" and getattr(source, option) is not None:
                yield (
                    f"data_path: {name} has {option}, and task: rerank has one {option} for the whole run: give it to the "
                    "run, or leave it out"
                )
        if source.val_data_path is not None and not data.has_validation:
            yield (
                f"data_path: {name} has val_data_path, and the run has none: give it val_data_path too, whose score "
                "chooses the checkpoint"
            )
    if data.homogeneous_batches:
        return
    if losses_differ(data) or is_sized:
        what = "losses or a temperature" if losses_differ(data) else "a batch size"
        yield f"data_path: a source with {what} of its own needs batches of its own: set homogeneous_batches: true"
    if data.sampling == "round_robin" and len(sources) > 1:
        yield "sampling: round_robin takes a batch of each source in turn: set homogeneous_batches: true"


def _task_rules(options: Options, terms: Sequence[ResolvedTerm]) -> Iterator[str]:
    """Options that go only with `task: embed`, or only with `task: rerank`."""
    # By value: a config that a run has written names every option.
    changed = [
        name
        for name, option in all_options().items()
        if options[name] != option.default
    ]
    if options["task"] == "embed":
        for name in RERANKER_OPTIONS.split():
            if name in changed:
                yield f"{name} is for rerankers: set task: rerank, or leave it out"
        return
    for name in EMBEDDER_OPTIONS.split():
        if name in changed:
            yield f"{name}: {options[name]} is for embedding models and does not work with task: rerank: leave it out"
    known = [name for name, loss in LOSSES.items() if loss.reads_lists]
    for term in terms:
        loss = term.loss
        if not loss.reads_lists:
            yield (
                f"loss: {loss.name} compares vectors, and task: rerank has scores of a query's documents: use one of "
                f"{', '.join(known)}"
            )
        for name, field in type(loss).model_fields.items():
            value = getattr(loss, name)
            if name in EMBEDDER_LOSS_OPTIONS.split() and value != field.default:
                yield (
                    f"{name}: {value} needs candidates of the whole batch, and task: rerank reads the documents of each "
                    "query: leave it out"
                )


def _run_rules(config: TrainConfig) -> Iterator[str]:
    """Rules on names, evaluations, checkpoints and the files of the run."""
    run = config.run
    data = config.data
    for name, value in config.option_values().items():
        if name in ("model_name", "data_path", "output_dir") and value in ("", []):
            yield f"{name} is empty: give it a value"
        if isinstance(value, str) and "\0" in value:
            yield f"{name}: {value!r} holds a NUL character: write it without"
    profiled = config.logging.profile_steps
    if profiled is not None and (len(profiled) != 2 or profiled[0] > profiled[1]):
        yield f"profile_steps: {profiled} must be two numbers, the first and the last step: [10, 12]"
    log_file = config.logging.log_file
    if run.resume is not False and run.overwrite:
        yield (
            f"resume: {yaml_word(run.resume)} continues the run in output_dir and overwrite: true replaces it: keep one "
            "of them"
        )
    is_name = log_file.strip(". ") and PurePath(log_file).name == log_file
    if not is_name or RUN_FILE_PATTERN.fullmatch(log_file):
        yield (
            f"log_file: {log_file!r} must be the name of a file in output_dir that the run does not write otherwise, as "
            "training_log.txt"
        )
    if data.val_split is not None and data.val_data_path is not None:
        yield (
            f"val_split: {data.val_split:g} and val_data_path: {data.val_data_path} both give validation data: keep one "
            "of them"
        )
    others = [guard.path for guard in config.evaluation.listed_guards()]
    others += [
        source.val_data_path for source in data.sources() if source.val_data_path
    ]
    if others and config.evaluation.has_run_file:
        yield (
            f"first_stage: {config.evaluation.first_stage} ranks documents of the run's validation data alone, and "
            f"{', '.join(others)} has others: use bm25 or an embedding model"
        )
    # A run replaces or cuts its own files, so data must not be among them.
    output = Path(run.output_dir).absolute()
    for option, name in data_paths(data):
        path = Path(name).absolute()
        if output not in path.parents or not path.exists():
            continue
        first = path.relative_to(output).parts[0]
        if first == log_file or RUN_FILE_PATTERN.fullmatch(first):
            yield (
                f"{option}: {name} is in output_dir under a name that the run writes itself ({first}), and would be "
                "lost: move the data, or choose another output_dir"
            )
    eval_steps = config.evaluation.eval_steps
    save_steps = run.save_steps
    asking = None
    if run.load_best_model_at_end is True:
        asking = "load_best_model_at_end"
    elif config.evaluation.guards:
        asking = "guards"
    if asking is None:
        return
    missing = [] if data.has_validation else ["val_data_path"]
    for name, steps in (("eval_steps", eval_steps), ("save_steps", save_steps)):
        if steps is None:
            missing.append(name)
    if missing:
        yield f"{asking} needs checkpoints that were evaluated: give {' and '.join(missing)} too"
    if not isinstance(eval_steps, int) or not isinstance(save_steps, int):
        return
    if save_steps % eval_steps:
        yield (
            f"{asking} needs an evaluation at every checkpoint: save_steps: {save_steps} must be a multiple of "
            f"eval_steps: {eval_steps}"
        )


# ---- remarks: options without effect, or that are easily misunderstood


def remarks(config: TrainConfig) -> list[str]:
    """Return one sentence per option that has no effect or may be misunderstood."""
    values = config.option_values()
    data = config.data
    model = config.model
    optimizer = config.optimizer
    terms = run_terms(config.objective, data, model.model_name)

    # Why options have no effect -> these options.
    unread = {}
    for switch, names in NEEDED_BY.items():
        if not values[switch]:
            unread[f"without {switch}"] = set(names.split())
    loss_options = {*LOSS_OPTIONS, "max_negatives"}
    for term in terms:
        # A guide or a teacher may serve one of several losses, so one that reads it is enough.
        loss_options -= read_options(term.loss.name)
    unread[f"with {_names(config.objective, terms)}"] = loss_options
    optim = optimizer.optim
    unread[f"with optim: {optim}"] = _options_of_others(OPTIMIZERS, [optim])
    report_to = config.logging.report_to
    trackers = ", ".join(report_to) or "none"
    unread[f"with report_to: {trackers}"] = _options_of_others(TRACKERS, report_to)
    if not data.has_validation:
        evaluation_options = {"eval_before", "eval_metric"}
        for name in ("eval_steps", "patience"):
            if isinstance(values[name], int):
                evaluation_options.add(name)
        unread["without val_data_path or val_split"] = evaluation_options
    elif config.evaluation.eval_steps is None and isinstance(values["patience"], int):
        unread["with eval_steps: null"] = {"patience"}
    if len(data.sources()) < 2:
        source_options = {"sampling"}
        if not isinstance(data.data_path, list):
            source_options.add("homogeneous_batches")
        unread["with a single source in data_path"] = source_options

    lines = []
    for reason, options in unread.items():
        for name in sorted(options & values.keys()):
            # By value: an option that is given as its default changes nothing.
            if values[name] != all_options()[name].default:
                lines.append(
                    f"{name}: {yaml_word(values[name])} has no effect {reason}"
                )
    for number, entry in enumerate(config.objective.losses or [], 1):
        for name in sorted(LOSS_OPTIONS.keys() - read_options(entry.loss)):
            value = getattr(entry, name)
            if value is not None:
                lines.append(
                    f"losses, entry {number}: {name}: {yaml_word(value)} has no effect with loss: {entry.loss}"
                )
    needed = {
        teacher.label for teacher in needed_teachers(config.objective, data, model)
    }
    for teacher in listed_teachers(config.objective):
        if teacher.label not in needed:
            lines.append(
                f"teachers: {teacher.label} has no effect: no loss follows it, and it is no guide"
            )
    if optimizer.max_steps is not None and optimizer.epochs != "auto":
        lines.append(
            f"max_steps: {optimizer.max_steps:,d} decides the length of the run, epochs: {optimizer.epochs:g} does not"
        )
    has_weights = any(source.weight != 1.0 for source in data.sources())
    if data.sampling == "round_robin" and has_weights:
        lines.append(
            "data_path: the weights of the sources have no effect with sampling: round_robin"
        )
    if data.val_data_path is not None and data.val_data_path == data.data_path:
        lines.append(
            "val_data_path is the training data: its scores will not say how the model does on new data"
        )
    rate = optimizer.learning_rate
    if rate == "auto" and not OPTIMIZERS[optim].takes_adam_rates:
        lines.append(
            f"learning_rate: auto is of the size that AdamW takes: with optim: {optim} give a rate"
        )
    if config.adapters.use_lora and rate != "auto" and rate < LOWEST_USUAL_ADAPTER_RATE:
        lines.append(
            f"learning_rate: {rate:g} is a rate for training all weights, and adapters learn little with it: leave it "
            "out (auto), or give about ten times that"
        )
    for name in ("query_prompt", "document_prompt"):
        prompt = getattr(model, name)
        if prompt is not None and "\\n" in prompt:
            lines.append(
                f"{name}: {prompt} holds a backslash and an n where a line break is usual, and the model "
                "reads them so: a line break is \"\\n\" in double quotes in a YAML file, and $'\\n' in a shell"
            )
    return lines


def _options_of_others(kinds: Mapping[str, Any], chosen: Sequence[str]) -> set[str]:
    """Return the options that declared kinds read, and none of the chosen ones."""
    options = set()
    for kind in kinds.values():
        options |= kind.options
    for name in chosen:
        options -= kinds[name].options
    return options


def _names(objective: ObjectiveSection, terms: Sequence[ResolvedTerm]) -> str:
    names = loss_names(terms)
    if len(names) == 1 and objective.losses is None:
        return f"loss: {names[0]}"
    return f"losses: {', '.join(names)}"


# ---- paths that are missing


def data_paths(data: DataSection) -> list[tuple[str, str]]:
    """Return the option and the path of each source of data."""
    sources = data.sources()
    paths = [("data_path", source.path) for source in sources]
    for source in sources:
        if source.val_data_path is not None:
            paths.append(("val_data_path", source.val_data_path))
    if data.val_data_path:
        paths.append(("val_data_path", data.val_data_path))
    return paths


def missing_path(
    option: str,
    path: str,
    future_folders: Sequence[Path] = (),
) -> str | None:
    """Return a sentence about data that are not here and no name on the Hub, pattern or address; otherwise None.

    `future_folders`: those that will be there when the data are read.
    """
    if existing(path) or is_pattern(path) or is_address(path):
        return None
    if is_inside(path, future_folders):
        return None
    from vembed.data.formats.table import is_hub_dataset  # loads the formats' libraries

    # A name like that of a file here is a typing error.
    if is_hub_dataset(path) and not similar_path(path):
        return None
    return f"{option}: {path} does not exist (looked from {Path.cwd()}){similar_path(path)}"


def is_inside(path: str, folders: Sequence[Path]) -> bool:
    """Return whether a path is in one of the folders, none of which need be there yet."""
    return any(
        Path(path).absolute().is_relative_to(folder.absolute()) for folder in folders
    )


def require_paths(run: ResolvedRun, future_folders: Sequence[Path] = ()) -> None:
    """Raise UserError if a file or folder is missing that a run would look for. `future_folders`: those that will be
    there when the run begins."""
    data = run.config.data
    model = run.config.model
    problems = []
    for option, path in data_paths(data):
        sentence = missing_path(option, path, future_folders)
        if sentence is not None:
            problems.append(sentence)
    folder = model.model_name
    is_given_elsewhere = (
        folder == model.model_class
        or RESULT_SEPARATOR in run.origins["model_name"]
        or is_inside(folder, future_folders)
    )
    if not existing(folder) and not is_hub_model(folder) and not is_given_elsewhere:
        problems.append(
            f"model_name: {folder} is not a folder (looked from {Path.cwd()}); give an existing folder or a Hub name "
            f"such as org/model{similar_path(folder)}"
        )
    if data.image_root is not None and not existing(data.image_root):
        problems.append(
            f"image_root: {data.image_root} does not exist (looked from {Path.cwd()})"
        )
    if problems:
        raise UserError("\nalso: ".join(problems))
