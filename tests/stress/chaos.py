"""python -m tests.stress.chaos: a real run killed, stopped, halted, cut off from the disk and damaged until it is done.

Then it is compared with the same run left in peace: no step missing or doubled, equal losses, equal weights, no process
left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
from safetensors.torch import load_file

from tests.commands import Started
from tests.commands import start as start_forked
from tests.tiny import WORDS, tiny_bert

STEPS_PER_ROUND = 4
PATIENCE_SECONDS = 120.0
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-5
FAULTS = ("kill", "kill all", "launcher", "stop", "halt", "evaluation", "disk")
"""One per round in turn: SIGKILL to one process, to all, to the launcher alone; SIGTERM to one; SIGSTOP of a rank for a
moment; SIGKILL in an evaluation; a limit on the size of files, as a disk that fills up in the checkpoint."""
SMALL_FILES = 100_000
"""Bytes; less than a checkpoint's tensors, more than its index."""
Process = subprocess.Popen[bytes] | Started
KEY_BIAS_TOLERANCE = 2e-4
"""The gradient of an attention key's bias is zero in exact arithmetic: what moves it is rounding."""


def main(words=None):
    """Parse the arguments and run; exit code 0 if the two runs are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=50, help="how often the run is broken"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="vembed-chaos-") as folder:
        chaos(Path(folder), arguments.rounds, arguments.seed)


def chaos(folder, rounds, seed, *, is_forked=False):
    """Break a run `rounds` times in `folder`, and assert that it ends equal to the unbroken one. Return the number of
    faults of each kind.

    `is_forked`: its processes are forked from the tests' server, which saves the time of their imports.
    """
    start = partial(start_run, is_forked=is_forked)
    print(f"chaos: {rounds} rounds, seed {seed}")
    whole = folder / "whole"
    broken = folder / "broken"
    config = write_run(folder, num_steps=STEPS_PER_ROUND * (rounds + 1))
    draw = random.Random(seed)
    faults = Counter()
    for number in range(rounds):
        one_round(start, config, broken, draw, number, faults)
    process = start(config, broken, 1, "ddp")
    is_final_begun = (broken / ".final.new").exists
    wait_until(process, is_final_begun, seconds=10 * PATIENCE_SECONDS)
    hurt(process, "kill all", draw, faults)
    finish(start(config, broken, 2, "ddp"))
    finish(start(config, whole, 1, "ddp"))
    compare(whole, broken)
    print(f"faults: {dict(faults)}")
    return faults


def one_round(start, config, broken, draw, number, faults):
    """Start the run, let it take some steps, and break it; every fifth time damage its newest checkpoint."""
    nproc = draw.choice([1, 2, 3])
    strategy = draw.choice(["ddp", "fsdp"])
    fault = FAULTS[number % len(FAULTS)]
    process = start(config, broken, nproc, strategy, has_small_disk=fault == "disk")
    wait_for_steps(
        process, broken, last_step(broken) + draw.randint(0, STEPS_PER_ROUND)
    )
    if fault == "evaluation":
        wait_until(process, lambda: is_evaluating(broken))
    else:
        time.sleep(draw.random() * 0.2)
    hurt(process, fault, draw, faults)
    assert_nobody_left(broken)
    newest = max(broken.glob("checkpoint-*[0-9]"), key=step_of, default=None)
    if newest is not None and number % 5 == 4:
        victim = draw.choice(
            sorted(path for path in newest.iterdir() if path.stat().st_size)
        )
        os.truncate(victim, draw.randrange(victim.stat().st_size))
        faults["damaged checkpoint"] += 1
    print(
        f"round {number + 1}: {strategy} on {nproc}, {fault}, "
        f"step {last_step(broken)}, exit code {process.returncode}",
        flush=True,
    )


def write_run(folder, num_steps):
    """A tiny model, data and config; the path of the config."""
    draw = random.Random(0)
    lines = []
    for _ in range(96):
        first, second = draw.sample(WORDS, 2)
        positive = " ".join(
            [first, *draw.choices(WORDS, k=draw.randint(1, 20)), second]
        )
        lines.append(json.dumps({"query": f"{first} {second}", "positive": positive}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "val.jsonl").write_text("\n".join(lines[:40]) + "\n")
    settings = {
        "model_name": str(tiny_bert(folder / "model", dropout=0.0)),
        "data_path": str(folder / "train.jsonl"),
        "global_batch_size": 12,
        "max_steps": num_steps,
        "learning_rate": 1e-3,
        # The gradient of an attention key bias is zero but for rounding, which Adam would blow up to whole steps.
        "adam_epsilon": 1e-4,
        "micro_batch_tokens": 64,
        "use_gradient_cache": True,
        "val_data_path": str(folder / "val.jsonl"),
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "resume": "auto",
        "report_to": "none",
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def start_run(
    config, output, nproc, strategy, *, has_small_disk=False, is_forked=False
):
    """`vembed train` as a user starts it, in a process group of its own and in its output folder."""
    words = [
        "train",
        str(config),
        f"output_dir={output}",
        f"strategy={strategy}",
        "--nproc",
        str(nproc),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    output.mkdir(exist_ok=True)
    if is_forked:
        path = output.parent / f"{output.name}.txt"
        most = SMALL_FILES if has_small_disk else None
        return start_forked(
            *words, stdout=path, stderr=path, folder=output, max_file_bytes=most
        )
    limit = ["prlimit", f"--fsize={SMALL_FILES}"] if has_small_disk else []
    with (output.parent / f"{output.name}.txt").open("ab") as console:
        return subprocess.Popen(
            [*limit, sys.executable, "-m", "vembed", *words],
            stdout=console,
            stderr=console,
            env=environment,
            cwd=output,
            start_new_session=True,
        )


def finish(process):
    """Wait for a run that nobody disturbs."""
    assert process.wait(timeout=10 * PATIENCE_SECONDS) == 0, (
        f"exit code {process.returncode}"
    )


def wait_until(process, condition, seconds=PATIENCE_SECONDS):
    """Until the condition holds, the process has ended, or the patience has."""
    end = time.monotonic() + seconds
    while process.poll() is None and not condition() and time.monotonic() < end:
        time.sleep(0.002)


def wait_for_steps(process, output, expected):
    """Until the run has logged a step."""
    wait_until(process, lambda: last_step(output) >= expected)


def is_evaluating(output):
    """Whether a step is logged whose evaluation is not."""
    content = (output / "metrics.jsonl").read_bytes()
    lines = [line for line in content.splitlines() if line.endswith(b"}")]
    if not lines:
        return False
    last = json.loads(lines[-1])
    return "loss" in last and last["step"] % 2 == 0


def hurt(process, fault, draw, faults):
    """Do one of FAULTS to a run, and wait for its end."""
    family = [process.pid, *(child.pid for child in children(process.pid))]
    if process.poll() is None or fault == "disk":
        faults[fault] += 1
    if process.poll() is None:
        if fault in ("kill", "evaluation"):
            send(draw.choice(family), signal.SIGKILL)
        elif fault == "kill all":
            for entry in family:
                send(entry, signal.SIGKILL)
        elif fault == "launcher":
            send(process.pid, signal.SIGKILL)
        elif fault == "halt":
            halted = draw.choice(family)
            send(halted, signal.SIGSTOP)
            time.sleep(1.0)
            send(halted, signal.SIGCONT)
            send(draw.choice(family), signal.SIGTERM)
        elif fault == "stop":
            send(draw.choice(family), signal.SIGTERM)
    code = process.wait(timeout=PATIENCE_SECONDS)
    # 2: a full disk is found before anything is written.
    allowed = (
        (0, 1, 2)
        if fault == "disk"
        else (0, 1, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
    )
    assert code in allowed, f"exit code {code}"


def children(pid):
    """All processes below one that is still there."""
    try:
        yield from psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return


def send(pid, number):
    """A signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def assert_nobody_left(output):
    """Within a few seconds no process works on the folder any more."""
    end = time.monotonic() + 30
    while True:
        left = [
            entry
            for entry in psutil.process_iter(["cwd"])
            if entry.info["cwd"] == str(output.resolve())
        ]
        if not left:
            return
        assert time.monotonic() < end, f"orphans: {[entry.pid for entry in left]}"
        time.sleep(0.1)


