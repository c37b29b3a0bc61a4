"""TrainConfig: the schema of all options, with type, default, unit and interactions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, create_model, model_validator
from pydantic.fields import FieldInfo

from vembed.config.values import (
    Auto,
    CodeName,
    ConfigModel,
    Dtype,
    FileReference,
    FiniteFloat,
    Fraction,
    Momentum,
    NonNegativeFloat,
    NonNegativeInt,
    OnBadRecord,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    RetrievalMode,
    Task,
    ValueSyntax,
)
from vembed.errors import UserError
from vembed.losses.table import LOSS_ENTRY_ONLY, LOSS_OPTIONS, LOSS_TEXT, LOSSES
from vembed.models.families.table import FAMILY_TEXT, FamilyName
from vembed.models.poolings.table import POOLING_TEXT, PoolingName
from vembed.training.optimizer_kinds import OPTIMIZER_TEXT, OPTIMIZERS
from vembed.training.trackers.table import TRACKER_TEXT, TRACKERS

if TYPE_CHECKING:
    LossName = str
    OptimizerName = str
    TrackerName = str
else:
    LossName = Literal[tuple(LOSSES)]
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    TrackerName = Literal[tuple(TRACKERS)]


# ---- entries of options that hold several values

# Numbers that match: 0, 1, .5, 0.5, 1.0.
SAMPLING = (
    r"^(?:(proportional|round_robin|weights)"
    r"|temperature\(\s*(0|1|0?\.\d+|0\.|1\.0*)\s*\))$"
)


@dataclass(frozen=True)
class Sampling:
    """A value of `sampling`."""

    kind: str = "proportional"
    """proportional, temperature, round_robin or weights."""
    alpha: float = 1.0
    """Power of a source's size."""


PROPORTIONAL = Sampling()


def parse_sampling(text: str) -> Sampling:
    """Return the sampling that a value of the option stands for."""
    match = re.fullmatch(SAMPLING, text)
    assert match is not None
    alpha = float(match[2] or 1.0)
    kind = match[1] or "temperature"
    # Power 0: the size does not count.
    return Sampling(kind, 0.0 if kind == "weights" else alpha)


SamplingName = Annotated[
    str,
    Field(pattern=SAMPLING),
    ValueSyntax(
        "proportional, temperature(alpha) with alpha from 0 to 1, round_robin or weights"
    ),
]


class Guard(ConfigModel):
    """One entry of `guards`."""

    path: str
    """Evaluation data, as `val_data_path` takes them."""
    name: str | None = None
    """Name in the log and the report. Default: the name of the file."""
    max_drop: NonNegativeFloat = 0.02
    """How far its score (ndcg@10, or spearman for scored pairs) may fall below the score before training."""

    @property
    def label(self) -> str:
        """Name of the guard in this run."""
        return self.name or PurePath(self.path).stem


class Teacher(ConfigModel):
    """One entry of `teachers`."""

    model: str
    """An embedding model or a reranker: a Hub name or a local folder."""
    name: str | None = None
    """Name that `teacher` and `guide` refer to. Default: `model`."""
    kind: Literal["auto", "embedder", "reranker", "yes_no"] = "auto"
    """embedder: gives vectors. reranker: a sequence classifier that scores (query, document) pairs. yes_no: a decoder
    whose next token answers whether they belong together (Qwen3-Reranker). `auto`: from the architectures that the
    model's config names. A decoder without files of Sentence Transformers is yes_no, unless a loss needs vectors."""
    query_prompt: str | None = None
    """Text put before every query. Default: the model's own."""
    document_prompt: str | None = None
    """Text put before every document. Default: the model's own."""
    max_length: PositiveInt | None = None
    """Longest text in tokens. Default: the model's own limit, at most 512."""
    scale: PositiveFloat = 1.0
    """Factor of a reranker's scores. They are logits, and losses compare them with similarities, which are much smaller.
    The score of yes_no is the logit of yes minus that of no."""
    instruction: str | None = None
    """yes_no: the sentence in the prompt that says what a relevant document is. Default: the one that the model was
    trained with, or Qwen3-Reranker's."""
    sharded: Auto | bool = "auto"
    """Divide the teacher's weights among the processes, rather than load all of them in each. `auto`: where the trained
    model is sharded, or the teacher takes more than four fifths of a process's memory."""

    @property
    def label(self) -> str:
        """Name of the teacher in this run."""
        return self.name or self.model


class _LossEntry(ConfigModel):
    """One entry of `losses`: a loss, its weight, and options of losses for this term alone."""

    loss: LossName
    """Name of the loss."""
    weight: PositiveFloat = 1.0
    """Factor of this loss in the sum."""


if TYPE_CHECKING:
    LossEntry = _LossEntry
else:
    # Every option of every loss, or None.
    _optional = {
        name: (field.rebuild_annotation() | None, None)
        for name, field in LOSS_OPTIONS.items()
    }
    LossEntry = create_model("LossEntry", __base__=_LossEntry, **_optional)


