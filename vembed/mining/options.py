"""Options of mine, judge, audit and generate: from a file of their own, or from a training config, and key=value."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import Field, ValidationError, model_validator

from vembed.config.loading import (
    STAGES,
    TRAINING_STAGES,
    USER_PRESETS,
    one_line_yaml,
    resolve_paths,
)
from vembed.config.options import (
    COMMAND_LINE,
    OPTION_BLOCKS,
    Layer,
    Level,
    Option,
    OptionValue,
    all_options,
    field_option,
    known_names,
    quoted,
    target_of,
)
from vembed.config.parsing import read_tree, tree_of_mapping
from vembed.config.schema import DataSource, NegativeSelection
from vembed.config.values import (
    ConfigModel,
    Fraction,
    ModelDtype,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RefusesBool,
    RetrievalMode,
)
from vembed.errors import UserError, did_you_mean

log = logging.getLogger("vembed")

BM25 = "bm25"
"""Name of the lexical retriever, where a model would stand."""
READING_OPTIONS = (
    "column_mapping",
    "retrieval_mode",
    "image_root",
    "allow_image_urls",
    "on_bad_record",
)
"""Options that say how records are read."""


def paths_of(paths: str | list[str] | None) -> list[str]:
    """Return the paths of an option that is one path or a list."""
    if paths is None:
        return []
    return [paths] if isinstance(paths, str) else paths


class Retriever(ConfigModel):
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


class Endpoint(ConfigModel):
    """An OpenAI-compatible endpoint."""

    base_url: Annotated[str, Field(pattern="^https?://")] | None = None
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
    instruction: str | None = None
    """Definition of relevance, for yes_no and endpoints. Default of yes_no: the one that the model was trained with, or
    Qwen3-Reranker's."""
    max_length: PositiveInt = 512
    """Longest pair in tokens; the longer of the two texts is cut (yes_no and endpoints: the document)."""

    @model_validator(mode="after")
    def _check(self) -> Judge:
        if self.unsure[0] > self.unsure[1]:
            raise ValueError(f"unsure: {self.unsure} must be [low, high]")
        if self.kind == "endpoint" and self.base_url is None:
            raise ValueError(f"{self.model}: kind: endpoint needs base_url")
        return self


class CommandConfig(ConfigModel):
    """Base class of the configs of commands, which may be read from a training config."""

    not_of_training: ClassVar[tuple[str, ...]] = ()
    """Options that mean something else in training. All others of the same name are taken from a training config."""


class RecordOptions(ConfigModel):
    """Options of every command that reads records; the names mean what they mean in training."""

    image_root: str | None = None
    """Folder that relative image paths start from, and must stay in. Default: the folder of the file."""
    allow_image_urls: bool = False
    """Load images from http(s) addresses."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """A record that cannot be used: stop with the first ten of them, or leave them out and count them."""


class RowOptions(RecordOptions):
    """Options of every command that reads training data."""

    # ---- data --------------------------------------------------------------------------------------------------
    data_path: str | list[DataSource | str]
    """Training data: a file (JSONL, CSV, TSV, Parquet), a folder saved by `datasets`, a Hub dataset name, a BEIR-style
    folder, or a list of these."""
    column_mapping: dict[str, str] | None = None
    """Names in the files -> names that vembed reads: {question: query}."""
    retrieval_mode: RetrievalMode = "auto"
    """Type of bare strings of queries and documents: texts (t) or image paths (i)."""
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


class WeightOptions(ConfigModel):
    """Options of every command that loads a model."""

    # ---- model -------------------------------------------------------------------------------------------------
    torch_dtype: ModelDtype = "auto"
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


class WorkOptions(ConfigModel):
    """Options of every command that keeps vectors for a second run."""

    work_dir: str | None = None
    """Folder for vectors and intermediate results, which all machines must see. Default: `output_path` with `.work`."""
    keep_work: bool = True
    """Keep that folder, so that a run with other choices computes no vector again. false: delete it at the end."""
    seed: NonNegativeInt = 42
    """Seed of all that is drawn."""


class MineConfig(
    NegativeSelection, DataOptions, ModelOptions, WorkOptions, CommandConfig
):
    """One run of `vembed mine`. The text under each field is its documentation."""

    not_of_training = ("margin", "sampling")

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

    @classmethod
    def shared(cls, config: CommandConfig, **changes: Any) -> MineConfig:
        """Return the options that another command shares with `vembed mine`, with some changes."""
        names = set(cls.model_fields) & set(type(config).model_fields)
        values = config.model_dump(include=names, exclude_unset=True)
        return cls.model_validate(values | changes)

    @model_validator(mode="after")
    def _check(self) -> MineConfig:
        if (self.model_name is None) == (not self.retrievers):
            raise ValueError(
                "give model_name or retrievers, one of them (null leaves one out)"
            )
        return self

    def all_retrievers(self) -> list[Retriever]:
        """The retrievers with the defaults of this config filled in."""
        prompts = self.model_dump(include={"query_prompt", "document_prompt"})
        retrievers = []
        for entry in self.retrievers or [str(self.model_name)]:
            values: dict[str, Any] = {"model": entry}
            if isinstance(entry, Retriever):
                values = entry.model_dump(exclude_none=True)
            retrievers.append(Retriever.model_validate(prompts | values))
        return retrievers

    @property
    def depth(self) -> int:
        """Candidates that are chosen per query before the judges see them."""
        number = self.negatives_per_query
        if not self.judges:
            return number
        return max(self.judged_per_query or 2 * number, number)


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


class AuditConfig(DataOptions, ModelOptions, WorkOptions, CommandConfig):
    """One run of `vembed audit`."""

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
    max_false_negative_rate: Annotated[float, Field(gt=0.0, lt=1.0), RefusesBool] = 0.05
    """The rate that the recommended threshold keeps to."""
    num_examples: NonNegativeInt = 20
    """Examples of each finding on the page."""


ModelFreeKind = Literal[
    "docstring_function",
    "caption_image",
    "title_body",
    "heading_section",
    "first_sentence",
    "crop",
]
WrittenKind = Literal["question", "keywords", "claim", "instruction"]
WRITTEN_KINDS = get_args(WrittenKind)


class Writer(Endpoint):
    """A language model that writes queries."""

    model: str
    """A decoder (a folder or a Hub name), or the name of a model at `base_url`."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0), RefusesBool] = 0.0
    """0: the most likely words."""
    max_new_tokens: PositiveInt = 64
    """Longest query in tokens."""
    max_length: PositiveInt = 1024
    """Longest document in tokens that the model reads."""
    batch_size: PositiveInt = 8
    """Documents that a local model reads at once."""