def last_step(output):
    """The newest logged step; 0 before the first."""
    return max(steps_and_losses(output), default=0)


def steps_and_losses(output, key="loss"):
    """Every logged step, or evaluation, once; AssertionError where one is doubled."""
    path = output / "metrics.jsonl"
    actual = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
        except ValueError:
            continue  # cut by a kill; resuming drops it
        if key in values:
            assert values["step"] not in actual, f"step {values['step']} is there twice"
            actual[values["step"]] = values[key]
    return actual


def step_of(checkpoint):
    """checkpoint-12 -> 12."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def compare(whole, broken):
    """Same steps, same losses, same weights."""
    evaluations = steps_and_losses(whole, "eval"), steps_and_losses(broken, "eval")
    assert list(evaluations[0]) == list(evaluations[1]), (
        "evaluations are missing or doubled"
    )
    expected = steps_and_losses(whole)
    actual = steps_and_losses(broken)
    assert list(actual) == list(expected), (
        f"steps differ: {sorted(set(expected) ^ set(actual))}"
    )
    worst = max(
        abs(actual[step] - expected[step]) / max(1.0, abs(expected[step]))
        for step in expected
    )
    assert worst <= LOSS_TOLERANCE, f"losses differ by {worst:.1e}"
    first, two = (
        load_file(folder / "final" / "model.safetensors") for folder in (whole, broken)
    )
    assert first.keys() == two.keys()
    off = {name: float((first[name] - two[name]).abs().max()) for name in first}
    for name, difference in off.items():
        bound = KEY_BIAS_TOLERANCE if name.endswith("key.bias") else WEIGHT_TOLERANCE
        assert difference <= bound, f"{name} differs by {difference:.1e}"
    worst_weight = max(
        difference for name, difference in off.items() if not name.endswith("key.bias")
    )
    print(
        f"losses within {worst:.1e}, weights within {worst_weight:.1e} (key biases {max(off.values()):.1e})"
    )


if __name__ == "__main__":
    main()