LossEntries = Annotated[list[LossEntry], Field(min_length=1)]


class DataSource(ConfigModel):
    """One entry of `data_path` when it is a list."""

    path: str
    """A file (JSONL, CSV, TSV, Parquet), a folder saved by `datasets`, or a Hub dataset name."""
    weight: PositiveFloat = 1.0
    """How often each example of the source is drawn per epoch, on average. 1: once. 0.5: half of the examples. With
    `sampling: weights`, the source's share of all draws."""
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
    losses: LossEntries | None = None
    """The losses of this source, instead of those of the run. Needs `homogeneous_batches`. Sources with the same losses,
    temperature and batch size are one task of the data (not the option `task`)."""
    temperature: PositiveFloat | None = None
    """Like the option of the same name, for this source only. Needs `homogeneous_batches`."""
    batch_size: PositiveInt | None = None
    """Examples per process in a batch of this source. Needs `homogeneous_batches`."""
    global_batch_size: PositiveInt | None = None
    """Examples in a batch of this source over all processes, in a run with `global_batch_size`."""
    val_data_path: str | None = None
    """Validation data of the task of the data that this source belongs to. Each evaluation scores them beside those of the
    run."""
    max_negatives: NonNegativeInt | None = None
    """Like the option of the same name, for this source only."""


NEGATIVE_LIMITS = frozenset({"relative_margin", "margin", "max_score", "threshold"})
"""Options that limit how high a negative may score."""


class NegativeSelection(ConfigModel):
    """Options that choose negatives among the candidates, and their number."""

    num_negatives: PositiveInt = 5
    """Number of negatives for each row. Fewer where there are not enough candidates."""
    top_k: PositiveInt = 100
    """Number of candidates for each query: the documents with the highest scores, without its known positives."""
    skip_first: NonNegativeInt = 0
    """Number of candidates with the highest scores that are not used, since they may be relevant."""
    relative_margin: Fraction | None = 0.05
    """Keep a candidate d only if s(q, d) <= s(q, p) - relative_margin * |s(q, p)|, p being the query's known positive
    with the lowest score. `null`: no such limit."""
    margin: FiniteFloat | None = None
    """Keep a candidate d only if s(q, d) <= s(q, p) - margin."""
    max_score: FiniteFloat | None = None
    """Keep only candidates with at most this score."""
    min_score: FiniteFloat | None = None
    """Keep only candidates with at least this score."""
    threshold: Auto | None = None
    """`auto`: hide a part of the known positives, find the score from which too many of them would become negatives, and
    use it as the limit instead of `relative_margin`. The log gives the threshold and the estimated rate."""
    max_false_negative_rate: ProperFraction = 0.05
    """With `threshold: auto`: the highest estimated share of negatives that are relevant after all."""
    prefer_claimed: Auto | bool = "auto"
    """Use claimed candidates first. A candidate d of a query q is claimed if it belongs to another query q' rather than to
    q, so that it is rarely relevant for q. With p and p' the positives of q and q', this is the case if
    s(q, d) + s(p, d) <= 0.95 * (s(q', d) + s(p', d)). `auto`: true if none of `relative_margin`, `margin`, `max_score` and
    `threshold` is set. In that case a claimed candidate may score up to 5 % above the positive. Other candidates have the
    limit of the default `relative_margin`."""
    near_duplicate: Fraction | None = 0.9
    """Do not use a candidate if at least this share of its word n-grams is in a known positive, or the other way round.
    `null`: only if the texts are equal, apart from case, punctuation and spaces."""
    sampling: Literal["top", "random", "softmax"] = "top"
    """How negatives are chosen from the remaining candidates. `top`: those with the highest scores. `random`: each with
    the same probability. `softmax`: each with probability softmax(score / sampling_temperature)."""
    sampling_temperature: PositiveFloat = 0.05
    """Temperature of `sampling: softmax`."""
    per_query_budget: PositiveInt | None = None
    """Number of different negatives for all rows of a query together: a query with several positives has several rows,
    and each row gets the next `num_negatives` of them in turn. Default: `num_negatives`, so that all rows of a query get
    the same ones."""

    @model_validator(mode="after")
    def _has_enough_candidates(self) -> Self:
        if self.skip_first + self.num_negatives > self.top_k:
            raise ValueError(
                f"top_k: {self.top_k} must be at least skip_first + num_negatives: "
                f"{self.skip_first} + {self.num_negatives}"
            )
        if (
            self.per_query_budget is not None
            and self.per_query_budget < self.num_negatives
        ):
            raise ValueError(
                f"per_query_budget: {self.per_query_budget} must be at least num_negatives: {self.num_negatives}"
            )
        return self

    @property
    def takes_claimed(self) -> bool:
        """True if claimed candidates come first."""
        if self.prefer_claimed != "auto":
            return self.prefer_claimed
        # A limit counts as set even if its value is the default. That is why `config_yaml` leaves out options that were not
        # given: otherwise `auto` would mean false when the saved config is read.
        return NEGATIVE_LIMITS.isdisjoint(self.model_fields_set)

    @property
    def negatives_per_query(self) -> int:
        """Different negatives that are chosen for each query."""
        return self.per_query_budget or self.num_negatives


