"""`vembed init`: a commented starter config for a data file, whose columns and sizes are summary at, and a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

from vembed.cli.commands.demo import demo_model
from vembed.config.loading import load_config, one_line_yaml
from vembed.config.options import join_words, nearest
from vembed.data.columns import Columns
from vembed.data.conversations import as_fields, is_conversation
from vembed.data.example_store import open_examples
from vembed.data.examples import BadRecord
from vembed.data.formats.saved_datasets import has_validation_split
from vembed.data.images.files import IMAGE_SUFFIXES
from vembed.data.language import is_english
from vembed.data.records import Mode
from vembed.data_tools.init import values
from vembed.data_tools.init.columns import (
    bad_records,
    confirm,
    doubts_about,
    guess,
    is_terminal,
)
from vembed.data_tools.init.data_page import unlogged
from vembed.data_tools.init.sample import FileSample, read_sample, texts_of, utf8_copy
from vembed.errors import UserError
from vembed.models.families.family import Family
from vembed.models.families.table import FAMILIES

GUESSED = "# GUESSED, please check: "
"""Beginning of a line about a guess."""
CHECK = "# CHECK: "
"""Beginning of a line about something that may be wrong."""
SMALLEST_SCORED = 200
"""Scored pairs from which a tenth can be held out."""
MAX_CHECKED = 100_000
"""Records that are all checked, as training does. Of larger data only the first ones are summary at."""
DEMO = "demo"
"""Name for --model: all-MiniLM-L6-v2 from the demo's package, without a network."""


@dataclass(frozen=True, slots=True)
class DataSummary:
    """Findings in the data file."""

    sample: FileSample
    mapping: dict[str, str]
    loss: str
    about: str
    """One line on the records."""
    guesses: dict[str, str]
    """Columns that were guessed -> why."""
    queries: list[str]
    documents: list[str]
    doubts: list[str] = field(default_factory=list)
    """Sentences on what may be wrong with the data, for the user to check."""
    bad: tuple[int, str] = (0, "")
    """How many of the first records are invalid, and what is wrong with the first one."""


