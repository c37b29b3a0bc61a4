"""python -m benchmarks.proof [parity|resume|exports]: the tables of docs/proof.md.

parity: gradients of the real step on several ranks against one dense float64 computation.
resume: a sharded run is killed and goes on with another number of processes; its weights against an unbroken run.
exports: folders with a wrong pooling, length or weight are served and compared with the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.harness import RankFailed
from tests.parity.engine import worst_error
from tests.parity.test_parity import BY_NAME, CASES, GROUPS, found, wanted

VEMBED = (sys.executable, "-m", "vembed")
NUM_STEPS = 24
KILL_AFTER_STEP = 14
SAVE_STEPS = 6
START_TIMEOUT_SECONDS = 180
DESCRIPTION_FILE = "vembed.json"
CHECKSUMS_FILE = "checksums.json"


def main(args: Sequence[str] | None = None) -> None:
    """Print one table, or all of them."""
    parts = {"parity": parity, "resume": resume, "exports": exports}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=parts)
    chosen = parser.parse_args(args).part
    for name, part in parts.items():
        if chosen in (None, name):
            print(f"\n## {name}\n")
            part()


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")


# ---- parity ------------------------------------------------------------------------------------------------------


def parity() -> None:
    """Print the largest relative error of any parameter's gradient, by case and strategy."""
    rows = []
    for case in CASES:
        row = [case.name, "yes" if case.cache else "no"]
        for group, (world_size, _, _) in GROUPS.items():
            row.append(_gradient_error(case.name, group, world_size))
        rows.append(row)
    print_table(["case", "Gradient Cache", *GROUPS], rows)


def _gradient_error(name: str, group: str, world_size: int) -> str:
    result = found(group).get(name)
    if result is None:
        return ""
    if isinstance(result, RankFailed):
        return "failed"
    case = BY_NAME[name]
    # Draws of dropout depend on the number of ranks, so that the reference repeats them.
    has_dropout = case.dropout or case.options.get("lora_dropout")
    _, error = worst_error(result, wanted(name, world_size if has_dropout else 1))
    return f"{error:.0e}"


# ---- resume ------------------------------------------------------------------------------------------------------


def resume() -> None:
    """Print the distance of the weights of killed and resumed runs from those of an unbroken one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("demo", "--output", folder / "demo", "--quick", "max_steps=1")
        model = folder / "demo" / "final"
        # Random draws of dropout depend on the number of processes.
        _edit_json(
            model / "config.json", hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
        whole = train(folder, "whole", 1)
        rows = []
        for first, second in ((1, 1), (2, 2), (2, 1), (1, 2), (2, 3)):
            run_name = f"killed-{first}-{second}"
            train(folder, run_name, first, kill_after=KILL_AFTER_STEP)
            weights = train(folder, run_name, second, "resume=true")
            distance = relative_distance(weights, whole)
            rows.append([str(first), str(second), f"{distance:.1e}"])
        header = ["processes before the kill", "after it", "relative distance"]
        print_table(header, rows)


def train(
    folder: Path, name: str, num_processes: int, *more: str, kill_after: int = 0
) -> dict[str, torch.Tensor]:
    """Train sharded over `num_processes`; return the weights, none of a run that was killed after a step."""
    output = folder / name
    options = [
        f"model_name={folder / 'demo' / 'final'}",
        f"data_path={folder / 'demo' / 'data' / 'train.jsonl'}",
        f"output_dir={output}",
        "global_batch_size=12",
        f"max_steps={NUM_STEPS}",
        f"save_steps={SAVE_STEPS}",
        "strategy=fsdp" if num_processes > 1 else "strategy=single",
        "mixed_precision=no",
        "logging_steps=1",
        "report_to=none",
    ]
    command = [*VEMBED, "train", *options, *more, "--nproc", str(num_processes)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    metrics = output / "metrics.jsonl"
    while kill_after and process.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) >= kill_after:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {}
        time.sleep(0.05)
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(errors.decode())
    return load_file(output / "final" / "model.safetensors")


def relative_distance(
    weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> float:
    """Return the norm of the difference of all weights, relative to the norm of the weights."""
    difference = 0.0
    norm = 0.0
    for name, weight in weights.items():
        difference += float((weight.double() - others[name].double()).square().sum())
        norm += float(others[name].double().square().sum())
    return (difference / norm) ** 0.5


# ---- exports -----------------------------------------------------------------------------------------------------


def exports() -> None:
    """Print what `vembed check-server` says of a right folder and of three that were changed on purpose."""
    changes: dict[str, Callable[[Path], None]] = {
        "nothing": lambda model: None,
        "pooling: first token in place of the mean": _wrong_pooling,
        "texts cut at 16 tokens in place of 64": _short_texts,
        "one weight matrix halved": _wrong_weight,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("demo", "--output", folder / "demo", "--quick", "max_steps=1")
        right = folder / "demo" / "final"
        rows = []
        for number, (change, apply) in enumerate(changes.items()):
            copy = folder / f"copy-{number}"
            shutil.copytree(right, copy)
            apply(copy)
            rows.append([change, *_compare_with_server(copy, right)])
        print_table(["changed in the served folder", "exit code", "says"], rows)


def _edit_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def _wrong_pooling(model: Path) -> None:
    _edit_json(model / DESCRIPTION_FILE, pooling="cls")


def _short_texts(model: Path) -> None:
    _edit_json(model / DESCRIPTION_FILE, max_length=16)


def _wrong_weight(model: Path) -> None:
    path = model / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "layer.0.attention" in name)
    weights[name] = weights[name] / 2
    save_file(weights, path, metadata={"format": "pt"})
    # With checksums that do not match vembed would refuse to serve the folder.
    (model / CHECKSUMS_FILE).unlink()


def _compare_with_server(served: Path, model: Path) -> list[str]:
    """Return the exit code and the last line of `vembed check-server`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    port = address.rpartition(":")[2]
    server = subprocess.Popen(
        [*VEMBED, "serve", str(served), "--port", port],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(f"{address}/health", server)
        done = run("check-server", address, model, check=False)
    finally:
        server.terminate()
        server.wait()
    distance = re.search(r"largest cosine distance \S+", done.stdout + done.stderr)
    return [str(done.returncode), distance[0] if distance else ""]


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5)
        except OSError:
            time.sleep(0.2)
        else:
            return
    sys.exit(f"{address} did not answer")


def run(*args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of vembed."""
    command = [*VEMBED, *map(str, args)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(done.stderr)
    return done


if __name__ == "__main__":
    main()