class EpochMining(NegativeSelection):
    """The option `mine`: negatives that the run's own model mines between epochs."""

    every_epochs: PositiveInt = 1
    """Epochs from one mining to the next."""
    at_start: bool = True
    """Mine before the first epoch too. false: the first epoch has only the negatives of the data."""
    corpus_path: str | list[str] | None = None
    """Documents that are searched: a file with one document per record, a BEIR-style folder, or a list of these. Default:
    the documents of the training data."""


# ---- sections


class Section(ConfigModel):
    """Base class of the sections of a TrainConfig."""


class ModelSection(Section):
    """Weights, dtypes, attention, inputs and pooling of the model."""

    model_name: Annotated[str, FileReference("model")]
    """The model to start from: a Hub name or a local folder (Transformers or Sentence Transformers layout)."""
    task: Task = "embed"
    """Kind of model to train. `embed`: an embedding model, which gives a vector for each input. `rerank`: a reranker,
    which reads a query and a document together and gives a score."""
    reranker_head: Literal["auto", "label", "answer"] = "auto"
    """task: rerank: the layer that gives the score. `label`: a classifier with one label. `answer`: the language-model
    head of a decoder, whose logit of `yes` minus that of `no` is the score. `auto`: that of the model's files, otherwise
    `answer` for a causal language model and `label` for others."""
    model_family: Auto | FamilyName = Field(default="auto", description=FAMILY_TEXT)
    model_revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. Only for models that you trust as you trust your own code."""
    model_class: Annotated[str | None, FileReference("code")] = None
    """A torch module of your own as backbone: path/to/file.py:Class or package.module:Class. New weights, unless
    `model_name` names a folder of them."""
    model_arguments: dict[str, Any] | None = None
    """Keyword arguments of `model_class` (alias: `model_config`). Without `model_class`: values that replace those in the
    model's config.json, such as {rope_theta: 1000000}, or {num_hidden_layers: 6} for the first six layers. They are saved
    in `final/`."""
    tokenizer_name: Annotated[str | None, FileReference("model")] = None
    """Tokenizer, or image processor, of `model_class`: a folder or a Hub name. Default: that of `model_name`."""
    from_scratch: bool = False
    """Start from random weights with the config of `model_name`, whose weights are not read."""
    image_model_name: Annotated[str | None, FileReference("model")] = None
    """Image encoder of a composed model, whose text encoder is `model_name` (model_family: composed). Their shared space
    has max(mrl_dims) dimensions, by default as many as the smaller of the two."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16", "pure_bfloat16"] = (
        "auto"
    )
    """Dtype of frozen weights, and of all weights in `final/`. Trained weights are kept as float32 master weights.
    `auto`: the dtype of the model's files. `pure_bfloat16`: no master weights, so training takes half the memory. It
    needs optim: adamw, which then rounds updates stochastically, so that small ones are not lost."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Dtype of computation. `auto`: bf16 on GPUs that support it, and on CPUs with AMX or AVX512-BF16 for models with a
    hidden size of at least 256 that are not sharded. Otherwise no. Trained weights, gradients, norms, pooling and loss
    are float32, except with torch_dtype: pure_bfloat16. Results of `auto` may differ between CPUs with and without these
    instructions. With `no` they do not."""
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"
    """Attention kernel. `auto`: flash-attn where it is installed and the GPU allows, otherwise sdpa."""
    padding_free: Auto | bool = "auto"
    """Concatenate the texts of a micro-batch instead of padding them. `auto`: if model and attention kernel support it.
    `true`: stop with the reason if they do not."""
    bidirectional_attention: bool = False
    """Decoder-only models: every token attends to every other token (no causal mask)."""
    max_length: PositiveInt | None = None
    """Maximum length of a text in tokens. Longer texts are truncated. Default: the model's own limit, at most 512."""
    pooling: Auto | PoolingName = Field(default="auto", description=POOLING_TEXT)
    query_prompt: str | None = None
    """Text put before every query. Default: the model's own. An empty string means none."""
    document_prompt: str | None = None
    """Text put before every document. Default: the model's own. An empty string means none."""
    min_pixels: PositiveInt | None = None
    """Vision-language models: smallest image area in pixels. Smaller images are enlarged. Default: the model's own."""
    max_pixels: PositiveInt | None = None
    """Vision-language models: largest image area in pixels. Larger images are reduced. Default: the model's own."""
    torch_compile: Auto | bool = "auto"
    """Compile the backbone's layers with torch.compile. `auto`: on GPUs, in runs of more than about five minutes, never on
    CPUs. The log gives the decision. Has no effect with gradient checkpointing and `padding_free` together."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, a third more time. Default: false, and with `strategy: fsdp`
    true, unless micro-batches fit on the GPU without it and Gradient Cache may be used."""


