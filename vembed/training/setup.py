"""Set-up of a run: its data, its model, and decisions that need both."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch

from vembed.config.rhythm import Rhythm, Size, passes, rhythm
from vembed.config.sampling import parse_sampling
from vembed.config.schema import TrainConfig
from vembed.config.terms import source_batch_sizes, task_numbers, with_temperature
from vembed.cores import num_cores
from vembed.data.batches import BatchSchedule
from vembed.data.features import Features, Featuriser
from vembed.data.feeding import Feeder
from vembed.data.rank_batch import RankBatchStream
from vembed.data.sources import ExampleStore
from vembed.data_tools.init.datasets import open_sets
from vembed.errors import UserError
from vembed.evaluation.scores import check_metric
from vembed.inference.encoding import encode_items
from vembed.losses.batch import EmbeddingLoss
from vembed.losses.build import build_loss
from vembed.models.embedding_model import EmbeddingModel, build_model
from vembed.models.families.decisions import describe, without_effect
from vembed.models.families.description import ModelDescription
from vembed.models.row_gradients import use_row_gradients
from vembed.parallel import collectives
from vembed.parallel.parameters import num_parameters
from vembed.parallel.session import Session
from vembed.teachers.supply import Teachers
from vembed.training.auto_rate import with_rate
from vembed.training.compiled import check_compiled, decide_compilation, some_inputs
from vembed.training.frozen import InputSource, open_stores
from vembed.training.optim import build_optimizer
from vembed.training.parts import RunData, RunModel

log = logging.getLogger("vembed")

SAMPLE = 2048
"""Number of documents whose embeddings determine the principal directions."""
PIXELS_SHARE = 0.1
"""Share of the free host memory that decoded images may take, over all processes of the machine."""
SAMPLED = 64
"""Number of examples whose inputs are counted, for the cost of a run."""


@contextmanager
def main_first(session: Session) -> Iterator[None]:
    """Run the with-block on rank 0 before the other ranks, which then find in the cache what it has read; on another
    machine, whose cache may be another, on its first rank before the others. A UserError on rank 0 is raised on all
    ranks."""
    if not session.is_main:
        # The other ranks wait here until rank 0 is done, or take over its mistake.
        mistake = collectives.broadcast_json(None)
        if mistake is not None:
            raise UserError(mistake)
        if session.local_rank == 0:
            yield
            session.barrier()
        else:
            session.barrier()
            yield
        return
    try:
        yield
    except UserError as error:
        collectives.broadcast_json(str(error))
        raise
    collectives.broadcast_json(None)
    session.barrier()


def open_data(config: TrainConfig, session: Session) -> RunData:
    """Read the examples and the evaluation data, and fix the order of the batches. Collective."""
    with main_first(session):
        sets = open_sets(config, compares=session.is_main)
    is_decided_here = (
        config.optimizer.epochs == "auto" and config.optimizer.max_steps is None
    )
    # Only then is the model looked at: a checkpoint of another model is to be refused first.
    has_scale = is_decided_here and describe(config.model).traits.has_scale_and_bias
    epochs = passes(config, len(sets.examples), has_scale=has_scale)
    if is_decided_here:
        log.info("epochs: %g (auto; %s)", epochs.value, epochs.reason)
    batch_schedule, total_steps = schedule_batches(
        config, sets.examples, session, epochs.value
    )
    return RunData(
        sets.examples,
        sets.evaluation,
        batch_schedule,
        config.batch.gradient_accumulation_steps,
        epochs.value,
        total_steps,
        sets.warnings,
        sets.by_task,
    )


def build_parts(config: TrainConfig, data: RunData, session: Session) -> RunModel:
    """Build model, loss and optimizer, with weights replicated or sharded. Collective."""
    # Before the model: the teachers' weights are no longer in memory when the model's are read.
    teachers = Teachers(config, session)
    teachers.prepare(data.examples)
    # The same start on every rank; the step seeds each forward pass anew.
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(config.run.deterministic)
    description = describe(
        config.model,
        config.matryoshka,
        similarity=config.objective.similarity,
        use_qlora=config.adapters.use_qlora,
    )
    log.info("model: %s", description.summary())
    values = config.options()
    user_options = {name: values[name] for name in config.given if name in values}
    for line in without_effect(description, user_options):
        log.info("%s", line)
    if data.evaluation is not None:
        check_metric(config, data.evaluation, description)
    # Both phases of Gradient Cache read the pixels of a batch: a large batch should fit.
    pixels = max(
        2**30,
        int(PIXELS_SHARE * psutil.virtual_memory().available)
        // session.local_world_size,
    )
    decoders = max(num_cores() // session.local_world_size, 1)
    featuriser = Featuriser(description, image_cache_bytes=pixels, decoders=decoders)
    # Before the model: compiled layers are chosen while it is built.
    decide_compilation(config, data, featuriser, session)
    embedder = build_model(
        description,
        config.model,
        config.adapters,
        objective=config.objective,
        seed=config.run.seed,
        device=session.model_device,
        computes_on=session.device,
        compute_dtype=session.placement.compute_dtype,
        recompute=session.placement.recomputation.value,
        compiles=session.placement.compilation.value,
        meta=session.builds_empty,
    )
    scale, bias = embedder.initial_scale_and_bias() or (None, None)
    config = _tempered(with_rate(config, embedder, session, data.total_steps), scale)
    if session.device.type == "cpu" and session.fsdp is None:
        use_row_gradients(embedder.backbone)
    if session.placement.copies_weights:
        embedder.compute_in_bf16()
    start_head(config, embedder, featuriser, data.examples, session)
    # Asked before `prepare`: it changes parameters and wraps modules, and rank 0 still holds the whole model.
    frozen, image_bytes, packs = (
        embedder.frozen_modalities(),
        embedder.bytes_of_frozen_images(),
        embedder.packs_texts(),
    )
    stores = open_stores(config, session, embedder)
    # The optimizer must see the parameters that `prepare` returns.
    model = session.prepare(embedder, description.layer_classes)
    check_compiled(model, embedder, featuriser, some_inputs(data), session)
    loss = build_loss(
        config,
        mrl_dims=description.mrl_dims,
        start_scale=scale,
        start_bias=bias,
        embedding_dim=description.embedding_dim,
        teacher_dims=teachers.dims,
    ).to(session.device)
    feeder = Feeder(featuriser, session.device, packs_texts=packs)
    return RunModel(
        embedder=embedder,
        model=model,
        loss=loss,
        optimizer=build_optimizer(model, loss, config),
        config=config,
        featuriser=featuriser,
        source=InputSource(
            model,
            feeder,
            session,
            frozen=frozen,
            stores=stores,
            image_bytes=image_bytes,
        ),
        teachers=teachers,
    )


def _tempered(config: TrainConfig, scale: float | None) -> TrainConfig:
    """Return the config with the temperature that suits its loss and the model's own scale, and log it where it is not
    the usual one. What a learned one starts from is said when the loss is built."""
    found = with_temperature(config, None if scale is None else 1 / scale)
    if found is not config and not config.objective.learn_temperature:
        why = (
            f"default of loss: {found.objective.loss}"
            if found.objective.loss != "infonce"
            else "with which this model was trained"
        )
        log.info("temperature: %.3g (%s)", found.objective.temperature, why)
    return found


def decide_rhythm(data: RunData, parts: RunModel) -> Rhythm:
    """Return how often the run is evaluated, saved and logged, and log what was left to `auto`."""
    some = [data.examples[index] for index in range(min(len(data.examples), SAMPLED))]
    # The weights and the two moments of AdamW, in float32.
    trained = num_parameters(parts.model, trainable_only=True)
    found = rhythm(
        parts.config,
        Size(
            total_steps=data.total_steps,
            examples_per_step=data.examples_per_step,
            num_training=sum(
                1 + len(one.positives) + len(one.negatives) for one in some
            )
            / max(len(some), 1),
            num_evaluated=0 if data.evaluation is None else data.evaluation.num_inputs,
            checkpoint_bytes=12 * trained,
        ),
    )
    for line in found.lines():
        log.info("%s", line)
    return found


def open_stream(
    config: TrainConfig, data: RunData, featuriser: Featuriser, session: Session
) -> RankBatchStream:
    """Return the stream of this rank's batches."""
    workers = num_workers(config, featuriser.description)
    store = data.examples
    return RankBatchStream(
        store,
        data.batch_schedule,
        featuriser,
        session.rank,
        session.world_size,
        workers,
        store.pair,
    )


