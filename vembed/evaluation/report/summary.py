"""RunSummary: facts about a finished run that its other files lack. The report reads it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path

from vembed.files import read_json_object
from vembed.saving.durability import replace_text

SUMMARY_FILE = "run.json"
REPORTED_PACKAGES = (
    "vembed",
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "flash-attn",
    "datasets",
    "numpy",
)


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run. Every field has a "not known" value, so that an interrupted run still gets a report."""

    model: str = ""
    """The model and the reasons for its settings, as logged (`ModelDescription.summary()`)."""
    properties: list[str] = field(default_factory=list)
    """The model's name and what its users need to know of it, one line each."""
    data: list[str] = field(default_factory=list)
    """The training data, one line per source, with counts and skipped records."""
    language: str | None = None
    """Of the training texts. Empty: unclear and not English."""
    evaluation: str = ""
    """The evaluation data (`EvalData.summary()`)."""
    metric: str = ""
    """The deciding metric, e.g. ndcg@10. Empty: derived from the measured ones."""
    final_step: int | None = None
    """The step whose weights are in `final/`. None: the last one."""
    num_steps: int | None = None
    """Optimizer steps of the run."""
    num_examples: int | None = None
    num_parameters: int | None = None
    num_trainable: int | None = None
    num_processes: int = 1
    strategy: str = ""
    device: str = ""
    precision: str = ""
    decisions: dict[str, dict[str, str]] = field(default_factory=dict)
    """Decisions of the run by name, each with its value, reason and source."""
    seconds: float | None = None
    """Wall-clock time of the run, over all resumed parts."""
    finished: str = ""
    """Date and time of the end, ISO 8601."""
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def save(self, output_dir: str | Path) -> None:
        """Write run.json. Only the main process calls it."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        replace_text(Path(output_dir, SUMMARY_FILE), text + "\n")


def read_summary(output_dir: str | Path) -> RunSummary:
    """Read the summary; return an empty one if there is none."""
    path = Path(output_dir, SUMMARY_FILE)
    if not path.exists():
        return RunSummary()
    values = read_json_object(path)
    # A later version of vembed may have written more.
    known = {field.name for field in fields(RunSummary)}
    return RunSummary(**{key: value for key, value in values.items() if key in known})


def collect_versions() -> dict[str, str]:
    """Return versions of Python, the system and packages that can affect a result. Packages not installed are left
    out."""
    versions = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in REPORTED_PACKAGES:
        version = _version_of(package)
        if version is not None:
            versions[package] = version
    return versions


@cache
def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
