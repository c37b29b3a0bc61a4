"""One global batch through model and loss. An optimizer step has one such batch or several. Without dropout the
result is the same on any number of ranks and with micro-batches of any size. Dropout draws depend on the rank and the
micro-batch.

The backward pass is split in two at the embeddings. The model gives each input i of the global batch an embedding e_i(w)
of width D, and the loss L is a function of the embeddings E [U, D] of all U inputs alone. By the chain rule

    dL/dw = sum over i of  G_i . de_i/dw        with  G = dL/dE  [U, D].

Once G is known, each input's summand can be computed by itself: it is the gradient of the dot product <e_i, G_i>,
with G_i as a constant. Inputs may therefore pass the model in micro-batches of any size, and be divided among ranks
in any way.

Words:

input         What the model encodes: a text, an image, both, or for rerankers a pair, whose vector is its score (D = 1).
              This rank holds n of the U inputs. Equal inputs of a rank are one input. Equal inputs of two ranks are two.
row           A query and one of its positives, as two indices of inputs. L is a sum over the rows. Each term is divided by
              the number of rows of all ranks already.
example       The record of the data that a row comes from. One with several positives has several rows.
hard negative A document that an example names as not relevant to its query.
content       A hash of an input's text or image. Inputs of equal content are not negatives of each other.
vector        One line of the matrix E. Dense models give one per input. Others give several, and E is then [T, D]. The
              number of an input's vectors is known before the forward pass, and `starts` says where they begin.
slice         Inputs of one modality that pass the model together.
micro-batch   The inputs of one forward pass: one slice, or one of each modality. Every rank runs equally many.
dummy         A slice without inputs. The model still runs on a placeholder, so that this rank takes part in the
              collectives of a sharded model. Its output is dropped and its gradient is zero.
replay        A second forward pass of a micro-batch whose graph was not kept (Gradient Cache).
label score   A score in the data. `score` without a further word is the similarity of a pair.

A batch passes five stages. Each is a method of TrainingStep:

1. `split`         One collective: the number of inputs, rows and micro-batches of each rank. From them every rank
                   derives the same number of micro-batches, and how many of their graphs are kept.
2. `encode`        The embeddings [n, D] of this rank, micro-batch by micro-batch. The first micro-batches keep their
                   graphs, as many as fit. The others are replayed later.
                   Outputs of frozen towers are computed first, or read from the cache. Gradients do not reach them.
3. `gather`        The embeddings of all ranks as one leaf E [U, D], and the indices by which the rows refer to them.
4. `differentiate` This rank computes the part of L that its rows add, and the gradient of that part with respect to all
                   of E. The sum of these gradients over the ranks is G. Each rank gets its n vectors of it, multiplied
                   by the world size because the ranks' gradients are averaged later.
5. `backward`      Backpropagate G_i from e_i through each micro-batch, in the graph that was kept, or in that of a
                   replay with the same random draws. Under FSDP the last backward pass synchronises the gradients of
                   the ranks.

After the last batch of an optimizer step, `synchronise` completes the gradients. Those of the loss's parameters are summed
over the ranks. Under DDP those of the model are averaged, which begins during the last backward pass.

When a rank runs out of memory, the step is repeated with a smaller budget. The rank notes the shortage and goes on. In the
next exchange of numbers (`split`, `gather` or `synchronise`) all ranks learn of it and raise OutOfMemory together. A step
cannot be repeated, and the rank raises RunError, which ends the run on all ranks, in three cases:

- Under FSDP after a shortage in a forward or backward pass. The other ranks wait inside a layer, and never reach the
  exchange. A model whose batch norms are shared by the ranks has the same problem.
- After a shortage in a collective on the embeddings or their gradient, in `gather` and at the end of `differentiate`.
- After a shortage in the loss, unless a smaller budget helps. It helps the loss only by keeping fewer graphs. So graphs have
  to be kept now, with use_gradient_cache: auto, and the budget must not be the smallest one.
"""

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vembed.config.schema import ObjectiveSection
from vembed.data.batching.rank_batch import (
    LockstepSplit,
    MicroBatch,
    ModelInputs,
    RankBatch,
    index_tensor,
)
from vembed.errors import RunError
from vembed.losses.batch import INDEX_FIELDS, LossBatch, LossModule, to_device_together
from vembed.models.families.family import Modality
from vembed.models.precision import bf16_weights_of
from vembed.parallel import collectives
from vembed.parallel.devices import is_shortage, matmul_precision, seed_draws
from vembed.parallel.parameters import reshard, set_fsdp_reduction
from vembed.parallel.session import Session
from vembed.parallel.step_memory import SMALLEST_BUDGET, Budget, OutOfMemory, advice
from vembed.teachers import Teachers
from vembed.training.auxiliary_losses import AuxiliaryBatch, SliceLosses
from vembed.training.frozen import InputBuilder, InputSource

