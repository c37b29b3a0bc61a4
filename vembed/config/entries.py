"""Types of option values, and the entries of options that are lists: teachers, losses, guards and data sources."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, create_model

from vembed.config.sampling import ACCEPTED, checked_sampling
from vembed.config.values import (
    Form,
    Frozen,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from vembed.losses.table import LOSSES, loss_options, with_constraints

SamplingName = Annotated[str, AfterValidator(checked_sampling), Form(ACCEPTED)]
RELEVANCE = (
    "Given a search query, retrieve the passages that answer it or are relevant to it"
)
"""Definition of relevance for models that are asked whether a document is relevant."""
if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


class Guard(Frozen):
    """One entry of `guards`."""

    path: str
    """Evaluation data, as `val_data_path` takes them."""
    name: str | None = None
    """Name in the log and the report. Default: that of the file."""
    max_drop: NonNegativeFloat = 0.02
    """The most that its main score (ndcg@10, or spearman for scored pairs) may fall below that before training."""

    @property
    def label(self) -> str:
        """Name of the guard in this run."""
        return self.name or PurePath(self.path).stem


class Teacher(Frozen):
    """One entry of `teachers`."""

    model: str
    """An embedding model or a reranker: a Hub name or a local folder."""
    name: str | None = None
    """Name that `teacher` and `guide` refer to. Default: `model`."""
    kind: Literal["auto", "embedder", "reranker", "yes_no"] = "auto"
    """embedder: gives vectors. reranker: a sequence classifier that scores (query, document) pairs. yes_no: a decoder
    whose next token answers whether they belong together (Qwen3-Reranker). `auto`: from the architectures that the
    model's config names; a decoder without files of Sentence Transformers is yes_no where no loss needs vectors."""
    query_prompt: str | None = None
    """Text put before every query. Default: the model's own."""
    document_prompt: str | None = None
    """Text put before every document. Default: the model's own."""
    max_length: PositiveInt | None = None
    """Longest text in tokens. Default: the model's own limit, at most 512."""
    scale: PositiveFloat = 1.0
    """Factor of a reranker's scores: its logits are no cosines, and losses compare them with similarities. The score of
    yes_no is the logit of yes less that of no."""
    instruction: str = RELEVANCE
    """Definition of relevance, for yes_no."""
    sharded: Literal["auto"] | bool = "auto"
    """Each of several processes holds a shard of the teacher. `auto`: where the model is sharded, or a copy of the
    teacher takes more than four fifths of a process's memory."""

    @property
    def label(self) -> str:
        """Name of the teacher in this run."""
        return self.name or self.model


class _LossTerm(Frozen):
    """One entry of `losses`: a loss, its weight, and options of the same names for this term alone."""

    loss: LossName
    """Its loss."""
    weight: PositiveFloat = 1.0
    """Factor of the term in the sum."""


def _with_loss_options() -> Any:
    """Return the model of an entry of `losses`: every option of every loss, or None."""
    fields: dict[str, Any] = {}
    for name, field in loss_options().items():
        fields[name] = (with_constraints(field) | None, None)
    return create_model("LossTerm", __base__=_LossTerm, **fields)


if TYPE_CHECKING:
    LossTerm = _LossTerm
else:
    LossTerm = _with_loss_options()


class DataSource(Frozen):
    """One entry of `data_path` when it is a list."""

    path: str
    """A file (JSONL, CSV, TSV, Parquet), a folder saved by `datasets`, or a Hub dataset name."""
    weight: PositiveFloat = 1.0
    """Number of times that each example is drawn per epoch, on average. 1: once; 0.5: half of them. With `sampling:
    weights`, the source's share of the draws."""
    name: str | None = None
    """Name in logs. Default: the path."""
    column_mapping: dict[str, str] | None = None
    """Like the option of the same name, for this source only."""
    query_prompt: str | None = None
    """Text put before the queries of this source, in place of the run's."""
    document_prompt: str | None = None
    """Text put before the documents of this source, in place of the run's."""
    max_length: PositiveInt | None = None
    """Maximum length of this source's texts in tokens, where it is below the run's."""
    losses: list[LossTerm] | None = None
    """The losses of this source, instead of those of the run; needs `homogeneous_batches`. A task of its own."""
    temperature: PositiveFloat | None = None
    """Like the option of the same name, for this source only; needs `homogeneous_batches`."""
    batch_size: PositiveInt | None = None
    """Examples per process and step of this source; needs `homogeneous_batches`."""
    global_batch_size: PositiveInt | None = None
    """The same over all processes, where the run has a `global_batch_size`."""
    val_data_path: str | None = None
    """Validation data of this source's task, as those of the run: scored with each evaluation."""
    max_negatives: NonNegativeInt | None = None
    """Like the option of the same name, for this source only."""
