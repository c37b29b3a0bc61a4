"""python -m benchmarks.step: a step against a plain padded one, and peak memory by batch size, Gradient Cache and
gradient checkpointing. Every row is a training run in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, Case, rows_of, write_rows
from benchmarks.train import compare, machine, table
from benchmarks.worker import AGREEMENT_STEPS, ask_once
from vembed.cli.commands.demo import demo_model

MODES: dict[str, dict[str, Any]] = {
    "graphs kept": {"use_gradient_cache": False},
    "gradient checkpointing": {
        "use_gradient_cache": False,
        "gradient_checkpointing": True,
    },
    "Gradient Cache": {"use_gradient_cache": True},
    "both": {"use_gradient_cache": True, "gradient_checkpointing": True},
}
MICRO_BATCH_TOKENS = 4096


def run_here(case: Case, options: dict[str, Any]) -> dict[str, float]:
    """Train the case in this process. Return the seconds of the last step and the process's peak memory."""
    import vembed

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(rows_of(case, case.steps), case.batch_size, folder / "data.jsonl")
        result = vembed.train(
            {
                "model_name": str(demo_model()),
                "data_path": str(folder / "data.jsonl"),
                "output_dir": str(folder / "out"),
                "batch_size": case.batch_size,
                "max_length": case.max_length,
                "micro_batch_tokens": MICRO_BATCH_TOKENS,
                "logging_steps": 1,
                "report_to": [],
                **options,
            }
        )
        lines = [
            json.loads(line)
            for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()
        ]
    seconds = [line["step_seconds"] for line in lines if "loss" in line]
    return {
        "seconds": seconds[-1],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def run_apart(case: Case, options: dict[str, Any]) -> dict[str, float]:
    """Train the case in a fresh process."""
    words = json.dumps({"case": asdict(case), "options": options})
    command = [sys.executable, "-m", "benchmarks.step", "--worker", words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return result


def memory_table() -> str:
    """Return the process's peak memory as the batch grows, with the same budget."""
    lines = [
        "| batch, texts of 64 tokens | peak GB | times the first |",
        "|---|---|---|",
    ]
    first = 0.0
    for batch_size in (64, 512, 2048):
        case = Case(
            f"memory-{batch_size}", 64, batch_size=batch_size, steps=1, uniform=True
        )
        peak = run_apart(case, {})["peak_gb"]
        first = first or peak
        lines.append(f"| {batch_size:,d} | {peak:.2f} | {peak / first:.2f} |")
    return "\n".join(lines)


def mode_table(batch_size: int = 256) -> str:
    """Return the memory saved by Gradient Cache and gradient checkpointing, and their time."""
    lines = [
        f"| batch {batch_size}, 128 tokens | seconds per step | peak GB |",
        "|---|---|---|",
    ]
    case = Case("modes", 128, batch_size=batch_size, steps=2, uniform=True)
    for name, options in MODES.items():
        result = run_apart(case, options)
        lines.append(f"| {name} | {result['seconds']:.1f} | {result['peak_gb']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["plain", "memory", "modes"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work = json.loads(arguments.worker)
        print("RESULT " + json.dumps(run_here(Case(**work["case"]), work["options"])))
        return
    print(machine() + "\n", flush=True)
    if arguments.only in (None, "plain"):
        chosen = [case for case in CASES if case.name in ("natural-128", "uniform-128")]
        results = [
            compare(ask_once, case, "plain", 1, AGREEMENT_STEPS) for case in chosen
        ]
        print(table(results, "plain"), flush=True)
    if arguments.only in (None, "memory"):
        print(memory_table(), flush=True)
    if arguments.only in (None, "modes"):
        print(mode_table(), flush=True)


if __name__ == "__main__":
    main()