GROUPED_GRADIENT_BYTES = 2**30
"""Up to this size the gradients of a backward pass are added to the earlier ones all together, in few kernels. That needs
memory for the new gradients beside the earlier ones. Above this size it would save nothing, since launching a kernel for
each parameter costs little compared with the additions."""


@dataclass(frozen=True)
class BatchCounts:
    """Numbers of a global batch that all ranks know after `split`. Each list has one entry per rank."""

    inputs: list[int]
    """Distinct inputs. Their sum is U."""
    vectors: list[int]
    """Vectors that the model returns for them. As many as inputs, for dense vectors."""
    rows: list[int]
    """Rows of the loss: pairs of a query and a positive."""
    negatives: list[int]
    """Hard negatives."""
    has_label_scores: list[int]
    """1 if the rank's data have label scores of its positives."""
    padded_tokens: list[int]
    """Tokens, with padding, of the micro-batches that each rank has cut by itself, before the ranks agree on their number."""
    longest: list[int]
    """Tokens of the rank's longest input."""
    failed: list[int]
    """1 if the rank ran out of memory in the previous batch."""


@dataclass
class BatchState:
    """State of one global batch between the stages, as this rank sees it."""

    rank_batch: RankBatch
    batch_number: int
    """Number of the global batch in the run."""
    is_last_batch: bool
    """True if this is the last batch before the optimizer step, so its last micro-batch synchronises the ranks."""
    input_source: InputSource

    # Set by `split`, and equal on every rank, except for the inputs in the micro-batches and slices.
    counts: BatchCounts = field(init=False)
    micro_batches: list[MicroBatch] = field(init=False)
    """Equally many on every rank, of the same modalities."""
    frozen_slices: dict[Modality, list[list[int]]] = field(init=False)
    """Slices for the frozen towers, of the inputs whose outputs are not in the cache."""
    num_kept_graphs: int = field(init=False)
    """Number of micro-batches, the first ones, that keep their graphs until their backward pass. The others are replayed."""

    # Set by `encode`.
    embeddings: Tensor = field(init=False)
    """[n, D] this rank's embeddings, detached. Where inputs have several vectors, a line for each of them."""
    kept_outputs: deque[tuple[list[Tensor], SliceLosses]] = field(default_factory=deque)
    """Embeddings and auxiliary losses of the first `num_kept_graphs` micro-batches, with their graphs."""
    auxiliary_sums: AuxiliaryBatch | None = None
    """Sums of the auxiliary losses, those that the model itself returns. None for a model without."""

    def is_last_backward(self, micro_index: int) -> bool:
        """Return whether the backward pass of this micro-batch is the last before the optimizer step."""
        return self.is_last_batch and micro_index == len(self.micro_batches) - 1

    @cached_property
    def starts(self) -> np.ndarray | None:
        """[n + 1] where each input's vectors begin in `embeddings`, known before the forward pass.

        None where each input has one: dense vectors of texts and images, scores of pairs.
        """
        num_vectors = self.rank_batch.num_vectors
        if set(num_vectors) <= {1}:
            return None
        return np.cumsum([0, *num_vectors])

    def vector_indices(self, inputs: Sequence[int]) -> Sequence[int]:
        """Return where the vectors of some inputs are in `embeddings`, in the order of the inputs."""
        if self.starts is None:
            return inputs
        indices: list[int] = []
        for index in inputs:
            start, stop = self.starts[index : index + 2]
            indices += range(start, stop)
        return indices