def run_init(
    family: str,
    data: str = "train.jsonl",
    output: str = "vembed.yaml",
    *,
    model: str | None = None,
    val_data: str | None = None,
    mapping: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write the config. Raise UserError if the file exists already or the data file cannot be used for training.

    `mapping`: columns that the user names; only the others are guessed.
    """
    path = Path(output)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--output {output}: a starter config is YAML: give a name that ends in .yaml"
        )
    if path.exists() and not force:
        raise UserError(
            f"{output} exists already: give another --output, or --force to overwrite it"
        )
    kind = FAMILIES.get(family)
    if kind is None:
        near = nearest(family, FAMILIES)
        hint = (
            f", did you mean {near!r}?"
            if near
            else f": give one of {join_words(list(FAMILIES))}"
        )
        raise UserError(f"--family {family!r} is not known{hint}")
    data, about = _in_utf8(data, force)
    val_data, about_val = (None, "") if val_data is None else _in_utf8(val_data, force)
    text = (
        starter(kind, data, model=model, val_data=val_data, mapping=mapping)
        + about
        + about_val
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    # Read as `vembed train` will read it: what is written here is never refused there.
    load_config(path)
    for line in text.splitlines():
        if line.startswith((CHECK, GUESSED)):
            sys.stderr.write(f"note: {line.removeprefix(CHECK).removeprefix('# ')}\n")
    return path


def _in_utf8(data: str, force: bool) -> tuple[str, str]:
    """Return the file to train on, of one that is not UTF-8 a copy that is, and a comment on it for the config."""
    made = utf8_copy(Path(data), force=force)
    if made is None:
        return data, ""
    copy, encoding = made
    sys.stderr.write(
        f"note: {data} is not UTF-8; {copy} is a copy that is, read as {encoding}: check its letters\n"
    )
    return (
        str(copy),
        f"\n# GUESSED, please check its letters: {copy} is a copy of {data} in UTF-8, read as {encoding}\n",
    )


def starter(
    family: Family,
    data: str,
    *,
    model: str | None = None,
    val_data: str | None = None,
    mapping: Mapping[str, str] | None = None,
) -> str:
    """Return the text of the config."""
    kind = family.starter
    if val_data is None and has_validation_split(Path(data)):
        val_data = data
    if Path(data).is_dir() and any(
        path.suffix.lower() in IMAGE_SUFFIXES for path in Path(data).iterdir()
    ):
        raise UserError(
            f"--data {data} is a folder of images, which says nothing of what belongs together: give a file whose "
            'records name them, such as {"query": "a cat", "positive": {"image": "cat.jpg"}} (docs/data.md)'
        )
    summary = look_at(
        read_sample(Path(data)),
        data,
        mapping or {},
        cast(Mode, kind.retrieval_mode or "auto"),
    )
    name = str(demo_model()) if model == DEMO else model or kind.model_name
    about = kind.about
    if (
        model is None
        and kind.multilingual is not None
        and not is_english([*summary.queries, *summary.documents])
    ):
        name = kind.multilingual
        about = f"{kind.about} of many languages: the texts are not English"
    facts = values.model_facts(name)
    is_foreign = not is_english([*summary.queries, *summary.documents])
    if model == DEMO and is_foreign:
        summary.doubts.append(
            "the texts are not English, and the model of the demo is English: give --model one of many languages, "
            f"such as {kind.multilingual or 'intfloat/multilingual-e5-small'}"
        )
    lines = [
        "# A starter config for vembed. Train with:   vembed train <this file>",
        "# What the data are:                        vembed data <this file>",
        "# What it comes to:                         vembed config <this file>",
        "# Every option, with its default and meaning: docs/options.md, or `vembed schema` for your editor.",
        "",
        _line("model_name", name, f"a name on the Hub or a local folder ({about})"),
    ]
    if kind.image_model_name:
        lines += [
            _line("model_family", family.name, "two towers"),
            _line("image_model_name", kind.image_model_name, "images"),
        ]
    lines += _data_lines(family, summary, data, val_data, facts)
    lines += _training_lines(family, summary, val_data, facts)
    lines += _bad_record_lines(summary, "\n".join(lines))
    if facts is not None:
        from vembed.cli.commands.init_memory import (
            memory_lines,  # imported late: torch takes seconds
        )

        lines += memory_lines("\n".join(lines))
    else:
        lines += [
            "",
            f"# Memory: not planned, since {name} is not on this machine; once it is, `vembed plan <this file>`",
        ]
    return "\n".join(lines) + "\n"


def _data_lines(
    family: Family,
    summary: DataSummary,
    data: str,
    val_data: str | None,
    facts: values.ModelFacts | None,
) -> list[str]:
    kind = family.starter
    lines = [
        "",
        f"# Data: {summary.about}",
        _line(
            "data_path",
            data,
            "JSONL, CSV, TSV, Parquet, a folder of `datasets`, a Hub name",
        ),
    ]
    if summary.mapping:
        lines.append(
            _line(
                "column_mapping",
                summary.mapping,
                "names in your file: names that vembed reads",
            )
        )
        lines += [
            f"{GUESSED}{column} is the {summary.mapping[column]} ({why})"
            for column, why in summary.guesses.items()
        ]
    lines += [f"{CHECK}{doubt}" for doubt in summary.doubts]
    share = _held_out(summary, val_data)
    if val_data:
        lines.append(
            _line("val_data_path", val_data, "scored before, during and after training")
        )
    elif share is not None:
        lines.append(
            _line(
                "val_split",
                share,
                "share of the queries held out, scored before and after",
            )
        )
    else:
        lines.append(
            "# val_data_path: val.jsonl        # as data_path, or a BEIR-style folder; scored before and after"
        )
    if kind.retrieval_mode is not None:
        lines.append(
            _line(
                "retrieval_mode",
                kind.retrieval_mode,
                "plain strings are paths of images",
            )
        )
    if not family.reads_only_text:
        lines.append(
            "# image_root: images              # where relative image paths start; default: beside the data file"
        )
    if kind.max_length is not None:
        lengths = values.measure([*summary.queries, *summary.documents], facts)
        limit = None if facts is None else facts.max_length
        lines.append(
            _line(
                "max_length",
                values.fitting_length(lengths, limit, kind.max_length),
                _said(lengths, limit),
            )
        )
    if family.reads_only_text:
        lines.append(
            '# query_prompt: "query: "         # put before every query; default: what the model brings along'
        )
    return lines


def _bad_record_lines(summary: DataSummary, text: str) -> list[str]:
    """Return lines that leave out the records that training would refuse."""
    sample = summary.sample
    if not sample.records:
        return []
    num_bad, first = summary.bad
    total = f"the first {len(sample.records):,d}"
    if not sample.is_estimate and sample.num_records <= MAX_CHECKED:
        # All of them, with their images, as training does.
        config = load_config({**yaml.safe_load(text), "on_bad_record": "skip"})
        try:
            with unlogged():
                store = open_examples(config, config.data.data_path)
        except UserError as error:
            return [f"{CHECK}{str(error).splitlines()[0]}"]
        num_bad = store.num_skipped
        total = f"{len(store) + num_bad:,d}"
        for line in reversed(store.summary()):
            if line.startswith("left out: "):
                first = line.removeprefix("left out: ")
    if not num_bad:
        return []
    return [
        f"{CHECK}{num_bad:,d} of {total} records are invalid and left out, the first: {first}",
        _line("on_bad_record", "skip", "fix these records to train on all"),
    ]


def _held_out(summary: DataSummary, val_data: str | None) -> float | None:
    """Return the share of the data that becomes validation data."""
    num_records = summary.sample.num_records
    # A correlation needs more pairs, and different scores among them.
    is_enough = summary.loss == "infonce" or num_records >= SMALLEST_SCORED
    return values.held_out_share(num_records) if is_enough and not val_data else None


def _training_lines(
    family: Family,
    summary: DataSummary,
    val_data: str | None,
    facts: values.ModelFacts | None,
) -> list[str]:
    kind = family.starter
    num_records = summary.sample.num_records
    held_out = _held_out(summary, val_data) or 0.0
    num_train = int(num_records * (1 - held_out))
    batch = values.fitting_batch(num_train, kind.batch_size)
    epochs = values.fitting_epochs(num_train, has_scale=family.has_scale_and_bias)
    total = max(num_train // batch, 1) * epochs if num_train else 0
    between = values.steps_between(total)
    lines = [
        "",
        "# Training",
        _line(
            "loss",
            summary.loss,
            "infonce: pairs; cosent: pairs with scores; triplet: given negatives",
        ),
    ]
    if summary.loss in ("infonce", "cosent"):
        model_temperature = None if facts is None else facts.temperature
        why = (
            "smaller: harder"
            if model_temperature is None
            else "as this model was trained; smaller: harder"
        )
        lines.append(_line("temperature", model_temperature or kind.temperature, why))
    passes = "passes over the data by their number"
    if total:
        passes = (
            f"{epochs:,d} passes over {num_train:,d} examples, {total:,d} steps in all"
        )
    if val_data or held_out:
        passes += "; auto ends early where the score stops rising"
    lines += [
        _line(
            "batch_size",
            batch,
            "examples per process; memory is bounded by micro-batches, so larger is fine",
        ),
        _line("epochs", "auto", passes),
        _line(
            "learning_rate",
            kind.learning_rate or "auto",
            "auto: by what is trained; the log says which and why",
        ),
    ]
    if kind.use_lora:
        lines.append(
            _line("use_lora", True, "train small adapters instead of all weights")
        )
    lines += [
        "# use_mrl: true                   # Matryoshka: embeddings that can be cut to fewer numbers",
        "# use_fsdp: true                  # shard a large model over several GPUs",
        "",
        "# Output",
        _line(
            "output_dir",
            "output",
            "settings, logs, checkpoints, the model in final/, report.html",
        ),
    ]
    if between is None:
        lines += [
            "# eval_steps: 100                 # evaluate during training (needs validation data)",
            "# save_steps: 100                 # write checkpoints to go on from with --resume",
        ]
    else:
        is_scored = bool(val_data or held_out)
        lines += [
            _line("eval_steps", between, "evaluate during training")
            if is_scored
            else f"# eval_steps: {between}".ljust(32)
            + "  # evaluate during training (needs validation data)",
            _line(
                "save_steps", between, "write checkpoints to go on from with --resume"
            ),
        ]
    return lines


def look_at(
    sample: FileSample, data: str, columns_given: Mapping[str, str], mode: Mode = "auto"
) -> DataSummary:
    """Return what the first records show. `given`: columns that the user names."""
    sample = replace(sample, records=[_fields(record) for record in sample.records])
    if not sample.records:
        return DataSummary(
            sample,
            dict(columns_given),
            "infonce",
            "not summary at (no file of that name here)",
            {},
            [],
            [],
        )
    names = sample.columns
    for name in columns_given:
        if name not in names:
            near = nearest(name, names)
            hint = f", did you mean {near!r}?" if near else ""
            raise UserError(
                f"{data} has no column {name!r}{hint} (it has {', '.join(names)})"
            )
    layout = Columns(columns_given).layout(names)
    has = {
        "query": layout.query or layout.query_image,
        "positive": layout.positive or layout.positive_image,
    }
    missing = [role for role, name in has.items() if name is None]
    guesses_made = guess(sample.records, missing, layout.read)
    # Asked only where each missing part has a column to choose from.
    mapping = (
        confirm(guesses_made, missing)
        if missing and len(guesses_made.candidates) >= len(missing) and is_terminal()
        else None
    )
    guesses = guesses_made.reasons if mapping is None else {}
    mapping = {
        **columns_given,
        **(guesses_made.mapping if mapping is None else mapping),
    }
    layout = Columns(mapping).layout(names)
    if layout.problem:
        raise UserError(f"{data}: {layout.problem}, or with --query and --positive")
    scored = layout.score is not None and not layout.negatives
    first = len(sample.records)
    many = f"{'about ' if sample.is_estimate else ''}{sample.num_records:,d} records"
    about = f"{many}; the first {first:,d} records have {', '.join(layout.read)}"
    queries = _texts(sample, (layout.query,))
    documents = _texts(sample, (layout.positive, *layout.negatives))
    loss = "cosent" if scored else "infonce"
    return DataSummary(
        sample,
        mapping,
        loss,
        about,
        guesses,
        queries,
        documents,
        doubts_about(sample, mapping),
        bad_records(sample, data, mapping, loss, mode),
    )


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record of conversations; other records, and those that cannot be read, as they are."""
    try:
        return as_fields(record) if is_conversation(record) else record
    except BadRecord:
        return record


def _texts(sample: FileSample, names: Sequence[str | None]) -> list[str]:
    guesses_made = (
        text
        for record in sample.records
        for name in names
        for text in texts_of(record.get(name or ""))
    )
    return [text for text in guesses_made if text is not None]


def _said(lengths: values.Lengths | None, limit: int | None) -> str:
    most = f"; this model reads {limit:,d}" if limit is not None else ""
    if lengths is None:
        return f"tokens; longer texts are cut{most}"
    how = (
        "measured"
        if lengths.is_measured
        else "estimated from the characters, the model is not here"
    )
    return f"tokens; 99 % of the texts have at most {lengths.full:,d} ({how}), the longest {lengths.longest:,d}{most}"


def _line(name: str, value: Any, comment: str) -> str:
    return f"{name}: {one_line_yaml(value)}".ljust(32) + f"  # {comment}"