class MatryoshkaSection(Section):
    """Matryoshka dims of the embedding."""

    mrl_dims: Auto | Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    """Matryoshka dims: the loss is a weighted sum of the losses on the first d dimensions, for each d of this list.
    `auto`: the embedding's size, halved repeatedly down to 64. Alias: `use_mrl: true` for `auto`."""
    mrl_weights: list[PositiveFloat] | None = None
    """Weight of each dim in the loss, in the order of `mrl_dims`. Default: 1 for each."""
    mrl_projection: Literal["auto", "pca"] | bool = "auto"
    """Add a linear layer from the hidden size to max(mrl_dims). `auto`: only if max(mrl_dims) is smaller. The layer starts
    as rows of the identity. `pca`: it starts as the principal components of a sample of the data."""


class AdapterSection(Section):
    """LoRA, and weights that are not trained."""

    use_lora: bool = False
    """Train low-rank adapters instead of the weights."""
    lora_r: PositiveInt = 32
    """Rank of the adapters."""
    lora_alpha: PositiveInt = 32
    """Scale of the adapters: their update is multiplied by alpha / r."""
    lora_dropout: Fraction = 0.0
    """Dropout inside the adapters. Slower, since it draws numbers for every input of every adapted layer."""
    lora_target_modules: Literal["auto", "all-linear"] | list[str] = "auto"
    """Layers that get an adapter, by the ends of their names. `auto`: the attention and feed-forward projections of all
    towers that are not frozen."""
    lora_variant: Literal["lora", "rslora", "dora"] = "lora"
    """rslora: the update is multiplied by alpha / sqrt(r) instead of alpha / r, which suits large ranks (alias:
    `use_rslora`). dora: weight-decomposed adapters, slower, often better at small ranks (alias: `use_dora`)."""
    quantize_weights: Literal["int8", "nf4"] | None = None
    """nf4: QLoRA, which keeps the frozen weights in 4 bits and trains adapters (also `use_qlora: true`, which implies
    `use_lora`). Needs bitsandbytes. int8: quantization-aware training, for a model that is served in int8. Each forward
    pass rounds the weights of the linear layers to int8, with a scale per row, and gradients pass through the rounding.
    `final/` has the rounded weights."""
    save_merged: bool = True
    """After a LoRA run, save the merged model in `final/`, with the adapter beside it. false: only the adapter."""
    freeze: list[str] = Field(default_factory=list)
    """Parts not to train: `text`, `vision`, `embeddings`, `first_n_layers=6` (of every tower),
    `vision.first_n_layers=6` (of one), or names of modules and parameters (`encoder.layer.1`)."""

    @property
    def use_qlora(self) -> bool:
        """True if adapters are trained over base weights in 4 bits."""
        return self.quantize_weights == "nf4"


class DataSection(Section):
    """Training and validation data."""

    data_path: Annotated[str | list[str | DataSource], FileReference("data")]
    """Training data: a file (JSONL, CSV, TSV, Parquet, also .gz, .zst), a folder or pattern of files, an address
    (`s3://...`), a Hub name, or a list with weights."""
    val_data_path: Annotated[str | None, FileReference("data")] = None
    """Validation data: as `data_path`, or a BEIR-style folder (corpus, queries and qrels, in JSON Lines or Parquet)."""
    val_split: ProperFraction | None = None
    """Hold out this share of the queries of `data_path` for validation, instead of `val_data_path`. Examples with equal
    or nearly equal queries or documents are either all held out or all trained, by the seed and the texts alone. The
    evaluation searches among all documents of the data."""
    column_mapping: dict[str, str] | None = None
    """Names in your file -> names that vembed reads, e.g. {question: query, answer: positive}."""
    retrieval_mode: RetrievalMode = "auto"
    """What plain strings in the data stand for, in queries and in documents: t a text, i the path of an image, m a record
    with both. So `t2i` has texts as queries and images as documents. `auto`: plain strings are texts, and images are
    written as {"image": path}."""
    image_root: str | None = None
    """Base folder of relative image paths, which must not lead out of it. Default: the folder of the data file."""
    allow_image_urls: bool = False
    """Fetch images from http(s) addresses."""
    on_bad_record: OnBadRecord = "stop"
    """Invalid records. stop: end before training with a list of the first ten. skip: train without them and log their
    number."""
    max_negatives: NonNegativeInt | None = None
    """Maximum number of negatives per record, the first ones. Default: all."""
    in_batch_negatives: NonNegativeInt = 0
    """task: rerank: number of additional negatives for each query, taken from the positives of other examples of the global
    batch. An embedding model compares each query with all of these without this option."""
    max_train_examples: PositiveInt | None = None
    """Use only this many examples, the first ones of each source. Default: all."""
    no_duplicates: bool = False
    """Form global batches in which no content occurs twice. Examples that fit in no batch are left out in that epoch: as few
    as possible, ideally no more than the last incomplete batch would have. The log gives the number."""
    homogeneous_batches: Literal["task"] | bool = False
    """With several sources: draw every global batch from a single source. `task`: from the sources of one task of
    the data, which are those with the same losses, temperature and batch size. The option `task` means something else: the
    kind of model."""
    sampling: SamplingName = "proportional"
    """With several sources: how often each is drawn, for a source of n examples. `proportional`: in proportion to its
    weight times n. `temperature(0.5)`: in proportion to its weight times n ** 0.5, so that small sources are drawn more
    often. The number is the power, from 0 to 1. `weights`: in proportion to its weight alone. `round_robin`: a
    batch of each source in turn. An epoch has as many examples as with `proportional`."""
    mine: Annotated[EpochMining | None, FileReference("data")] = None
    """Mine hard negatives between epochs with the model as it is then, and add them to those of the data: {every_epochs: 1,
    num_negatives: 5, ...}, with the options of `vembed mine` that choose negatives. Checkpoints hold them."""
    num_workers: Auto | NonNegativeInt = "auto"
    """Number of threads that prepare batches ahead of the step. `auto`: 1 for text, up to 4 with images. 0: batches are
    prepared during the step. On GPUs a single worker is a process instead of a thread."""

    @property
    def has_validation(self) -> bool:
        """True if there are validation data."""
        return self.val_data_path is not None or self.val_split is not None

    def sources(self) -> list[DataSource]:
        """Return an entry for each source of `data_path`."""
        return sources_of(self.data_path)