def schedule_batches(
    config: TrainConfig, store: ExampleStore, session: Session, epochs: float
) -> tuple[BatchSchedule, int]:
    """Return the order of the examples and the number of optimizer steps."""
    size = (
        config.batch.global_batch_size or config.batch.batch_size * session.world_size
    )
    batch_schedule = BatchSchedule(
        store.sizes,
        size,
        config.run.seed,
        weights=store.weights,
        names=store.names,
        homogeneous=bool(config.data.homogeneous_batches),
        tasks=task_numbers(config),
        batch_sizes=source_batch_sizes(config, session.world_size),
        sampling=parse_sampling(config.data.sampling),
        keys=store.all_keys() if config.data.no_duplicates else None,
        drop_last=config.data.drop_last,
        labels=store.labels,
    )
    log.info(batch_schedule.summary())
    steps = config.optimizer.max_steps or math.ceil(
        epochs
        * batch_schedule.steps_per_epoch
        / config.batch.gradient_accumulation_steps
    )
    log.info(
        "global batch: %s examples over %s (%s each)%s; %s steps",
        f"{size:,d}",
        "1 process" if session.world_size == 1 else f"{session.world_size} processes",
        f"{size / session.world_size:,.6g}",
        f", {config.batch.gradient_accumulation_steps} batches per step"
        if config.batch.gradient_accumulation_steps > 1
        else "",
        f"{steps:,d}",
    )
    if size < session.world_size:
        raise UserError(
            f"global_batch_size: {size} is less than the number of processes, {session.world_size}"
        )
    if batch_schedule.smallest_batch < session.world_size:
        raise UserError(
            f"the smallest batch has {batch_schedule.smallest_batch} examples, fewer than the "
            f"{session.world_size} processes: use fewer processes, add data, or set drop_last: true"
        )
    return batch_schedule, max(steps, 1)


