"""Set-up of a run: its data and their identity, its model, its hooks, and the values in place of `auto`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from vembed.config.decisions import (
    HEAD_RATE,
    RateFacts,
    RunIntervals,
    RunSize,
    TrainedPart,
    has_initial_weights,
    peak_rate,
    run_intervals,
)
from vembed.config.schema import (
    FILE_OPTIONS,
    DataSection,
    DataSource,
    EvaluationSection,
    RunSection,
    TrainConfig,
)
from vembed.config.terms import needed_teachers, run_temperature
from vembed.config.values import Auto
from vembed.data.batching.rank_batch import Feeder
from vembed.data.batching.stream import RankBatchStream
from vembed.data.datasets import RunLength, Sets, open_sets, run_length
from vembed.data.example_store import ExampleStore
from vembed.data.features import (
    BaseFeaturiser,
    Features,
    build_featuriser,
    refuse_prompts,
)
from vembed.errors import UserError
from vembed.evaluation.dataset import num_prompts
from vembed.evaluation.scores import check_metric
from vembed.inference.encoding import encode_items
from vembed.losses.batch import LossModule
from vembed.losses.build import build_loss
from vembed.models.building import (
    build_model,
    has_initial_norms,
    is_embedding_model,
    stored_scale_and_bias,
)
from vembed.models.embedding_model import ComposedModel, EmbeddingModel
from vembed.models.families.description import ModelDescription, describe_trained
from vembed.models.heads import principal_components
from vembed.models.precision import use_row_gradients
from vembed.parallel import collectives
from vembed.parallel.environment import num_cores
from vembed.parallel.launch_check import require_equal
from vembed.parallel.parameters import num_parameters
from vembed.parallel.placement import PRECISION_DTYPES
from vembed.parallel.session import Session
from vembed.parallel.step_memory import measure
from vembed.teachers import Teachers
from vembed.training.checkpoint.folders import fingerprint_of_option, of_images
from vembed.training.frozen import InputBuilder, open_stores
from vembed.training.hooks.base import Hook
from vembed.training.hooks.evaluations import (
    Guards,
    Patience,
    QueryRecord,
    TaskScores,
    WeightAverage,
)
from vembed.training.hooks.metrics import (
    MetricsLog,
    Profile,
    ProgressBar,
    StepMetrics,
    Watch,
)
from vembed.training.hooks.mining import EpochMiner
from vembed.training.optimizer import build_optimizer

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

NUM_PCA_DOCUMENTS = 2048
"""Documents whose embeddings determine the principal directions."""
IMAGE_CACHE_SHARE = 0.1
"""Share of the free host memory that decoded images may take, over all processes of the machine."""
MIN_IMAGE_CACHE_BYTES = 2**30
NUM_COUNTED_EXAMPLES = 64
"""Examples whose inputs are counted, for the cost of a run."""
ADAMW_BYTES_PER_PARAMETER = 12
"""The weight and the two moments of AdamW, in float32."""

SOURCE_GROUP_OPTIONS = {"losses", "temperature", "batch_size", "global_batch_size"}
"""Options of a source that are no part of the data's fingerprint."""