def sources_of(paths: str | Sequence[str | DataSource]) -> list[DataSource]:
    """Return an entry for each source of data. Raise UserError for an empty list."""
    sources = []
    for path in [paths] if isinstance(paths, str) else paths:
        source = DataSource(path=path) if isinstance(path, str) else path
        sources.append(source)
    if not sources:
        raise UserError(
            "data_path is an empty list: name at least one file, folder or dataset"
        )
    return sources


class _Objective(Section):
    """The loss, its candidates and its teachers: options of the run, beside those of the losses."""

    loss: LossName = "infonce"
    auxiliary_losses: dict[str, float] | None = None
    """Weight of each loss that the model itself returns, by name, such as {next_token: 0.1}. 0: it is logged only. Losses
    of a model of your own (`model_class`) have the weight 1 by default. Decoders have `next_token`, which is trained
    beside `loss` only if it is named here, and alone with loss: none. Text encoders have `masked_token`, only with loss:
    none: the prediction of tokens that are masked with probability 0.15."""
    losses: Annotated[LossEntries | None, FileReference("model")] = None
    """Several losses instead of `loss`, added up with weights. Each entry has a `loss`, a `weight`, and may have its own
    `temperature`, `teacher`, `guide` and other options of this section. Some options are for entries alone
    (docs/teachers.md)."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """Similarity of two embeddings, in the loss, the evaluation and the saved model."""
    quantize_embeddings: Literal["int8", "binary"] | None = None
    """Quantization-aware training, for vectors that are stored in int8 or as bits. The loss is the mean of the loss on
    float embeddings and of the loss on quantized ones (straight-through gradient), at every size of `mrl_dims`.
    Evaluations score int8 and binary documents too."""
    teachers: Annotated[list[str | Teacher] | None, FileReference("model")] = None
    """Embedding models or rerankers that losses follow (`teacher`) or choose candidates by (`guide`): each a Hub name, a
    folder, or an entry with further options."""


if TYPE_CHECKING:
    ObjectiveSection = _Objective
else:
    # With the options that the losses declare, without those that are allowed only in entries of `losses`.
    _fields = {"loss": (LossName, Field("infonce", description=LOSS_TEXT))}
    for _name, _field in LOSS_OPTIONS.items():
        if _name not in LOSS_ENTRY_ONLY:
            _value = Field(default=_field.default, description=_field.description)
            _fields[_name] = (_field.rebuild_annotation(), _value)
    ObjectiveSection = create_model("ObjectiveSection", __base__=_Objective, **_fields)


class BatchSection(Section):
    """Batch and micro-batches."""

    batch_size: PositiveInt = 32
    """Examples per process in a batch."""
    global_batch_size: PositiveInt | None = None
    """Examples in a batch over all processes. Replaces `batch_size`."""
    gradient_accumulation_steps: PositiveInt = 1
    """Global batches per optimizer step. Each has its own negatives. For more negatives raise `batch_size` instead: its
    memory is bounded by `micro_batch_tokens`."""
    micro_batch_tokens: Auto | PositiveInt = "auto"
    """Maximum number of tokens (and image patches) in a micro-batch, with padding, also in evaluations. Affects memory and
    speed, not the result. `auto`: by the memory of the device."""
    use_gradient_cache: Auto | bool = "auto"
    """Gradient Cache: run every micro-batch a second time instead of keeping its autograd graph, so that memory for one
    graph is enough. `auto`: only for micro-batches whose graphs do not fit in memory. The gradient is the same."""
    cache_frozen_features: bool = False
    """Store the outputs of frozen towers in vembed's cache folder, so that each input passes the tower only once, over all
    epochs and runs. Needs a tower without trained parameters (`freeze`)."""

    def examples_per_process(self, world_size: int) -> int:
        """Return the examples of a process in a batch. Raise UserError for a remainder."""
        size = self.global_batch_size
        if size is None:
            return self.batch_size
        if size % world_size:
            raise UserError(
                f"global_batch_size: {size:,d} cannot be divided among {world_size:,d} processes: give a multiple"
            )
        return size // world_size


class OptimizerSection(Section):
    """Optimizer, learning rate and length of the run."""

    epochs: Auto | PositiveFloat = "auto"
    """Passes over the data. May be a fraction. `max_steps` takes precedence. `auto`: 1 for many examples to 6 for few, up to
    48 for CLIP and SigLIP, and four times as many from random weights. The log gives the number."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps. Default: from `epochs`."""
    learning_rate: Auto | PositiveFloat = "auto"
    """Peak learning rate. It does not depend on the number of processes. `auto`: by what is trained (all weights, adapters,
    a head alone, random weights, CLIP), the model's width and the number of steps. The log gives the reason."""
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """linear: multiply the learning rate by global batch / 32. sqrt: by its square root. The log shows the result."""
    optim: OptimizerName = Field(default="adamw", description=OPTIMIZER_TEXT)
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, not applied to biases and norms."""
    adam_betas: Annotated[list[Momentum], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.9, 0.999]
    )
    """Decay rates of the first and the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Term added to the denominator for numerical stability."""
    head_learning_rate: PositiveFloat | None = None
    """Learning rate of heads, projections and learned scales. Default: `learning_rate`, and with `learning_rate: auto` 1e-3
    for the new projections of a composed model and the new layer of a reranker's score."""
    warmup_steps: NonNegativeInt | Fraction = 0.1
    """Steps in which the learning rate rises to its peak. A number with a decimal point, such as 0.1, is a share of all
    steps (alias: `warmup_ratio`)."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Decay of the learning rate after the warm-up. constant: no decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum global gradient norm. Larger gradients are scaled down to it. 0: no clipping."""
    ema: ProperFraction | None = None
    """Decay of an exponential moving average of the weights, such as 0.999. Evaluations and `final/` use the average.
    The decay is lower during the first steps. Not under FSDP1."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If the loss or the gradient is not finite. stop: end with an error that names the examples. skip: leave the weights
    as they are, and log the number of such steps."""

    def sets_length(self) -> bool:
        """Return whether the length of the run is given, rather than left to `auto`."""
        return self.epochs != "auto" or self.max_steps is not None


