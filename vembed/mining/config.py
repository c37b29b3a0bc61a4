"""Options of `vembed mine`, and those that other commands on data share with it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vembed.config.schema import RELEVANCE, ChoiceOptions, DataSource
from vembed.config.values import (
    Fraction,
    Immutable,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

BM25 = "bm25"
"""Name of the lexical retriever, where a model would stand."""


def paths_of(paths: str | list[str] | None) -> list[str]:
    """Return the paths of an option that is one path or a list."""
    if paths is None:
        return []
    return [paths] if isinstance(paths, str) else paths


class Retriever(Immutable):
    """One entry of `retrievers`."""

    model: str
    """A model folder, a Hub name, or `bm25`."""
    weight: PositiveFloat = 1.0
    """Weight in the fusion, relative to the others."""
    query_prompt: str | None = None
    """Text put before every query. Default: the model's own."""
    document_prompt: str | None = None
    """Text put before every document. Default: the model's own."""
    truncate_dim: PositiveInt | None = None
    """Keep the first so many coordinates of every embedding."""
    library: Literal["auto", "vembed", "sentence_transformers"] = "auto"
    """Library that loads the model. `auto`: vembed, and Sentence Transformers for modules that vembed does not know."""


class Endpoint(Immutable):
    """An OpenAI-compatible endpoint."""

    base_url: str | None = None
    """Address of the endpoint, up to `/v1`: http://127.0.0.1:8000/v1."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key. The key itself stands in no file."""
    timeout_seconds: PositiveFloat = 60.0
    """Time limit of one request."""
    max_retries: NonNegativeInt = 5
    """Further attempts for a request that times out, or is answered with 429 or 5xx; the waiting time doubles."""
    retry_seconds: PositiveFloat = 1.0
    """Waiting time before the second attempt."""
    concurrency: PositiveInt = 8
    """Requests in flight."""


class Judge(Endpoint):
    """One entry of `judges`."""

    model: str
    """A reranker (a folder or a Hub name), or the name of a model at `base_url`."""
    kind: Literal["auto", "cross_encoder", "yes_no", "endpoint"] = "auto"
    """Kind of judge. `auto`: endpoint with `base_url`, yes_no for decoders, otherwise cross_encoder."""
    unsure: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = Field(
        default=[0.5, 0.5]
    )
    """[low, high]: relevant from `high` on, not relevant below `low`, and between them the next judge is asked. The
    last judge decides in the middle."""
    instruction: str = RELEVANCE
    """Definition of relevance, for yes_no and endpoints."""
    max_length: PositiveInt = 512
    """Longest pair in tokens; the longer of the two texts is cut (yes_no and endpoints: the document)."""

    @model_validator(mode="after")
    def _check(self) -> Judge:
        if self.unsure[0] > self.unsure[1]:
            raise ValueError(f"unsure: {self.unsure} must be [low, high]")
        if (self.kind == "endpoint") and self.base_url is None:
            raise ValueError(f"{self.model}: kind: endpoint needs base_url")
        if self.base_url is not None and not self.base_url.startswith(
            ("http://", "https://")
        ):
            raise ValueError(
                f"base_url: {self.base_url} must begin with http:// or https://"
            )
        return self


class CommandConfig(Immutable):
    """Base class of the configs of commands, which may be read from a training config."""

    training_options: ClassVar[tuple[str, ...]] = ()
    """Options that are taken from a training config."""


ROW_OPTIONS = (
    "data_path",
    "column_mapping",
    "retrieval_mode",
    "image_root",
    "allow_image_urls",
    "on_bad_record",
)
WEIGHT_OPTIONS = ("torch_dtype", "trust_remote_code")
SEARCH_OPTIONS = (
    *ROW_OPTIONS,
    *WEIGHT_OPTIONS,
    "model_name",
    "query_prompt",
    "document_prompt",
    "max_length",
    "seed",
)
"""Options that commands share with training."""


class RowOptions(Immutable):
    """Options of every command that reads training data; the names mean what they mean in training."""

    # ---- data --------------------------------------------------------------------------------------------------
    data_path: str | list[DataSource | str]
    """Training data: a file (JSONL, CSV, TSV, Parquet), a folder saved by `datasets`, a Hub dataset name, a BEIR-style
    folder, or a list of these."""
    column_mapping: dict[str, str] | None = None
    """Names in the files -> names that vembed reads: {question: query}."""
    retrieval_mode: Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"] = "auto"
    """Type of bare strings of queries and documents: texts (t) or image paths (i)."""
    image_root: str | None = None
    """Folder that relative image paths start from, and must stay in. Default: the folder of the file."""
    allow_image_urls: bool = False
    """Load images from http(s) addresses."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """A record that cannot be used: stop with the first ten of them, or leave them out and count them."""
    split: str | None = None
    """The qrels of a BEIR-style folder that are read. Default: train."""


class DataOptions(RowOptions):
    """Options of every command that searches documents for the queries of training data."""

    corpus_path: str | list[str] | None = None
    """Documents to search: a file with one document per record, a BEIR-style folder, or a list of these. Default: the
    documents of the data."""
    qrels_path: str | None = None
    """A qrels file (query id, document id, grade) with more known positives. Default: those of a BEIR-style folder."""
    query_id_field: str | None = None
    """Field of a row with its query's id. Default: query_id, qid, query-id or _id, the first that is there."""
    positive_id_field: str | None = None
    """Field of a row with the ids of its positives in the corpus, one or a list. Default: positive_id, positive_ids,
    pos_id, document_id, doc_id or corpus_id, the first that is there."""