@dataclass(frozen=True, kw_only=True)
class RunData(Sets, RunLength):
    """Examples, evaluation data and the order of the batches."""

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs, with a fraction, that are done after `step` optimizer steps."""
        return step * self.batches_per_step / self.batch_schedule.batches_per_epoch


@dataclass(frozen=True)
class TrainingComponents:
    """Model, loss and optimizer, and what feeds them."""

    embedding_model: EmbeddingModel
    """The model as it was built: description and layout of the files. Its parameters may be shards by now."""
    model: nn.Module
    """The model as it is called: replicated or sharded."""
    loss: LossModule
    optimizer: torch.optim.Optimizer
    featuriser: BaseFeaturiser
    input_builder: InputBuilder
    teachers: Teachers | None
    """None where no loss follows one."""


def open_data(config: TrainConfig, session: Session) -> RunData:
    """Read the examples and the evaluation data, and fix the order of the batches. Collective."""
    data_options = config.data
    # Rank 0 reads first, then the first rank of each machine, then the others, which find in the cache what it has read.
    turn_of_rank = 0 if session.is_main else 1 + min(session.local_rank, 1)
    for turn in range(3):
        problem = None
        if turn == turn_of_rank:
            try:
                sets = open_sets(
                    data_options,
                    config.objective,
                    model_name=config.model.model_name,
                    seed=config.run.seed,
                    compares=session.is_main,
                )
            except UserError as error:
                problem = str(error)
        for rank, reason in enumerate(collectives.gather_objects(problem)):
            if reason is not None:
                raise UserError(f"{reason} (rank {rank})" if rank else reason)

    store = sets.examples
    if config.model.task == "rerank":
        counts = store.counts
        has_comparisons = counts["negatives"] or counts["scored"]
        if not has_comparisons and not data_options.in_batch_negatives:
            raise UserError(
                "task: rerank compares the documents of one query, and every record has one alone: find negatives with "
                "`vembed mine`, or take those of other queries with in_batch_negatives: 7"
            )
        refuse_prompts(counts["prompts"], "data_path")
        for evaluation in (sets.evaluation, *sets.by_task.values()):
            if evaluation is not None:
                refuse_prompts(num_prompts(evaluation), evaluation.name)
    length = run_length(
        store,
        data_options,
        config.batch,
        config.model,
        config.optimizer,
        seed=config.run.seed,
        world_size=session.world_size,
    )
    return RunData(
        **vars(sets),
        **vars(length),
    )


def identity_of(
    options: Mapping[str, Any],
    sources: Sequence[DataSource],
    data: RunData,
) -> dict[str, Any]:
    """Return what besides the options must stay when the run is resumed.

    The content of every file and folder that an option names is part of it. A model that is not on this machine yet
    (a Hub name) has no fingerprint.
    """
    tasks = []
    for source in sources:
        tasks.append(
            source.model_dump(
                mode="json", include=SOURCE_GROUP_OPTIONS, exclude_none=True
            )
        )
    identity = {
        "data": data.examples.fingerprint,
        "tasks": tasks if any(tasks) else [],
        "global_batch_size": data.examples_per_step,
    }
    images = of_images(data.examples)
    if images is not None:
        identity["image_files"] = images
    for name, kind in FILE_OPTIONS.items():
        contents = fingerprint_of_option(name, options[name], options["model_revision"])
        # The examples have a fingerprint of their own.
        if kind != "data" and contents != options[name]:
            identity[f"{name}_files"] = contents
    return identity


def require_same_data(identity: Mapping[str, Any], data: RunData) -> None:
    """Raise the same UserError on every rank unless all have read the same data, with the same images. Collective."""
    evaluation_images = None
    if data.evaluation is not None:
        evaluation_images = of_images(*data.evaluation.collections)
    contents = {
        "data": data.examples.fingerprint,
        "images": identity.get("image_files"),
        "validation images": evaluation_images,
    }
    advice = "give every machine the same data_path and images"
    require_equal("the data's content", contents, advice)


def build_components(
    config: TrainConfig,
    data: RunData,
    session: Session,
) -> tuple[TrainingComponents, TrainConfig]:
    """Build model, loss and optimizer, with weights replicated or sharded. Collective.

    Return them with the config in which learning rates and temperature are decided.
    """
    model_options = config.model
    objective = config.objective
    # Before the model: the teachers' weights are no longer in memory when the model's are read.
    teachers = None
    if needed_teachers(objective, config.data, model_options):
        teachers = Teachers(objective, config.data, model_options, session)
        teachers.prepare(data.examples)
    # The same start on every rank; the step seeds each forward pass anew.
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(config.run.deterministic)
    description = describe_model(config, data)
    # Both phases of Gradient Cache read the pixels of a batch: a large batch should fit.
    num_sharing = session.local_world_size
    image_bytes = int(IMAGE_CACHE_SHARE * psutil.virtual_memory().available)
    featuriser = build_featuriser(
        description,
        image_cache_bytes=max(MIN_IMAGE_CACHE_BYTES, image_bytes // num_sharing),
        decoders=max(num_cores() // num_sharing, 1),
    )
    # On CPUs `auto` is false.
    if model_options.torch_compile == "auto" and session.device.type == "cuda":
        decide_compilation(data, featuriser, session)
    log.info(f"compiled layers: {session.placement.compilation}")
    embedding_model = unsharded_model(config, description, session)

    # What needs the whole model, on rank 0: `prepare` changes parameters and wraps modules.
    if config.optimizer.learning_rate == "auto":
        config = decide_rates(config, embedding_model, data.total_steps)
    scale, bias = stored_scale_and_bias(description) or (None, None)
    if config.matryoshka.mrl_projection == "pca":
        start_projection(embedding_model, featuriser, data.examples, session)
    frozen = embedding_model.frozen_modalities()
    bytes_per_token = embedding_model.frozen_image_token_bytes()
    packs_texts = embedding_model.packs_texts()
    caches_features = config.batch.cache_frozen_features
    stores = open_stores(embedding_model, session) if caches_features else {}

    # The loss and the optimizer must see the parameters that `prepare` returns.
    model = session.prepare(embedding_model, description.layer_classes)
    loss = build_loss(
        config,
        mrl_dims=description.mrl_dims,
        start_scale=scale,
        start_bias=bias,
        embedding_dim=description.embedding_dim,
        teacher_dims={} if teachers is None else teachers.dims,
    ).to(session.device)
    input_builder = InputBuilder(
        model,
        Feeder(featuriser, session.device, packs_texts=packs_texts),
        session,
        frozen=frozen,
        stores=stores,
        image_bytes=bytes_per_token,
    )
    optimizer = build_optimizer(model, loss, config.optimizer, seed=config.run.seed)
    components = TrainingComponents(
        embedding_model, model, loss, optimizer, featuriser, input_builder, teachers
    )
    temperature = run_temperature(
        config.objective,
        config.data,
        config.model,
        None if scale is None else 1 / scale,
    )
    if temperature is not None:
        config = config.changed(temperature=temperature)
    return components, config


def describe_model(config: TrainConfig, data: RunData) -> ModelDescription:
    """Return and log what the model is, with the options that have no effect on it.

    Raise UserError if `eval_metric` is none of its scores.
    """
    description = describe_trained(
        config.model, config.matryoshka, config.objective, config.adapters
    )
    log.info(f"model: {description.summary()}")
    if description.scores == "label":
        for name in ("query_prompt", "document_prompt"):
            if prompt := getattr(description, name):
                raise UserError(
                    f"{name}: {prompt!r} does not work with reranker_head: label, because CrossEncoder would not add it in "
                    f'final/: put it into the texts of the data, and set {name}: ""'
                )
    # Options that are given, and that a model of this kind does not look at.
    unused = []
    if "multimodal" not in description.modalities:
        unused += ["min_pixels", "max_pixels"]
    if description.modalities == ("image",):
        unused += ["max_length", "query_prompt", "document_prompt", "padding_free"]
    if not description.bidirectional_attention:
        unused.append("bidirectional_attention")
    for name in unused:
        value = dict(config.model)[name]
        if name in config.model.model_fields_set and value not in (None, False):
            log.info(
                f"{name}: {value} has no effect on a model of the family {description.family}"
            )
    if data.evaluation is not None:
        check_metric(
            config.evaluation,
            config.objective.quantize_embeddings,
            data.evaluation,
            description,
        )
    return description


def unsharded_model(
    config: TrainConfig,
    description: ModelDescription,
    session: Session,
) -> EmbeddingModel:
    """Return the model as it is placed, before it is sharded. Where it will be, ranks other than 0 have empty weights."""
    placement = session.placement
    embedding_model = build_model(
        description,
        config.model,
        config.adapters,
        objective=config.objective,
        seed=config.run.seed,
        device=session.model_device,
        computes_on=session.device,
        compute_dtype=PRECISION_DTYPES[placement.precision.value],
        recompute=placement.recomputation.value,
        compiles=placement.compilation.value,
        meta=session.builds_empty,
    )
    if session.device.type == "cpu" and session.fsdp is None:
        use_row_gradients(embedding_model.backbone)
    if placement.copies_weights:
        embedding_model.compute_in_bf16()
    return embedding_model


def configured_hooks(trainer: Trainer) -> list[Hook]:
    """Return the hooks of a run, in the order of their calls."""
    config = trainer.config
    hooks: list[Hook] = []
    # Before those that write the scores, since some of these add scores.
    if config.optimizer.ema is not None:
        hooks.append(WeightAverage(config.optimizer.ema))
    if config.evaluation.guards:
        hooks.append(Guards())
    if config.data.mine is not None:
        hooks.append(EpochMiner(config.data.mine))
    if trainer.intervals.patience is not None:
        hooks.append(
            Patience(trainer.intervals.patience, trainer.schedule.warmup_steps)
        )
    hooks.append(ProgressBar(trainer.run_log.console))
    if config.logging.profile_steps is not None:
        hooks.append(Profile(*config.logging.profile_steps))
    if trainer.data.by_task:
        hooks.append(TaskScores())
    hooks += [StepMetrics(), Watch()]
    if trainer.session.is_main:
        hooks += [QueryRecord(), MetricsLog()]
    return hooks


def open_stream(
    options: DataSection,
    data: RunData,
    featuriser: BaseFeaturiser,
    session: Session,
) -> RankBatchStream:
    """Return the stream of this rank's batches."""
    # For texts one thread suffices: the tokenizer is parallel itself.
    is_text = featuriser.description.modalities == ("text",)
    num_workers = 1 if is_text else min(4, max(1, num_cores() // 2))
    if options.num_workers != "auto":
        num_workers = options.num_workers
    return RankBatchStream(
        data.examples,
        data.batch_schedule,
        featuriser,
        session.rank,
        session.world_size,
        num_workers,
        options.in_batch_negatives,
        # Equal inputs pass the model as often as they occur: an input would otherwise weigh in the statistics of shared
        # batch norms by the number of processes that have it.
        encodes_duplicates=session.syncs_batch_norms,
        # On CPUs a process would take the cores that compute. Images are decoded by processes in any case.
        uses_process=session.device.type == "cuda" and num_workers == 1,
    )


def log_truncated_texts(
    features: Sequence[Features], description: ModelDescription
) -> None:
    """Log how many of these inputs reach the maximum length, at which texts are truncated."""
    if description.family_traits.has_fixed_length:
        return  # every text is padded to it
    lengths = []
    for feature in features:
        if feature.modality == "text" and feature.token_ids is not None:
            lengths.append(len(feature.token_ids))
    num_full = sum(length >= description.max_length for length in lengths)
    if num_full:
        # Cut texts may be equal, and then nothing can be learned from them.
        level = logging.WARNING if 2 * num_full > len(lengths) else logging.INFO
        log.log(
            level,
            f"max_length: {num_full:,d} of the first {len(lengths):,d} texts fill {description.max_length:,d} tokens, "
            "and what is longer is cut there",
        )


def start_projection(
    embedding_model: EmbeddingModel,
    featuriser: BaseFeaturiser,
    examples: ExampleStore,
    session: Session,
) -> None:
    """Rotate the Matryoshka projection so that its first coordinates hold the most variance. Collective."""
    projection = embedding_model.mrl_projection
    if projection is None:
        return
    if session.is_main:
        # Spread over the whole store: its sources follow one another.
        count = min(len(examples), NUM_PCA_DOCUMENTS)
        items = []
        for number in range(count):
            example = examples[number * len(examples) // count]
            items.append(example.positives[0])
        # The sample is what the projection is given.
        inputs = []
        hook = projection.register_forward_pre_hook(
            lambda _, arguments: inputs.append(arguments[0].float())
        )
        encode_items(embedding_model, featuriser, items, "document")
        hook.remove()
        sample = torch.cat(inputs)
        weight = projection.linear.weight
        with torch.no_grad():
            weight.copy_(principal_components(sample, len(weight)))
        log.info(f"mrl_projection: principal components of {count:,d} documents")
    collectives.broadcast_tensors([projection.linear.weight])


# ---- values in place of `auto` -----------------------------------------------


def decide_rates(
    config: TrainConfig,
    embedding_model: EmbeddingModel,
    total_steps: int,
) -> TrainConfig:
    """Return the config with the peak learning rates in place of `auto`, and log their reason. Collective.

    Call it before the model is sharded, while rank 0 holds all of it.
    """
    description = embedding_model.description
    is_main = collectives.rank() == 0
    is_new = collectives.broadcast_object(
        is_main and has_initial_norms(embedding_model)
    )
    trained_names = [
        name
        for name, weight in embedding_model.named_parameters()
        if weight.requires_grad
    ]
    heads = tuple(f"{name}." for name in embedding_model.modules_behind_towers())
    what: TrainedPart = "weights"
    if config.adapters.use_lora:
        what = "adapters"
    elif trained_names and all(name.startswith(heads) for name in trained_names):
        what = "head"
    facts = RateFacts(
        what=what,
        family=description.family,
        width=description.text_hidden_dim or description.hidden_dim,
        is_tuned=is_embedding_model(description.folder),
        is_new=is_new or has_initial_weights(config.model),
        has_logit_scale=description.family_traits.has_logit_scale_and_bias,
        total_steps=total_steps,
    )
    decision = peak_rate(config.objective, config.adapters, facts)
    head_rate = config.optimizer.head_learning_rate
    log.info(f"learning_rate: {decision.value:g} (auto; {decision.reason})")
    new_layers = None
    backbone = embedding_model.backbone
    if isinstance(backbone, ComposedModel) and backbone.projections_are_new:
        new_layers = "the projections of the two towers are"
    elif getattr(embedding_model.head, "is_new", False):
        new_layers = "the layer of the score is"
    if new_layers is not None and head_rate is None:
        head_rate = max(HEAD_RATE, decision.value)
        log.info(f"head_learning_rate: {head_rate:g} (auto; {new_layers} new)")
    return config.changed(learning_rate=decision.value, head_learning_rate=head_rate)


def decide_intervals(
    evaluation: EvaluationSection,
    run_options: RunSection,
    logging_steps: int | Auto,
    data: RunData,
    model: nn.Module,
    *,
    is_length_given: bool,
) -> RunIntervals:
    """Return how often the run is evaluated, saved and logged, and log what was left to `auto`."""
    num_counted = min(len(data.examples), NUM_COUNTED_EXAMPLES)
    num_inputs = 0
    for index in range(num_counted):
        num_inputs += len(data.examples[index].items)
    num_trained = num_parameters(model, trainable_only=True)
    num_evaluated = 0
    if data.evaluation is not None:
        num_evaluated = sum(map(len, data.evaluation.collections))
    size = RunSize(
        total_steps=data.total_steps,
        examples_per_step=data.examples_per_step,
        num_training=num_inputs / max(num_counted, 1),
        num_evaluated=num_evaluated,
        checkpoint_bytes=ADAMW_BYTES_PER_PARAMETER * num_trained,
        is_length_given=is_length_given,
    )
    intervals, reasons = run_intervals(evaluation, run_options, logging_steps, size)
    for name, reason in reasons.items():
        interval = getattr(intervals, name)
        value = "none" if interval is None else str(interval).lower()
        log.info(f"{name}: {value} (auto; {reason})")
    return intervals


# ---- compiled layers ---------------------------------------------------------

FLOPS_PER_PARAMETER_AND_TOKEN = 6.0
"""Forward and backward pass."""
NUM_FIRST_EXAMPLES = 8
"""Examples whose inputs are counted."""


def decide_compilation(
    data: RunData,
    featuriser: BaseFeaturiser,
    session: Session,
) -> None:
    """Decide by the operations of the whole run whether layers are compiled, before the model is built.

    The first examples, by which they are estimated, are the same on every rank.
    """
    num_first = min(NUM_FIRST_EXAMPLES, len(data.examples))
    units = []
    for number in range(num_first):
        units += featuriser.units(data.examples[number])
    features = featuriser.features(units)
    num_examples = data.total_steps * data.examples_per_step
    num_samples = num_examples / max(num_first, 1)
    num_tokens = num_samples * sum(feature.length for feature in features)
    size = session.placement.size or measure(session.placement.run.config)
    session.placement = session.placement.for_work(
        FLOPS_PER_PARAMETER_AND_TOKEN * size.total * num_tokens
    )
    if session.placement.compilation.value:
        import torch._dynamo  # imports the compiler

        # Nobody has asked for it: a layer that does not compile runs plain.
        torch._dynamo.config.suppress_errors = True
