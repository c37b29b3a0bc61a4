"""One report over all stages: what each was, how long it took, what it scored, and where its own report is."""

from __future__ import annotations

import json
from pathlib import Path

from vembed.config.stages import Pipeline
from vembed.files import read_json_object, read_state_text

REPORT = "stages.md"
_SHOWN = ("ndcg@10", "mrr@10", "recall@10", "spearman")


def write_report(pipeline: Pipeline, state_file: str) -> Path:
    """Write the report into the folder of all stages, and return it."""
    rows = []
    for step in pipeline.steps:
        folder = pipeline.folder(step.name)
        path = folder / state_file
        state = read_json_object(path) if path.exists() else {}
        scores = state.get("scores") or _last_scores(folder / "metrics.jsonl")
        scores_text = ", ".join(
            f"{name} {scores[name]:.4f}" for name in _SHOWN if name in scores
        )
        link = (
            f"[report]({folder.name}/report.html)"
            if (folder / "report.html").is_file()
            else ""
        )
        took = f"{state['seconds']:,.0f} s" if "seconds" in state else ""
        rows.append(
            f"| {step.name} | {step.kind} | {state.get('state', 'not run')} | {took} | {scores_text} | {link} |"
        )
    lines = [
        "# Stages",
        "",
        "| stage | step | state | took | scores | |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    path = Path(pipeline.root) / REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _last_scores(metrics: Path) -> dict[str, float]:
    """Return the newest evaluation of a training."""
    if not metrics.exists():
        return {}
    last_scores: dict[str, float] = {}
    for line in read_state_text(metrics, errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # the run was killed while it wrote its last line
        if "eval" in values:
            last_scores = values["eval"]
    return last_scores
