"""One global batch, two ways: through the real step on N ranks, and plainly in one process; gradients by name."""

import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from tests.built import described, model_of
from tests.losses.reference import reference_loss
from tests.measure import gradient_errors
from tests.tiny import shared, texts, tiny_bert, tiny_reranker
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig
from vembed.data.batching.rank_batch import (
    Feeder,
    make_rank_batch,
    split_by_length,
)
from vembed.data.batching.schedule import rank_examples
from vembed.data.examples import Example, Item
from vembed.data.features import build_featuriser
from vembed.losses.batch import INDEX_FIELDS, LossBatch
from vembed.losses.build import build_loss
from vembed.models.building import stored_scale_and_bias
from vembed.models.families.backbones import unwrapped_name
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import Budget
from vembed.training.frozen import InputBuilder
from vembed.training.step import (
    TrainingStep,
    join_slices,
    seed_of,
)

SEED = 5
BATCH_NUMBER = 3
Data = Literal["pairs", "negatives", "several", "scored", "graded"]
MRL = {"mrl_dims": [8, 32, 16], "mrl_weights": [0.5, 1.0, 2.0]}
LORA = {"use_lora": True, "lora_r": 4}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """Options of TrainConfig: the loss, LoRA, gradient checkpointing, MRL."""
    data: Data = "negatives"
    cache: bool | None = True
    kept_tokens: int = 10**9
    """Tokens whose graphs fit, if `cache` is None."""
    micro: Literal["row", "odd", "whole"] = "odd"
    dropout: float = 0.0
    num_examples: int = 7
    """Of two, three and four ranks some have more of them than others."""

    def config(self, folder, **more):
        """The run that this case stands for."""
        return TrainConfig(
            model_name=str(folder), data_path="none", **{**self.options, **more}
        )

    def folder(self):
        """The model that is trained."""
        if self.options.get("task") == "rerank":
            return shared(tiny_reranker, dropout=self.dropout)
        return shared(tiny_bert, dropout=self.dropout)

    def budget(self):
        """Micro-batches of one row, of an odd size, or everything at once."""
        tokens = {"row": 1, "odd": 73, "whole": 10**9}[self.micro]
        return Budget(tokens, self.kept_tokens, self.cache)


def examples(case):
    """Texts of very different lengths; some occur again, as negatives, as positives, on other ranks."""
    words = texts(4 * case.num_examples, seed=3, longest=30)
    built = []
    for row in range(case.num_examples):
        query, positive, other, negative = words[4 * row : 4 * row + 4]
        if row % 3 == 2:
            positive = words[1]  # the positive of row 0, also on another rank
        if row % 4 == 3:
            # Another text of the same tokens: not equal, on whatever rank it is.
            positive = words[1].upper()
        if row % 5 == 4:
            # The positive of row 1: a negative that another row must not be pushed from.
            negative = words[5]
        positives = [positive]
        negatives = []
        scores = None
        negative_scores = None
        if case.data in ("negatives", "several", "graded"):
            negatives = [negative, other] if row % 3 == 0 else [negative]
        if case.data in ("several", "graded") and row % 2 == 0:
            positives.append(other)
        if case.data == "scored":
            scores = (((7 * row) % 5) / 5,)
        if case.data == "graded":
            scores = (1.0 + 0.01 * row, 0.7 + 0.01 * row)[: len(positives)]
            negative_scores = (-0.1 * row, 0.2 - 0.1 * row)[: len(negatives)]
        items = (tuple(map(Item, positives)), tuple(map(Item, negatives)))
        more = {"where": f"row {row}", "negative_scores": negative_scores}
        built.append(Example(Item(query), *items, scores, **more))
    return built


def build(config, teacher_dims=None):
    """Model and loss in float64, the same on every call; adapters are not left at zero."""
    description = described(config)
    model = model_of(
        config, description, recompute=resolve_run(config).recomputation.value
    ).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.normal_(0, 0.05, generator=generator)
    scale, bias = stored_scale_and_bias(description) or (None, None)
    loss = build_loss(
        config,
        mrl_dims=description.mrl_dims,
        start_scale=scale,
        start_bias=bias,
        embedding_dim=description.embedding_dim,
        teacher_dims=teacher_dims,
    ).double()
    return model.train(), loss, build_featuriser(description)


