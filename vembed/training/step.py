"""One contrastive step: encode micro-batches, score the gathered embeddings, backpropagate through the micro-batches.

One global batch, of which this rank holds a rank batch of distinct inputs, passes five stages:

1. `agree`    one collective: the number of inputs, rows and micro-batches of each rank; whether graphs are kept.
2. `encode`   every micro-batch to embeddings, without graphs if Gradient Cache is on. Features of frozen towers are
              computed first, or read from the cache; gradients do not reach them.
3. `gather`   the embeddings of all ranks (in a ring the own ones), and the indices by which the rows refer to them.
4. `score`    this rank's part of L, and d L / d embeddings, which is summed over the ranks.
5. `backward` every micro-batch again (same random draws), surrogate <embedding, gradient>; the last synchronises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vembed.data.batching.feeding import MicroBatch, ModelInputs, row_index
from vembed.data.batching.microbatches import LockstepSplit
from vembed.data.batching.rank_batch import RankBatch
from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.models.bf16 import holding_copies
from vembed.models.families.table import Modality
from vembed.parallel import collectives
from vembed.parallel.devices import matmul_precision, seed_draws
from vembed.parallel.memory import is_shortage
from vembed.parallel.parameters import reshard, set_gradient_sync, set_keep_gathered
from vembed.parallel.session import Session
from vembed.teachers.supply import Teachers
from vembed.training.auxiliary_losses import AuxiliaryBatch, AuxiliaryLosses, Parts
from vembed.training.budget import Budget, MemoryGuard, OutOfMemory
from vembed.training.exchange import (
    Column,
    Counts,
    gather_columns,
    loss_exchange,
    part_of,
)
from vembed.training.frozen import BatchInputs, InputSource
from vembed.training.timing import PhaseTimer


@dataclass(frozen=True, slots=True)
class Agreement:
    """Facts about a global batch that all ranks share after one collective."""

    num_inputs: list[int]
    """Per rank, as the two below."""
    num_rows: list[int]
    num_negatives: list[int]
    has_scores: bool
    """True if every rank has scores of its positives; the next: of its hard negatives."""
    has_negative_scores: bool
    padded_tokens: int
    """The maximum over the ranks."""

    @property
    def counts(self) -> Counts:
        """The numbers of each rank, for the exchange of embeddings."""
        return Counts(self.num_inputs, self.num_rows, self.num_negatives)


@dataclass(slots=True)
class StepBatch:
    """One global batch on its way through the stages, as this rank sees it."""

    rank_batch: RankBatch
    number: int
    """Number of the global batch in the run."""
    is_last: bool
    """True if this is the last batch before the optimizer step, so its last micro-batch synchronises the ranks."""
    inputs: BatchInputs
    agreed: Agreement = field(init=False)
    micro_batches: list[MicroBatch] = field(init=False)
    """Equally many on every rank, of the same modalities."""
    frozen_splits: dict[Modality, list[list[int]]] = field(init=False)
    """Micro-batches for the frozen towers."""
    keeps_graphs: bool = field(init=False)
    outputs: list[list[Tensor]] = field(default_factory=list)
    """Embeddings of each micro-batch with their graphs; empty with Gradient Cache."""
    embeddings: Tensor = field(init=False)
    """[n, D] embeddings of this rank's inputs, detached."""
    auxiliary: AuxiliaryBatch | None = None
    """Sums of the model's own losses; None for a model without."""
    auxiliary_outputs: list[Parts] = field(default_factory=list)
    """The model's own losses of each micro-batch with their graphs; empty with Gradient Cache."""

    def synchronises(self, micro_batch: int) -> bool:
        """Return whether the backward pass of this micro-batch is the last before the optimizer step."""
        return self.is_last and micro_batch == len(self.micro_batches) - 1


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Result of one global batch, besides gradients."""

    loss_share: Tensor
    """This rank's part of the loss. The sum over the ranks is the loss."""
    padded_tokens: int
    num_forwards: int
    kept_graphs: bool
    embeddings: Tensor
    """This rank's embeddings, for diagnostics."""
    is_finite: Tensor
    """Bool: whether all of them are finite. On the device, so that nothing waits for it."""
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    """The model's own losses of the global batch, without their weights."""
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's part of each term of `losses`, without its weight. Empty for a loss of one term."""

    def without_embeddings(self) -> BatchResult:
        """Return the result without the memory of its embeddings."""
        return replace(
            self, embeddings=self.embeddings.new_empty(0, self.embeddings.shape[1])
        )