def num_workers(config: TrainConfig, description: ModelDescription) -> int:
    """Return the number of threads that prepare rank batches ahead. One suffices for text: the tokenizer is parallel
    itself."""
    if config.data.num_workers != "auto":
        return config.data.num_workers
    return (
        1 if description.modalities == ("text",) else min(4, max(1, num_cores() // 2))
    )


def log_cut_texts(features: Sequence[Features], description: ModelDescription) -> None:
    """Log how many of these inputs reach the maximum length, at which texts are truncated."""
    texts = [
        one.token_ids
        for one in features
        if one.modality == "text" and one.token_ids is not None
    ]
    num_full = sum(len(one) >= description.max_length for one in texts)
    if (
        num_full and not description.traits.has_fixed_length
    ):  # which pads every text to it
        log.info(
            "max_length: %s of the first %s texts fill %s tokens, and what is longer is cut there",
            f"{num_full:,d}",
            f"{len(texts):,d}",
            f"{description.max_length:,d}",
        )


def learned(loss: EmbeddingLoss) -> dict[str, float]:
    """Return the loss's learned scale and bias, for the log."""
    values = loss.scale_and_bias()
    return {} if values is None else {"scale": values[0], "bias": values[1]}


def start_head(
    config: TrainConfig,
    model: EmbeddingModel,
    featuriser: Featuriser,
    store: ExampleStore,
    session: Session,
) -> None:
    """Rotate the projection so that its first coordinates hold the most variance, with `mrl_projection_init: pca`.
    Collective."""
    if config.matryoshka.mrl_projection_init != "pca" or model.mrl_projection is None:
        return
    if session.is_main:
        # Spread over the whole store: its sources follow one another.
        count = min(len(store), SAMPLE)
        items = [
            store[number * len(store) // count].positives[0] for number in range(count)
        ]
        with model.without_mrl_projection():
            vectors = encode_items(
                model, featuriser, items, "document", normalize=False
            )
        model.start_mrl_projection(torch.from_numpy(vectors))
        log.info(
            "mrl_projection_init: principal components of %s documents",
            f"{len(items):,d}",
        )
    collectives.broadcast_tensors([model.mrl_projection.linear.weight])
