"""One contrastive step: encode micro-batches, score the gathered embeddings, send the gradient back through them.

The order, for one global batch of which this rank holds a share of distinct inputs:

1. `_agree`    one collective: how many inputs, rows and micro-batches each rank has; whether graphs are kept. What
               frozen towers give is computed next, or was kept on disk: these towers have no part in what follows.
2. `_forward`  every micro-batch to embeddings, without graphs where Gradient Cache is on.
3. `_gather`   the embeddings of all ranks, and how the rows refer to them.
4. the loss    this rank's share of L, and d L / d embeddings, which the ranks add up.
5. `_backward` every micro-batch again (same random draws), surrogate <embedding, gradient>; the last one synchronises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vembed.data import microbatches
from vembed.data.features import Featuriser
from vembed.data.feeding import Call, Feeder, Inputs, row_index, to_device
from vembed.data.share import Share
from vembed.distributed import collectives
from vembed.distributed.devices import float32_products
from vembed.distributed.fsdp import reshard, set_gradient_sync, set_keep_gathered
from vembed.distributed.session import Session
from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.models.description import Lane
from vembed.training.budget import Budget
from vembed.training.frozen import FrozenImages, FrozenTowers, Known, Stores
from vembed.training.shortage import MemoryGuard, OutOfMemory
from vembed.training.timing import PhaseTimer


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know about a global batch after one collective."""

    num_inputs: list[int]
    num_rows: list[int]
    num_negatives: list[int]
    has_scores: bool
    num_micro_batches: dict[Lane, int]
    """Per lane, the maximum over the ranks."""
    num_tower_calls: dict[Lane, int]
    """The same for what frozen towers have yet to compute."""
    padded_tokens: int
    """The maximum over the ranks."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one global batch left behind, besides gradients."""

    loss_share: Tensor
    """This rank's share of the loss; the sum over ranks is the loss."""
    padded_tokens: int
    num_calls: int
    kept_graphs: bool
    embeddings: Tensor
    """This rank's embeddings, for diagnostics."""


def seed_of(seed: int, batch: int, rank: int, call: int) -> int:
    """The seed of one forward: a pure function, so that a replay and a resumed run draw the same dropout masks."""
    mixed = (seed * 0x9E3779B97F4A7C15 + batch * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB + call) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    return (mixed ^ (mixed >> 32)) >> 1


def order_calls(plans: dict[Lane, list[list[int]]], frozen: Collection[str] = ()) -> list[Call]:
    """Micro-batches to forwards. The last micro-batches of all lanes share one forward, so that the backward pass that
    synchronises gradients reaches every tower; in a forward, lanes of frozen towers come last."""
    lanes = sorted(plans, key=lambda lane: lane in frozen)
    calls: list[Call] = [[(lane, rows)] for lane in lanes for rows in plans[lane][:-1]]
    return [*calls, [(lane, plans[lane][-1]) for lane in lanes]]


