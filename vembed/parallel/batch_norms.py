"""Batch norms: shared statistics over all ranks on GPUs and on CPUs, and a warning where they are not shared."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from vembed.parallel import collectives

log = logging.getLogger("vembed")
_Base = nn.modules.batchnorm._BatchNorm


class _SumOverRanks(torch.autograd.Function):
    """Sum over all ranks. Each rank's loss depends on every rank's input, so the gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        return collectives.sum_tensor(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return collectives.sum_tensor(gradients[0].clone())


class AllReduceBatchStatistics(_Base):
    """Batch norm over the inputs of all ranks, for devices that torch's SyncBatchNorm does not support.

    The name avoids "Norm": Accelerate's FSDP2 code looks for a final norm by class names.
    """

    def forward(self, values_NC: Tensor) -> Tensor:
        """Normalise [n, channels, ...] by the mean and variance over all ranks; in evaluation, by the running ones."""
        if not self.training or collectives.world_size() == 1:
            return super().forward(values_NC)
        others = [0, *range(2, values_NC.dim())]
        # One collective for count, sums and sums of squares, in float64: a difference of squares cancels digits.
        wide = values_NC.double()
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        parts = torch.cat((count, wide.sum(others), wide.square().sum(others)))
        total: Tensor = _SumOverRanks.apply(parts)  # type: ignore[no-untyped-call]
        channels = wide.shape[1]
        count = total[:1].detach()
        sums = total[1 : 1 + channels]
        squares = total[1 + channels :]
        mean = sums / count
        variance = squares / count - mean.square()
        if self.track_running_stats:
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None
            assert self.running_var is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:
                momentum = 1 / float(self.num_batches_tracked)
            # The running variance is the unbiased one, as in torch. Normalisation takes the biased one.
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        shape = [1, -1, *(1 for _ in others[1:])]
        scale = (variance.view(shape) + self.eps).rsqrt()
        normal: Tensor = ((wide - mean.view(shape)) * scale).to(values_NC.dtype)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"batch norm needs at least 2 dimensions, not {input.dim()}"
            )


def share_batch_norms(model: nn.Module, device: torch.device, *, shared: bool) -> int:
    """Make batch norms share their statistics between ranks if `shared`, else warn; return their number."""
    norms = [module for module in model.modules() if isinstance(module, _Base)]
    if not norms:
        if shared:
            log.info("sync_batchnorm: the model has no batch norms")
        return 0
    if not shared:
        if model.training:
            way_out = ""
            if collectives.world_size() > 1:
                way_out = "; sync_batchnorm: true shares their statistics"
            log.warning(
                f"batch norms: {len(norms)}, each over the micro-batch of one process, so losses and gradients depend on "
                f"the number of processes and on micro_batch_tokens{way_out}"
            )
        return len(norms)
    if device.type == "cpu":
        for module in norms:
            module.__class__ = AllReduceBatchStatistics
    else:
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    log.info(
        f"sync_batchnorm: {len(norms)} batch norms share their statistics among processes"
    )
    return len(norms)
