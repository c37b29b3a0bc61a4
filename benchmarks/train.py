"""python -m benchmarks.train: the same model, batches and loss on vembed and on a peer, alternately, as tables."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cases import CASES, QUICK_CASES, QUICK_MATRYOSHKA, START_UP, Case
from benchmarks.sides import SIDES
from benchmarks.work import matrix_peak, precision, useful_work
from benchmarks.worker import AGREEMENT_STEPS, Answer, ask_once, running, training_task
from vembed.parallel.devices import bf16_instructions
from vembed.parallel.placement import PRECISION_DTYPES

AGREEMENT = 1e-3
"""Largest relative difference of the two sides' losses without dropout. Beyond it there is nothing to compare."""
SAME_EMBEDDINGS = 0.9995
"""Least cosine between the two sides' embeddings of a text; one side may compute in bfloat16."""
Ask = Callable[[str, dict[str, Any], int], Answer]
"""Function (side, task, ranks) -> answer."""


def train_once(
    ask: Ask, side: str, case: Case, agreement_steps: int = AGREEMENT_STEPS
) -> Answer:
    """Train a case on one side."""
    with training_task(case, agreement_steps) as task:
        return ask(side, task, case.ranks)


def difference(case: Case, ours: Answer, theirs: Answer) -> float:
    """Return the largest relative difference of the losses without dropout, step by step. Exit if it is too large."""
    pairs = list(zip(ours["losses"], theirs["losses"], strict=True))
    worst = max(abs(ours - theirs) / max(abs(theirs), 1e-9) for ours, theirs in pairs)
    if worst > AGREEMENT:
        raise SystemExit(
            f"{case.name}: the losses differ by {worst:.1e} ({pairs}); this is not the same work"
        )
    return worst


def compare(
    ask: Ask, case: Case, peer: str, repeats: int, agreement_steps: int
) -> dict[str, Any]:
    """Run both sides alternately. Return medians, and the ratio of each pair of runs."""
    peak = matrix_peak(PRECISION_DTYPES[precision()])
    runs = [
        (
            train_once(ask, "vembed", case, agreement_steps),
            train_once(ask, peer, case, agreement_steps),
        )
        for _ in range(repeats)
    ]
    worst = max(difference(case, ours, theirs) for ours, theirs in runs)
    tokens, flops, padding = useful_work(case, agreement_steps + 1)
    ours, theirs = (medians([run[side] for run in runs]) for side in (0, 1))
    return {
        "case": case.name,
        "ours": ours,
        "theirs": theirs,
        "ratios": [
            ours["samples_per_second"] / theirs["samples_per_second"]
            for ours, theirs in runs
        ],
        "difference": worst,
        "tokens_per_second": tokens / ours["seconds_per_step"],
        "share_of_peak": flops / ours["seconds_per_step"] / peak,
        "padding": (ours["padding"], padding[1]),
    }


def medians(answers: list[Answer]) -> dict[str, float]:
    """Return the median of each figure."""
    return {
        key: statistics.median(answer[key] for answer in answers)
        for key, value in answers[0].items()
        if not isinstance(value, list)
    }


