"""audit(): what is in training data, as a page, as JSON, and on request as cleaned data."""

import functools
import json
import shlex
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vembed.config.loading import one_line_yaml
from vembed.data.datasets import short_item
from vembed.data.example_store import Records, Rows
from vembed.data.examples import ImageRoot
from vembed.data.near_duplicates import NearIndex, comparable_text, ngrams
from vembed.errors import UserError
from vembed.evaluation.report.page import render_page
from vembed.files import replace_text
from vembed.mining.candidates import CandidateSearch, calibrate, open_candidates
from vembed.mining.inputs import (
    MiningInputs,
    content_key,
    open_command_session,
    open_rows,
    read_mining_inputs,
)
from vembed.mining.mine import clear_folder, work_folder
from vembed.mining.options import (
    READING_OPTIONS,
    AuditConfig,
    CommandConfigSource,
    MineConfig,
    load_options,
)
from vembed.mining.output import check_output, write_rows
from vembed.progress import Log, duration

Severity = Literal["error", "warning", "note"]
preview = functools.partial(short_item, length=300)
"""An item for the page."""
LOW_RANK = 10
"""A positive below so many other documents is looked at."""


@dataclass(frozen=True)
class Finding:
    """One thing to look at."""

    kind: str
    severity: Severity
    title: str
    text: str
    count: int
    share: float
    """Of the rows, or of what the text says."""
    fix: str
    """The command that fixes it."""
    examples: list[dict[str, str]]


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
    source: CommandConfigSource,
    overrides: Sequence[str] = (),
    *,
    log: Log | None = None,
) -> AuditResult:
    """Check training data with the options of a YAML file, a dict or an `AuditConfig`. Collective, as `mine`."""
    config = load_options(AuditConfig, source, overrides)
    page = check_audit(config)
    json_path = page.with_suffix(".json")
    began = time.monotonic()
    with open_command_session(log) as (running, log_line):
        mining = mining_config(config)
        inputs = read_mining_inputs(mining)
        rows = inputs.rows
        data = AuditedRows(rows)
        for line in inputs.summary():
            log_line(line)
        validation = None
        if config.val_data_path is not None:
            changes = {
                "data_path": config.val_data_path,
                "on_bad_record": "skip",
                "split": None,
            }
            options = config.model_copy(update=changes)
            validation = AuditedRows(open_rows(options, "validation"))
        checks = Checks(config, data)
        checks.records(rows)
        checks.duplicates()
        checks.contradictions()
        if config.near_duplicate is not None:
            checks.near_duplicates(config.near_duplicate)
        if validation is not None:
            checks.leakage(validation)
        sizes = zip(rows.names, rows.sizes, strict=True)
        sources = {name: {"rows": size} for name, size in sizes}
        if config.model_name is not None:
            folder = work_folder(mining)
            search = open_candidates(mining, inputs, folder, running)
            sources = checks.ranks(inputs, search, mining)
            if not config.keep_work:
                clear_folder(folder, running)

        num_cleaned = None
        if config.cleaned_path is not None:
            dropped = set()
            for kind in config.drop:
                dropped |= checks.rows_to_drop.get(kind, set())
            num_cleaned = len(rows) - len(dropped)
            if running.is_main:
                kept_rows = (row for row in range(len(rows)) if row not in dropped)
                cleaned = Path(config.cleaned_path).expanduser()
                root = ImageRoot.of(config, cleaned.parent)
                write_rows(cleaned, (rows.row(row, root) for row in kept_rows))
            log_line(f"{config.cleaned_path}: {num_cleaned:,d} of {len(rows):,d} rows")
        findings = checks.findings
        name = f"{len(rows.names)} sources"
        if isinstance(config.data_path, str):
            name = config.data_path
        report = {
            "name": name,
            "summary": " ".join(f"{line}." for line in inputs.summary()),
            "num_rows": len(data),
            "num_queries": inputs.known.num_queries,
            "num_documents": inputs.documents.num_candidates,
            "sources": sources,
            "findings": list(map(asdict, findings)),
        }
        if running.is_main:
            title = f"Audit of {name}"
            html = render_page("audit.html.j2", title=title, report=report)
            replace_text(page, html)
            replace_text(json_path, json.dumps(report, indent=2) + "\n")
        for finding in findings:
            # Not as a line that begins with "error:": the command has not failed.
            log_line(
                f"finding ({finding.severity}): {finding.title}: {finding.count:,d} ({finding.share:.1%})"
            )
        seconds = duration(time.monotonic() - began)
        log_line(f"{page} and {json_path.name}: {len(findings)} findings, in {seconds}")
        running.barrier()
    return AuditResult(page, tuple(findings), report, num_cleaned)