class HostCopy:
    """An asynchronous copy of a tensor to the host. `read` waits for the copy, but not for work queued after it."""

    def __init__(self, tensor: Tensor) -> None:
        # From a GPU it goes to pinned memory.
        self._copy = tensor.to("cpu", non_blocking=True)
        self._arrival: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def read(self) -> Tensor:
        """Return the copy when it has arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy


@dataclass(frozen=True)
class BatchResult:
    """Result of one global batch, besides gradients."""

    loss_share: Tensor
    """This rank's part of the loss, with its auxiliary losses, not multiplied by the `weight` of `accumulate`. The sum over
    the ranks is the loss of the batch."""
    loss_share_on_host: HostCopy
    """`loss_share` on the host."""
    computed_tokens: int
    """Tokens of this rank's micro-batches, with padding where texts are padded. Those of a replay count once."""
    num_forwards: int
    """Forward passes, with the replays."""
    num_kept_graphs: int
    embeddings: Tensor
    """[n, D] this rank's embeddings, for diagnostics."""
    embeddings_sum: Tensor
    """Their sum, not finite if one of them is not. On the device, so that nothing waits for it."""
    auxiliary_means: Mapping[str, float] = field(default_factory=dict)
    """The auxiliary losses of the global batch, without their weights."""
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's part of each term of `losses`, without its weight. Empty for a loss of one term."""


def seed_of(
    seed: int,
    batch_number: int,
    rank: int,
    micro_index: int,
) -> int:
    """Return the seed of one forward pass. A pure function: a replay and a resumed run draw the same dropout masks."""
    # Odd multipliers and xor-shifts, as in splitmix64, so that neighbouring batches and ranks get unrelated seeds.
    mixed = (
        seed * 0x9E3779B97F4A7C15
        + batch_number * 0xBF58476D1CE4E5B9
        + rank * 0x94D049BB133111EB
        + micro_index
    ) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    return (mixed ^ (mixed >> 32)) >> 1


def join_slices(
    slices: dict[Modality, list[list[int]]], frozen: Collection[str] = ()
) -> list[MicroBatch]:
    """Return micro-batches that run the slices of all modalities.

    The last slices of all modalities form one micro-batch, so that the backward pass that synchronises gradients
    reaches every tower. In it, frozen modalities come last, as InputSource.feed gives them.
    """
    # False sorts before True, and the sort is stable: the order is the same on every rank.
    modalities = sorted(slices, key=lambda modality: modality in frozen)
    micro_batches = []
    last = []
    for modality in modalities:
        *earlier, last_inputs = slices[modality]
        for inputs in earlier:
            micro_batches.append([(modality, inputs)])
        last.append((modality, last_inputs))
    micro_batches.append(last)
    return micro_batches


