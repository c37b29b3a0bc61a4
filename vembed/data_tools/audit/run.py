"""audit(): what is in training data, as a page, as JSON, and on request as cleaned data."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vembed.config.schema import ModelSection
from vembed.data.example_store import Records
from vembed.data.messages import joined, listed
from vembed.data.misreadings import unread_judgement
from vembed.data.overlap import find_overlap, warnings_of
from vembed.data_tools.audit.checks import (
    SHOWN_CHARACTERS,
    AuditedRows,
    Finding,
    Findings,
    check_rows,
    lengths,
    scripts,
)
from vembed.data_tools.audit.ranks import check_ranks
from vembed.data_tools.config import AuditConfig
from vembed.data_tools.init.data_page import PageSection, sections
from vembed.errors import UserError
from vembed.evaluation.report.page import render_page
from vembed.mining.candidates import open_candidates
from vembed.mining.config import MineConfig
from vembed.mining.known_positives import Inputs, read_inputs
from vembed.mining.mine import Log, open_session, work_folder
from vembed.mining.options import Source, load_options
from vembed.mining.output import check_output, write_rows
from vembed.mining.record_tables import Rows, open_rows
from vembed.parallel.session import Session
from vembed.progress import duration
from vembed.saving.durability import replace_text

SEVERITY_ORDER = ("error", "warning", "note")
LENGTH_COLUMNS = ("count", "mean", "p5", "median", "p95", "longest")
SOURCE_COLUMNS = [
    "source",
    "rows",
    "positive found first",
    "among the first 10",
    "documents above it (median)",
]


@dataclass(frozen=True)
class AuditResult:
    """Findings of an audit."""

    output_path: Path
    """The page; the JSON is beside it."""
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
    log: Log | None = None,
) -> AuditResult:
    """Check training data with the options of a YAML file, a dict or an `AuditConfig`. Collective, as `mine`."""
    config = load_options(AuditConfig, source, overrides)
    page = check_audit(config)
    json_path = page.with_suffix(".json")
    began = time.monotonic()
    with open_session(session, log) as (running, log_line):
        mining = mining_config(config)
        inputs = read_inputs(mining)
        rows = inputs.rows
        data = AuditedRows(rows)
        for line in inputs.summary():
            log_line(line)
        validation = None
        if config.val_data_path is not None:
            changes = {"data_path": config.val_data_path, "on_bad_record": "skip"}
            validation = AuditedRows(open_rows(config.model_copy(update=changes)))
        # The options that name the data, as arguments of a command.
        arguments = []
        for name in ("model_name", "data_path", "val_data_path", "corpus_path"):
            value = getattr(config, name)
            if isinstance(value, str):
                arguments.append(f"{name}={value}")
        findings = Findings(len(rows), config.num_examples, " ".join(arguments))
        _check_records(rows, findings)
        check_rows(data, validation, config.near_duplicate, findings)
        sources: dict[str, Any] = {}
        for name, size in zip(data.names, data.sizes, strict=True):
            sources[name] = {"rows": size}
        if config.model_name is not None:
            folder = work_folder(mining)
            search = open_candidates(mining, inputs, folder, running)
            search.find_all()
            sources = check_ranks(inputs, search, data, mining, findings)
            running.barrier()
            if running.is_main and not config.keep_work:
                shutil.rmtree(folder, ignore_errors=True)

        num_cleaned = None
        if config.cleaned_path is not None:
            dropped: set[int] = set()
            for kind in config.drop:
                dropped |= findings.rows_to_drop.get(kind, set())
            num_cleaned = len(rows) - len(dropped)
            if running.is_main:
                kept = (row for row in range(len(rows)) if row not in dropped)
                write_rows(check_output(config.cleaned_path), map(rows.record, kept))
            log_line(f"{config.cleaned_path}: {num_cleaned:,d} of {len(rows):,d} rows")
        parts = {
            "queries": [example.query for example in data.examples],
            "positives": [i for example in data.examples for i in example.positives],
            "negatives": [i for example in data.examples for i in example.negatives],
        }
        parts = {part: items for part, items in parts.items() if items}
        is_one = isinstance(config.data_path, str)
        report: dict[str, Any] = {
            "name": config.data_path if is_one else f"{len(data.names)} sources",
            "summary": " ".join(f"{line}." for line in inputs.summary()),
            "num_rows": len(data),
            "num_queries": inputs.known.num_queries,
            "num_documents": inputs.documents.num_candidates,
            "lengths": {part: lengths(items) for part, items in parts.items()},
            "scripts": {part: scripts(items) for part, items in parts.items()},
            "sources": sources,
            "findings": list(map(asdict, findings.found)),
        }
        if running.is_main:
            beginning = data_sections(config, inputs, data, validation)
            report["data"] = list(map(asdict, beginning))
            replace_text(page, render(report))
            replace_text(json_path, json.dumps(report, indent=2) + "\n")
        for finding in findings.found:
            log_line(
                f"{finding.severity}: {finding.title}: {finding.count:,d} ({finding.share:.1%})"
            )
        seconds = duration(time.monotonic() - began)
        log_line(
            f"{page} and {json_path.name}: {len(findings.found)} findings, in {seconds}"
        )
        running.barrier()
    return AuditResult(page, tuple(findings.found), report, num_cleaned)


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
    # Without limits, and with the rows' own negatives among the candidates: what they are is what the audit looks at.
    # Bad records are left out here and become a finding.
    return MineConfig.shared(
        config,
        # MineConfig wants a model; without one the audit searches nothing.
        model_name=config.model_name or "none",
        output_path=config.output_path,
        top_k=config.top_k,
        relative_margin=None,
        keep_negatives=False,
        on_bad_record="skip",
    )


def data_sections(
    config: AuditConfig,
    inputs: Inputs,
    data: AuditedRows,
    validation: AuditedRows | None,
) -> list[PageSection]:
    """Return the beginning of the page: the sections that `vembed data` shows, of the rows that the audit has read.

    Of the model only its tokenizer is read, if it is on this machine.
    """
    lines = inputs.summary()
    for table in inputs.rows.tables:
        if isinstance(table, Records):
            problems = joined(table.index.problems)
            lines += [f"left out: {problem}" for problem in problems]
            if table.index.unused:
                lines.append(f"{table.name}: not used: {listed(table.index.unused)}")
    if validation is not None:
        names = ", ".join(validation.names)
        lines.append(f"validation: {len(validation):,d} rows of {names}")
        pairs = []
        for example in validation.examples:
            pairs += [(example.query, positive) for positive in example.positives]
        warnings = warnings_of(find_overlap(data, pairs))
        lines += [f"warning: {warning}" for warning in warnings]
    model = None
    if config.model_name is not None:
        names_of_model = {"query_prompt", "document_prompt", "max_length"}
        options = config.model_dump(
            include=names_of_model | {"trust_remote_code"}, exclude_none=True
        )
        model = ModelSection(model_name=config.model_name, **options)
    return sections(data, lines, model)


def _check_records(rows: Rows, findings: Findings) -> None:
    """Records that training would refuse, and pairs with a column that probably says which match, and is not read."""
    tables = [table for table in rows.tables if isinstance(table, Records)]
    num_bad = sum(table.index.num_bad for table in tables)
    problems: list[dict[str, str]] = []
    for table in tables:
        for problem in table.index.problems:
            place, _, reason = problem.partition(": ")
            problems.append({"place": place, "reason": reason})
    findings.add(
        "bad_records",
        "error",
        "Records that are invalid",
        "Training stops at them, or leaves them out with on_bad_record: skip.",
        problems,
        count=num_bad,
        num_all=num_bad + len(rows),
        fix=f"vembed audit {findings.arguments} cleaned_path=cleaned.jsonl",
    )
    for table in tables:
        index = table.index
        sentence = unread_judgement(index.unused)
        if index.labels is None and not index.counts["scored"] and sentence is not None:
            examples = []
            for number in range(min(findings.num_examples, len(table))):
                example = {}
                for name, value in table.record(number).items():
                    example[name] = str(value)[:SHOWN_CHARACTERS]
                examples.append(example)
            findings.add(
                "unread_judgement",
                "warning",
                "Pairs that may not match",
                f"{table.name}: {sentence}.",
                examples,
                count=len(table),
            )


def render(report: Mapping[str, Any]) -> str:
    """Return the page: first what `vembed data` prints, then the findings."""
    ordered = sorted(
        report["findings"],
        key=lambda row: (SEVERITY_ORDER.index(row["severity"]), -row["share"]),
    )
    findings = []
    for finding in ordered:
        columns: dict[str, None] = {}
        for example in finding["examples"]:
            columns |= dict.fromkeys(example)
        examples = []
        for example in finding["examples"]:
            examples.append([example.get(name, "") for name in columns])
        numbers = {
            "count": f"{finding['count']:,d} ({finding['share']:.1%})",
            "columns": list(columns),
            "examples": examples,
        }
        findings.append(finding | numbers)

    words = []
    for part, values in report["lengths"].items():
        row = [part]
        for key in LENGTH_COLUMNS:
            row.append(f"{values[key]:,.0f}" if key in values else "")
        words.append(row)
    letters = []
    for part, shares in report["scripts"].items():
        names = [f"{name} {share:.1%}" for name, share in shares.items()]
        letters.append([part, ", ".join(names)])
    sources = []
    for source, values in report["sources"].items():
        row = [source]
        for key, value in values.items():
            row.append(f"{value:.1%}" if key.startswith("found") else f"{value:,.0f}")
        sources.append(row)
    # Title, header, rows, and whether the texts wrap.
    tables = [
        ("Words", ["words", *LENGTH_COLUMNS], words, False),
        ("Scripts", ["letters of", "scripts"], letters, True),
    ]
    if any(len(row) > 2 for row in sources):
        tables.append(("Sources and the model", SOURCE_COLUMNS, sources, False))
    return render_page(
        "audit.html.j2",
        title=f"Audit of {report['name']}",
        name=report["name"],
        summary=report["summary"],
        data_sections=report["data"],
        num_errors=sum(finding["severity"] == "error" for finding in findings),
        findings=findings,
        tables=tables,
    )
