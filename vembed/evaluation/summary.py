"""RunSummary: what a run knows about itself at its end and its other files do not say; the report reads it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path

from vembed.errors import UserError

SUMMARY_FILE = "run.json"
REPORTED_PACKAGES = (
    "vembed", "torch", "transformers", "tokenizers", "accelerate", "peft", "bitsandbytes", "flash-attn", "datasets",
    "numpy",
)  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """Everything has a value that means "not known", so that a run that was cut short still gets a report."""

    model: str = ""
    """What the model is and why, as logged (`ModelDescription.summary()`)."""
    data: list[str] = field(default_factory=list)
    """What it was trained on, one line per source, counts and skipped records included."""
    evaluation: str = ""
    """What it was evaluated on (`EvalData.summary()`)."""
    metric: str = ""
    """The key that decided, e.g. ndcg@10; empty: from what was measured."""
    final_step: int | None = None
    """The step whose weights are in `final/`; None: the last one."""
    num_examples: int | None = None
    num_parameters: int | None = None
    num_trainable: int | None = None
    num_processes: int = 1
    strategy: str = ""
    device: str = ""
    precision: str = ""
    seconds: float | None = None
    """Wall-clock time of the run, over all resumed parts."""
    finished: str = ""
    """Date and time of the end, ISO 8601."""
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def save(self, output_dir: str | Path) -> None:
        """Write run.json; only the main process calls it."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        Path(output_dir, SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")


def read_summary(output_dir: str | Path) -> RunSummary:
    """What `save` wrote; an empty summary where there is none."""
    path = Path(output_dir, SUMMARY_FILE)
    if not path.is_file():
        return RunSummary()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    known = {one.name for one in fields(RunSummary)}
    return RunSummary(**{key: value for key, value in values.items() if key in known})


def collect_versions() -> dict[str, str]:
    """Versions of Python, the system and the packages that can change a result; those that are not installed are left
    out."""
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