class ParallelSection(Section):
    """Processes, devices and sharding."""

    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """How the model is distributed over processes. ddp: each has the whole model, and gradients are averaged. fsdp: each
    has a shard, with the options of `configs/accelerate_fsdp.yaml`. single: one process. `auto`: by the model's size. The
    log gives the reason. Alias: `use_fsdp: true` for fsdp. `use_fsdp: false` for ddp, which is single where
    there is one process."""
    accelerate_config: str | None = None
    """YAML file of Accelerate, or the name of a preset (accelerate_fsdp, accelerate_ddp, ...). Options of the training
    config and values that `accelerate launch` sets override it."""
    num_processes: Auto | PositiveInt = "auto"
    """Processes per machine that `vembed train` starts (alias: `devices`). `auto`: one per GPU, 1 without."""
    num_machines: PositiveInt = 1
    """Number of machines (alias: `num_nodes`)."""
    fsdp_version: Literal[1, 2] | None = None
    """FSDP implementation. Default: the preset's, 2."""
    fsdp_sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None
    ) = None
    """Sharding strategy. FULL_SHARD: parameters, gradients and optimizer state are sharded. SHARD_GRAD_OP: parameters
    stay gathered between forward and backward (alias: `reshard_after_forward: false`). NO_SHARD: as strategy: ddp. HYBRID_SHARD:
    sharded inside a machine, replicated between machines."""
    fsdp_offload_params: bool | None = None
    """Keep parameters, gradients and optimizer state in host memory while they are not in use."""
    fsdp_auto_wrap_policy: Annotated[
        Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
        | CodeName
        | None,
        FileReference("code"),
    ] = None
    """Choice of FSDP units: each transformer layer, each module above `fsdp_min_num_params`, or the whole model. Also a
    function of your own, path/to/file.py:function, which is called with each module and returns whether it is a unit."""
    fsdp_transformer_layer_cls_to_wrap: str | list[str] | None = None
    """Layer classes (name, dotted path, or a list). Default: the classes that the backbone declares."""
    fsdp_min_num_params: NonNegativeInt | None = None
    """Minimum number of parameters of a unit. SIZE_BASED_WRAP: 0 or null means 1,000,000. TRANSFORMER_BASED_WRAP:
    layers with fewer do not become units, and with 0 or null all layers do."""
    fsdp_forward_prefetch: bool | None = None
    """Gather the next unit before the current one has finished its forward pass."""
    fsdp_state_dict_type: (
        Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"] | None
    ) = None
    """Format of checkpoints under FSDP. LOCAL_STATE_DICT exists only in FSDP1."""
    fsdp_reduce_dtype: Dtype | None = None
    """Dtype in which gradients are reduced. Default: float32."""
    sync_batchnorm: bool = False
    """Let batch norms use statistics over all processes. Each micro-batch has its own statistics. Inputs that repeat in a
    batch are encoded as often as they occur, so that they count equally on any number of processes."""
    dist_timeout_minutes: PositiveFloat = 30.0
    """Timeout of collectives in minutes. After it the run fails with a message. Without this option, the environment
    variable `NCCL_TIMEOUT` (seconds) sets it."""


