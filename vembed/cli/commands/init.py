"""`vembed init`: a commented starter config for a data file, by its columns and sizes, and a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Option

from vembed.cli.commands.demo import demo_model
from vembed.cli.support import ColumnMapping, option, print_lines, print_progress
from vembed.config.loading import load_config, one_line_yaml
from vembed.config.rules import missing_path
from vembed.config.values import Task
from vembed.data.example_store import ExampleStore, open_examples
from vembed.data.examples import Item
from vembed.data.formats.saved_datasets import has_validation_split
from vembed.data.language import is_english
from vembed.data.records import Columns
from vembed.data_tools.data_page import unlogged
from vembed.data_tools.starter import (
    FileSample,
    fitting_batch,
    fitting_epochs,
    fitting_length,
    guess,
    header_doubt,
    held_out_share,
    is_of_english,
    measure_lengths,
    model_facts,
    read_sample,
    sampled_items,
)
from vembed.errors import UserError, did_you_mean
from vembed.evaluation.report.page import render_page
from vembed.losses.declaration import LossDeclaration
from vembed.losses.table import LOSSES
from vembed.models.families.family import Family
from vembed.models.families.table import FAMILIES, FamilyName

GUESSED = "# GUESSED, please check: "
"""Beginning of a line about a guess."""
CHECK = "# CHECK: "
"""Beginning of a line about something that may be wrong."""
SMALLEST_SCORED = 200
"""Scored pairs from which a tenth can be held out."""
MAX_CHECKED = 100_000
"""Records that are all checked, as training does. Of larger data only the first ones are."""
MINING = """
# The data have no hard negatives, which a reranker learns from. BM25 finds them first, which needs
# pip install "vembed[mine]"; model_name may also be an embedding model.
stages:
  - {}
  - {{name: reranker}}  # all of the above"""
DEMO = "demo"
"""Name for --model: all-MiniLM-L6-v2 from the demo's package, without a network."""


@dataclass(frozen=True)
class DataSummary:
    """Findings in the data file."""

    sample: FileSample
    mapping: dict[str, str]
    loss: type[LossDeclaration]
    about: str
    """One line on the records."""
    has_negatives: bool = True
    is_scored: bool = False
    """The pairs have scores."""
    guesses: Mapping[str, str] = field(default_factory=dict)
    """Columns that were guessed -> why."""
    queries: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    doubt: str | None = None
    """What may be wrong with the header."""


