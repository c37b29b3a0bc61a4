"""Options of `vembed audit`, `judge` and `generate`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from vembed.config.values import Fraction, NonNegativeInt, Number, PositiveInt
from vembed.mining.config import (
    ROW_OPTIONS,
    SEARCH_OPTIONS,
    WEIGHT_OPTIONS,
    CommandConfig,
    DataOptions,
    Endpoint,
    Judge,
    ModelOptions,
    RowOptions,
    WeightOptions,
)

DropKind = Literal[
    "duplicates",
    "near_duplicates",
    "leakage",
    "contradictions",
    "low_positives",
    "weak_queries",
]
"""Findings of an audit whose rows can be left out."""


class JudgeConfig(RowOptions, WeightOptions, CommandConfig):
    """One run of `vembed judge`."""

    training_options: ClassVar[tuple[str, ...]] = (*ROW_OPTIONS, *WEIGHT_OPTIONS)

    # ---- judges ------------------------------------------------------------------------------------------------
    judges: Annotated[list[Judge], Field(min_length=1)]
    """Models that read a query and a negative of its row together, the cheap one first; each a {model, kind, base_url,
    unsure, ...}. Each judgement is kept in the cache folder by content."""
    false_negatives: Literal["drop", "relabel", "keep"] = "drop"
    """A negative that the judges call relevant: leave it out, make it a positive, or keep it."""

    # ---- output ------------------------------------------------------------------------------------------------
    output_path: str
    """File to write, by its ending: .jsonl or .parquet."""
    scores: bool = False
    """Write the judgements too: `negative_judge_scores`, the probability that a negative is relevant."""


class AuditConfig(DataOptions, ModelOptions, CommandConfig):
    """One run of `vembed audit`."""

    training_options: ClassVar[tuple[str, ...]] = (*SEARCH_OPTIONS, "val_data_path")

    # ---- audit -------------------------------------------------------------------------------------------------
    model_name: str | None = None
    """The model that searches: a folder or a Hub name. Without one only what needs no model is looked at."""
    query_prompt: str | None = None
    """Text put before every query. Default: the model's own."""
    document_prompt: str | None = None
    """Text put before every document. Default: the model's own."""
    val_data_path: str | None = None
    """Validation data, which should share nothing with the training data."""
    output_path: str = "audit.html"
    """The page to write; the same as JSON is written beside it."""
    cleaned_path: str | None = None
    """Write the rows that are left when those in `drop` are taken out: .jsonl or .parquet."""
    drop: list[DropKind] = Field(default=["duplicates", "leakage"])
    """Findings whose rows `cleaned_path` leaves out; of duplicates the first row stays."""
    near_duplicate: Fraction | None = 0.9
    """Texts are near-duplicates if one holds at least this share of the other's 3-grams. `null`: not looked for."""
    top_k: PositiveInt = 50
    """Documents that are searched per query."""
    num_negatives: PositiveInt = 5
    """Negatives per query for which the rate of false ones is estimated."""
    max_false_negative_rate: Annotated[float, Field(gt=0.0, lt=1.0), Number] = 0.05
    """The rate that the recommended threshold keeps to."""
    num_examples: NonNegativeInt = 20
    """Examples of each finding on the page."""
    work_dir: str | None = None
    """Folder for vectors, which all machines must see. Default: `output_path` with `.work`."""
    keep_work: bool = True
    """Keep that folder for a second run. false: delete it at the end."""
    seed: NonNegativeInt = 42
    """Seed of what is hidden for the estimate."""


ModelFreeKind = Literal[
    "docstring_function",
    "caption_image",
    "title_body",
    "heading_section",
    "first_sentence",
    "crop",
]
WrittenKind = Literal["question", "keywords", "claim", "instruction"]