class TrainingStep:
    """Passes global batches through model and loss, and accumulates the gradient of L in the parameters."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossModule,
        input_builder: InputBuilder,
        session: Session,
        budget: Budget,
        seed: int,
        teachers: Teachers | None = None,
        auxiliary_options: ObjectiveSection | None = None,
    ) -> None:
        """`budget` may be replaced between two batches, after a shortage of memory. `teachers`: of the loss, if any.
        `auxiliary_options`: options of the auxiliary losses. None for a model without."""
        self.model = model
        self.loss = loss
        self.input_builder = input_builder
        self.session = session
        self.budget = budget
        self.seed = seed
        self.teachers = teachers
        self.auxiliary_options = auxiliary_options
        self.timer = StepTimer(session.device)
        # Gradients of the model are averaged under DDP. Those of loss parameters are summed, since L is a sum over rows.
        averaged = model.parameters() if session.strategy == "ddp" else ()
        self.gradient_sync = collectives.GradientSync(averaged, loss.parameters())
        self.bf16_weights = bf16_weights_of(model)
        self._grouped_parameters: list[nn.Parameter] = []
        """Parameters whose gradients a backward pass adds together. Empty under FSDP, which adds them itself, and on CPUs,
        where launches cost nothing."""
        if session.device.type == "cuda" and session.fsdp is None:
            trained = [
                parameter for parameter in model.parameters() if parameter.requires_grad
            ]
            num_bytes = sum(parameter.nbytes for parameter in trained)
            if num_bytes <= GROUPED_GRADIENT_BYTES:
                self._grouped_parameters = trained
        self._ran_out_of_memory = False
        """True from a shortage on this rank until the ranks know of it."""

    def accumulate(
        self,
        rank_batch: RankBatch,
        batch_number: int,
        *,
        weight: float,
        is_last_batch: bool,
        float16_scale: float = 1.0,
    ) -> BatchResult:
        """Add `weight` times the gradient of L of a global batch to the parameters' gradients. Collective.

        `is_last_batch`: this is the last batch before the optimizer step. `float16_scale`: the factor of the gradient scaler, 1
        without float16.
        """
        scaled_weight = weight * float16_scale
        # Weights stay the same until the optimizer step, so one set of bfloat16 copies serves all micro-batches of the batch.
        with self.bf16_weights.held():
            with self.timer("data"):
                input_source = InputSource(self.input_builder, rank_batch.features)
                batch = BatchState(
                    rank_batch, batch_number, is_last_batch, input_source
                )
            if self.auxiliary_options is not None:
                batch.auxiliary_sums = AuxiliaryBatch(
                    self.auxiliary_options, rank_batch, self.session.device
                )
            with self.timer("wait"):
                self.split(batch)
            # Whether the step can be repeated after a shortage in a forward or backward pass. Not if the pass has
            # collectives, in which the other ranks would wait: those of FSDP's layers, or of shared batch norms.
            session = self.session
            shares_norms = session.syncs_batch_norms and session.world_size > 1
            can_repeat = session.strategy != "fsdp" and not shares_norms
            with self.timer("forward"), self._deferring_shortage(can_repeat=can_repeat):
                self.encode(batch)
            with self._deferring_shortage(can_repeat=False, in_loss=True):
                with self.timer("wait"):
                    loss_batch = self.gather(batch)
                loss_share, gradient = self.differentiate(
                    loss_batch, batch, scaled_weight
                )
            loss_share_on_host = HostCopy(loss_share)
            with (
                self.timer("backward"),
                self._deferring_shortage(can_repeat=can_repeat),
            ):
                self.backward(batch, gradient, scaled_weight)
        feeder = self.input_builder.feeder
        computed_tokens = 0
        for micro_batch in batch.micro_batches:
            computed_tokens += feeder.padded_tokens(micro_batch, rank_batch.features)
        auxiliary_means = {}
        if batch.auxiliary_sums is not None:
            auxiliary_means = batch.auxiliary_sums.means()
        return BatchResult(
            loss_share=loss_share,
            loss_share_on_host=loss_share_on_host,
            computed_tokens=computed_tokens,
            num_forwards=2 * len(batch.micro_batches) - batch.num_kept_graphs,
            num_kept_graphs=batch.num_kept_graphs,
            embeddings=batch.embeddings,
            embeddings_sum=batch.embeddings.sum(dtype=torch.float32),
            auxiliary_means=auxiliary_means,
            terms=self.loss.term_shares,
        )

    def synchronise(self, loss_share: float) -> float:
        """Complete the gradients of an optimizer step, and return the sum of `loss_share` over the ranks. Collective."""
        failed = float(self._ran_out_of_memory)
        loss, num_failed = self.gradient_sync.finish([loss_share, failed])
        self._raise_if_any([num_failed])
        return loss

    # ---- the stages ----------------------------------------------------------

    def split(self, batch: BatchState) -> None:
        """Set the micro-batches, equally many on every rank, and how many keep their graphs. One collective."""
        rank_batch = batch.rank_batch
        budget = self.budget
        features = rank_batch.features
        limit = budget.micro_batch_tokens
        input_split = rank_batch.split(limit)
        lengths = input_split.lengths
        # The inputs of frozen towers that no cache has. They pass in micro-batches of their own.
        frozen_split = LockstepSplit(lengths, batch.input_source.uncached, limit)
        rank_counts = {
            "inputs": len(features),
            "vectors": sum(rank_batch.num_vectors),
            "rows": len(rank_batch.query),
            "negatives": len(rank_batch.negative),
            "has_label_scores": rank_batch.label_scores is not None,
            "padded_tokens": input_split.padded_tokens,
            "longest": max(lengths, default=0),
            "failed": self._ran_out_of_memory,  # in the batch before
        }
        # One collective for all numbers, [ranks, numbers]: the counts above, then the number of this rank's slices of each
        # modality, then of each frozen modality. Before the first forward pass, because under FSDP all ranks must run
        # equally many.
        numbers = [int(count) for count in rank_counts.values()]
        table = collectives.all_gather_ints(
            [*numbers, *input_split.counts, *frozen_split.counts]
        )
        # The columns of the table: one for each number, with an entry per rank.
        columns = [list(values) for values in zip(*table, strict=True)]
        num_counts = len(rank_counts)
        counts = dict(zip(rank_counts, columns[:num_counts], strict=True))
        batch.counts = BatchCounts(**counts)
        self._raise_if_any(batch.counts.failed)
        # The maximum over the ranks for each modality. A rank with fewer slices splits its inputs finer, or runs dummies.
        num_slices = [max(values) for values in columns[num_counts:]]
        num_modalities = len(input_split.counts)
        slices = input_split.split_into(num_slices[:num_modalities])
        batch.frozen_slices = frozen_split.split_into(num_slices[num_modalities:])
        frozen = self.input_builder.frozen_modalities
        batch.micro_batches = join_slices(slices, frozen)
        # From numbers that are equal on all ranks: a rank with fewer replays would leave the others waiting.
        batch.num_kept_graphs = budget.num_kept_graphs(
            max(batch.counts.padded_tokens),
            max(batch.counts.longest),
            len(batch.micro_batches),
            self.session,
        )

    def encode(self, batch: BatchState) -> None:
        """Set this rank's embeddings [n, D] in the order of its inputs, and keep the first graphs. Collective."""
        embeddings: Tensor | None = None
        with torch.no_grad():
            # A frozen image tower's hidden states are kept for the replays, if there are any and memory allows.
            max_tokens = max(batch.counts.padded_tokens)
            images_fit = max_tokens <= self.input_builder.max_tokens_to_keep_images
            has_replays = batch.num_kept_graphs < len(batch.micro_batches)
            keeps_image_states = images_fit and has_replays
            batch.input_source.encode_frozen(
                batch.frozen_slices, keeps_image_states=keeps_image_states
            )
            # FSDP2: units stay gathered from the first micro-batch to the last backward, instead of one all-gather per
            # micro-batch.
            self.session.keep_gathered(self.model, on=True)
            inputs_in_turn = batch.input_source.feed(
                batch.micro_batches, first_replayed=batch.num_kept_graphs
            )
            for micro_index, model_inputs in enumerate(inputs_in_turn):
                micro_batch = batch.micro_batches[micro_index]
                # FSDP reads this in the forward pass already. `backward` sets it again for each micro-batch.
                self._set_fsdp_reduction(batch.is_last_backward(micro_index))
                # The first ones keep their graphs: their backward passes come first, and free them before any replay.
                keeps_graph = micro_index < batch.num_kept_graphs
                with torch.set_grad_enabled(keeps_graph):
                    outputs, auxiliary_losses = self._forward(
                        batch, model_inputs, micro_index
                    )
                if batch.auxiliary_sums is not None:
                    batch.auxiliary_sums.add(micro_batch, auxiliary_losses)
                if embeddings is None:
                    width = outputs[0].shape[1]
                    num_rank_vectors = batch.counts.vectors[self.session.rank]
                    embeddings = outputs[0].new_zeros(num_rank_vectors, width)
                for (_, input_indices), output in zip(
                    micro_batch, outputs, strict=True
                ):
                    # A dummy's output is dropped. The pass was needed for its collectives.
                    if input_indices:
                        indices = batch.vector_indices(input_indices)
                        embeddings[index_tensor(indices, output.device)] = (
                            output.detach()
                        )
                if keeps_graph:
                    batch.kept_outputs.append((outputs, auxiliary_losses))
        assert embeddings is not None, "every rank runs at least one micro-batch"
        batch.embeddings = embeddings

    def gather(self, batch: BatchState) -> LossBatch:
        """Gather the embeddings as one leaf, and the rows of all ranks with indices into it. Collective."""
        rank_batch = batch.rank_batch
        counts = batch.counts
        rank = self.session.rank
        parts = self._fields(batch)
        failed = np.array([self._ran_out_of_memory], dtype=np.int64)
        parts["failed"] = FieldPart(failed, [1] * self.session.world_size)
        on_host = gather_fields(parts)
        # Before the embeddings, which a rank without memory does not have.
        self._raise_if_any(on_host.pop("failed").tolist())
        # The gather itself is not differentiated; `differentiate` does its backward by hand.
        embeddings = collectives.all_gather_parts(batch.embeddings, counts.vectors)
        embeddings.requires_grad_()
        num_vectors = on_host.pop("num_vectors", None)
        if num_vectors is not None:
            # [U + 1] where the vectors of each of the U inputs begin in E.
            ends = num_vectors.cumsum(0)
            on_host["starts"] = F.pad(ends, (1, 0))
        fields: dict[str, Any] = to_device_together(on_host, self.session.device)
        for name, values in fields.items():
            if values.is_floating_point():
                fields[name] = values.to(embeddings.dtype)
        loss_batch = LossBatch(
            embeddings=embeddings,
            **fields,
            rank_rows=rank_range(rank, counts.rows),
            rank_negatives=rank_range(rank, counts.negatives),
            batch_number=batch.batch_number,
            source_index=rank_batch.source_index,
            embeddings_are_scores=self.input_builder.feeder.featuriser.reads_pairs,
            host_indices={name: on_host[name] for name in INDEX_FIELDS},
        )
        if self.teachers is None:
            return loss_batch
        return self.teachers.attach(
            loss_batch, rank_batch, counts.rows, counts.negatives
        )

    def differentiate(
        self,
        loss_batch: LossBatch,
        batch: BatchState,
        scaled_weight: float,
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's part of L, and the gradient of `scaled_weight` * L for this rank's vectors [n, D], multiplied
        by the world size. Collective."""
        embeddings = loss_batch.embeddings
        budget = self.budget
        # A smaller budget keeps fewer graphs, and leaves their memory to the loss. None is `use_gradient_cache: auto`.
        can_repeat_loss = (
            batch.num_kept_graphs > 0
            and budget.use_gradient_cache is None
            and budget.micro_batch_tokens > SMALLEST_BUDGET
        )
        loss_share: Tensor | None = None
        with (
            self.timer("loss"),
            self._deferring_shortage(can_repeat=can_repeat_loss, in_loss=True),
            torch.enable_grad(),
            # Not TF32: the rounding of a score is divided by the temperature too.
            matmul_precision("highest"),
        ):
            loss_share = self.loss(loss_batch)
            # The loss runs in float32. Its gradient carries the float16 scale into the backward of each micro-batch.
            loss_share.backward(loss_share.new_full((), scaled_weight))
        if loss_share is None:
            # Out of memory: the ranks wait for this one in the collectives that follow.
            loss_share = embeddings.new_zeros(())
        loss_share = loss_share.detach()
        with self.timer("wait"):
            # Every rank's part of L depends on all embeddings, so it has a gradient [U, D]. The gradients are summed over
            # the ranks, and each rank gets the lines of its own vectors [n, D].
            gradient = embeddings.grad
            if gradient is None:
                # The loss does not depend on the embeddings.
                gradient = torch.zeros_like(embeddings)
            gradient = collectives.reduce_scatter_parts(gradient, batch.counts.vectors)
            if batch.auxiliary_sums is not None:
                batch.auxiliary_sums.sum_over_ranks()
                loss_share = loss_share + batch.auxiliary_sums.loss_share()
        # FSDP and GradientSync average gradients over the ranks, but L is a sum over them: the factor makes up for that.
        return loss_share, gradient * self.session.world_size

    def backward(
        self,
        batch: BatchState,
        gradient: Tensor,
        scaled_weight: float,
    ) -> None:
        """Backpropagate `gradient` [n, D], and `scaled_weight` times the auxiliary losses, through every micro-batch.

        Micro-batches whose graphs were not kept are replayed. Collective.
        """
        num_kept = batch.num_kept_graphs
        replayed_inputs = batch.input_source.feed(
            batch.micro_batches, starts_at=num_kept
        )
        for micro_index, micro_batch in enumerate(batch.micro_batches):
            is_last_backward = batch.is_last_backward(micro_index)
            self._set_fsdp_reduction(is_last_backward)
            if micro_index < num_kept:
                # Taken out, so that each graph is freed as soon as its backward is done.
                outputs, auxiliary_losses = batch.kept_outputs.popleft()
            else:
                # The seed is a function of the index, so this replay draws the dropout masks of `encode`.
                outputs, auxiliary_losses = self._forward(
                    batch, next(replayed_inputs), micro_index
                )
            # FSDP2 may free the parameters after the last backward pass, and not earlier. If this were set before a replay's
            # forward pass, FSDP2 would free them after that pass, and gather them again for the backward pass.
            self.session.keep_gathered(self.model, on=not is_last_backward)
            # The roots of this backward pass, each with the gradient that it starts from.
            roots = []
            gradients = []
            for (_, input_indices), output in zip(micro_batch, outputs, strict=True):
                if not output.requires_grad:
                    continue
                if input_indices:
                    indices = batch.vector_indices(input_indices)
                    output_gradient = gradient[index_tensor(indices, gradient.device)]
                else:
                    # A dummy's gradient adds nothing, but its backward takes part in the ranks' collectives.
                    output_gradient = torch.zeros_like(output)
                roots.append(output)
                gradients.append(output_gradient)
            if batch.auxiliary_sums is not None:
                auxiliary_share = batch.auxiliary_sums.micro_batch_share(
                    micro_batch, auxiliary_losses
                )
                if auxiliary_share is not None:
                    # The loss is a sum over the ranks, but the gradients of the ranks are averaged (see `differentiate`).
                    factor = scaled_weight * self.session.world_size
                    roots.append(auxiliary_share)
                    gradients.append(auxiliary_share.new_full((), factor))
            # From here on GradientSync starts a bucket as soon as its gradients are there. Not with shared batch norms: they
            # have collectives in the backward pass too, and the order of both kinds could differ between the ranks.
            if is_last_backward and not self.session.syncs_batch_norms:
                self.gradient_sync.start_early()
            grouping: AbstractContextManager[None] = nullcontext()
            # The last backward pass sums its gradients over the ranks while it runs.
            reduces_now = is_last_backward and self.session.world_size > 1
            if self._grouped_parameters and not reduces_now:
                # Converts and adds the gradients of all parameters together, in few kernels.
                grouping = self.bf16_weights.grouped_gradients(self._grouped_parameters)
            if roots:
                with grouping:
                    torch.autograd.backward(roots, gradients)
        # FSDP units without a backward pass (a frozen tower, a tower without inputs) are still gathered: free them now.
        if batch.is_last_batch and self.session.keeps_gathered:
            reshard(self.model)

    # ---- parts of the stages -------------------------------------------------

    def _fields(self, batch: BatchState) -> dict[str, "FieldPart"]:
        """Return this rank's part of the fields of LossBatch that describe inputs, rows and hard negatives, by name.

        A further field is one more line here and one more in LossBatch. If the host plans scores by it, as by the indices of
        rows, it also stands in INDEX_FIELDS.
        """
        rank_batch = batch.rank_batch
        counts = batch.counts
        # A rank's indices count its own inputs from 0. After the gather its inputs follow those of all lower ranks.
        offset = sum(counts.inputs[: self.session.rank])
        parts = {
            "content": FieldPart(rank_batch.content, counts.inputs),
            "query": FieldPart(rank_batch.query + offset, counts.rows),
            "positive": FieldPart(rank_batch.positive + offset, counts.rows),
            "example": FieldPart(rank_batch.example, counts.rows),
            "negative": FieldPart(rank_batch.negative + offset, counts.negatives),
            "negative_example": FieldPart(
                rank_batch.negative_example, counts.negatives
            ),
        }
        # Some inputs have several vectors. Every rank sees this in the shared counts.
        if counts.vectors != counts.inputs:
            num_vectors = np.array(rank_batch.num_vectors, dtype=np.int64)
            parts["num_vectors"] = FieldPart(num_vectors, counts.inputs)
        # Label scores are used only if every rank has them: all ranks pass the same fields.
        if all(counts.has_label_scores) and rank_batch.label_scores is not None:
            parts["label_scores"] = FieldPart(rank_batch.label_scores, counts.rows)
            parts["negative_label_scores"] = FieldPart(
                rank_batch.negative_label_scores, counts.negatives
            )
        return parts

    def _forward(
        self,
        batch: BatchState,
        inputs: ModelInputs,
        micro_index: int,
    ) -> tuple[list[Tensor], SliceLosses]:
        """Return the embeddings of each slice of a micro-batch, and its auxiliary losses."""
        session = self.session
        seed = seed_of(self.seed, batch.batch_number, session.rank, micro_index)
        seed_draws(seed, session.device)
        if self.auxiliary_options is None:
            return self.model(inputs), []
        outputs, losses = self.model(inputs, with_auxiliary=True)
        return outputs, losses

    def _set_fsdp_reduction(self, is_last_backward: bool) -> None:
        """Set whether FSDP reduces gradients over the ranks in the next backward pass.

        It does in the last one. In the others the gradients stay on this rank, unless memory is too small for gradients that
        are not sharded (`reduces_each_micro_batch`).
        """
        session = self.session
        if session.fsdp is None:
            return
        # `all_reduce`: HYBRID_SHARD sums earlier micro-batches only inside each machine. The last backward pass sums all of
        # them between the machines.
        set_fsdp_reduction(
            self.model,
            is_last_backward or session.reduces_each_micro_batch,
            all_reduce=is_last_backward or not session.all_reduces_once,
            is_last_backward=is_last_backward,
        )

    @contextmanager
    def _deferring_shortage(
        self,
        *,
        can_repeat: bool,
        in_loss: bool = False,
    ) -> Iterator[None]:
        """Note if this rank runs out of memory inside the with-block, and go on behind it. The ranks learn of it in their
        next exchange of numbers. Raise RunError instead if the step cannot be repeated. OutOfMemory, by which a stage tells of an
        earlier shortage, passes."""
        try:
            yield
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            if not can_repeat:
                raise RunError(
                    advice(self.session, self.budget, in_loss=in_loss)
                ) from error
            self._ran_out_of_memory = True

    def _raise_if_any(self, failed: Sequence[float]) -> None:
        """Raise OutOfMemory if any rank ran out of memory. `failed`: a flag of each rank, or their sum."""
        if any(failed):
            self._ran_out_of_memory = False
            raise OutOfMemory


# ---- gathering the fields of a LossBatch -------------------------------------


@dataclass(frozen=True)
class FieldPart:
    """A rank's part of one field of the global batch."""

    values: np.ndarray
    """One-dimensional, int64 or float64."""
    counts: Sequence[int]
    """Length of each rank's part, known to all ranks."""


def rank_range(rank: int, counts: Sequence[int]) -> slice:
    """Return where a rank's part is in a field that the ranks have gathered."""
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def gather_fields(parts: Mapping[str, FieldPart]) -> dict[str, Tensor]:
    """Return the fields of all ranks on the host, each concatenated by rank. One collective, however many fields there are.

    Every rank passes the same names and dtypes. Example: rank 0 has 2 numbers of the field a and 1 of b, rank 1 has 1 and 2.
    Gathered they are [a a | b | a | b b], and the field a is the pieces 0 and 2.
    """
    # All fields share one int64 collective. Floating-point ones are sent as their bits, without conversion.
    flat = [part.values.view(np.int64) for part in parts.values()]
    # How many numbers each rank has of each field: a tuple for each rank, with an entry for each field.
    counts = [part.counts for part in parts.values()]
    sizes = list(zip(*counts, strict=True))
    per_rank = [sum(rank_sizes) for rank_sizes in sizes]
    # [this rank's numbers], field by field. Where there is a process group for CPU tensors the host gathers them: the
    # results on a GPU would be there only after a wait.
    rank_numbers = torch.from_numpy(np.concatenate(flat))
    rank_numbers = rank_numbers.to(collectives.number_device())
    # [numbers of all ranks], rank by rank, and field by field within a rank.
    gathered = collectives.all_gather_parts(rank_numbers, per_rank).cpu()
    pieces = torch.split(gathered, list(chain.from_iterable(sizes)))
    fields = {}
    for index, (name, part) in enumerate(parts.items()):
        # One piece of each rank.
        values = torch.cat(pieces[index :: len(parts)]).numpy()
        fields[name] = torch.from_numpy(values.view(part.values.dtype))
    return fields


# ---- time --------------------------------------------------------------------

ACTIVITIES = ("data", "forward", "loss", "backward", "optimizer", "wait")
"""What the time of a step is spent on. `wait` is the time in collectives, including the wait for other ranks."""


class StepTimer:
    """Seconds per activity: by the wall clock on a CPU, and on CUDA between events, which `take` reads.

    On CUDA a wait of the host during which the device works does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Count the time inside the with-block for an activity."""
        # Batches are prepared on the host. Events on the device would not show the time that the step waits for them.
        if self.on_cuda and activity != "data":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            try:
                yield
            finally:
                end.record()
                self.events.append((activity, start, end))
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Return the seconds per activity since the last call. Waits for the device."""
        if self.events:
            # A stream works in order: when the last event has been reached, all have.
            self.events[-1][2].synchronize()
            for activity, start, end in self.events:
                self.seconds[activity] += start.elapsed_time(end) / 1000
            self.events.clear()
        seconds = {activity: self.seconds[activity] for activity in ACTIVITIES}
        self.seconds.clear()
        return seconds
