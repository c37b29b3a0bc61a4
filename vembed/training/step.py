"""One contrastive step: encode micro-batches, score the gathered embeddings, backpropagate through the micro-batches.

The order for one global batch, of which this rank holds a rank batch of distinct inputs:

1. `_agree`    one collective: the number of inputs, rows and micro-batches of each rank; whether graphs are kept.
               Features of frozen towers are then computed, or read from the cache; gradients do not reach them.
2. `_forward`  every micro-batch to embeddings, without graphs if Gradient Cache is on.
3. `_gather`   the embeddings of all ranks, and the indices by which the rows refer to them.
4. the loss    this rank's part of L, and d L / d embeddings, which is summed over the ranks.
5. `_backward` every micro-batch again (same random draws), surrogate <embedding, gradient>; the last synchronises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vembed.data import microbatches
from vembed.data.features import Featuriser
from vembed.data.feeding import Feeder, MicroBatch, ModelInputs, row_index, to_device
from vembed.data.rank_batch import RankBatch
from vembed.distributed import collectives
from vembed.distributed.devices import matmul_precision
from vembed.distributed.parameters import reshard, set_gradient_sync, set_keep_gathered
from vembed.distributed.session import Session
from vembed.families.table import Modality
from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.training.budget import Budget
from vembed.training.frozen import CachedRows, FrozenImages, FrozenTowers, Stores
from vembed.training.shortage import MemoryGuard, OutOfMemory
from vembed.training.timing import PhaseTimer


@dataclass(frozen=True, slots=True)
class Agreement:
    """Facts about a global batch that all ranks share after one collective."""

    num_inputs: list[int]
    num_rows: list[int]
    num_negatives: list[int]
    has_scores: bool
    num_micro_batches: dict[Modality, int]
    """Per modality, the maximum over the ranks."""
    num_tower_micro_batches: dict[Modality, int]
    """Per frozen modality, the maximum over the ranks of micro-batches not in the cache."""
    padded_tokens: int
    """The maximum over the ranks."""


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


def seed_of(seed: int, batch: int, rank: int, micro_batch: int) -> int:
    """Return the seed of one forward pass. A pure function: a replay and a resumed run draw the same dropout masks."""
    # Odd multipliers and xor-shifts, as in splitmix64, so that neighbouring batches and ranks get unrelated seeds.
    mixed = (seed * 0x9E3779B97F4A7C15 + batch * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB + micro_batch) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    return (mixed ^ (mixed >> 32)) >> 1


def order_micro_batches(splits: dict[Modality, list[list[int]]], frozen: Collection[str] = ()) -> list[MicroBatch]:
    """Order micro-batches into forward passes. The last micro-batches of all modalities share one forward pass, so
    that the backward pass that synchronises gradients reaches every tower. Within a forward pass, frozen modalities
    come last."""
    modalities = sorted(splits, key=lambda modality: modality in frozen)
    micro_batches: list[MicroBatch] = [[(modality, rows)] for modality in modalities for rows in splits[modality][:-1]]
    return [*micro_batches, [(modality, splits[modality][-1]) for modality in modalities]]


class ContrastiveStep:
    """Passes global batches through model and loss, and accumulates the gradient of L in the parameters."""

    def __init__(
        self,
        model: nn.Module,
        loss: EmbeddingLoss,
        featuriser: Featuriser,
        session: Session,
        budget: Budget,
        timer: PhaseTimer,
        guard: MemoryGuard,
        seed: int,
        frozen_modalities: Sequence[Modality] = (),
        stores: Stores | None = None,
        image_bytes: int | None = None,
        *,
        packs_texts: bool = False,
    ) -> None:
        """`frozen_modalities`: modalities whose towers are not trained. Each of their inputs passes its tower once per
        step, or never if `stores` holds its features. `image_bytes`, `packs_texts`: see `EmbeddingModel`."""
        self.model = model
        self.loss = loss
        self.featuriser = featuriser
        self.session = session
        self.budget = budget
        self.timer = timer
        self.guard = guard
        self.seed = seed
        self.feeder = Feeder(featuriser, session.device, packs_texts=packs_texts)
        self.frozen = FrozenTowers(model, frozen_modalities, self.feeder, stores or {})
        self.images = FrozenImages(model, session, image_bytes)

    def accumulate(
        self, rank_batch: RankBatch, batch: int, *, weight: float, last: bool, scale: float = 1.0
    ) -> BatchResult:
        """Add `weight` times the gradient of L of global batch number `batch` to the parameters' gradients.

        `last`: this is the last batch before the optimizer step, so its last micro-batch synchronises the ranks.
        `scale`: the factor of the float16 gradient scaler.
        """
        with self.timer("data"):
            cached = self.frozen.look_up(rank_batch.features)
        with self.timer("wait"):
            agreed = self._agree(rank_batch, cached)
        splits = self._split(
            rank_batch,
            {modality: of_modality(rank_batch, modality) for modality in self._modalities},
            agreed.num_micro_batches,
        )
        micro_batches = order_micro_batches(splits, self.frozen.modalities)
        keep = self.budget.keeps_graphs(agreed.padded_tokens, len(micro_batches), self.session)
        with self.timer("forward"), self._watching_memory(), torch.set_grad_enabled(keep):
            missing = {modality: one.missing for modality, one in cached.items()}
            tables = self.frozen.features(
                rank_batch.features, cached, self._split(rank_batch, missing, agreed.num_tower_micro_batches)
            )
            # FSDP2: units stay gathered from the first micro-batch to the last backward, instead of one all-gather per
            # micro-batch.
            self._keep_gathered(True)
            # With kept graphs there is no second phase that could reuse image features.
            keeps_images = not keep and self.images.keeps(agreed.padded_tokens)
            outputs: list[list[Tensor]] = []
            seen: list[list[Tensor]] = []
            for number, inputs in enumerate(self._inputs(micro_batches, tables, rank_batch)):
                is_last = last and number == len(micro_batches) - 1
                # Set before the forward pass, as FSDP requires; `_backward` sets it again for each micro-batch.
                set_gradient_sync(self.model, is_last or self.session.reduces_each_micro_batch)
                if keeps_images:
                    seen.append(self.images.encode(inputs))
                outputs.append(self._forward(self.images.substitute(inputs, seen, number), batch, number))
            own = self._join(micro_batches, outputs, len(rank_batch.features))
        kept = outputs if keep else None
        with self.timer("wait"):
            loss_batch = self._gather(own, rank_batch, agreed)
        with self.timer("loss"), torch.enable_grad(), matmul_precision("highest"):
            loss_share = self.loss(loss_batch)
            # The loss runs in float32. Its gradient carries the float16 scale into the backward of each micro-batch.
            (loss_share * (weight * scale)).backward()
        with self.timer("wait"):
            # Every rank's loss depends on all embeddings. Summed over the ranks, each rank gets the rows of its own
            # inputs.
            gradient = collectives.reduce_scatter_rows(gradient_of(loss_batch.embeddings), agreed.num_inputs)
        with self.timer("backward"), self._watching_memory():
            # FSDP and the flat all-reduce average over the ranks, but L is a sum over them.
            gradient = gradient * self.session.world_size
            self._backward(micro_batches, kept, tables, seen, gradient, rank_batch, batch, last)
        padded = sum(self.feeder.padded_tokens(micro_batch, rank_batch.features) for micro_batch in micro_batches)
        return BatchResult(loss_share.detach(), padded, len(micro_batches) * (1 if keep else 2), keep, own)

    @contextmanager
    def _watching_memory(self) -> Iterator[None]:
        """Raise OutOfMemory on all ranks if one of them ran out of memory inside the with-block. Collective at exit."""
        failed = False
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            failed = True
        self.guard.agree(failed, self.budget)
        if failed:
            raise OutOfMemory

    @property
    def _modalities(self) -> tuple[Modality, ...]:
        return self.featuriser.description.modalities

    def _agree(self, rank_batch: RankBatch, cached: Mapping[Modality, CachedRows]) -> Agreement:
        counts: list[int] = []
        padded = 0
        for modality in self._modalities:
            lengths = [rank_batch.features[place].length for place in of_modality(rank_batch, modality)]
            split = microbatches.split(lengths, self.budget.micro_batch_tokens, self.budget.max_rows)
            counts.append(len(split))
            padded += microbatches.padded_tokens(lengths, split)
        for one in cached.values():
            lengths = [rank_batch.features[place].length for place in one.missing]
            counts.append(len(microbatches.split(lengths, self.budget.micro_batch_tokens, self.budget.max_rows)))
        mine = [
            len(rank_batch.features),
            len(rank_batch.query),
            len(rank_batch.negative),
            int(rank_batch.scores is not None),
            padded,
        ]
        # Ranks must run equally many micro-batches per modality (collectives inside the model), so the counts are
        # exchanged first.
        table = collectives.all_gather_ints([*mine, *counts])
        largest = [max(column) for column in zip(*(row[len(mine) :] for row in table), strict=True)]
        return Agreement(
            num_inputs=[row[0] for row in table],
            num_rows=[row[1] for row in table],
            num_negatives=[row[2] for row in table],
            has_scores=all(row[3] for row in table),
            padded_tokens=max(row[4] for row in table),
            num_micro_batches=dict(zip(self._modalities, largest, strict=False)),
            num_tower_micro_batches=dict(zip(cached, largest[len(self._modalities) :], strict=True)),
        )

    def _split(
        self, rank_batch: RankBatch, places_of: Mapping[Modality, list[int]], counts: Mapping[Modality, int]
    ) -> dict[Modality, list[list[int]]]:
        """Return micro-batches of some inputs of each modality, exactly as many as agreed."""
        splits: dict[Modality, list[list[int]]] = {}
        for modality, places in places_of.items():
            lengths = [rank_batch.features[place].length for place in places]
            split = microbatches.split(
                lengths, self.budget.micro_batch_tokens, self.budget.max_rows, at_least=counts[modality]
            )
            if split:
                splits[modality] = [[places[row] for row in rows] for rows in split]
        return splits

    def _inputs(
        self, micro_batches: Sequence[MicroBatch], tables: Mapping[Modality, Tensor], rank_batch: RankBatch
    ) -> Iterator[ModelInputs]:
        """Yield the model's input for each forward pass, with features in place of frozen towers' inputs."""
        moving = [
            [part for part in micro_batch if part[0] not in self.frozen.modalities] for micro_batch in micro_batches
        ]
        for micro_batch, inputs in zip(micro_batches, self.feeder.feed(moving, rank_batch.features), strict=True):
            yield [
                *inputs,
                *(self.frozen.inputs(part, tables) for part in micro_batch if part[0] in self.frozen.modalities),
            ]

    def _forward(self, inputs: ModelInputs, batch: int, micro_batch: int) -> list[Tensor]:
        torch.manual_seed(seed_of(self.seed, batch, self.session.rank, micro_batch))
        outputs: list[Tensor] = self.model(inputs)
        return outputs

    def _join(self, micro_batches: Sequence[MicroBatch], outputs: Sequence[list[Tensor]], num_inputs: int) -> Tensor:
        """Return the rank batch's embeddings in the order of its inputs. Outputs of dummies are dropped."""
        first = outputs[0][0]
        joined = torch.zeros(num_inputs, first.shape[1], dtype=first.dtype, device=first.device)
        for micro_batch, embeddings in zip(micro_batches, outputs, strict=True):
            for (_, rows), embedding in zip(micro_batch, embeddings, strict=True):
                if rows:
                    joined[row_index(rows, first.device)] = embedding.detach()
        return joined

    def _gather(self, own: Tensor, rank_batch: RankBatch, agreed: Agreement) -> LossBatch:
        """Gather the embeddings of all ranks as one leaf, and the rows of all ranks with indices into it."""
        session = self.session
        # A new leaf: the gather itself is not differentiated; `reduce_scatter_rows` does its backward by hand.
        embeddings = collectives.all_gather_rows(own, agreed.num_inputs).requires_grad_()
        # Row indices are local; behind the gather, rank r's inputs begin after those of ranks 0 to r - 1.
        offset = sum(agreed.num_inputs[: session.rank])
        columns = [
            torch.tensor([feature.content for feature in rank_batch.features], dtype=torch.int64),
            torch.from_numpy(rank_batch.query) + offset,
            torch.from_numpy(rank_batch.positive) + offset,
            torch.from_numpy(rank_batch.example),
            torch.from_numpy(rank_batch.negative) + offset,
            torch.from_numpy(rank_batch.negative_example),
        ]
        sizes = [agreed.num_inputs, *[agreed.num_rows] * 3, *[agreed.num_negatives] * 2]
        if agreed.has_scores and rank_batch.scores is not None:
            # Reinterpreted bits, not a conversion: all columns travel in one int64 collective.
            columns.append(torch.from_numpy(rank_batch.scores).view(torch.int64))
            sizes.append(agreed.num_rows)
        per_rank = [sum(size[rank] for size in sizes) for rank in range(session.world_size)]
        flat = collectives.all_gather_rows(to_device(torch.cat(columns), session.device), per_rank)
        pieces = [
            torch.split(chunk, [size[rank] for size in sizes]) for rank, chunk in enumerate(torch.split(flat, per_rank))
        ]
        content, query, positive, example, negative, negative_example, *scores = [
            torch.cat([piece[column] for piece in pieces]) for column in range(len(columns))
        ]
        first_row, first_negative = sum(agreed.num_rows[: session.rank]), sum(agreed.num_negatives[: session.rank])
        return LossBatch(
            embeddings=embeddings,
            content=content,
            query=query,
            positive=positive,
            example=example,
            negative=negative,
            negative_example=negative_example,
            scores=scores[0].view(torch.float64).to(embeddings.dtype) if scores else None,
            own_rows=slice(first_row, first_row + agreed.num_rows[session.rank]),
            own_negatives=slice(first_negative, first_negative + agreed.num_negatives[session.rank]),
            world_size=session.world_size,
        )

    def _backward(
        self,
        micro_batches: Sequence[MicroBatch],
        kept: list[list[Tensor]] | None,
        tables: Mapping[Modality, Tensor],
        seen: list[list[Tensor]],
        gradient: Tensor,
        rank_batch: RankBatch,
        batch: int,
        last: bool,
    ) -> None:
        feed = self._inputs(micro_batches, tables, rank_batch) if kept is None else None
        for number, micro_batch in enumerate(micro_batches):
            is_last = last and number == len(micro_batches) - 1
            set_gradient_sync(self.model, is_last or self.session.reduces_each_micro_batch)
            # From the last backward on, the units reshard again.
            self._keep_gathered(not is_last)
            if kept is not None:
                # Dropping the reference frees each graph as soon as its backward is done.
                outputs, kept[number] = kept[number], []
            else:
                assert feed is not None
                outputs = self._forward(self.images.substitute(next(feed), seen, number), batch, number)
            pairs = [
                # A dummy gets a zero gradient: it adds nothing, but its backward takes part in the ranks' collectives.
                (output, gradient[row_index(rows, gradient.device)] if rows else torch.zeros_like(output))
                for (_, rows), output in zip(micro_batch, outputs, strict=True)
                if output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        if last and self.session.keeps_gathered:
            reshard(self.model)

    def _keep_gathered(self, on: bool) -> None:
        if self.session.fsdp is not None and self.session.keeps_gathered:
            set_keep_gathered(self.model, on, self.session.fsdp.reshard_after_forward)


def of_modality(rank_batch: RankBatch, modality: Modality) -> list[int]:
    """Return the positions of a modality's inputs in a rank batch."""
    return [place for place, feature in enumerate(rank_batch.features) if feature.modality == modality]


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf, or zeros if the loss did not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