def check_audit(config: AuditConfig) -> Path:
    """Refuse what cannot be written before anything is read; returns the page's path."""
    page = check_output(config, config.output_path, (".html", ".htm"))
    check_output(config, str(page.with_suffix(".json")), (".json",))
    if config.cleaned_path is not None:
        check_output(config, config.cleaned_path, option="cleaned_path")
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


class AuditedRows:
    """The rows of a data set in memory, with the contents of their queries and positives as numbers."""

    def __init__(self, rows: Rows) -> None:
        self.examples = list(rows)
        self.names = rows.names
        self.sources = np.repeat(np.arange(len(rows.sizes)), rows.sizes)
        """Number of each row's source."""
        self.query_keys = [content_key(example.query) for example in self.examples]
        self.positive_keys = [
            list(map(content_key, example.positives)) for example in self.examples
        ]

    def __len__(self) -> int:
        return len(self.examples)

    def preview(self, row: int, **more: str) -> dict[str, str]:
        """A row for the page, with more columns."""
        example = self.examples[row]
        return {
            "row": str(row + 1),
            "query": preview(example.query),
            "positive": preview(example.positives[0]),
        } | more


class Checks:
    """The checks of an audit. Each adds its findings, and the rows that `cleaned_path` may leave out."""

    def __init__(self, config: AuditConfig, data: AuditedRows) -> None:
        self.config = config
        self.data = data
        self.findings: list[Finding] = []
        self.rows_to_drop: dict[str, set[int]] = {}
        # The options that name and read the data, as arguments of a command that is advised.
        arguments = []
        for name in ("model_name", "data_path", "corpus_path", *READING_OPTIONS):
            value = getattr(config, name)
            if isinstance(value, str | dict):
                arguments.append(f"{name}={one_line_yaml(value)}")
        self.arguments = shlex.join(arguments)
        self.command = (
            f"vembed audit {self.arguments} cleaned_path={self.new_file('cleaned')}"
        )
        if config.val_data_path is not None:
            self.command += f" val_data_path={config.val_data_path}"

    def new_file(self, name: str) -> str:
        """Return the name of a file that an advised command writes, other than that of the data."""
        file = f"{name}.jsonl"
        return f"new-{file}" if self.config.data_path == file else file

    def add(
        self,
        kind: str,
        severity: Severity,
        title: str,
        text: str,
        examples: Iterable[dict[str, str]],
        *,
        count: int,
        num_bad: int = 0,
        fix: str = "",
    ) -> None:
        """Add a finding about `count` of all rows, and of `num_bad` that are invalid, if there are any."""
        if count:
            share = count / (len(self.data) + num_bad)
            first = list(islice(examples, self.config.num_examples))
            finding = Finding(kind, severity, title, text, count, share, fix, first)
            self.findings.append(finding)

    def add_rows(
        self,
        kind: str,
        severity: Severity,
        title: str,
        text: str,
        rows: Collection[int],
        examples: Iterable[dict[str, str]],
    ) -> None:
        """Add a finding about rows that `cleaned_path` may leave out."""
        self.rows_to_drop[kind] = set(rows)
        fix = f"{self.command} drop=[{kind}]"
        self.add(kind, severity, title, text, examples, count=len(rows), fix=fix)

    def records(self, rows: Rows) -> None:
        """Records that training would refuse."""
        num_bad = 0
        problems = []
        for source in rows.sources:
            if not isinstance(source, Records):
                continue
            num_bad += source.index.counts["bad"]
            for problem in source.index.problems:
                place, _, reason = problem.partition(": ")
                problems.append({"place": place, "reason": reason})
        self.add(
            "bad_records",
            "error",
            "Records that are invalid",
            "Training stops at them, or leaves them out with on_bad_record: skip.",
            problems,
            count=num_bad,
            num_bad=num_bad,
            fix=self.command,
        )

    def duplicates(self) -> None:
        """Rows that say again what another row says."""
        data = self.data
        first_rows: dict[tuple[int, ...], int] = {}
        copies = {}
        for row, query in enumerate(data.query_keys):
            content = (query, *sorted(data.positive_keys[row]))
            first = first_rows.setdefault(content, row)
            if first != row:
                copies[row] = first
        self.add_rows(
            "duplicates",
            "warning",
            "Rows that occur more than once",
            "Query and positives are equal, apart from case and spaces. Each copy is trained on again.",
            copies,
            (
                data.preview(row, **{"the same as row": str(first + 1)})
                for row, first in copies.items()
            ),
        )

    def contradictions(self) -> None:
        """Pairs that one row calls relevant and another one not."""
        data = self.data
        positive_row: dict[tuple[int, int], int] = {}
        for row, query in enumerate(data.query_keys):
            for key in data.positive_keys[row]:
                positive_row.setdefault((query, key), row)
        examples = []
        rows = set()
        for row, query in enumerate(data.query_keys):
            example = data.examples[row]
            for item in example.negatives:
                earlier = positive_row.get((query, content_key(item)))
                if earlier is None:
                    continue
                rows.add(row)
                examples.append(
                    {
                        "query": preview(example.query),
                        "document": preview(item),
                        "positive in": data.names[data.sources[earlier]],
                        "negative in": data.names[data.sources[row]],
                    }
                )
        self.add_rows(
            "contradictions",
            "error",
            "Pairs that are positive in one row and negative in another",
            "The query and the document of both are equal, apart from case and spaces.",
            rows,
            examples,
        )

    def near_duplicates(self, threshold: float) -> None:
        """Rows that, query and positive together, are near-duplicates of an earlier row that stays."""
        data = self.data
        texts = []
        for example in data.examples:
            pair = [
                comparable_text(example.query),
                comparable_text(example.positives[0]),
            ]
            # A side without a text to compare says that there are images.
            texts.append("\n".join(pair) if all(pair) else "")
        index = NearIndex(map(ngrams, texts), threshold)
        near = {}
        for row in range(len(texts)):
            if row in self.rows_to_drop["duplicates"]:
                continue
            earlier = next(index.near(row), None)
            if earlier is None:
                index.add(row)
            else:
                near[row] = earlier
        examples = []
        for row, earlier in islice(near.items(), self.config.num_examples):
            other = data.preview(earlier)
            text = f"{other['row']}: {other['query']} -> {other['positive']}"
            examples.append(data.preview(row, **{"near row": text}))
        self.add_rows(
            "near_duplicates",
            "note",
            "Rows that are nearly the same",
            f"At least {threshold:.0%} of the word 3-grams of one are in the other.",
            near,
            examples,
        )

    def leakage(self, validation: AuditedRows) -> None:
        """Training rows whose query is in the validation data too, or nearly."""
        data = self.data
        in_validation = dict.fromkeys(validation.query_keys, "the same query")
        num_held_out = len(in_validation)
        num_held_out_equal = len(in_validation.keys() & data.query_keys)
        num_equal = sum(key in in_validation for key in data.query_keys)
        if self.config.near_duplicate is not None:
            # Each query once: rows of one query leak together.
            queries = {}
            for rows in (validation, data):
                for key, example in zip(rows.query_keys, rows.examples, strict=True):
                    queries[key] = comparable_text(example.query)
            texts = list(queries.values())
            index = NearIndex(map(ngrams, texts), self.config.near_duplicate)
            for number, key in enumerate(queries):
                if number < num_held_out:
                    index.add(number)
                    continue
                other = next(index.near(number), None)
                if other is not None:
                    in_validation[key] = texts[other]
        leaks = {
            row: in_validation[key]
            for row, key in enumerate(data.query_keys)
            if key in in_validation
        }
        self.add_rows(
            "leakage",
            "error",
            "Training rows with a query of the validation data",
            f"{num_equal:,d} rows have the same query and {len(leaks) - num_equal:,d} a similar one. Of the "
            f"{num_held_out:,d} validation queries, {num_held_out_equal:,d} are in the training data. Scores on these "
            "say what was memorised.",
            leaks,
            (
                data.preview(row, **{"in validation": text})
                for row, text in leaks.items()
            ),
        )

    def ranks(
        self,
        inputs: MiningInputs,
        search: CandidateSearch,
        mining: MineConfig,
    ) -> dict[str, Any]:
        """Where positives rank, how many negatives would be false, and what each source adds.

        Return per source: rows, the share whose positive the model ranks first, among the first ten, and the median
        number of documents above it.
        """
        data = self.data
        known = inputs.known
        chunks = list(search.chunks())
        documents_QK = np.concatenate([chunk.documents for chunk in chunks])
        scores_QK = np.concatenate([chunk.scores for chunk in chunks])
        first_Q = documents_QK[:, 0]
        # The score of the best known positive of each query, -inf where none is known. Known positives are no
        # candidates, so that all above it are others.
        best_Q = np.full(known.num_queries, -np.inf)
        positive_scores = np.concatenate([chunk.positive_scores for chunk in chunks])
        # ufunc.at, not fancy indexing: a query with several positives occurs several times.
        np.maximum.at(best_Q, known.positives.queries, positive_scores)
        above_Q = (scores_QK > best_Q[:, None]).sum(axis=1)
        finite_QK = np.where(np.isfinite(scores_QK), scores_QK, np.inf)
        is_weak_Q = best_Q < finite_QK.min(axis=1, initial=np.inf)
        above = above_Q[known.query_of_row]

        def row_preview(row: int) -> dict[str, str]:
            first = int(first_Q[known.query_of_row[row]])
            text = preview(inputs.documents.item(first)) if first >= 0 else ""
            columns = {
                "documents above it": f"{above[row]:,d}",
                "the first of them": text,
            }
            return data.preview(row, **columns)

        low = np.flatnonzero(above >= LOW_RANK)
        low_rows = low[np.argsort(-above[low], kind="stable")].tolist()
        self.add_rows(
            "low_positives",
            "warning",
            f"Positives that rank below {LOW_RANK} or more other documents",
            "The model finds other documents more similar to the query than each of its known positives. These rows are "
            "hard, or wrong.",
            low_rows,
            map(row_preview, low_rows),
        )
        weak = np.flatnonzero(is_weak_Q[known.query_of_row]).tolist()
        self.add_rows(
            "weak_queries",
            "warning",
            "Queries without any positive that looks relevant",
            f"None of the known positives is among the {mining.top_k} documents that are most similar to the query.",
            weak,
            map(row_preview, weak),
        )

        passed = np.flatnonzero((above_Q > 0) & np.isfinite(best_Q))
        # Estimated share of relevant documents among the best candidates.
        try:
            estimate = calibrate(chunks, mining, mining.seed)
            text = (
                f"An estimated {estimate.rate_without:.1%} of the best {mining.num_negatives} candidates of each query are "
                f"in truth relevant ({estimate.num_hidden:,d} known positives were hidden for the estimate). "
                f"{estimate.threshold} brings the rate to {estimate.rate:.1%}."
            )
        except UserError:
            text = "Too few queries with known positives for an estimate of the rate."
        lead = scores_QK[passed, 0] - best_Q[passed]

        def query_preview(query: int) -> dict[str, str]:
            candidate = inputs.documents.item(int(first_Q[query]))
            return {
                "query": preview(known.item(query)),
                "known positive scores": f"{best_Q[query]:.3f}",
                "candidate scores": f"{scores_QK[query, 0]:.3f}",
                "candidate": preview(candidate),
            }

        self.add(
            "false_negatives",
            "warning",
            "Documents above the known positive: candidates for false negatives",
            text,
            map(query_preview, passed[np.argsort(-lead, kind="stable")].tolist()),
            count=len(passed),
            fix=f"vembed mine {self.arguments} output_path={self.new_file('mined')} threshold=auto",
        )
        by_source = {}
        for number, name in enumerate(data.names):
            of_source = above[data.sources == number]
            by_source[name] = {
                "rows": len(of_source),
                "found_first": float((of_source == 0).mean()),
                "found_in_10": float((of_source < 10).mean()),
                "median_above": float(np.median(of_source)),
            }
        return by_source