class GenerateConfig(RecordOptions, ModelOptions, WorkOptions, CommandConfig):
    """One run of `vembed generate`."""

    not_of_training = ("model_name",)

    # ---- documents ---------------------------------------------------------------------------------------------
    corpus_path: str | list[str]
    """Documents: a file with one document per record, a text file, a BEIR-style folder, or a list of these."""
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

    @model_validator(mode="after")
    def _check(self) -> GenerateConfig:
        written = [kind for kind in self.kinds if kind in WRITTEN_KINDS]
        if written and self.writer is None:
            raise ValueError(f"kinds: {written[0]} needs writer, a language model")
        if self.writer is not None and self.kinds and not written:
            raise ValueError(
                "writer has no effect: kinds has none of question, keywords, claim and instruction"
            )
        unknown = sorted(set(self.prompts) - set(WRITTEN_KINDS))
        if unknown:
            raise ValueError(
                f"prompts: {unknown[0]} is none of {', '.join(WRITTEN_KINDS)}"
            )
        for kind, prompt in self.prompts.items():
            try:
                prompt.format(
                    document="",
                    language="",
                    persona="",
                    examples="",
                )
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"prompts: {kind} holds braces that are none of {{document}}, {{language}}, {{persona}} and "
                    f"{{examples}} ({error}): write a brace of the text twice, as {{{{ and }}}}"
                ) from error
        return self

    def written_kinds(self) -> list[str]:
        """The kinds that the writer writes."""
        chosen: list[str] = [kind for kind in self.kinds if kind in WRITTEN_KINDS]
        return chosen or (["question"] if self.writer is not None else [])


Config = TypeVar("Config", bound=CommandConfig)
CommandConfigSource = str | Path | Mapping[str, Any] | ConfigModel | None
INPUT_OPTIONS = (
    "data_path",
    "corpus_path",
    "qrels_path",
    "val_data_path",
    "examples_path",
)
"""Options that name what a command reads. Relative paths are also looked for beside the config file."""
TRAINING_ONLY_KEYS = (STAGES, TRAINING_STAGES, USER_PRESETS, "stage")
"""Keys of a training config that are no options."""
EPOCH_MINING = "mine"
"""Option of training whose block holds options of `vembed mine`."""


