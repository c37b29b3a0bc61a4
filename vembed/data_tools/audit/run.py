"""audit(): what is in training data, as a page, as JSON, and on request as cleaned data."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vembed.config.schema import TrainConfig
from vembed.data.columns import judgement_column, unread_judgement
from vembed.data.examples import Example
from vembed.data.messages import joined, listed
from vembed.data.overlap import find_overlap, warnings_of
from vembed.data_tools.audit.checks import (
    SHOWN_CHARACTERS,
    Checker,
    Finding,
    Texts,
    items_by_part,
    lengths,
    per_source,
    rank_findings,
    scripts,
)
from vembed.data_tools.audit.page import render
from vembed.data_tools.init.data_page import sections
from vembed.data_tools.init.sections import Section
from vembed.errors import UserError
from vembed.mining.candidates import CandidateStore
from vembed.mining.config import AuditConfig, MineConfig
from vembed.mining.mine import Inputs, Say, open_session, read_inputs
from vembed.mining.options import Source, load_options
from vembed.mining.output import check_output, row_writer
from vembed.mining.record_tables import FileTable, Rows, open_rows
from vembed.parallel.session import Session
from vembed.progress import duration
from vembed.saving.durability import replace_text


class _Examples:
    """The rows of an audit as examples of their sources."""

    def __init__(self, data: Texts) -> None:
        self._data = data
        self.names = data.names
        self.sizes = tuple(per_source(data).values())

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> Example:
        return self._data.examples[index]

    def source_of(self, index: int) -> int:
        """Return the number of the source of a row."""
        return self._data.sources[index]


def data_sections(
    config: AuditConfig, inputs: Inputs, data: Texts, validation: Texts | None
) -> list[Section]:
    """Return the sections. Of the model only its tokenizer is read, if it is on this machine."""
    examples = _Examples(data)
    read = [*inputs.summary()]
    for table in inputs.rows.tables:
        if isinstance(table, FileTable):
            read += [f"left out: {problem}" for problem in joined(table.index.problems)]
            if table.index.unused:
                read.append(f"{table.name}: not used: {listed(table.index.unused)}")
    if validation is not None:
        read.append(
            f"validation: {len(validation):,d} rows of {', '.join(validation.names)}"
        )
        pairs = [
            (one.query, item) for one in validation.examples for item in one.positives
        ]
        read += [
            f"warning: {one}" for one in warnings_of(find_overlap(examples, pairs))
        ]
    return sections(
        examples,
        read,
        None if config.model_name is None else _model_config(config, config.model_name),
    )


def _model_config(config: AuditConfig, name: str) -> TrainConfig:
    names = ("query_prompt", "document_prompt", "max_length", "trust_remote_code")
    given = config.model_dump(include=set(names), exclude_none=True)
    return TrainConfig(model_name=name, data_path="unused", **given)


@dataclass(frozen=True)
class AuditResult:
    """Findings of an audit."""

    output_path: Path
    """The page; the JSON stands beside it."""
    findings: tuple[Finding, ...]
    report: dict[str, Any]
    """Content of the JSON file."""
    num_cleaned: int | None
    """Rows that were written to `cleaned_path`."""


def audit(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    session: Session | None = None,
    say: Say | None = None,
) -> AuditResult:
    """Look at training data as a YAML file, a dict or an AuditConfig says. Collective, as `mine`."""
    config = load_options(AuditConfig, source, overrides)
    page = check_audit(config)
    began = time.monotonic()
    with open_session(session, say) as (running, tell):
        inputs = read_inputs(mining_config(config))
        data = Texts.of(inputs.rows)
        for line in inputs.summary():
            tell(line)
        validation = _validation(config)
        words = command_words(config)
        checker = Checker(
            data,
            validation,
            near_duplicate=config.near_duplicate,
            num_examples=config.num_examples,
            words=words,
        )
        findings = [
            *_bad_records(inputs.rows, config.num_examples, words),
            *_unread_judgements(inputs.rows, config.num_examples),
            *checker.findings(),
        ]
        to_drop = dict(checker.rows_to_drop)
        sources: dict[str, Any] = {
            name: {"rows": count} for name, count in per_source(data).items()
        }
        if config.model_name is not None:
            found, sources, more = _with_model(config, inputs, data, running, words)
            findings += found
            to_drop |= more

        num_cleaned = None
        if config.cleaned_path is not None:
            # Counted on every rank, since all return the result; the first one writes.
            num_cleaned = len(inputs.rows) - len(
                set().union(*(to_drop.get(kind, set()) for kind in config.drop))
            )
            if running.is_main:
                _write_cleaned(config, inputs.rows, to_drop)
            tell(
                f"{config.cleaned_path}: {num_cleaned:,d} of {len(inputs.rows):,d} rows"
            )
        report = _report(config, inputs, data, findings, sources)
        if running.is_main:
            beginning = data_sections(config, inputs, data, validation)
            report["data"] = [asdict(one) for one in beginning]
            replace_text(page, render(report["name"], report, beginning, findings))
            replace_text(page.with_suffix(".json"), json.dumps(report, indent=2) + "\n")
        for one in findings:
            tell(f"{one.severity}: {one.title}: {one.count:,d} ({one.share:.1%})")
        names = f"{page} and {page.with_suffix('.json').name}"
        tell(
            f"{names}: {len(findings)} findings, in {duration(time.monotonic() - began)}"
        )
        running.barrier()
    return AuditResult(page, tuple(findings), report, num_cleaned)


def check_audit(config: AuditConfig) -> Path:
    """Refuse what cannot be written before anything is read; returns the page's path."""
    page = Path(config.output_path).expanduser()
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"output_path: {config.output_path} must end in .html; the JSON is written beside it"
        )
    if not page.absolute().parent.is_dir():
        raise UserError(
            f"{page.absolute().parent} is no folder, so {page.name} cannot be written there"
        )
    if config.cleaned_path is not None:
        check_output(config.cleaned_path)
    return page