class EvaluationSection(Section):
    """Evaluations during a run, and what they decide."""

    eval_steps: Auto | PositiveInt | None = "auto"
    """Steps between evaluations. `auto`, with validation data: about ten evaluations in a run, fewer if they would take
    over a tenth of its time, none in a very short run. null: only before and after training."""
    patience: Auto | PositiveInt | None = "auto"
    """End the run after this many evaluations in a row without a better score, counted from the end of the warm-up.
    `auto`: 4 if neither `epochs` nor `max_steps` is set, otherwise never. null: never."""
    eval_before: bool = True
    """Evaluate before the first step, for the comparison in the report."""
    eval_metric: str = "auto"
    """Metric that selects the best checkpoint: ndcg, mrr, recall or map at any cut-off, such as mrr@20. `auto`: ndcg@10
    for retrieval, spearman for scored pairs. Evaluations have the cut-offs 1, 5, 10, 100, and that of this metric."""
    guards: Annotated[list[str | Guard] | None, FileReference("data")] = None
    """Evaluation data of abilities that the model should keep. Each evaluation scores them. If one of these scores falls
    by more than its `max_drop`, the run ends, and `final/` is the last checkpoint before that. Needs val_data_path,
    eval_steps and save_steps."""
    first_stage: Annotated[str, FileReference("model")] = "bm25"
    """task: rerank: what chooses the documents that evaluations rerank: `bm25`, an embedding model, or a run file (`.trec`
    with the ids of a BEIR-style folder, `.jsonl` with texts)."""
    rerank_top_k: PositiveInt = 50
    """task: rerank: number of documents of the first stage that are reranked for each query."""

    @property
    def has_run_file(self) -> bool:
        """True if the first stage is a file of rankings."""
        return self.first_stage.endswith((".trec", ".jsonl"))

    def cutoffs(self) -> list[int]:
        """Return the k of nDCG, MRR, Recall and MAP, in ascending order."""
        metric = re.fullmatch(
            r"\S*(?:ndcg|mrr|recall|map)@([1-9]\d{0,5})", self.eval_metric
        )
        of_metric = int(metric[1]) if metric else 10
        return sorted({1, 5, 10, 100, of_metric})

    def listed_guards(self) -> list[Guard]:
        """Return an entry for each of `guards`."""
        return [
            Guard(path=guard) if isinstance(guard, str) else guard
            for guard in self.guards or []
        ]


