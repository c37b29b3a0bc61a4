"""python -m benchmarks.strategies: ddp against fsdp at equal global batch on processes of this machine, in turns."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.train import machine
from vembed.cli.commands.demo import (
    demo_model,
    split_by_module,
    standard_library_pairs,
    write_pairs,
)

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp, SHARD_GRAD_OP": {
        "strategy": "fsdp",
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    },
    "fsdp, FULL_SHARD": {"strategy": "fsdp", "fsdp_sharding_strategy": "FULL_SHARD"},
}


def model_of(folder: Path, layers: int, hidden: int) -> int:
    """Write a BERT of this size with initial weights and MiniLM's tokenizer; return its number of parameters."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    network = BertModel(config)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(network.num_parameters())


def run(
    folder: Path, number: int, options: dict[str, Any], processes: int, steps: int
) -> dict[str, Any]:
    """Train by the command; return samples per second after the first step, the largest peak of a process, losses."""
    output = folder / f"out-{number}"
    config = folder / f"{number}.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model_name": str(folder / "model"),
                "data_path": str(folder / "train.jsonl"),
                "output_dir": str(output),
                "max_steps": steps,
                "max_length": 128,
                "mixed_precision": "no",
                "logging_steps": 1,
                "report_to": "none",
                "save_steps": None,
                "learning_rate": 1e-5,
                **options,
            }
        )
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    words = [
        sys.executable,
        "-m",
        "vembed",
        "train",
        str(config),
        "--nproc",
        str(processes),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    lines = [
        json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    lines = [line for line in lines if "loss" in line]
    return {
        "rate": statistics.median(line["samples_per_second"] for line in lines[1:]),
        "peak": max(process["peak_gb"] for process in lines[-1]["memory"]),
        "losses": [line["loss"] for line in lines],
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument(
        "--batch", type=int, default=12, help="examples per step over all processes"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = model_of(folder / "model", arguments.layers, arguments.hidden)
        pairs, _ = split_by_module(
            standard_library_pairs(), arguments.batch * arguments.steps, 10
        )
        write_pairs(pairs, folder / "train.jsonl")
        by_strategy: dict[str, list[dict[str, Any]]] = {
            label: [] for label in STRATEGIES
        }
        for turn in range(arguments.repeats):
            for number, (label, options) in enumerate(STRATEGIES.items()):
                more = {**options, "global_batch_size": arguments.batch}
                place = turn * len(STRATEGIES) + number
                by_strategy[label].append(
                    run(folder, place, more, arguments.nproc, arguments.steps)
                )
    plain = by_strategy["ddp"]
    print(
        f"{size:,d} parameters, {arguments.nproc} processes, {arguments.batch} examples per step\n"
    )
    print(
        "| strategy | samples/s (each run) | of ddp's | peak GB of a process | largest difference of losses |"
    )
    print("|---|---|---|---|---|")
    for name, runs in by_strategy.items():
        rates = [result["rate"] for result in runs]
        share = statistics.median(
            result["rate"] / reference["rate"]
            for result, reference in zip(runs, plain, strict=True)
        )
        worst = max(
            abs(loss - plain_loss)
            for result in runs
            for loss, plain_loss in zip(
                result["losses"], plain[0]["losses"], strict=True
            )
        )
        print(
            f"| {name} | {', '.join(f'{rate:.2f}' for rate in rates)} | {share:.2f} | "
            f"{max(result['peak'] for result in runs):.2f} | {worst:.0e} |"
        )


if __name__ == "__main__":
    main()
