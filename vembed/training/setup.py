"""RunData and RunModel: the data and the model of a run, each with all that is made once at its start."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from vembed.config.rate import HEAD, Trained, What, peak_rate
from vembed.config.resolved import Decision
from vembed.config.rhythm import Rhythm, Size, passes, rhythm, starts_from_nothing
from vembed.config.sampling import parse_sampling
from vembed.config.schema import TrainConfig
from vembed.config.terms import source_batch_sizes, task_numbers, with_temperature
from vembed.cores import num_cores
from vembed.data.batching.feeding import Feeder
from vembed.data.batching.rank_batch import RankBatchStream
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Item, Kind
from vembed.data.features import Features, Featuriser
from vembed.data_tools.init.datasets import open_sets
from vembed.errors import UserError
from vembed.evaluation.dataset import EvalData
from vembed.evaluation.scores import check_metric
from vembed.inference.encoding import encode_items
from vembed.losses.batch import EmbeddingLoss
from vembed.losses.build import build_loss
from vembed.models.adapters import wants_adapters
from vembed.models.cpu_kernels import use_row_gradients
from vembed.models.embedding_model import EmbeddingModel, build_model
from vembed.models.families.backbones import layers_of
from vembed.models.families.decisions import describe, without_effect
from vembed.models.families.description import ModelDescription
from vembed.models.families.table import Modality
from vembed.parallel import collectives
from vembed.parallel.estimate import measure
from vembed.parallel.parameters import discard_passes, num_parameters, set_gradient_sync
from vembed.parallel.session import Session
from vembed.teachers.supply import Teachers
from vembed.training.frozen import InputSource, open_stores
from vembed.training.optimizer import build_optimizer, head_prefixes

log = logging.getLogger("vembed")


@dataclass(frozen=True, slots=True)
class RunData:
    """Examples, evaluation data and the order of the batches."""

    examples: ExampleStore
    evaluation: EvalData | None
    batch_schedule: BatchSchedule
    batches_per_step: int
    """Global batches of an optimizer step: gradient_accumulation_steps."""
    epochs: float
    """Passes over the data, where `max_steps` does not say how long the run is."""
    total_steps: int
    """Optimizer steps of the whole run."""
    warnings: tuple[str, ...] = ()
    """Problems between training and validation data, on rank 0."""
    by_task: Mapping[str, EvalData] = field(default_factory=dict)
    """Evaluation data of single tasks, by the task's name."""

    @property
    def examples_per_step(self) -> int:
        """Examples of all global batches of an optimizer step."""
        return self.batch_schedule.global_batch_size * self.batches_per_step

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs, with a fraction, that are done after `step` optimizer steps."""
        return step * self.batches_per_step / self.batch_schedule.steps_per_epoch


@dataclass(frozen=True, slots=True)
class RunModel:
    """Model, loss and optimizer."""

    embedder: EmbeddingModel
    """The model as it was built: description and layout of the files. Its parameters may be shards by now."""
    model: nn.Module
    """The model as it is called: replicated or sharded."""
    loss: EmbeddingLoss
    optimizer: torch.optim.Optimizer
    featuriser: Featuriser
    source: InputSource
    teachers: Teachers
    config: TrainConfig
    """The config, with the learning rate that was decided for this model."""

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for module in (self.model, self.loss):
            module.zero_grad(set_to_none=True)


def with_rate(
    config: TrainConfig, embedder: EmbeddingModel, session: Session, total_steps: int
) -> TrainConfig:
    """Return the config with a number for `learning_rate`, and log why. Call it before the model is sharded, while rank
    0 holds all of it. Collective. `total_steps`: of the run."""
    if config.optimizer.learning_rate != "auto":
        return config
    description = embedder.description
    is_new = collectives.broadcast_json(
        has_initial_norms(embedder) if session.is_main else None
    )
    facts = Trained(
        what=_what(config, embedder),
        family=description.family,
        width=description.text_hidden_dim or description.hidden_dim,
        is_tuned=_is_tuned(Path(description.source)),
        is_new=is_new or starts_from_nothing(config),
        has_scale=description.traits.has_scale_and_bias,
        total_steps=total_steps,
    )
    decision = peak_rate(config, facts)
    log.info("learning_rate: %g (auto; %s)", decision.value, decision.reason)
    changes: dict[str, float] = {"learning_rate": decision.value}
    if (
        description.traits.has_two_models
        and config.optimizer.head_learning_rate is None
    ):
        changes["head_learning_rate"] = max(HEAD, decision.value)
        log.info(
            "head_learning_rate: %g (auto; the projections of the two towers are new)",
            changes["head_learning_rate"],
        )
    return config.changed(**changes)


def _is_tuned(folder: Path) -> bool:
    """Return whether the folder is that of an embedding model: it names a pooling, and has learned from pairs."""
    return any(
        (one / "modules.json").is_file() for one in (folder, folder.parent)
    ) and not _is_pretrained(folder)


def _is_pretrained(folder: Path) -> bool:
    """Return whether a run of vembed without a loss over pairs wrote the folder, such as one on the next token.

    It saves the layout of an embedding model as every run does."""
    config = folder.parent / "config.yaml"
    if folder.name != "final" or not config.is_file():
        return False
    written = yaml.safe_load(config.read_text("utf-8"))
    return (
        isinstance(written, dict)
        and written.get("loss") == "none"
        and not written.get("losses")
    )


def has_initial_norms(model: nn.Module) -> bool:
    """Return True if every norm has its initial weights, ones and zeros, which no trained model has."""
    weights = [
        one
        for module in model.modules()
        if "Norm" in type(module).__name__
        for one in _norm_weights(module)
    ]
    return bool(weights) and all(bool((one == value).all()) for one, value in weights)


def _norm_weights(module: nn.Module) -> Iterable[tuple[torch.Tensor, float]]:
    for name, value in module.named_parameters(recurse=False):
        if value.device.type != "meta":
            yield value.detach(), 0.0 if name == "bias" else 1.0


def _what(config: TrainConfig, embedder: EmbeddingModel) -> What:
    if wants_adapters(config.adapters):
        return "adapters"
    names = [
        name
        for name, parameter in embedder.named_parameters()
        if parameter.requires_grad
    ]
    heads = head_prefixes(embedder)
    only_heads = all(name.startswith(heads) for name in names)
    return "head" if names and only_heads else "weights"


OPERATIONS = 6.0
"""Floating-point operations of a parameter for each token, forward and backward."""
COMPARED_EXAMPLES = 8
"""Examples whose inputs are counted, and compared."""
FARTHEST = {True: 1e-2, False: 1e-4}
"""Largest 1 - cosine of an embedding by compiled and by plain layers: in 16 bits, and in float32."""

Inputs = list[tuple[Modality, dict[str, Tensor]]]


def some_inputs(data: RunData) -> list[tuple[Item, Kind]]:
    """Return the inputs of the first examples, the same on every rank."""
    found: list[tuple[Item, Kind]] = []
    for number in range(min(COMPARED_EXAMPLES, len(data.examples))):
        example = data.examples[number]
        found.append((example.query, "query"))
        found += [(one, "document") for one in (*example.positives, *example.negatives)]
    return found


def decide_compilation(
    config: TrainConfig, data: RunData, featuriser: Featuriser, session: Session
) -> None:
    """Decide `torch_compile: auto` by the arithmetic of the run."""
    placement = session.placement
    if config.model.torch_compile == "auto" and session.device.type == "cuda":
        features = featuriser.features(some_inputs(data))
        tokens = sum(one.length for one in features) / max(
            min(COMPARED_EXAMPLES, len(data.examples)), 1
        )
        num_examples = data.total_steps * data.examples_per_step
        size = placement.size or measure(config)
        session.placement = placement.for_work(
            OPERATIONS * size.total * tokens * num_examples
        )


def log_compilation(
    config: TrainConfig, embedder: EmbeddingModel, session: Session
) -> None:
    """Log whether the layers of the model are compiled, where there is a choice."""
    asked = config.model.torch_compile
    decision = session.placement.compilation
    layers = layers_of(embedder.backbone)
    if decision.value and not any(layer._compiled_call_impl for layer in layers):
        option = "auto" if asked == "auto" else "torch_compile: true has no effect"
        reason = f"{option}: layers with gradient checkpointing and packed texts cannot be compiled"
        session.placement = replace(
            session.placement, compilation=Decision(False, reason)
        )
    if asked != "auto" or session.device.type == "cuda":
        log.info("compiled layers: %s", session.placement.compilation)


def check_compiled(
    model: nn.Module,
    embedder: EmbeddingModel,
    featuriser: Featuriser,
    items: Sequence[tuple[Item, Kind]],
    session: Session,
) -> None:
    """Compare compiled with plain layers, where `auto` has compiled them; where they differ, or do not compile, plain
    layers are used, with a warning. Collective."""
    if (
        session.config.model.torch_compile != "auto"
        or not session.placement.compilation.value
    ):
        return
    layers = layers_of(embedder.backbone)
    problem = difference(
        model, layers, inputs_of(featuriser, items, session.device), session
    )
    # All processes decide alike: compiled and plain layers round differently.
    if not collectives.max_ints([int(problem is not None)])[0]:
        return
    reason = f"auto: {problem or 'another process could not compile them'}"
    log.warning("compiled layers: false (%s)", reason)
    for layer in layers:
        layer._compiled_call_impl = None
    session.placement = replace(session.placement, compilation=Decision(False, reason))


def inputs_of(
    featuriser: Featuriser, items: Sequence[tuple[Item, Kind]], device: torch.device
) -> Inputs:
    """Return the tensors of one micro-batch with all modalities among the items."""
    features = featuriser.features(items)
    found: Inputs = []
    for modality in featuriser.description.modalities:
        chosen = [one for one in features if one.modality == modality] or [
            featuriser.dummy(modality)
        ]
        batch = {
            name: tensor.to(device)
            for name, tensor in featuriser.joined(chosen).items()
        }
        found.append((modality, featuriser.finished(batch)))
    return found


def difference(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Inputs, session: Session
) -> str | None:
    """Return what is wrong with the compiled layers; None: they give the embeddings of plain layers, and compile in
    the backward pass too. Leaves no gradients. Collective under FSDP."""
    from torch._dynamo.exc import TorchDynamoException  # imports the compiler

    was_training = model.training
    compiled = [layer._compiled_call_impl for layer in layers]
    # The gradients of this check are dropped, so FSDP need not sum them over the processes.
    set_gradient_sync(model, False)
    try:
        # Dropout would make the two differ.
        model.eval()
        with torch.no_grad():
            found = [one.float() for one in model(inputs)]
            for layer in layers:
                layer._compiled_call_impl = None
            plain = [one.float() for one in model(inputs)]
            for layer, call in zip(layers, compiled, strict=True):
                layer._compiled_call_impl = call
        model.train()
        outputs = [one for one in model(inputs) if one.requires_grad]
        if outputs:
            torch.autograd.backward([one.float().sum() for one in outputs])
    except TorchDynamoException as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
    finally:
        for layer, call in zip(layers, compiled, strict=True):
            layer._compiled_call_impl = call
        discard_passes(model)
        model.train(was_training)
    cosines = [
        functional.cosine_similarity(*pair, dim=1)
        for pair in zip(found, plain, strict=True)
    ]
    farthest = max(float((1 - one).max()) for one in cosines)
    if farthest <= FARTHEST[session.placement.computes_in_half]:
        return None
    return f"compiled layers give other embeddings (1 - cosine is {farthest:.1e})"


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
    log_compilation(config, embedder, session)
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