def mining_config(config: AuditConfig) -> MineConfig:
    """The search that an audit needs, as options of mining."""
    # near_duplicate has another meaning in an audit: between rows, not between a candidate and a positive.
    names = set(MineConfig.model_fields) & set(AuditConfig.model_fields) - {
        "near_duplicate"
    }
    values = config.model_dump(include=names, exclude_unset=True)
    # MineConfig wants a model; without one the audit searches nothing.
    fixed = {
        "model_name": config.model_name or "none",
        "output_path": config.output_path,
        "top_k": config.top_k,
    }
    return MineConfig.model_validate(
        # Without limits, and with the rows' own negatives among the candidates: what they are is what the audit looks
        # at. Bad records are left out here and become a finding.
        values
        | fixed
        | {"relative_margin": None, "keep_negatives": False, "on_bad_record": "skip"}
    )


def command_words(config: AuditConfig) -> str:
    """The options that name the data, as words of a command."""
    names = ("model_name", "data_path", "val_data_path", "corpus_path")
    values = config.model_dump(include=set(names), exclude_none=True)
    return " ".join(
        f"{name}={values[name]}" for name in names if isinstance(values.get(name), str)
    )


def _validation(config: AuditConfig) -> Texts | None:
    if config.val_data_path is None:
        return None
    return Texts.of(
        open_rows(
            config.model_copy(
                update={"data_path": config.val_data_path, "on_bad_record": "skip"}
            )
        )
    )


def _with_model(
    config: AuditConfig, inputs: Inputs, data: Texts, session: Session, words: str
) -> tuple[list[Finding], dict[str, Any], dict[str, set[int]]]:
    mining = mining_config(config)
    folder = Path(config.work_dir or f"{config.output_path}.work").expanduser()
    store = CandidateStore(mining, inputs.documents, inputs.known, folder, session)
    store.find_all()
    found, sources, to_drop = rank_findings(
        inputs, store, data, mining, config.num_examples, words
    )
    session.barrier()
    if session.is_main and not config.keep_work:
        shutil.rmtree(folder, ignore_errors=True)
    return found, dict(sources), to_drop


def _bad_records(rows: Rows, num_examples: int, words: str) -> list[Finding]:
    """Records that training would refuse: no JSON, empty texts, broken or missing images."""
    problems = [
        problem
        for table in rows.tables
        if isinstance(table, FileTable)
        for problem in table.index.problems
    ]
    count = sum(
        table.index.num_bad for table in rows.tables if isinstance(table, FileTable)
    )
    if not count:
        return []
    examples = [
        dict(zip(("place", "reason"), problem.split(": ", 1), strict=False))
        for problem in problems[:num_examples]
    ]
    return [
        Finding(
            "bad_records",
            "error",
            "Records that cannot be used",
            "Training stops at them, or leaves them out with on_bad_record: skip.",
            count,
            count / (count + len(rows)),
            f"vembed audit {words} cleaned_path=cleaned.jsonl",
            examples,
        )
    ]


def _unread_judgements(rows: Rows, num_examples: int) -> list[Finding]:
    """Pairs with a column that probably says which of them match, and is not read."""
    found = []
    for table in rows.tables:
        if (
            not isinstance(table, FileTable)
            or table.index.labels is not None
            or table.index.counts.scored
        ):
            continue
        column, sentence = (
            judgement_column(table.index.unused),
            unread_judgement(table.index.unused),
        )
        if column is None or sentence is None:
            continue
        records = [
            table.record(number) for number in range(min(num_examples, len(table)))
        ]
        found.append(
            Finding(
                "unread_judgement",
                "warning",
                "Pairs that may not match",
                f"{table.name}: {sentence}.",
                len(table),
                len(table) / len(rows),
                examples=[
                    {name: str(value)[:SHOWN_CHARACTERS] for name, value in one.items()}
                    for one in records
                ],
            )
        )
    return found


def _write_cleaned(
    config: AuditConfig, rows: Rows, to_drop: dict[str, set[int]]
) -> None:
    dropped: set[int] = set().union(*(to_drop.get(kind, set()) for kind in config.drop))
    assert config.cleaned_path is not None
    with row_writer(check_output(config.cleaned_path)) as writer:
        for row in range(len(rows)):
            if row not in dropped:
                writer.write(rows.record(row))


def _report(
    config: AuditConfig,
    inputs: Inputs,
    data: Texts,
    findings: Sequence[Finding],
    sources: dict[str, Any],
) -> dict[str, Any]:
    parts = {name: items for name, items in items_by_part(data).items() if items}
    name = (
        config.data_path
        if isinstance(config.data_path, str)
        else f"{len(data.names)} sources"
    )
    return {
        "name": name,
        "summary": " ".join(f"{line}." for line in inputs.summary()),
        "num_rows": len(data),
        "num_queries": inputs.known.num_queries,
        "num_documents": inputs.documents.num_candidates,
        "lengths": {part: lengths(items) for part, items in parts.items()},
        "scripts": {part: scripts(items) for part, items in parts.items()},
        "sources": sources,
        "findings": [one.to_dict() for one in findings],
    }