def init(
    family: FamilyName | None = None,
    data: str = "train.jsonl",
    val_data: str | None = None,
    task: Task = "embed",
    model: str | None = None,
    query: str | None = None,
    positive: str | None = None,
    column_mapping: ColumnMapping = "",
    output: str = "vembed.yaml",
    force: bool = False,
    tokenizer: str | None = None,
    vocab_size: Annotated[int, Option(min=300)] = 8192,
) -> None:
    """Write a commented starter config for a kind of model and a data file, whose columns are guessed by content.

    Args:
        family: Kind of model: text_encoder, text_decoder, clip, ... Default: that of a --model on this machine, else text_encoder.
        data: Training data. Its first records are read.
        val_data: Validation data.
        task: An embedding model, or a reranker.
        model: Hub name or folder. demo: that of `vembed demo`. Default: a good one of that kind.
        query: The column of the queries. Default: guessed.
        positive: The column of what they should find. Default: guessed.
        output: The config to write.
        force: Write over an existing file.
        tokenizer: Train a tokenizer on the data instead, and write it to this folder.
        vocab_size: Its size.
    """
    mapping = dict(option("column_mapping", column_mapping) or {})
    if query is not None:
        mapping[query] = "query"
    if positive is not None:
        mapping[positive] = "positive"
    if tokenizer is not None:
        from vembed.data_tools.new_tokenizer import tokenizer_of_data

        count = tokenizer_of_data(data, mapping, tokenizer, vocab_size)
        print_lines(
            f"wrote {tokenizer}: {count:,d} tokens; use it with tokenizer_name: {tokenizer}"
        )
        return
    path = Path(output)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--output {output}: a starter config is YAML: give a name that ends in .yaml"
        )
    if path.exists() and not force:
        raise UserError(
            f"{output} exists already: give another --output, or --force to overwrite it"
        )
    if family is None and model is not None and model != DEMO:
        described = model_facts(model, task)
        family = described.family if described is not None else None
    family = family or "text_encoder"
    missing = missing_path("--data", data)
    if missing is not None:
        raise UserError(missing)
    text = starter(FAMILIES[family], data, model, val_data, mapping, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    # Read as `vembed train` will read it: what is written here is never refused there.
    load_config(path)
    for line in text.splitlines():
        if line.startswith((CHECK, GUESSED)):
            print_progress(f"note: {line.removeprefix(CHECK).removeprefix('# ')}")
    print_lines(f"wrote {path}; train with: vembed train {path}")


def starter(
    family: Family,
    data: str,
    model: str | None,
    val_data: str | None,
    mapping: Mapping[str, str],
    task: Task,
) -> str:
    """Return the text of the config. `mapping`: columns that the user names; only the others are guessed."""
    kind = family.starter
    if task == "rerank":
        if family.reranker_starter is None:
            raise UserError(
                f"--task rerank --family {family.name}: rerankers read texts: give text_encoder or text_decoder"
            )
        kind = family.reranker_starter
    if val_data is None and has_validation_split(Path(data)):
        val_data = data
    summary = look_at(read_sample(Path(data)), data, mapping, task)
    doubts = []
    if summary.doubt is not None:
        doubts.append(summary.doubt)
    is_foreign = not is_english([*summary.queries, *summary.documents])
    name = model or kind.model_name
    about = kind.about
    if model == DEMO:
        name = str(demo_model())
    elif model is None and kind.multilingual is not None and is_foreign:
        name = kind.multilingual
        about += " of many languages: the texts are not English"
    if is_foreign and is_of_english(name):
        doubts.append(
            f"the texts are not English, and {model or name} is a model of English alone, by its README.md: give --model "
            f"one of many languages, such as {kind.multilingual or 'intfloat/multilingual-e5-small'}"
        )
    description = model_facts(name, task)
    if description is None and model is not None:
        doubts.append(
            f"{model} could not be looked at: it is no folder here, and not in the Hub's cache. The config is that of a "
            f"{family.name} (--family names another kind), and max_length follows from the characters of the texts. "
            "Training needs such a folder, or the Hub"
        )
    texts = [*summary.queries, *summary.documents]
    if task == "rerank":
        pairs = zip(cycle(summary.queries), summary.documents, strict=False)
        asks = family.name == "text_decoder"
        if description is not None:
            asks = description.scores == "answer"
        question = ""
        if asks:
            from vembed.data.features import blank_question

            question = blank_question()
        texts = [f"{question}{query} {document}" for query, document in pairs]
    lengths = measure_lengths(texts, description)
    limit = None if description is None else description.max_length
    max_length = fitting_length(lengths, limit, kind.max_length or 0)

    def rendered(num_records: int) -> str:
        """Return the config of a run over so many records."""
        # A correlation needs more pairs, and different scores among them.
        is_enough = not summary.is_scored or num_records >= SMALLEST_SCORED
        held_out = None
        if is_enough and not val_data:
            held_out = held_out_share(num_records)
        num_train = int(num_records * (1 - (held_out or 0.0)))
        batch_size = fitting_batch(num_train, kind.batch_size)
        epochs = fitting_epochs(
            num_train, has_logit_scale=family.has_logit_scale_and_bias
        )
        num_steps = max(num_train // batch_size, 1) * epochs if num_train else 0
        return render_page(
            "starter.yaml.j2",
            option=_line,
            task=task,
            family=family,
            kind=kind,
            name=name,
            about=about,
            limit=limit,
            data=data,
            val_data=val_data,
            held_out=held_out,
            is_evaluated=bool(val_data or held_out),
            summary=summary,
            doubts=doubts,
            lengths=lengths,
            max_length=max_length,
            batch_size=batch_size,
            epochs=epochs,
            num_train=num_train,
            num_steps=num_steps,
        )

    text = rendered(summary.sample.num_records)
    store, lines = _checked(family, summary.sample, text)
    if store is not None:
        # The passes and steps are those over the records that can be used.
        text = rendered(len(store))
    lines = [text.rstrip(), *lines]
    if task == "rerank" and not (summary.is_scored or summary.has_negatives):
        configured = yaml.safe_load("\n".join(lines))
        options = {"model_name": "bm25", "num_negatives": 7}
        for option in ("data_path", "column_mapping", "on_bad_record"):
            if option in configured:
                options[option] = configured[option]
        step = one_line_yaml({"name": "negatives", "mine": options})
        lines.append(MINING.format(step))
    return "\n".join(lines) + "\n"


def _checked(
    family: Family,
    sample: FileSample,
    text: str,
) -> tuple[ExampleStore | None, list[str]]:
    """Return the examples, and lines on what may be wrong with the records, with one that leaves out those that training
    would refuse. Without examples where the data are too large to be checked here."""
    is_large = sample.is_estimate or sample.num_records > MAX_CHECKED
    if is_large or not sample.records:
        return None, []
    # All of them, with their images, as training does.
    config = load_config({**yaml.safe_load(text), "on_bad_record": "skip"})
    try:
        with unlogged():
            store = open_examples(
                config.data,
                config.data.data_path,
                config.objective,
                model_name=config.model.model_name,
            )
    except UserError as error:
        if family.reads_only_text:
            raise
        # The images may be in another folder, which image_root will name.
        return None, [CHECK + " ".join(str(error).split())]
    # Behind the line on the source: records that are left out, and columns that are not used.
    doubts = [*store.warnings(), *store.summary()[1:]]
    lines = [CHECK + doubt for doubt in doubts]
    if store.counts["bad"]:
        lines.append(
            _line("on_bad_record", "skip", "fix these records to train on all")
        )
    return store, lines


def look_at(
    sample: FileSample,
    data: str,
    named: Mapping[str, str],
    task: Task,
) -> DataSummary:
    """Return what the first records show. `named`: columns that the user names."""
    if not sample.records:
        about = "not looked at (no file of that name here)"
        return DataSummary(sample, dict(named), starter_loss(task), about)
    names = sample.columns
    for name in named:
        if name not in names:
            hint = did_you_mean(name, names)
            raise UserError(
                f"{data} has no column {name!r}{hint} (it has {', '.join(names)})"
            )
    layout = Columns(named).layout(names)
    missing = []
    if not (layout.query or layout.query_image):
        missing.append("query")
    if not (layout.positive or layout.positive_image):
        missing.append("positive")
    guesses, reasons = guess(sample, missing, layout.read)
    mapping = {**named, **guesses}
    layout = Columns(mapping).layout(names)
    if layout.problem:
        raise UserError(
            f"{data}: {layout.problem}. The flags --query and --positive name columns too"
        )
    is_scored = layout.score is not None and not layout.negatives
    loss = starter_loss(task, is_scored=is_scored)
    queries, documents = sampled_items(sample, mapping)
    about = "about " if sample.is_estimate else ""
    about += f"{sample.num_records:,d} records; {len(sample.records):,d} looked at, with {', '.join(layout.read)}"
    return DataSummary(
        sample,
        mapping,
        loss,
        about,
        bool(layout.negatives),
        is_scored,
        reasons,
        _plain_texts(queries),
        _plain_texts(documents),
        header_doubt(sample),
    )


def starter_loss(task: Task, *, is_scored: bool = False) -> type[LossDeclaration]:
    """Return bce for rerankers, else the first loss of the table that learns from such records."""
    if task == "rerank":
        return LOSSES["bce"]
    records = "scores" if is_scored else "matches"
    return next(loss for loss in LOSSES.values() if loss.records == records)


def _plain_texts(items: Sequence[Item]) -> list[str]:
    """Return the texts of the items that have no image."""
    return [item.text for item in items if item.text is not None and not item.images]


def _line(
    name: str,
    value: Any,
    comment: str,
) -> str:
    return f"{name}: {one_line_yaml(value)}".ljust(32) + f"  # {comment}"