class WeightOptions(Immutable):
    """Options of every command that loads a model."""

    # ---- model -------------------------------------------------------------------------------------------------
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. `auto`: the file's own."""
    trust_remote_code: bool = False
    """Run Python code that a model's folder brings along. Only for models that you trust as you trust your own code."""


class ModelOptions(WeightOptions):
    """Options of every command that encodes."""

    max_length: PositiveInt | None = None
    """Longest text in tokens; longer ones are cut. Default: the model's own limit."""
    batch_tokens: Literal["auto"] | PositiveInt = "auto"
    """Padded tokens that go through a model at once."""
    vector_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the vectors on disk; products are float32 whatever it is."""


class MineConfig(ChoiceOptions, DataOptions, ModelOptions, CommandConfig):
    """One run of `vembed mine`. The text under each field is its documentation."""

    training_options: ClassVar[tuple[str, ...]] = (*SEARCH_OPTIONS, "mine")

    # ---- retrievers --------------------------------------------------------------------------------------------
    model_name: str | None = None
    """The model that searches: a folder (vembed's or any of Sentence Transformers), a Hub name, or `bm25`."""
    retrievers: list[Retriever | str] = Field(default_factory=list)
    """Several models instead of one, each a name or {model, weight, query_prompt, document_prompt, truncate_dim,
    library}. The first one that is no `bm25` gives the scores that margins and limits speak of."""
    query_prompt: str | None = None
    """Text put before every query, for retrievers without one of their own. Default: the model's own."""
    document_prompt: str | None = None
    """Text put before every document, for retrievers without one of their own. Default: the model's own."""
    fusion: Literal["rrf", "scores"] = "rrf"
    """Fusion of several rankings: by reciprocal rank, or by the sum of standardised scores."""
    rrf_k: PositiveInt = 60
    """Constant of the reciprocal-rank fusion: weight / (rrf_k + rank)."""

    # ---- rows -------------------------------------------------------------------------------------------------
    keep_negatives: bool = True
    """Negatives that rows have already stay, before the mined ones. false: they are replaced."""
    on_missing: Literal["keep", "drop"] = "keep"
    """A row for which no negative is left: keep it without negatives, or drop it."""

    # ---- judges ------------------------------------------------------------------------------------------------
    judges: list[Judge] = Field(default_factory=list)
    """Models that read query and candidate together, the cheap one first; each a {model, kind, base_url, unsure, ...}.
    Each judgement is kept in the cache folder by content."""
    false_negatives: Literal["drop", "relabel", "keep"] = "drop"
    """A candidate that the judges call relevant: leave it out, make it a positive, or keep it as a negative."""
    judged_per_query: PositiveInt | None = None
    """Candidates that the judges see per query. Default: twice the negatives that are chosen."""

    # ---- output ------------------------------------------------------------------------------------------------
    output_path: str
    """File to write, by its ending: .jsonl or .parquet."""
    scores: bool = False
    """Write the retriever's scores too: `positive_scores`, `negative_scores`."""
    work_dir: str | None = None
    """Folder for vectors and intermediate results, which all machines must see. Default: `output_path` with `.work`."""
    keep_work: bool = True
    """Keep that folder, so that a run with other choices computes no vector again. false: delete it at the end."""
    seed: NonNegativeInt = 42
    """Seed of sampling and of what is hidden for `threshold: auto`."""

    @classmethod
    def shared(cls, config: CommandConfig, **changes: Any) -> MineConfig:
        """Return the options that another command shares with `vembed mine`, with some changes."""
        names = set(cls.model_fields) & set(type(config).model_fields)
        values = config.model_dump(include=names, exclude_unset=True)
        return cls.model_validate(values | changes)

    @model_validator(mode="after")
    def _check(self) -> MineConfig:
        if (self.model_name is None) == (not self.retrievers):
            raise ValueError("give model_name or retrievers, one of them")
        return self

    def all_retrievers(self) -> list[Retriever]:
        """The retrievers with the defaults of this config filled in."""
        retrievers = []
        for entry in self.retrievers or [str(self.model_name)]:
            retriever = Retriever(model=entry) if isinstance(entry, str) else entry
            prompts: dict[str, str | None] = {}
            if retriever.query_prompt is None:
                prompts["query_prompt"] = self.query_prompt
            if retriever.document_prompt is None:
                prompts["document_prompt"] = self.document_prompt
            retrievers.append(retriever.model_copy(update=prompts))
        return retrievers

    @property
    def depth(self) -> int:
        """Candidates that are chosen per query before the judges see them."""
        return (
            max(self.judged_per_query or 2 * self.budget, self.budget)
            if self.judges
            else self.budget
        )