def seed_of(seed: int, batch: int, rank: int, micro_batch: int) -> int:
    """Return the seed of one forward pass. A pure function: a replay and a resumed run draw the same dropout masks."""
    # Odd multipliers and xor-shifts, as in splitmix64, so that neighbouring batches and ranks get unrelated seeds.
    mixed = (
        seed * 0x9E3779B97F4A7C15
        + batch * 0xBF58476D1CE4E5B9
        + rank * 0x94D049BB133111EB
        + micro_batch
    ) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    return (mixed ^ (mixed >> 32)) >> 1


def order_micro_batches(
    splits: dict[Modality, list[list[int]]], frozen: Collection[str] = ()
) -> list[MicroBatch]:
    """Order micro-batches into forward passes. The last micro-batches of all modalities share one forward pass, so
    that the backward pass that synchronises gradients reaches every tower. Within a forward pass, frozen modalities
    come last."""
    modalities = sorted(splits, key=lambda modality: modality in frozen)
    micro_batches: list[MicroBatch] = [
        [(modality, rows)] for modality in modalities for rows in splits[modality][:-1]
    ]
    return [
        *micro_batches,
        [(modality, splits[modality][-1]) for modality in modalities],
    ]


class ContrastiveStep:
    """Passes global batches through model and loss, and accumulates the gradient of L in the parameters."""

    def __init__(
        self,
        model: nn.Module,
        loss: EmbeddingLoss,
        source: InputSource,
        session: Session,
        budget: Budget,
        guard: MemoryGuard,
        seed: int,
        teachers: Teachers | None = None,
        auxiliary: AuxiliaryLosses | None = None,
    ) -> None:
        """`budget` may be replaced between two batches, after a shortage of memory. `teachers`: of the loss, if any.
        `auxiliary`: losses of the model's own, if it has any."""
        self.model = model
        self.loss = loss
        self.source = source
        self.session = session
        self.budget = budget
        self.guard = guard
        self.seed = seed
        self.teachers = teachers
        self.auxiliary = auxiliary
        self.timer = PhaseTimer(session.device)
        self.exchange = loss_exchange(session)

    def accumulate(
        self,
        rank_batch: RankBatch,
        number: int,
        *,
        weight: float,
        last: bool,
        scale: float = 1.0,
    ) -> BatchResult:
        """Add `weight` times the gradient of L of global batch `number` to the parameters' gradients. Collective.

        `last`: this is the last batch before the optimizer step. `scale`: the factor of the float16 gradient scaler.
        """
        with holding_copies(
            self.model
        ):  # the weights stay the same until the optimizer step
            with self.timer("data"):
                batch = StepBatch(
                    rank_batch, number, last, self.source.of(rank_batch.features)
                )
            if self.auxiliary is not None:
                batch.auxiliary = self.auxiliary.begin(rank_batch, self.session.device)
            with self.timer("wait"):
                self.agree(batch)
            with self.timer("forward"), self._watching_memory():
                self.encode(batch)
            with self.timer("wait"):
                loss_batch = self.gather(batch)
            loss_share, gradient = self.score(loss_batch, batch, weight * scale)
            with self.timer("backward"), self._watching_memory():
                self.backward(batch, gradient, weight * scale)
        return self._result(batch, loss_share)

    # ---- the stages --------------------------------------------------------------------------------------------

    def agree(self, batch: StepBatch) -> None:
        """Set the micro-batches, equally many on every rank, and whether their graphs are kept. One collective."""
        rank_batch, budget = batch.rank_batch, self.budget
        lengths = [feature.length for feature in rank_batch.features]
        modalities = self.source.feeder.featuriser.description.modalities
        places = {
            modality: of_modality(rank_batch, modality) for modality in modalities
        }
        own = LockstepSplit(lengths, places, budget.micro_batch_tokens, budget.max_rows)
        frozen = LockstepSplit(
            lengths, batch.inputs.missing, budget.micro_batch_tokens, budget.max_rows
        )
        sizes = [len(lengths), len(rank_batch.query), len(rank_batch.negative)]
        is_scored = (
            rank_batch.scores is not None,
            rank_batch.negative_scores is not None or not sizes[-1],
        )
        # All numbers of a rank in one row, so that one collective carries them.
        mine = [
            *sizes,
            *map(int, is_scored),
            own.padded_tokens,
            *own.counts,
            *frozen.counts,
        ]
        # The model's forward passes are collective under FSDP, so their numbers are exchanged before the first of them.
        table = collectives.all_gather_ints(mine)
        inputs, rows, negatives, scored, negatives_scored, padded, *counts = zip(
            *table, strict=True
        )
        has_negative_scores = any(negatives) and all(negatives_scored)
        batch.agreed = Agreement(
            list(inputs),
            list(rows),
            list(negatives),
            all(scored),
            has_negative_scores,
            max(padded),
        )
        most = [max(column) for column in counts]
        # A rank with fewer micro-batches splits its inputs finer, or runs dummies, up to the maximum over the ranks.
        splits = own.agreed(most[: len(own.counts)])
        batch.frozen_splits = frozen.agreed(most[len(own.counts) :])
        batch.micro_batches = order_micro_batches(splits, self.source.towers.modalities)
        # From numbers that are equal on all ranks: a rank without a second phase would leave the others waiting in it.
        batch.keeps_graphs = budget.keeps_graphs(
            max(padded), len(batch.micro_batches), self.session
        )

    def encode(self, batch: StepBatch) -> None:
        """Set this rank's embeddings in the order of its inputs, and keep the graphs if so agreed. Collective."""
        joined: Tensor | None = None
        with torch.set_grad_enabled(batch.keeps_graphs):
            # With kept graphs there is no second phase that could reuse image features.
            keeps_images = not batch.keeps_graphs and self.source.images.keeps(
                batch.agreed.padded_tokens
            )
            batch.inputs.encode_frozen(batch.frozen_splits, keeps_images=keeps_images)
            # FSDP2: units stay gathered from the first micro-batch to the last backward, instead of one all-gather per
            # micro-batch.
            self._keep_gathered(True)
            for number, inputs in enumerate(batch.inputs.feed(batch.micro_batches)):
                # Set before the forward pass, as FSDP requires; `backward` sets it again for each micro-batch.
                self._synchronise_gradients(batch.synchronises(number))
                outputs, losses = self._forward(inputs, batch.number, number)
                if self.auxiliary is not None and batch.auxiliary is not None:
                    self.auxiliary.count(
                        batch.auxiliary, losses, rows_of(batch.micro_batches[number])
                    )
                if joined is None:
                    joined = outputs[0].new_zeros(
                        len(batch.rank_batch.features), outputs[0].shape[1]
                    )
                for (_, rows), output in zip(
                    batch.micro_batches[number], outputs, strict=True
                ):
                    if rows:  # otherwise the output of a dummy, which was run only for its collectives
                        joined[row_index(rows, joined.device)] = output.detach()
                if batch.keeps_graphs:
                    batch.outputs.append(outputs)
                    batch.auxiliary_outputs.append(losses)
        assert joined is not None, (
            "a global batch has at least one input, so every rank runs at least one micro-batch"
        )
        batch.embeddings = joined

    def gather(self, batch: StepBatch) -> LossBatch:
        """Gather the embeddings as one leaf, and the rows of all ranks with indices into it. Collective.

        A further column of the rows, the inputs or the negatives is one more line here and one more field of LossBatch.
        """
        rank_batch, agreed, rank = batch.rank_batch, batch.agreed, self.session.rank
        counts = agreed.counts
        embeddings = self.exchange.leaf(batch.embeddings, counts)
        # Row indices are local; behind the gather, rank r's inputs begin after those of ranks 0 to r - 1.
        offset = sum(agreed.num_inputs[:rank])
        content = torch.tensor(
            [feature.content for feature in rank_batch.features], dtype=torch.int64
        )
        columns = {
            "content": Column(content, agreed.num_inputs),
            "query": Column(
                torch.from_numpy(rank_batch.query) + offset, agreed.num_rows
            ),
            "positive": Column(
                torch.from_numpy(rank_batch.positive) + offset, agreed.num_rows
            ),
            "example": Column(torch.from_numpy(rank_batch.example), agreed.num_rows),
            "negative": Column(
                torch.from_numpy(rank_batch.negative) + offset, agreed.num_negatives
            ),
            "negative_example": Column(
                torch.from_numpy(rank_batch.negative_example), agreed.num_negatives
            ),
        }
        if agreed.has_scores and rank_batch.scores is not None:
            columns["scores"] = Column(
                torch.from_numpy(rank_batch.scores), agreed.num_rows
            )
        if agreed.has_negative_scores:
            own = torch.empty(0, dtype=torch.float64)  # a rank without negatives
            if rank_batch.negative_scores is not None:
                own = torch.from_numpy(rank_batch.negative_scores)
            columns["negative_scores"] = Column(own, agreed.num_negatives)
        found = gather_columns(columns, self.session.device)
        scores, negative_scores = (
            found[name].to(embeddings.dtype) if name in found else None
            for name in ("scores", "negative_scores")
        )
        loss_batch = LossBatch(
            embeddings=embeddings,
            content=found["content"],
            query=found["query"],
            positive=found["positive"],
            example=found["example"],
            negative=found["negative"],
            negative_example=found["negative_example"],
            scores=scores,
            own_rows=part_of(rank, agreed.num_rows),
            own_negatives=part_of(rank, agreed.num_negatives),
            world_size=self.session.world_size,
            negative_scores=negative_scores,
            number=batch.number,
            source=rank_batch.source,
            ring=self.exchange.parts(counts, self.session.device),
        )
        if self.teachers is None:
            return loss_batch
        return self.teachers.attach(
            loss_batch, rank_batch, agreed.num_rows, agreed.num_negatives
        )

    def score(
        self, loss_batch: LossBatch, batch: StepBatch, weight: float
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's part of L, and the gradient of `weight` * L for its own embeddings. Collective."""
        # Not TF32: the rounding of a score is divided by the temperature too.
        with self.timer("loss"), torch.enable_grad(), matmul_precision("highest"):
            loss_share = self.loss(loss_batch)
            # The loss runs in float32. Its gradient carries the float16 scale into the backward of each micro-batch.
            (loss_share * weight).backward()
        with self.timer("wait"):
            gradient = self.exchange.own_gradient(
                loss_batch.embeddings, batch.agreed.counts
            )
            if self.auxiliary is not None and batch.auxiliary is not None:
                self.auxiliary.agree(batch.auxiliary)
                loss_share = loss_share.detach() + self.auxiliary.share(batch.auxiliary)
        # FSDP and the flat all-reduce average over the ranks, but L is a sum over them.
        return loss_share.detach(), gradient * self.session.world_size

    def backward(self, batch: StepBatch, gradient: Tensor, weight: float) -> None:
        """Backpropagate `gradient` [n, D], and `weight` times the model's own losses, through every micro-batch, run
        again without kept graphs. Collective."""
        feed = None if batch.keeps_graphs else batch.inputs.feed(batch.micro_batches)
        for number, micro_batch in enumerate(batch.micro_batches):
            self._synchronise_gradients(batch.synchronises(number))
            if feed is None:
                # Dropping the reference frees each graph as soon as its backward is done.
                outputs, batch.outputs[number] = batch.outputs[number], []
                losses, batch.auxiliary_outputs[number] = (
                    batch.auxiliary_outputs[number],
                    [],
                )
            else:
                # The seed is a function of the number, so this replay draws the dropout masks of `encode`.
                outputs, losses = self._forward(next(feed), batch.number, number)
            # From the last backward on, the units reshard again. Not before its forward: it would reshard as well, and
            # every unit would be gathered a second time.
            self._keep_gathered(not batch.synchronises(number))
            pairs: list[tuple[Tensor, Tensor]] = [
                # A dummy gets a zero gradient: it adds nothing, but its backward takes part in the ranks' collectives.
                (
                    output,
                    gradient[row_index(rows, gradient.device)]
                    if rows
                    else torch.zeros_like(output),
                )
                for (_, rows), output in zip(micro_batch, outputs, strict=True)
                if output.requires_grad
            ]
            if self.auxiliary is not None and batch.auxiliary is not None:
                added = self.auxiliary.surrogate(
                    batch.auxiliary, losses, rows_of(micro_batch)
                )
                if added is not None:
                    # As the loss: a sum over the ranks, which averaging would divide.
                    pairs.append(
                        (added, added.new_full((), weight * self.session.world_size))
                    )
            if pairs:
                torch.autograd.backward(
                    [output for output, _ in pairs], [grad for _, grad in pairs]
                )
        # Units that had no backward pass (a frozen tower, one without inputs) are gathered still.
        if batch.is_last and self.session.keeps_gathered:
            reshard(self.model)

    # ---- parts of the stages -----------------------------------------------------------------------------------

    def _result(self, batch: StepBatch, loss_share: Tensor) -> BatchResult:
        feeder, features, num_forwards = (
            self.source.feeder,
            batch.rank_batch.features,
            len(batch.micro_batches),
        )
        return BatchResult(
            loss_share=loss_share,
            padded_tokens=sum(
                feeder.padded_tokens(one, features) for one in batch.micro_batches
            ),
            num_forwards=num_forwards if batch.keeps_graphs else 2 * num_forwards,
            kept_graphs=batch.keeps_graphs,
            embeddings=batch.embeddings,
            is_finite=torch.isfinite(batch.embeddings).all(),
            auxiliary={} if batch.auxiliary is None else batch.auxiliary.means(),
            terms=self.loss.term_shares(batch.rank_batch.source),
        )

    def _forward(
        self, inputs: ModelInputs, batch: int, micro_batch: int
    ) -> tuple[list[Tensor], Parts]:
        seed_draws(
            seed_of(self.seed, batch, self.session.rank, micro_batch),
            self.session.device,
        )
        outputs: list[Tensor]
        if self.auxiliary is None:
            outputs = self.model(inputs)
            return outputs, []
        losses: list[dict[str, Tensor]]
        outputs, losses = self.model(inputs, with_auxiliary=True)
        return outputs, losses

    def _synchronise_gradients(self, is_last: bool) -> None:
        """Let FSDP reduce gradients in this backward pass. Other micro-batches only add to the local gradient."""
        if self.session.fsdp is None:
            return
        # HYBRID_SHARD: earlier micro-batches are summed inside each machine, and between the machines only with the
        # last.
        all_reduce = is_last or not self.session.all_reduces_once
        set_gradient_sync(
            self.model,
            is_last or self.session.reduces_each_micro_batch,
            all_reduce=all_reduce,
        )

    def _keep_gathered(self, on: bool) -> None:
        if self.session.fsdp is not None and self.session.keeps_gathered:
            set_keep_gathered(self.model, on, self.session.fsdp.reshard_after_forward)

    @contextmanager
    def _watching_memory(self) -> Iterator[None]:
        """Raise OutOfMemory on all ranks if one of them ran out of memory inside the with-block. Collective at exit."""
        failed = False
        try:
            yield
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            failed = True
        self.guard.agree(failed, self.budget)
        if failed:
            raise OutOfMemory


def of_modality(rank_batch: RankBatch, modality: Modality) -> list[int]:
    """Return the positions of a modality's inputs in a rank batch."""
    return [
        place
        for place, feature in enumerate(rank_batch.features)
        if feature.modality == modality
    ]


def rows_of(micro_batch: MicroBatch) -> list[list[int]]:
    """Return the positions of the inputs of each slice of a micro-batch."""
    return [rows for _, rows in micro_batch]