def table(results: list[dict[str, Any]], peer: str) -> str:
    """Return the results as a Markdown table."""
    lines = [
        f"| case | vembed samples/s | {peer} samples/s | ratio (each run) | useful tokens/s "
        "| padding: vembed, by column | peak GB: vembed, peer | share of matrix peak | loss difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        ours = result["ours"]
        theirs = result["theirs"]
        lines.append(
            f"| {result['case']} | {ours['samples_per_second']:.1f} | {theirs['samples_per_second']:.1f} "
            f"| {ratio_cell(result['ratios'])} | {result['tokens_per_second']:,.0f} "
            f"| {result['padding'][0]:.0%}, {result['padding'][1]:.0%} | {ours['peak_gb']:.2f}, {theirs['peak_gb']:.2f} "
            f"| {result['share_of_peak']:.0%} | {result['difference']:.0e} |"
        )
    return "\n".join(lines)


def ratio_cell(ratios: list[float]) -> str:
    """Return the median, with all values in brackets."""
    runs = (
        f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if len(ratios) > 1 else ""
    )
    return f"**{statistics.median(ratios):.2f}**{runs}"


def matryoshka_line(ask: Ask, case: Case, repeats: int, agreement_steps: int) -> str:
    """Return the cost of four Matryoshka sizes against one on the same batches. Of each step the fastest run counts."""
    runs: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(repeats):
        for mrl, seconds in runs.items():
            seconds.append(
                train_once(ask, "vembed", replace(case, mrl=mrl), agreement_steps)[
                    "each_step"
                ]
            )
    whole, cut = (
        sum(map(min, zip(*seconds, strict=True))) for seconds in runs.values()
    )
    return f"Four Matryoshka sizes take {cut / whole:.3f} times the time of one."


def start_up_line(peer: str, repeats: int, warm_up: int = 1) -> str:
    """Return the time from process start to the first batch, in fresh processes with warm file system caches."""
    runs: list[tuple[float, float]] = []
    for _ in range(repeats + warm_up):
        ours, theirs = (
            train_once(ask_once, side, START_UP, 0)["first_batch_after"]
            for side in ("vembed", peer)
        )
        runs.append((ours, theirs))
    ours, theirs = (
        statistics.median(run[side] for run in runs[warm_up:]) for side in (0, 1)
    )
    return f"Start-up to the first batch of {START_UP.num_rows:,d} pairs: vembed {ours:.1f} s, {peer} {theirs:.1f} s."


def encoding_line(
    ask: Ask, peer: str, repeats: int, num_texts: int, max_length: int
) -> str:
    """Return the speed of `Embedder.encode` against the peer's."""
    ratios = []
    rates = []
    cosines = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            answers = []
            embeddings = []
            for side in ("vembed", peer):
                folder = Path(name) / side
                folder.mkdir()
                task = {
                    "num_texts": num_texts,
                    "max_length": max_length,
                    "folder": str(folder),
                }
                answers.append(ask(side, task, 1))
                embeddings.append(np.load(folder / "embeddings.npy"))
        cosines.append(
            float((embeddings[0].astype(np.float64) * embeddings[1]).sum(1).min())
        )
        if cosines[-1] < SAME_EMBEDDINGS:
            raise SystemExit(
                f"embeddings of both sides have a cosine of {cosines[-1]:.6f}; this is not the same work"
            )
        rates.append([answer["samples_per_second"] for answer in answers])
        ratios.append(rates[-1][0] / rates[-1][1])
    ours, theirs = (statistics.median(rate[side] for rate in rates) for side in (0, 1))
    return (
        f"Encoding {num_texts:,d} functions of up to {max_length} tokens: vembed {ours:.1f}, {peer} {theirs:.1f} "
        f"texts/s, ratio {ratio_cell(ratios)}, least cosine {min(cosines):.6f}."
    )


def machine() -> str:
    """Return the machine and versions to which the figures apply."""
    packages = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "sentence-transformers")
    )
    bf16 = bf16_instructions()
    computes = f"matrices in bfloat16 by {bf16}" if precision() == "bf16" else "float32"
    peak = matrix_peak(PRECISION_DTYPES[precision()]) / 1e9
    return (
        f"{_processor()} ({torch.backends.cpu.get_cpu_capability()}{f', {bf16}' if bf16 else ''}), {os.cpu_count()} "
        f"cores, {computes}, matrix peak {peak:,.0f} GFLOP/s; Python {platform.python_version()}, {packages}"
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def quick(peer: str) -> None:
    """Run small cases once each, in two long-lived processes; start-up is measured separately."""
    with ExitStack() as stack:
        workers = {
            side: stack.enter_context(running(side)) for side in ("vembed", peer)
        }

        def ask(side: str, task: dict[str, Any], _: int) -> Answer:
            return workers[side].ask(task)

        results = []
        for case in QUICK_CASES:
            if peer == "plain" and case.cached:
                continue
            results.append(compare(ask, case, peer, 1, 1))
            _say(results[-1])
        print(table(results, peer))
        if peer != "plain":
            print(matryoshka_line(ask, QUICK_MATRYOSHKA, 1, 1))
            print(encoding_line(ask, peer, 1, 200, 128))
            print(start_up_line(peer, 1, warm_up=0))


def full(peer: str, cases: list[Case], repeats: int) -> None:
    """Run every case in a process of its own, so that peak memory is its own."""
    results = []
    for case in cases:
        results.append(
            compare(
                ask_once, case, peer, repeats, 1 if case.cached else AGREEMENT_STEPS
            )
        )
        _say(results[-1])
    if results:
        print(table(results, peer) + "\n")


def _say(result: dict[str, Any]) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} {result['case']}: {ratio_cell(result['ratios'])}",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    """Parse the arguments, run the cases, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peer", choices=list(SIDES)[1:], default="sentence-transformers"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small cases, once each, in about three minutes",
    )
    names = [case.name for case in CASES]
    others = ["matryoshka", "encoding", "start-up"]
    parser.add_argument(
        "--case", action="append", choices=[*names, *others], help="default: all"
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    peer = arguments.peer
    repeats = arguments.repeats
    began = time.time()
    print(f"{machine()}. Ratios above 1: vembed is faster.\n", flush=True)
    if arguments.quick:
        quick(peer)
    else:
        selected = arguments.case or [*names, *others]
        cases = [case for case in CASES if case.name in selected]
        if peer == "plain":
            cases = [
                case
                for case in cases
                if not (case.cached or case.mrl or case.ranks > 1)
            ]
            selected = []
        full(peer, cases, repeats)
        if "matryoshka" in selected:
            print(
                matryoshka_line(
                    ask_once,
                    next(case for case in CASES if case.mrl),
                    repeats,
                    AGREEMENT_STEPS,
                )
            )
        if "encoding" in selected:
            print(encoding_line(ask_once, peer, repeats, 1000, 256))
        if "start-up" in selected:
            print(start_up_line(peer, repeats))
    print(f"\n{(time.time() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
