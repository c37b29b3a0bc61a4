"""Watch: numbers that are none, losses that stand still, embeddings that collapse; said where a user can act on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.data.share import Share
from vembed.distributed import collectives
from vembed.errors import RunError
from vembed.training.update import Outcome

log = logging.getLogger("vembed")

COLLAPSED = 0.99
"""Mean cosine between two inputs above which embeddings no longer tell them apart."""
STILL_STEPS = 200
"""Steps after which a loss that has not left its starting range is worth a warning."""
STILL_RANGE = 0.001
MAX_NAMED = 5


class Watch:
    """Looks at each step's figures and warns once of each thing."""

    def __init__(self, config: TrainConfig) -> None:
        self.stops = config.on_nonfinite == "stop"
        self.loss = config.loss
        self.warned: set[str] = set()
        self.lowest = math.inf
        self.highest = -math.inf
        self.num_seen = 0

    def finite(self, step: int, outcome: Outcome, parts: Sequence[tuple[Share, Tensor]]) -> bool:
        """Whether the step counted. One that did not stops the run, or is named; the same on every rank. `parts`: this
        rank's share of each global batch of the step, and whether its embeddings are finite."""
        if outcome.applied:
            return True
        if outcome.is_overflow:
            log.info("step %d: float16 overflow, gradient scale halved, step left out", step)
            return False
        broken = [share for share, is_finite in parts if not bool(is_finite)]
        mine = [where for share in broken for where in share.where][:MAX_NAMED]
        named = collectives.gather_objects_as_json(mine)
        culprits = "; ".join(f"rank {rank}: {', '.join(where)}" for rank, where in enumerate(named) if where)
        if not culprits:
            culprits = f"no rank (the gradient overflowed; first examples: {', '.join(parts[0][0].where[:2])})"
        what = (
            f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; embeddings that are not finite on "
            f"{culprits}"
        )
        if self.stops:
            raise RunError(
                f"{what}. Lower learning_rate or max_grad_norm, use mixed_precision: bf16 instead of fp16, or set "
                "on_nonfinite: skip to leave such steps out; the last good checkpoint is untouched"
            )
        log.warning("%s; step left out (on_nonfinite: skip)", what)
        return False

    def figures(self, step: int, loss: float, embeddings: Tensor) -> dict[str, float]:
        """Called with every log line: the mean cosine between this rank's inputs, and warnings where there is cause."""
        self.num_seen += 1
        self.lowest, self.highest = min(self.lowest, loss), max(self.highest, loss)
        cosine = mean_cosine(embeddings)
        if cosine > COLLAPSED:
            self._once(
                "collapse",
                f"embeddings collapse: the mean cosine between inputs is {cosine:.3f}; lower learning_rate, check that "
                "pooling fits the model, and that positives are not the same text in every row",
            )
        if loss == 0.0 and self.loss == "infonce":
            self._once(
                "nothing",
                f"the loss of step {step:,d} is exactly 0, so it taught nothing: no positive had another document to "
                "be told from, or all are told apart already; check that positives differ (copies in a batch are left "
                "out: mask_duplicates), or add negatives",
            )
        is_still = self.highest - self.lowest <= STILL_RANGE * max(abs(self.highest), 1e-12)
        if step >= STILL_STEPS and self.num_seen > 1 and is_still:
            self._once(
                "still",
                f"the loss has stayed at {loss:.4f} for {step:,d} steps; raise learning_rate, and check that "
                "parameters are trained at all (freeze, use_lora)",
            )
        return {"mean_cosine": cosine}

    def _once(self, what: str, message: str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            log.warning(message)


def mean_cosine(embeddings: Tensor) -> float:
    """Mean cosine over all pairs of different rows, from the length of the mean direction: no matrix of pairs."""
    num = embeddings.shape[0]
    if num < 2:
        return 0.0
    unit = torch.nn.functional.normalize(embeddings.detach().float(), dim=1)
    total = float(unit.sum(dim=0).square().sum())
    return (total - num) / (num * (num - 1))