def step_of(
    model,
    loss,
    featuriser,
    session,
    rows,
    budget,
    teachers=None,
    auxiliary=None,
    **inputs,
):
    """The real step of a prepared model, and this rank's part of the rows. `inputs`: of InputBuilder."""
    rank = rank_examples(len(rows), session.rank, session.world_size)
    rank_batch = make_rank_batch(rows[rank], rank.start, featuriser)
    feeder = Feeder(featuriser, session.device)
    builder = InputBuilder(model, feeder, session, **inputs)
    step = TrainingStep(
        model, loss, builder, session, budget, SEED, teachers, auxiliary
    )
    return step, rank_batch


def steps_on_ranks(cases, strategy, more):
    """Called on every rank: each case, with its model's folder, through the real step. Return of each the whole
    gradients by name, and the numbers of forward passes and kept graphs."""
    steps = []
    first, folder = cases[0]
    with start_session(first.config(folder, strategy=strategy, **more)) as session:
        for case, folder in cases:
            config = case.config(folder, strategy=strategy, **more)
            gradients, result = step_on_rank(case, config, session)
            steps.append((gradients, result.num_forwards, result.num_kept_graphs))
    return steps


def with_whole_loss(by_rank):
    """The gradients of rank 0, with the loss of all ranks."""
    return {**by_rank[0], "loss": sum(gradients["loss"] for gradients in by_rank)}


def step_on_rank(case, config, session, auxiliary=None, teachers=None):
    """This rank's part of the case's batch through the real step: the whole gradients by name, and the result."""
    step, rank_batch = prepared_step(case, config, session, auxiliary, teachers)
    result = step.accumulate(rank_batch, BATCH_NUMBER, weight=1.0, is_last_batch=True)
    step.synchronise(0.0)
    return all_gradients(step.model, step.loss, result.loss_share), result


def prepared_step(case, config, session, auxiliary=None, teachers=None):
    """The real step of the case, and this rank's part of its batch."""
    embedder, loss, featuriser = build(
        config, {} if teachers is None else teachers.dims
    )
    model = session.prepare(embedder, embedder.description.layer_classes)
    rows = examples(case)
    budget = case.budget()
    return step_of(model, loss, featuriser, session, rows, budget, teachers, auxiliary)


def reference(case, world_size):
    """The same in one process, from the formula: every occurrence encoded by itself, one dense loss, autograd."""
    config = case.config(case.folder(), gradient_checkpointing=False)
    model, loss, featuriser = build(config)
    if case.dropout:
        batch = drawn_batch(case, model, featuriser, world_size)
    else:
        batch = plain_batch(case, model, featuriser)
    return formula_gradients(config, model, loss, batch)


def formula_gradients(config, model, loss, batch, **more):
    """The formula's gradients and loss for a batch. `more`: arguments of the formula."""
    value = reference_loss(
        batch,
        config,
        parameters=dict(loss.named_parameters()),
        mrl_dims=model.description.mrl_dims,
        **more,
    )
    value.backward()
    return all_gradients(model, loss, value.detach())


def plain_batch(case, model, featuriser):
    """Every occurrence of every text in one padded batch."""
    units = []
    rows = []
    negatives = []
    scores = []
    negative_scores = []
    is_reranker = gives_scores(model)
    for number, example in enumerate(examples(case)):
        query = len(units)
        units += featuriser.units(example)
        first = query if is_reranker else query + 1
        for place in range(len(example.positives)):
            position = first + place
            rows.append((position if is_reranker else query, position, number))
        scores += example.scores or ()
        first += len(example.positives)
        for place in range(len(example.negatives)):
            negatives.append((first + place, number))
        negative_scores += example.negative_scores or ()
    features = featuriser.features(units)
    embeddings = model([("text", featuriser.collate(features))])[0]
    table = torch.tensor(rows)
    extra = torch.tensor(negatives, dtype=torch.int64).reshape(-1, 2)
    return LossBatch(
        embeddings=embeddings,
        content=torch.tensor([feature.content for feature in features]),
        query=table[:, 0],
        positive=table[:, 1],
        example=table[:, 2],
        negative=extra[:, 0],
        negative_example=extra[:, 1],
        label_scores=label_scores(scores),
        rank_rows=slice(0, len(rows)),
        rank_negatives=slice(0, len(negatives)),
        negative_label_scores=label_scores(negative_scores),
        embeddings_are_scores=is_reranker,
    )


