"""Loss: what a loss is and what others need to know of it. Imports no torch.

A loss is one class in one file of this folder, listed in `table.py`. Its fields are
its options: users write them flat in the YAML, or in an entry of `losses`. Its class
variables say what it reads and needs. The config's rules, the reading of records, the
documentation and the contract tests follow from them. `share` computes the loss.

The config reads these classes, and a dry run imports no torch. A file with losses
therefore imports torch, and the modules that use it, inside methods.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from vembed.config.values import ConfigModel, FileReference, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vembed.losses.batch import LossBatch
    from vembed.losses.build import TermModule

LOWEST_TEMPERATURE = 0.005
"""Lower limit of a learned temperature."""
HIGHEST_TEMPERATURE = 1.0
"""Upper limit of a learned temperature."""
LABEL_SCORES = "scores"
"""Name of the teacher whose answers are the label scores, those in the data."""

RequiredRecords = Literal["matches", "scores", "pairs", "texts"]
"""matches: every pair of a record is a match; scored sentence pairs are refused.
scores: every pair needs a score. pairs: any pairs. texts: single texts will do too."""
Negatives = Literal["unread", "optional", "some", "each"]
"""Hard negatives of the records. unread: ignored. optional: used where there are any.
some: records without one add nothing to the loss, so that data without any is refused.
each: every record needs one."""
Follows = Literal["nobody", "scores_or_teacher", "teacher", "vectors", "start_model"]
"""nobody: no teacher. scores_or_teacher: a teacher if one is named, otherwise the scores
of the data. teacher: a teacher's scores. vectors: a teacher's vectors. start_model: the
vectors of the model before training."""


@dataclass(frozen=True)
class StartValues:
    """What learned parameters of a loss may start from."""

    scale: float | None = None
    """Scale with which the model was trained (CLIP, SigLIP)."""
    bias: float | None = None
    """Bias with which the model was trained (SigLIP)."""
    embedding_dim: int | None = None
    teacher_dim: int | None = None
    """Size of the vectors of the teacher that the loss follows."""
    seed: int = 0


class LossDeclaration(ConfigModel):
    """Base class of all losses. An instance holds the options of one term of a run."""

    name: ClassVar[str]
    """Its name: `loss: NAME`."""
    summary: ClassVar[str]
    """What it wants, in one sentence, for the documentation."""
    records: ClassVar[RequiredRecords]
    negatives: ClassVar[Negatives]
    follows: ClassVar[Follows] = "nobody"
    default_temperature: ClassVar[float | None] = None
    """Temperature where none is given, if it is not the default of the option."""
    takes_model_temperature: ClassVar[bool] = False
    """Where none is given, it takes the temperature with which the model was trained."""
    score_limits: ClassVar[tuple[float, float] | None] = None
    """The smallest and the largest score of the data that it can follow. None: any score."""
    counts_unscored: ClassVar[bool] = False
    """Where it follows the scores of the data, a hard negative without one counts too: as not relevant, or as the last."""
    ranks_pairs: ClassVar[bool] = False
    """It compares the pairs of a batch with each other by their scores."""
    reads_lists: ClassVar[bool] = False
    """It needs no more than scores of a row's pair and of its example's hard negatives: a reranker can train by it."""
    is_of_model: ClassVar[bool] = False
    """It stands for the losses that the model itself returns."""
    is_cross_entropy: ClassVar[bool] = False
    """With equal scores it is the logarithm of the number of candidates, and 0 only without any."""

    @abstractmethod
    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """Return this rank's share of the loss L of the global batch, a scalar.

        The shares of all ranks add up to L, and so do their gradients.
        """

    def needed_negatives(self) -> Negatives:
        """Return `negatives`, where it depends on the options."""
        return self.negatives

    def needs_vectors(self) -> bool:
        """Return whether it needs vectors of its teacher rather than scores of pairs."""
        return self.follows in ("vectors", "start_model")

    def score_range(self, similarity: str) -> tuple[float, float] | None:
        """Return the `score_limits` with a similarity."""
        del similarity
        return self.score_limits

    def learns_temperature(self) -> bool:
        """Return whether the temperature is a learned parameter."""
        return bool(getattr(self, "learn_temperature", False))

    def refusal(self, dims: Sequence[int]) -> str | None:
        """Return a sentence that names options which contradict each other; or None.

        `dims`: the Matryoshka dims that the config names.
        """
        del dims
        return None

    def start_values(self, start: StartValues) -> dict[str, Tensor]:
        """Return the first values of its learned parameters, by name."""
        del start
        return {}

    def clamp(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep learned parameters in their ranges. Called after each optimizer step."""

    def logit_scale_and_bias(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[float, float] | None:
        """Return the learned scale and bias of the logits, if there are any.

        They are saved with CLIP and SigLIP models.
        """
        del parameters
        return None


class FixedTemperature(LossDeclaration):
    """Base class of losses on similarities divided by a temperature."""

    temperature: PositiveFloat = 0.05
    """Divisor of the similarities. Smaller values weight hard negatives more. If left out: the default of the loss (0.1
    for cosent and angle), and with loss: infonce what the model's files name (CLIP, SigLIP). A learned one starts here if
    the option is given, otherwise from the value in the model's files or the default."""


class Temperature(FixedTemperature):
    """Base class of losses whose temperature may be learned."""

    learn_temperature: bool = False
    """Learn the temperature, starting at `temperature` and limited to [0.005, 1]."""

    def start_values(self, start: StartValues) -> dict[str, Tensor]:
        """See LossDeclaration."""
        import torch

        if not self.learn_temperature:
            return {}
        value = self.temperature if start.scale is None else 1.0 / start.scale
        value = min(max(value, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE)
        return {"temperature": torch.tensor(value)}

    def clamp(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """See LossDeclaration."""
        if "temperature" in parameters:
            temperature = parameters["temperature"].data
            temperature.clamp_(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)

    def logit_scale_and_bias(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[float, float] | None:
        """See LossDeclaration. A softmax has no bias."""
        if "temperature" not in parameters:
            return None
        return 1.0 / float(parameters["temperature"].detach()), 0.0


class CandidateLoss(FixedTemperature):
    """Base class of losses that compare a row's positive with candidates of the batch."""

    hard_negatives_scope: Literal["all", "own"] = "all"
    """Rows that a hard negative is a candidate for: all rows of the batch, or only its own row."""


class TeacherLoss(LossDeclaration):
    """Base class of losses that may follow a teacher."""

    teacher: Annotated[str | None, FileReference("model")] = None
    """Teacher of a loss: one of `teachers`, a model, or `scores` (those in the data). Default: the first of them."""
