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
from dataclasses import dataclass, field
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


@dataclass
class Story:
    """What was done to the run so far, kept in the folder: a story may be told in several sittings."""

    seed: int
    num_rounds: int
    """Rounds that are done."""
    faults: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    """Strategies and numbers of processes."""
    is_equal: bool = False
    """True when the run has been finished and compared."""

    @classmethod
    def of(cls, folder, seed):
        """Return the story of a folder, or a new one."""
        path = folder / "story.json"
        if not path.exists():
            return cls(seed, 0)
        values = json.loads(path.read_text())
        return cls(
            **values | {name: Counter(values[name]) for name in ("faults", "starts")}
        )

    def write(self, folder):
        """Keep the story in the folder."""
        (folder / "story.json").write_text(json.dumps(vars(self)))


def main(words=None):
    """Parse the arguments and run; exit code 0 if the two runs are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=50, help="how often the run is broken"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the runs here, and go on with them in another sitting",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no round after so long",
    )
    parser.add_argument(
        "--forked",
        action="store_true",
        help="fork all processes from one that has imported torch",
    )
    arguments = parser.parse_args(words)
    until = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory(prefix="vembed-chaos-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chaos(
            folder,
            arguments.rounds,
            arguments.seed,
            is_forked=arguments.forked,
            until=until,
        )


def chaos(folder, rounds, seed, *, is_forked=False, until=float("inf")):
    """Break a run `rounds` times in `folder`, then compare it with the unbroken one; asserts that they are equal. After
    `until` it returns; another call goes on.

    `is_forked`: its processes are forked from the tests' server, which saves the time of their imports.
    """
    start = partial(start_run, is_forked=is_forked)
    story = Story.of(folder, seed)
    print(f"chaos: {rounds} rounds, seed {story.seed}, {story.num_rounds} of them done")
    whole = folder / "whole"
    broken = folder / "broken"
    config = folder / "run.yaml"
    if not config.exists():
        write_run(folder, num_steps=STEPS_PER_ROUND * (rounds + 1))
    while story.num_rounds < rounds:
        if time.monotonic() > until:
            return story
        one_round(
            start,
            config,
            broken,
            random.Random(f"{story.seed} {story.num_rounds}"),
            story,
        )
        story.write(folder)
    if time.monotonic() > until:
        return story
    if not (whole / "run.json").exists():
        finish(start(config, whole, 1, "ddp"))
    if "final" not in story.faults:
        process = start(config, broken, 1, "ddp")
        wait_for_final(process, broken)
        hurt(process, "kill all", random.Random(story.seed), story, as_what="final")
        story.write(folder)
    finish(start(config, broken, 2, "ddp"))
    compare(whole, broken)
    story.is_equal = True
    story.write(folder)
    for what, counts in (("faults", story.faults), ("starts", story.starts)):
        print(
            f"{what}: "
            + ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
        )
    return story


def one_round(start, config, broken, draw, story):
    """Start the run, let it take some steps, and break it; every fifth time damage its newest checkpoint."""
    number = story.num_rounds
    nproc = draw.choice([1, 2, 3])
    strategy = draw.choice(["ddp", "fsdp"])
    fault = FAULTS[number % len(FAULTS)]
    process = start(config, broken, nproc, strategy, has_small_disk=fault == "disk")
    wait_for_steps(
        process, broken, last_step(broken) + draw.randint(0, STEPS_PER_ROUND)
    )
    if fault == "evaluation":
        wait_for_evaluation(process, broken)
    else:
        time.sleep(draw.random() * 0.2)
    hurt(process, fault, draw, story)
    assert_nobody_left(broken)
    newest = max(broken.glob("checkpoint-*[0-9]"), key=step_of, default=None)
    if newest is not None and number % 5 == 4:
        victim = draw.choice(
            sorted(path for path in newest.iterdir() if path.stat().st_size)
        )
        os.truncate(victim, draw.randrange(victim.stat().st_size))
        story.faults["damaged checkpoint"] += 1
    story.num_rounds += 1
    story.starts[f"{strategy} on {nproc}"] += 1
    did = (
        f"{strategy} on {nproc}, {fault}, step {last_step(broken)}, {exit_of(process)}"
    )
    print(f"round {story.num_rounds}: {did}", flush=True)


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


def wait_for_steps(process, output, expected):
    """Until the run has logged a step, has ended, or the patience has."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (
        process.poll() is None
        and last_step(output) < expected
        and time.monotonic() < end
    ):
        time.sleep(0.05)


def wait_for_evaluation(process, output):
    """Until a step is logged whose evaluation is not."""
    end = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < end:
        lines = [
            line
            for line in (output / "metrics.jsonl").read_bytes().splitlines()
            if line.endswith(b"}")
        ]
        if lines and b'"loss"' in lines[-1] and json.loads(lines[-1])["step"] % 2 == 0:
            return
        time.sleep(0.002)


def wait_for_final(process, output):
    """Until final/ is being written."""
    end = time.monotonic() + 10 * PATIENCE_SECONDS
    while (
        process.poll() is None
        and time.monotonic() < end
        and not (output / ".final.new").exists()
    ):
        time.sleep(0.002)


def hurt(process, fault, draw, story, *, as_what=None):
    """Do one of FAULTS to a run, and wait for its end. `as_what`: the name that is counted."""
    family = [process.pid, *(child.pid for child in children(process.pid))]
    if process.poll() is None or fault == "disk":
        story.faults[as_what or fault] += 1
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


def exit_of(process):
    """How the launcher ended."""
    return f"exit code {process.returncode}"


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
