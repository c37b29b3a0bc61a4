"""python -m tests.stress.chaos: a real run killed, stopped, halted, cut off from the disk and damaged until it is done.

Then it is compared with the same run left in peace: no step missing or doubled, equal losses, equal weights, no process
left over.
"""

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

from tests.commands import start as start_forked
from tests.tiny import tiny_bert
from tests.training.test_run import final_weights, settings

STEPS_PER_ROUND = 4
PATIENCE_SECONDS = 120.0
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
TOLERANCES = {"losses": 1e-5, "weights": 1e-5, "key biases": 2e-4}
"""The gradient of an attention key's bias is zero in exact arithmetic: what moves it is rounding."""
FAULTS = ("kill", "kill all", "launcher", "stop", "halt", "evaluation", "disk")
"""One per round in turn: SIGKILL to one process, to all, to the launcher alone; SIGTERM to one; SIGSTOP of a rank for a
moment; SIGKILL in an evaluation; a limit on the size of files, as a disk that fills up in the checkpoint."""
SMALL_FILES = 100_000
"""Bytes; less than a checkpoint's tensors, more than its index."""


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
        files = sorted(path for path in newest.iterdir() if path.stat().st_size)
        victim = draw.choice(files)
        os.truncate(victim, draw.randrange(victim.stat().st_size))
        faults["damaged checkpoint"] += 1
    print(
        f"round {number + 1}: {strategy} on {nproc}, {fault}, "
        f"step {last_step(broken)}, exit code {process.returncode}",
        flush=True,
    )


def write_run(folder, num_steps):
    """A tiny model, data and config; the path of the config."""
    options = settings(
        folder,
        model_name=str(tiny_bert(folder / "model")),
        global_batch_size=12,
        max_steps=num_steps,
        learning_rate=1e-3,
        # The gradient of an attention key bias is zero but for rounding, which Adam would blow up to whole steps.
        adam_epsilon=1e-4,
        micro_batch_tokens=64,
        use_gradient_cache=True,
        eval_steps=2,
        save_steps=2,
        resume="auto",
    )
    del options["batch_size"]
    path = folder / "run.yaml"
    path.write_text(json.dumps(options))
    return path


def start_run(
    config, output, nproc, strategy, *, has_small_disk=False, is_forked=False
):
    """`vembed train` as a user starts it, in a process group of its own and in its output folder."""
    options = [f"output_dir={output}", f"strategy={strategy}", "--nproc", str(nproc)]
    words = ["train", str(config), *options]
    output.mkdir(exist_ok=True)
    path = output.parent / f"{output.name}.txt"
    if is_forked:
        return start_forked(
            *words,
            stdout=path,
            stderr=path,
            folder=output,
            max_file_bytes=SMALL_FILES if has_small_disk else None,
        )
    limit = ["prlimit", f"--fsize={SMALL_FILES}"] if has_small_disk else []
    with path.open("ab") as console:
        return subprocess.Popen(
            [*limit, sys.executable, "-m", "vembed", *words],
            stdout=console,
            stderr=console,
            env=ENVIRONMENT,
            cwd=output,
            start_new_session=True,
        )


def finish(process):
    """Wait for a run that nobody disturbs."""
    code = process.wait(timeout=10 * PATIENCE_SECONDS)
    assert code == 0, f"exit code {code}"


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
    allowed = {0, 1, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}
    if fault == "disk":
        allowed = {0, 1, 2}  # 2: a full disk is found before anything is written
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
    for key in ("eval", "loss"):
        expected = steps_and_losses(whole, key)
        actual = steps_and_losses(broken, key)
        assert list(actual) == list(expected), f"{key}: missing or doubled"
    worst = {"losses": 0.0, "weights": 0.0, "key biases": 0.0}
    for step, loss in expected.items():
        error = abs(actual[step] - loss) / max(1.0, abs(loss))
        worst["losses"] = max(worst["losses"], error)
    weights = final_weights(broken)
    others = final_weights(whole)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        kind = "key biases" if name.endswith("key.bias") else "weights"
        worst[kind] = max(worst[kind], float(abs(weight - others[name]).max()))
    for kind, error in worst.items():
        print(f"{kind} within {error:.1e}")
        assert error <= TOLERANCES[kind], kind


if __name__ == "__main__":
    main()