def load_options(
    kind: type[Config],
    source: CommandConfigSource,
    overrides: Sequence[str] = (),
) -> Config:
    """Return the config of a file, a dict or a config, with `key=value` arguments on top.

    A training config serves too: the options that it shares with the command are taken, and its others are left.
    """
    if isinstance(source, ConfigModel):
        if not isinstance(source, kind):
            raise UserError(
                f"the config is a {type(source).__name__}, and a {kind.__name__} is needed"
            )
        if not overrides:
            return source
        source = source.model_dump(exclude_unset=True)
    options = _options(kind)
    file = Path(source) if isinstance(source, str | Path) else None
    source_name = "the config" if file is None else str(source)
    problems = []
    values = {}

    def refuse_key(name: str, place: str) -> None:
        # The command's own options first: a training's key that it lacks is no way out.
        hint = did_you_mean(name, options)
        hint = hint or did_you_mean(name, {*known_names()} - {name})
        hint = hint or f"; it has {', '.join(options)}"
        problems.append(f"{place}: unknown key {quoted(name)}{hint}")

    # Weaker than the options of the command.
    training = Layer(source_name, Level.ACCELERATE_FILE)
    if source is not None:
        tree = tree_of_mapping(source) if file is None else read_tree(file)
        nodes = {key: key.replace("-", "_") for key in tree.value}
        is_training = any(
            name not in options and _is_training_key(name) for name in nodes.values()
        )
        for key, name in nodes.items():
            node = tree.value[key]
            place = node.place(source_name)
            # An alias of training, such as output_path, is the command's option where it has one.
            is_command_option = name in options and name not in all_options()
            if is_training and not is_command_option and _is_training_key(name):
                if name not in TRAINING_ONLY_KEYS:
                    training.add_key(key.split("."), node, place)
            elif name in options:
                values[name] = OptionValue(
                    name,
                    node.plain(),
                    key,
                    place,
                )
            else:
                refuse_key(name, place)
        problems += training.problems
    for name, value in training.values.items():
        if name in kind.not_of_training or value.value is None:
            continue
        if name in options:
            values.setdefault(name, value)
        elif name == EPOCH_MINING and kind is MineConfig:
            # Options of the mining between epochs are options of `vembed mine` too.
            for inner, entry in value.value.model_dump(exclude_unset=True).items():
                if inner in options:
                    key = f"{value.key}.{inner}"
                    mined = OptionValue(
                        inner,
                        entry,
                        key,
                        value.place,
                    )
                    values.setdefault(inner, mined)

    for argument in overrides:
        key, _, text = argument.partition("=")
        name = key.strip().replace("-", "_")
        if name not in options:
            refuse_key(name, COMMAND_LINE)
            continue
        parsed = options[name].parse(text)
        kinds = options[name].kinds
        if isinstance(parsed, str) and "list" in kinds and "text" not in kinds:
            parsed = [part.strip() for part in parsed.split(",")]
        values[name] = OptionValue(
            name,
            parsed,
            key,
            COMMAND_LINE,
            Level.COMMAND_LINE,
        )

    if kind is MineConfig:
        for name in sorted({*kind.not_of_training} & {*training.values} - {*values}):
            log.warning(
                "%s is the option of training here, and mining does without: give %s=... on the command line, or in the "
                "block mine",
                training.values[name],
                name,
            )
    _choose_model(values)
    for name, option in options.items():
        if name in values:
            value = values[name]
            try:
                values[name] = replace(value, value=option.checked(value.value))
            except ValueError as error:
                problems.append(f"{value.place}: {error}")
        elif option.is_required:
            problems.append(
                f"{source_name}: {name} is missing: add `{name}: ...`, or give {name}=..."
            )
    if problems:
        raise UserError("\nalso: ".join(problems))
    resolve_paths(values, (*INPUT_OPTIONS, "image_root"), file)
    try:
        return kind.model_validate(
            {name: value.value for name, value in values.items()}
        )
    except ValidationError as error:
        # What is left are rules between the options.
        messages = [problem["msg"] for problem in error.errors()]
        rules = [message.removeprefix("Value error, ") for message in messages]
        raise UserError(f"{source_name}: " + "\nalso: ".join(rules)) from error


def _choose_model(values: dict[str, OptionValue]) -> None:
    """Leave one of model_name and retrievers where they come from two places: the stronger one wins."""
    names = ("model_name", "retrievers")
    levels = {
        name: values[name].level
        for name in names
        if name in values and values[name].value
    }
    if len(set(levels.values())) == 2:
        del values[min(levels, key=lambda name: levels[name])]


def describe_options(kind: type[CommandConfig]) -> list[tuple[str, str, str]]:
    """Return name, default and documentation of every option, those that must be given first."""
    rows = []
    for name, option in _options(kind).items():
        default = "required" if option.is_required else one_line_yaml(option.default)
        rows.append((name, default, " ".join(option.text.split())))
    return sorted(rows, key=lambda row: row[1] != "required")


def _options(kind: type[CommandConfig]) -> dict[str, Option]:
    return {
        name: field_option(name, field) for name, field in kind.model_fields.items()
    }


def _is_training_key(name: str) -> bool:
    first = name.partition(".")[0]
    return (
        name in TRAINING_ONLY_KEYS
        or first in OPTION_BLOCKS
        or target_of(first) is not None
    )