class ContrastiveStep:
    """Runs global batches through model and loss and leaves the gradient of L in the parameters."""

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
        frozen_lanes: Sequence[Lane] = (),
        stores: Stores | None = None,
        image_bytes: int | None = None,
        *,
        packs_texts: bool = False,
    ) -> None:
        """`frozen_lanes`: lanes whose towers are not trained; each of their inputs passes its tower once per step, or
        never where `stores` holds its features already. `image_bytes`, `packs_texts`: see `EmbeddingModel`."""
        self.model = model
        self.loss = loss
        self.featuriser = featuriser
        self.session = session
        self.budget = budget
        self.timer = timer
        self.guard = guard
        self.seed = seed
        self.feeder = Feeder(featuriser, session.device, packs_texts=packs_texts)
        self.frozen = FrozenTowers(model, frozen_lanes, self.feeder, stores or {})
        self.images = FrozenImages(model, session, image_bytes)

    def accumulate(self, share: Share, batch: int, *, weight: float, last: bool, scale: float = 1.0) -> BatchResult:
        """Add `weight` times the gradient of L of global batch number `batch` to the parameters' gradients.

        `last`: this is the last batch before the optimizer's step, so its last micro-batch synchronises the ranks.
        `scale`: the factor of the float16 gradient scaler.
        """
        with self.timer("data"):
            known = self.frozen.look_up(share.features)
        with self.timer("wait"):
            agreed = self._agree(share, known)
        plans = self._plan(share, {lane: of_lane(share, lane) for lane in self._lanes}, agreed.num_micro_batches)
        calls = order_calls(plans, self.frozen.lanes)
        keep = self.budget.keeps_graphs(agreed.padded_tokens, len(calls), self.session)
        with self.timer("forward"), self._watching_memory(), torch.set_grad_enabled(keep):
            missing = {lane: one.missing for lane, one in known.items()}
            tables = self.frozen.features(share.features, known, self._plan(share, missing, agreed.num_tower_calls))
            # Where there is no second phase, there is nothing to keep for it.
            self._keep_gathered(True)
            keeps_images = not keep and self.images.keeps(agreed.padded_tokens)
            outputs: list[list[Tensor]] = []
            seen: list[list[Tensor]] = []
            for number, inputs in enumerate(self._inputs(calls, tables, share)):
                is_last = last and number == len(calls) - 1
                set_gradient_sync(self.model, is_last or self.session.reduces_each_micro_batch)
                if keeps_images:
                    seen.append(self.images.see(inputs))
                outputs.append(self._forward(self.images.instead(inputs, seen, number), batch, number))
            own = self._join(calls, outputs, len(share.features))
        kept = outputs if keep else None
        with self.timer("wait"):
            loss_batch = self._gather(own, share, agreed)
        with self.timer("loss"), torch.enable_grad(), float32_products("highest"):
            loss_share = self.loss(loss_batch)
            (loss_share * (weight * scale)).backward()
        with self.timer("wait"):
            gradient = collectives.reduce_scatter_rows(gradient_of(loss_batch.embeddings), agreed.num_inputs)
        with self.timer("backward"), self._watching_memory():
            # FSDP and the flat all-reduce average over the ranks, and L is a sum over them.
            gradient = gradient * self.session.world_size
            self._backward(calls, kept, tables, seen, gradient, share, batch, last)
        padded = sum(self.feeder.padded_tokens(call, share.features) for call in calls)
        return BatchResult(loss_share.detach(), padded, len(calls) * (1 if keep else 2), keep, own)

    @contextmanager
    def _watching_memory(self) -> Iterator[None]:
        """At the end all ranks know whether one of them ran out of memory; then OutOfMemory is raised on all."""
        failed = False
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            failed = True
        self.guard.agree(failed, self.budget)
        if failed:
            raise OutOfMemory

    @property
    def _lanes(self) -> tuple[Lane, ...]:
        return self.featuriser.description.lanes

    def _agree(self, share: Share, known: Mapping[Lane, Known]) -> Agreement:
        counts: list[int] = []
        padded = 0
        for lane in self._lanes:
            lengths = [share.features[place].length for place in of_lane(share, lane)]
            plan = microbatches.plan(lengths, self.budget.micro_batch_tokens, self.budget.max_rows)
            counts.append(len(plan))
            padded += microbatches.padded_tokens(lengths, plan)
        for one in known.values():
            lengths = [share.features[place].length for place in one.missing]
            counts.append(len(microbatches.plan(lengths, self.budget.micro_batch_tokens, self.budget.max_rows)))
        mine = [len(share.features), len(share.query), len(share.negative), int(share.scores is not None), padded]
        table = collectives.all_gather_ints([*mine, *counts])
        largest = [max(column) for column in zip(*(row[len(mine) :] for row in table), strict=True)]
        return Agreement(
            num_inputs=[row[0] for row in table],
            num_rows=[row[1] for row in table],
            num_negatives=[row[2] for row in table],
            has_scores=all(row[3] for row in table),
            padded_tokens=max(row[4] for row in table),
            num_micro_batches=dict(zip(self._lanes, largest, strict=False)),
            num_tower_calls=dict(zip(known, largest[len(self._lanes) :], strict=True)),
        )

    def _plan(
        self, share: Share, places_of: Mapping[Lane, list[int]], counts: Mapping[Lane, int]
    ) -> dict[Lane, list[list[int]]]:
        """Micro-batches of some inputs of each lane, as many as agreed."""
        plans: dict[Lane, list[list[int]]] = {}
        for lane, places in places_of.items():
            lengths = [share.features[place].length for place in places]
            plan = microbatches.plan(
                lengths, self.budget.micro_batch_tokens, self.budget.max_rows, at_least=counts[lane]
            )
            if plan:
                plans[lane] = [[places[row] for row in rows] for rows in plan]
        return plans

    def _inputs(self, calls: Sequence[Call], tables: Mapping[Lane, Tensor], share: Share) -> Iterator[Inputs]:
        """What the model takes in each call: of frozen towers, what they gave."""
        moving = [[part for part in call if part[0] not in self.frozen.lanes] for call in calls]
        for call, inputs in zip(calls, self.feeder.feed(moving, share.features), strict=True):
            yield [*inputs, *(self.frozen.inputs(part, tables) for part in call if part[0] in self.frozen.lanes)]

    def _forward(self, inputs: Inputs, batch: int, call: int) -> list[Tensor]:
        torch.manual_seed(seed_of(self.seed, batch, self.session.rank, call))
        outputs: list[Tensor] = self.model(inputs)
        return outputs

    def _join(self, calls: Sequence[Call], outputs: Sequence[list[Tensor]], num_inputs: int) -> Tensor:
        """The embeddings of the share in the order of its inputs; what dummies gave is left out."""
        first = outputs[0][0]
        joined = torch.zeros(num_inputs, first.shape[1], dtype=first.dtype, device=first.device)
        for call, embeddings in zip(calls, outputs, strict=True):
            for (_, rows), embedding in zip(call, embeddings, strict=True):
                if rows:
                    joined[row_index(rows, first.device)] = embedding.detach()
        return joined

    def _gather(self, own: Tensor, share: Share, agreed: Agreement) -> LossBatch:
        """All ranks' embeddings as one leaf, and everybody's rows with indices into it."""
        session = self.session
        embeddings = collectives.all_gather_rows(own, agreed.num_inputs).requires_grad_()
        offset = sum(agreed.num_inputs[: session.rank])
        columns = [
            torch.tensor([feature.content for feature in share.features], dtype=torch.int64),
            torch.from_numpy(share.query) + offset,
            torch.from_numpy(share.positive) + offset,
            torch.from_numpy(share.example),
            torch.from_numpy(share.negative) + offset,
            torch.from_numpy(share.negative_example),
        ]
        sizes = [agreed.num_inputs, *[agreed.num_rows] * 3, *[agreed.num_negatives] * 2]
        if agreed.has_scores and share.scores is not None:
            columns.append(torch.from_numpy(share.scores).view(torch.int64))
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
        calls: Sequence[Call],
        kept: list[list[Tensor]] | None,
        tables: Mapping[Lane, Tensor],
        seen: list[list[Tensor]],
        gradient: Tensor,
        share: Share,
        batch: int,
        last: bool,
    ) -> None:
        feed = self._inputs(calls, tables, share) if kept is None else None
        for number, call in enumerate(calls):
            is_last = last and number == len(calls) - 1
            set_gradient_sync(self.model, is_last or self.session.reduces_each_micro_batch)
            self._keep_gathered(not is_last)
            if kept is not None:
                outputs, kept[number] = kept[number], []
            else:
                assert feed is not None
                outputs = self._forward(self.images.instead(next(feed), seen, number), batch, number)
            pairs = [
                (output, gradient[row_index(rows, gradient.device)] if rows else torch.zeros_like(output))
                for (_, rows), output in zip(call, outputs, strict=True)
                if output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        if last and self.session.keeps_gathered:
            reshard(self.model)

    def _keep_gathered(self, on: bool) -> None:
        if self.session.fsdp is not None and self.session.keeps_gathered:
            set_keep_gathered(self.model, on, self.session.fsdp.reshard_after_forward)


def of_lane(share: Share, lane: Lane) -> list[int]:
    """Places of a lane's inputs in a share."""
    return [place for place, feature in enumerate(share.features) if feature.lane == lane]


def gradient_of(leaf: Tensor) -> Tensor:
    """The gradient that a backward pass left in a leaf; zeros where the loss did not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
