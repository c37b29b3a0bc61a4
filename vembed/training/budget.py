"""Token budgets: the size of a micro-batch, and the batch size up to which autograd graphs are kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn

from vembed.config.schema import TrainConfig
from vembed.data.features import Features, Featuriser
from vembed.distributed import collectives
from vembed.distributed.estimate import (
    CPU_MEMORY_SHARE,
    CPU_MICRO_BATCH_TOKENS,
    CUDA_MEMORY_SHARE,
    largest_micro_batch,
    tokens_kept,
)
from vembed.distributed.parameters import forget_forward, reshard, set_keep_gathered
from vembed.distributed.session import Session
from vembed.families.table import Modality

log = logging.getLogger("vembed")

SMALLEST_BUDGET = 64
PROBE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one forward pass, and of the graphs kept until their backward pass."""

    micro_batch_tokens: int
    max_rows: int | None
    kept_graph_tokens: int
    use_gradient_cache: bool | None
    """Switch: use Gradient Cache. None: decided per batch by `kept_graph_tokens`."""

    def keeps_graphs(self, padded_tokens: int, num_forwards: int, session: Session) -> bool:
        """Return whether phase 1 keeps its graphs, so that no phase 2 is needed. The same on every rank."""
        if session.fsdp is not None and session.fsdp.version == 1 and num_forwards > 1:
            return False  # FSDP1 frees a unit's parameters after the first of several pending backward passes
        if self.use_gradient_cache is not None:
            return not self.use_gradient_cache
        return padded_tokens <= self.kept_graph_tokens

    def halved(self) -> Budget:
        """Return half this budget, for use after the device ran out of memory."""
        return replace(
            self,
            micro_batch_tokens=max(self.micro_batch_tokens // 2, 1),
            max_rows=None if self.max_rows is None else max(self.max_rows // 2, 1),
            kept_graph_tokens=self.kept_graph_tokens // 2,
        )


def find_budget(
    config: TrainConfig, model: nn.Module, featuriser: Featuriser, session: Session, sample: Sequence[Features]
) -> Budget:
    """Return the budget of the config, or the largest one the device holds. Collective; the same on every rank."""
    cache = None if config.use_gradient_cache == "auto" else config.use_gradient_cache
    rows = config.gradient_cache_chunk_size
    if cache is False and session.fsdp is not None and session.fsdp.version == 1:
        log.warning(
            "use_gradient_cache: false holds only for steps of one micro-batch under fsdp_version: 1, which frees a "
            "unit's parameters after the first of several backward passes: larger steps use Gradient Cache (the same "
            "gradient for one more forward pass). fsdp_version: 2 keeps the graphs of all micro-batches"
        )
    tokens, kept = config.micro_batch_tokens, config.kept_graph_tokens
    needs_probe = (cache is None and kept == "auto") or (tokens == "auto" and session.device.type == "cuda")
    per_token = bytes_per_token(model, featuriser, session, sample) if needs_probe else 0
    if tokens == "auto":
        tokens = 2**40 if rows else _auto_tokens(model, featuriser, session, sample, per_token)
    if kept == "auto":
        kept = tokens_kept(_free_bytes(session), per_token) if needs_probe else tokens
        # The minimum over the ranks: all must agree whether a batch has a second phase.
        kept = -collectives.max_ints([-kept])[0]
        if needs_probe:
            log.info(
                "graphs: kept for batches of up to %s padded tokens per rank (auto: %s bytes per token measured, "
                "%.1f GB free for them); larger batches use Gradient Cache",
                f"{kept:,d}", f"{per_token:,d}", _free_bytes(session) / 1e9,
            )  # fmt: skip
    return Budget(tokens, rows, kept, cache)


def bytes_per_token(model: nn.Module, featuriser: Featuriser, session: Session, sample: Sequence[Features]) -> int:
    """Return the graph bytes per token of the longest inputs, measured on a small forward pass. Collective."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        source = tensor if tensor._base is None else tensor._base
        if not isinstance(
            source, nn.Parameter
        ):  # parameters live without the graph; FSDP gathers them in storages of their own
            storage = tensor.untyped_storage()
            # Keyed by storage, so that views of one tensor are counted once.
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    most = 0
    for modality in featuriser.description.modalities:
        inputs, tokens = _repeat_longest(featuriser, modality, sample, PROBE_TOKENS)
        saved.clear()
        torch.manual_seed(0)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = model([(modality, _move(inputs, session.device))])
        del outputs
        forget_forward(model)
        most = max(most, sum(saved.values()) // tokens)
    return max(collectives.max_ints([most])[0], 1)


def _auto_tokens(
    model: nn.Module, featuriser: Featuriser, session: Session, sample: Sequence[Features], per_token: int
) -> int:
    longest = max((feature.length for feature in sample), default=1)
    if session.device.type != "cuda":
        log.info("micro-batches: %s padded tokens (auto: fixed on CPU)", f"{CPU_MICRO_BATCH_TOKENS:,d}")
        return CPU_MICRO_BATCH_TOKENS
    tokens = largest_micro_batch(_free_bytes(session), per_token, longest)
    tokens = -collectives.max_ints([-tokens])[0]
    while tokens > SMALLEST_BUDGET:
        fits = _trial(model, featuriser, session, sample, tokens)
        log.info("micro-batches: tried %s padded tokens: %s", f"{tokens:,d}", "fits" if fits else "too large")
        if fits:
            break
        tokens //= 2
    return tokens


def _trial(model: nn.Module, featuriser: Featuriser, session: Session, sample: Sequence[Features], tokens: int) -> bool:
    """Return whether forward and backward of the longest inputs stay within the memory limit on every rank.
    Collective."""
    torch.cuda.reset_peak_memory_stats(session.device)
    fits = True
    # As in a real step: all FSDP units stay gathered between micro-batches, so they count towards the peak.
    if session.keeps_gathered:
        set_keep_gathered(model, True)
    for modality in featuriser.description.modalities:
        inputs, _ = _repeat_longest(featuriser, modality, sample, tokens)
        try:
            outputs = model([(modality, _move(inputs, session.device))])
            if outputs[0].requires_grad:
                outputs[0].sum().backward()
            del outputs
        except torch.cuda.OutOfMemoryError:
            fits = False
        forget_forward(model)
    if session.fsdp is not None and session.keeps_gathered:
        set_keep_gathered(model, False, session.fsdp.reshard_after_forward)
        reshard(model)
    # The trial's gradients must not reach the first optimizer step.
    model.zero_grad(set_to_none=True)
    total = torch.cuda.get_device_properties(session.device).total_memory
    fits = fits and torch.cuda.max_memory_reserved(session.device) < CUDA_MEMORY_SHARE * total
    torch.cuda.empty_cache()
    return collectives.max_ints([int(not fits)])[0] == 0


def _repeat_longest(
    featuriser: Featuriser, modality: Modality, sample: Sequence[Features], tokens: int
) -> tuple[dict[str, Tensor], int]:
    """Return a micro-batch of a modality's longest input, repeated to fill `tokens`, and its size in tokens."""
    longest = max(
        (feature for feature in sample if feature.modality == modality),
        key=lambda feature: feature.length,
        default=featuriser.dummy(modality),
    )
    rows = max(tokens // longest.length, 1)
    return featuriser.collate([longest] * rows), rows * longest.length


def _free_bytes(session: Session) -> int:
    if session.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(session.device)
        return int(free * CUDA_MEMORY_SHARE)
    return int(psutil.virtual_memory().available * CPU_MEMORY_SHARE / session.local_world_size)


def _move(inputs: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}