def label_scores(scores):
    return torch.tensor(scores, dtype=torch.float64) if scores else None


def gives_scores(model):
    return model.description.scores is not None


def drawn_batch(case, model, featuriser, world_size):
    """With dropout the draws depend on the micro-batches: the same ones, with graphs kept, of all ranks in turn."""
    rows = examples(case)
    budget = case.budget()
    rank_batches = []
    for rank in range(world_size):
        local_rows = rank_examples(len(rows), rank, world_size)
        rank_batches.append(
            make_rank_batch(rows[local_rows], local_rows.start, featuriser)
        )
    tokens = budget.micro_batch_tokens
    counts = []
    for rank_batch in rank_batches:
        counts.append(len(split_by_length(lengths_of(rank_batch), tokens)))
    embeddings = []
    for rank, rank_batch in enumerate(rank_batches):
        schedule = split_by_length(lengths_of(rank_batch), tokens, at_least=max(counts))
        rows = {}
        for number, micro_batch in enumerate(join_slices({"text": schedule})):
            ((modality, places),) = micro_batch
            torch.manual_seed(seed_of(SEED, BATCH_NUMBER, rank, number))
            chosen = [rank_batch.features[place] for place in places]
            if not chosen:
                chosen = [featuriser.dummy("text")]
            output = model([(modality, featuriser.collate(chosen))])[0]
            rows.update(zip(places, output, strict=False))
        embeddings += [rows[place] for place in range(len(rank_batch.features))]
    return joined_batch(
        torch.stack(embeddings),
        rank_batches,
        embeddings_are_scores=gives_scores(model),
    )


def lengths_of(rank_batch):
    return [feature.length for feature in rank_batch.features]


def joined_batch(embeddings, rank_batches, **more):
    """The global batch of these embeddings, from the parts of its ranks."""
    parts = {name: [] for name in INDEX_FIELDS}
    scores = []
    offset = 0
    for rank_batch in rank_batches:
        for name in ("query", "positive", "negative"):
            parts[name] += (getattr(rank_batch, name) + offset).tolist()
        for name in ("example", "negative_example"):
            parts[name] += getattr(rank_batch, name).tolist()
        parts["content"] += [feature.content for feature in rank_batch.features]
        if rank_batch.label_scores is not None:
            scores += rank_batch.label_scores.tolist()
        offset += len(rank_batch.features)
    tensors = {}
    for name, values in parts.items():
        tensors[name] = torch.tensor(values, dtype=torch.int64)
    return LossBatch(
        embeddings=embeddings,
        **tensors,
        label_scores=label_scores(scores),
        rank_rows=slice(0, len(parts["query"])),
        rank_negatives=slice(0, len(parts["negative"])),
        **more,
    )


def all_gradients(model, loss, value):
    """The gradients of model and loss by name, and the loss."""
    return {**full_gradients(model), **loss_gradients(loss), "loss": value}


def full_gradients(model):
    """The gradients of the whole model by plain names; collective where it is sharded."""
    if FullyShardedDataParallel.fsdp_modules(model):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                unwrapped_name(name): parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad and parameter.grad is not None
            }
    return {
        unwrapped_name(name): parameter.grad.full_tensor()
        if isinstance(parameter.grad, DTensor)
        else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def loss_gradients(loss):
    """Gradients of learned temperatures, scales and biases."""
    return {
        f"loss.{name}": parameter.grad
        for name, parameter in loss.named_parameters()
        if parameter.grad is not None
    }


def worst_error(actual, expected):
    """Return the parameter whose gradient is farthest off, and how far, as `tests.measure` measures it."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    ours = {name: value for name, value in actual.items() if name != "loss"}
    theirs = {name: value for name, value in expected.items() if name != "loss"}
    errors = gradient_errors(ours, theirs)
    name = max(errors, key=errors.__getitem__)
    return name, errors[name]


def assert_equal_gradients(actual, expected, tolerance=1e-9):
    """Compare gradients, and the losses ten times as closely."""
    loss = float(expected["loss"])
    assert float(actual["loss"]) == pytest.approx(loss, rel=tolerance / 10)
    name, error = worst_error(actual, expected)
    assert error < tolerance, f"{name} is off by {error:.2e}"