class Writer(Endpoint):
    """A language model that writes queries."""

    model: str
    """A decoder (a folder or a Hub name), or the name of a model at `base_url`."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0), Number] = 0.0
    """0: the most likely words."""
    max_new_tokens: PositiveInt = 64
    """Longest query in tokens."""
    max_length: PositiveInt = 1024
    """Longest document in tokens that the model reads."""
    batch_size: PositiveInt = 8
    """Documents that a local model reads at once."""

    @model_validator(mode="after")
    def _check(self) -> Writer:
        if self.base_url is not None and not self.base_url.startswith(
            ("http://", "https://")
        ):
            raise ValueError(
                f"base_url: {self.base_url} must begin with http:// or https://"
            )
        return self


class GenerateConfig(ModelOptions, CommandConfig):
    """One run of `vembed generate`."""

    training_options: ClassVar[tuple[str, ...]] = (
        *WEIGHT_OPTIONS,
        "image_root",
        "allow_image_urls",
        "on_bad_record",
        "max_length",
        "seed",
    )

    # ---- documents ---------------------------------------------------------------------------------------------
    corpus_path: str | list[str]
    """Documents: a file with one document per record, a text file, a BEIR-style folder, or a list of these."""
    image_root: str | None = None
    """Folder that relative image paths start from, and must stay in. Default: the folder of the file."""
    allow_image_urls: bool = False
    """Load images from http(s) addresses."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """A document that cannot be used: stop with the first ten of them, or leave them out and count them."""
    max_documents: PositiveInt | None = None
    """Use only so many documents, drawn by the seed."""

    # ---- pairs -------------------------------------------------------------------------------------------------
    kinds: list[ModelFreeKind | WrittenKind] = Field(default_factory=list)
    """Kinds of pairs. Default: for each document the first kind that fits of docstring_function, caption_image,
    title_body, heading_section, first_sentence and crop. question, keywords, claim and instruction need `writer`."""
    writer: Writer | None = None
    """The language model that writes queries: {model, base_url, ...}."""
    language: str | None = None
    """Language of the written queries, as `German`. Default: that of the document."""
    personas: list[str] = Field(default_factory=list)
    """Persons who ask; documents take turns: [a student, a lawyer]."""
    examples_path: str | None = None
    """Training data of yours, from which examples for the writer are drawn."""
    num_examples: NonNegativeInt = 3
    """Examples in each prompt."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Own prompts by kind, with {document}, {language}, {persona} and {examples}."""

    # ---- round trip --------------------------------------------------------------------------------------------
    model_name: str | None = None
    """A model for the round trip: a pair is kept if its document is among the first for its query."""
    round_trip_top_k: PositiveInt = 20
    """Among the first so many."""

    # ---- output ------------------------------------------------------------------------------------------------
    output_path: str
    """File to write, by its ending: .jsonl or .parquet."""
    work_dir: str | None = None
    """Folder for what is written and for vectors, which all machines must see. Default: `output_path` with `.work`."""
    keep_work: bool = True
    """Keep that folder. false: delete it at the end."""
    seed: NonNegativeInt = 42
    """Seed of crops, examples and sampling."""

    @model_validator(mode="after")
    def _check(self) -> GenerateConfig:
        written = [kind for kind in self.kinds if kind in get_args(WrittenKind)]
        if written and self.writer is None:
            raise ValueError(f"kinds: {written[0]} needs writer, a language model")
        if self.writer is not None and self.kinds and not written:
            raise ValueError(
                "writer has no effect: kinds has none of question, keywords, claim and instruction"
            )
        unknown = sorted(set(self.prompts) - set(get_args(WrittenKind)))
        if unknown:
            raise ValueError(
                f"prompts: {unknown[0]} is none of {', '.join(get_args(WrittenKind))}"
            )
        for kind, prompt in self.prompts.items():
            try:
                prompt.format(document="", language="", persona="", examples="")
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"prompts: {kind} holds braces that are none of {{document}}, {{language}}, {{persona}} and "
                    f"{{examples}} ({error}): write a brace of the text twice, as {{{{ and }}}}"
                ) from error
        return self

    def written_kinds(self) -> list[str]:
        """The kinds that the writer writes."""
        chosen: list[str] = [
            kind for kind in self.kinds if kind in get_args(WrittenKind)
        ]
        return chosen or (["question"] if self.writer is not None else [])