class LoggingSection(Section):
    """Logs, trackers, reports and publishing."""

    logging_steps: Auto | PositiveInt = "auto"
    """Steps between log lines and lines of metrics.jsonl. `auto`: about 100 lines in a run, at most 50 steps apart."""
    report_to: list[TrackerName] = Field(
        default=["tensorboard"], description=TRACKER_TEXT
    )
    run_name: str | None = None
    """Name of the run in trackers. For TensorBoard, a folder inside `tensorboard/`. Default: the name of output_dir, for
    TensorBoard no folder."""
    wandb_project: str = "vembed"
    """Project in wandb or trackio, experiment in MLflow."""
    wandb_tags: list[str] = Field(default_factory=list)
    """Tags of the run in wandb."""
    push_to_hub: str | None = None
    """Private repository on the Hub (user/name) to upload `final/` to at the end, with card, report and a description of
    the data. The token is that of the login or of HF_TOKEN."""
    console: Literal["normal", "verbose", "quiet"] = "normal"
    """Lines on the console. normal: five lines on the set-up, then steps and scores. verbose: all lines of the log file
    (alias: `--verbose`). quiet: only warnings (alias: `--quiet`)."""
    log_file: str = "training_log.txt"
    """Log file, inside output_dir."""
    debug: bool = False
    """Write a detailed log of every process to logs/rank-<r>.log, and set TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    profile_steps: list[PositiveInt] | None = None
    """[first, last]: each process writes a profiler trace of these steps (trace-rank<r>.json)."""


class RunSection(Section):
    """Folder of the run, checkpoints, resuming and the saved model."""

    seed: NonNegativeInt = 42
    """Seed of data order, initialisation of new weights and dropout."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs, which are slower."""
    output_dir: str = "output"
    """Folder of the run: config, logs, checkpoints, model and report. May contain {model}, {data}, {seed} and {time}
    (the start), as in runs/{model}-{time}."""
    overwrite: bool = False
    """Replace the earlier run in `output_dir`. Without it, a folder with checkpoints or a finished run is refused."""
    save_steps: Auto | PositiveInt | None = "auto"
    """Steps between checkpoints. `auto`: one at each evaluation. Without validation data: about ten in a run, or none if
    the run has fewer than 200 steps or a checkpoint takes over 20 GB. null: none before the end."""
    save_total_limit: PositiveInt | None = 3
    """Number of checkpoints to keep. The best and the newest are never deleted."""
    load_best_model_at_end: Auto | bool = "auto"
    """`final/` holds the checkpoint with the best score instead of the last weights. Needs eval_steps and save_steps.
    `auto`: true with validation data if every checkpoint is evaluated."""
    async_save: bool = False
    """Write checkpoints in the background while training continues."""
    resume: Literal["auto", "force"] | bool | str = False
    """true: continue from the newest valid checkpoint of output_dir. auto: the same if there is one, otherwise start anew.
    A path: continue from that checkpoint. force: as true, even if model, data, batch or seed have changed."""
    max_train_minutes: PositiveFloat | None = None
    """Time limit in minutes. Before it is reached, the run writes a checkpoint and stops. `resume` continues it."""


Options = dict[str, Any]
"""Values by option."""


class TrainConfig(ConfigModel):
    """Options of a training run, by section. Users write them flat, in one file.

    `docs/options.md` is generated from the sections: the title of a section's class is
    its heading, and the docstring under a field is the option's text.
    """

    model: ModelSection
    matryoshka: MatryoshkaSection
    adapters: AdapterSection
    data: DataSection
    objective: ObjectiveSection
    batch: BatchSection
    optimizer: OptimizerSection
    parallel: ParallelSection
    evaluation: EvaluationSection
    logging: LoggingSection
    run: RunSection

    def __init__(self, **options: Any) -> None:
        """Make a config from options by their flat names."""
        sections: dict[str, Any] = {name: {} for name in type(self).model_fields}
        for name, value in options.items():
            if name not in sections_and_fields():
                raise ValueError(f"there is no option {name!r}")
            section, _ = sections_and_fields()[name]
            sections[section][name] = value
        super().__init__(**sections)

    def given_options(self) -> Options:
        """Return the options that were set, rather than left at their default."""
        values = {}
        for _, section in self:
            for name, value in section:
                if name in section.model_fields_set:
                    values[name] = value
        return values

    def option_values(self) -> Options:
        """Return all options by their flat names, in the order of the schema."""
        values: Options = {}
        for _, section in self:
            values |= dict(section)
        return values

    def to_dict(self) -> Options:
        """Return the options as plain values, as written to config.yaml."""
        values: Options = {}
        for _, section in self:
            values |= section.model_dump(mode="json")
        return values

    def changed(self, **options: Any) -> TrainConfig:
        """Return a config with other values of some options, which count as given. They are not validated."""
        sections = dict(self)
        for name, value in options.items():
            section, _ = sections_and_fields()[name]
            sections[section] = sections[section].model_copy(update={name: value})
        return self.model_copy(update=sections)


@cache
def sections_and_fields() -> dict[str, tuple[str, FieldInfo]]:
    """Return the section and the field of every option, in the order of the schema."""
    options: dict[str, tuple[str, FieldInfo]] = {}
    for section, field in TrainConfig.model_fields.items():
        section_class: Any = field.annotation
        for name, option_field in section_class.model_fields.items():
            if name in options:
                raise TypeError(
                    f"the sections {options[name][0]} and {section} both have the option {name}; if a loss declares it, "
                    "give it another name there"
                )
            options[name] = (section, option_field)
    return options


def option_fields() -> dict[str, FieldInfo]:
    """Return the pydantic field of every option, in the order of the schema."""
    return {name: field for name, (_, field) in sections_and_fields().items()}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, in which all options stand flat."""
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in option_fields().items()
    }
    model = create_model("TrainConfig", __base__=ConfigModel, **fields)
    return model.model_json_schema()


FILE_OPTIONS: dict[str, str] = {}
for _option, _option_field in option_fields().items():
    for _entry in _option_field.metadata:
        if isinstance(_entry, FileReference):
            FILE_OPTIONS[_option] = str(_entry)
"""Option that names files or folders -> their kind: model, data or code.

The schema marks them. They are compared by their content, under whatever name, between the ranks of a run and between a
run and its checkpoint.
"""
