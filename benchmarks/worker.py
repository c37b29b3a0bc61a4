"""Worker process of one side. It answers tasks: one as an argument, or one per line of standard input."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import Case, model_without_dropout, rows_of
from benchmarks.sides import ENCODERS, IN_FLOAT32, SIDES, FirstBatch, Trained
from vembed.cli.commands.demo import demo_model

MARK = "ANSWER "
Answer = dict[str, Any]
AGREEMENT_STEPS = 2


def train_task(side: str, case: Case, agreement_steps: int, folder: Path) -> Answer:
    """Return losses without dropout, then the timed steps. The first of those creates the optimizer's state."""
    agreed = Trained()
    if agreement_steps:
        rows = rows_of(case, agreement_steps)
        agreed = SIDES[IN_FLOAT32.get(side, side)](
            case, folder / "no-dropout", folder / "agree", rows, agreement_steps
        )
    rows = rows_of(case, case.steps, skip=agreement_steps)
    try:
        trained = SIDES[side](case, demo_model(), folder / "timed", rows, case.steps)
    except FirstBatch as first:
        return {"first_batch_after": first.args[0] - _process_began()}
    seconds = (trained.ends[-1] - trained.ends[0]) / (case.steps - 1)
    return {
        "losses": agreed.losses,
        "padding": float(np.mean(trained.padding[1:] or [np.nan])),
        "each_step": np.diff(trained.ends).tolist(),
        "seconds_per_step": seconds,
        "samples_per_second": case.batch_size / seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def encode_task(side: str, num_texts: int, max_length: int, folder: Path) -> Answer:
    """Encode distinct functions of the standard library and leave the embeddings in the folder."""
    texts = [
        str(row["positive"])
        for row in rows_of(Case("texts", max_length, batch_size=num_texts), 1)
    ]
    shutil.copytree(demo_model(), folder / "model")
    seconds, embeddings = ENCODERS[side](folder / "model", texts, max_length)
    np.save(folder / "embeddings.npy", embeddings)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "samples_per_second": num_texts / seconds,
        "seconds": seconds,
        "peak_gb": peak,
    }


def answer(side: str, task: dict[str, Any]) -> Answer:
    """Run the named task and return its answer."""
    folder = Path(task["folder"])
    if "case" in task:
        return train_task(side, Case(**task["case"]), task["agreement_steps"], folder)
    return encode_task(side, task["num_texts"], task["max_length"], folder)


@contextmanager
def training_task(
    case: Case, agreement_steps: int = AGREEMENT_STEPS
) -> Iterator[dict[str, Any]]:
    """Return a case as a task, with a folder for it."""
    with tempfile.TemporaryDirectory() as name:
        for part in ("agree", "timed"):
            (Path(name) / part).mkdir()
        model_without_dropout(Path(name))
        yield {"case": asdict(case), "agreement_steps": agreement_steps, "folder": name}


class Worker:
    """Parent's handle of a process that takes many tasks."""

    def __init__(self, side: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `running`)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=_environment(),
        )

    def ask(self, task: dict[str, Any]) -> Answer:
        """Send a task and wait for the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                result: Answer = json.loads(line.removeprefix(MARK))
                return result
        self.errors.seek(0)
        raise SystemExit(f"a worker ended:\n{self.errors.read()[-3000:]}")


@contextmanager
def running(side: str) -> Iterator[Worker]:
    """Run a worker while the with-block runs."""
    worker = Worker(side)
    try:
        yield worker
    finally:
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait(timeout=60)
        worker.errors.close()


def ask_once(side: str, task: dict[str, Any], ranks: int = 1) -> Answer:
    """Run one task in a fresh process, or in as many as the case has ranks."""
    words = [sys.executable, "-m"]
    environment = _environment()
    if ranks > 1:
        words += [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
        ]
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    words += ["benchmarks.worker", side, "--task", json.dumps(task)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    result: Answer = json.loads(lines[-1].removeprefix(MARK))
    return result


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def _process_began() -> float:
    """Return the time at which this process was started, by time.perf_counter."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return (
        ticks / os.sysconf("SC_CLK_TCK")
        + time.perf_counter()
        - time.clock_gettime(time.CLOCK_BOOTTIME)
    )


def main() -> None:
    """Answer the task of the command line, or all of standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--task")
    arguments = parser.parse_args()
    for line in [arguments.task] if arguments.task else sys.stdin:
        result = answer(arguments.side, json.loads(line))
        if os.environ.get("RANK", "0") == "0":
            print("\n" + MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
