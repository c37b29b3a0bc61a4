"""python -m benchmarks.defaults: vembed's defaults against a small search, adapters against all weights, and
sentence-transformers.

    python -m benchmarks.defaults search   --collection docstrings --size 300 --family encoder
    python -m benchmarks.defaults adapters --collection docstrings --steps 10 20 40
    python -m benchmarks.defaults peers    --collection characters --size 300
    python -m benchmarks.defaults table

`search`: each searched value is tried with one seed, the better third with the next one, and so on. The best mean is
then compared with the defaults on as many other seeds, so that a value gains nothing from having been lucky: the share
is the gain of the defaults over the model as it is, of that of the best, both on these. `adapters`: the gain with
`use_lora: true` as a share of that of all weights, in the same steps. `search --option use_lora=true` searches for
adapters, with their rank. `peers`: the same training data by the four-line config and by sentence-transformers at its
documented settings (one epoch, batches of 16 without duplicates, learning rate 2e-5, 10 % warm-up). All are scored on
test sets of the validation set's size that no side has seen; vembed chooses its checkpoint on the validation set.
Each run is a line of a JSONL; what it holds is not run again, and `--minutes` ends a search that is continued later.
`table` prints what the file holds as Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.collections_here import COLLECTIONS, Collection
from benchmarks.defaults_table import print_tables
from benchmarks.tiny_models import INITIAL, MODELS, made
from benchmarks.train import machine
from vembed.cli.commands.demo import demo_model
from vembed.config.decisions import epochs_for

Options = dict[str, Any]

RATES = (0.5, 2.0)
"""Learning rates that are tried, as multiples of the default."""
PASSES = (0.5, 2.0)
"""Passes over the data that are tried, as multiples of those by default."""
SEARCHED: list[Options] = [
    {"batch_size": 16},
    {"batch_size": 64},
    {"warmup_ratio": 0.0},
    {"weight_decay": 0.1},
]
"""Values that are tried by hand, one option at a time, besides learning rates and epochs."""
OF_LOSS: dict[str, list[Options]] = {
    "infonce": [{"temperature": 0.02}, {"temperature": 0.1}, {"bidirectional": True}],
    "cosent": [{"temperature": 0.05}, {"temperature": 0.2}],
}
"""Those that depend on the loss: on both sides of its default temperature, and negatives on both sides."""
OF_ADAPTERS: list[Options] = [{"lora_r": 16}, {"lora_r": 64}]
"""Values that are tried with `--option use_lora=true` too."""


class Runs:
    """Finished runs, one line each in a JSONL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self.done: dict[str, Options] = {
            self.key(entry["run"]): entry for entry in map(json.loads, lines)
        }

    @staticmethod
    def key(run: Options) -> str:
        """Return the name of a run."""
        return json.dumps(run, sort_keys=True)

    def add(self, run: Options, **results: Any) -> Options:
        """Store the result of a run, and print it."""
        line = {
            "run": run,
            **results,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        print(json.dumps(line), flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.done[self.key(run)] = line
        return line


@dataclass
class Trial:
    """A collection and a model, on which options are tried."""

    runs: Runs
    arguments: argparse.Namespace
    ends: float
    """Time at which no further run begins."""

    def __post_init__(self) -> None:
        arguments = self.arguments
        self.folder = Path(tempfile.mkdtemp())
        self.data, self.tests = parts(
            arguments.collection,
            arguments.size,
            arguments.val,
            arguments.tests,
            arguments.max_length,
        )
        self.model = made(arguments.family, arguments.models or self.folder / "models")
        self.about: Options = {
            "what": arguments.what,
            "collection": arguments.collection,
            "family": arguments.family,
            "size": arguments.size,
            "max_length": arguments.max_length,
            **({"given": dict(arguments.option)} if arguments.option else {}),
        }

    def before(self) -> float:
        """Return the score of the model as it is."""
        run = {**self.about, "what": "before"}
        run.pop("given", None)
        known = self.runs.done.get(self.runs.key(run))
        entry = known or self.runs.add(
            run, score=score(self.model, self.tests, self.folder)
        )
        return float(entry["score"])

    def score(self, options: Options, seed: int) -> float:
        """Return the score after training with options, of this or an earlier call."""
        run = {**self.about, "options": options, "seed": seed}
        known = self.runs.done.get(self.runs.key(run))
        if known is None:
            if time.monotonic() > self.ends:
                raise TimeoutError
            began = time.monotonic()
            run_folder = self.folder / "run"
            settings = {
                **dict(self.arguments.option),
                **({"from_scratch": True} if self.arguments.family in INITIAL else {}),
                **options,
            }
            model, rate = train(self.data, run_folder, self.model, settings, seed)
            mean_score = score(model, self.tests, self.folder)
            known = self.runs.add(
                run,
                score=mean_score,
                rate=rate,
                seconds=round(time.monotonic() - began),
            )
            shutil.rmtree(run_folder)
        return float(known["score"])

    def default_rate(self) -> float:
        """Return the learning rate that the defaults had with the first seed."""
        self.score({}, 0)
        return float(
            self.runs.done[self.runs.key({**self.about, "options": {}, "seed": 0})][
                "rate"
            ]
        )


def parts(
    name: str, size: int, num_val: int, num_tests: int, max_length: int
) -> tuple[Collection, list[Collection]]:
    """Return a collection, and test sets of the size of its validation set. Texts are cut to so many tokens here, so
    that a model reads the same before and after its training."""
    both = COLLECTIONS[name](size, (1 + num_tests) * num_val)
    train = shortened(both.train, max_length)
    held_out = shortened(both.val, max_length)
    random.Random(0).shuffle(held_out)
    data, *tests = (
        Collection(train, held_out[first : first + num_val], both.loss)
        for first in range(0, len(held_out), num_val)
    )
    return data, tests


def shortened(rows: list[dict[str, Any]], max_length: int) -> list[dict[str, Any]]:
    """Return rows whose texts have at most so many tokens of MiniLM, with the two at their ends."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def cut(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        places = tokenizer.encode(value, add_special_tokens=False).offsets
        return (
            value
            if len(places) <= max_length - 2
            else value[: places[max_length - 3][1]]
        )

    return [{name: cut(value) for name, value in row.items()} for row in rows]


def train(
    data: Collection, folder: Path, model: Path, options: Options, seed: int
) -> tuple[Path, float]:
    """Train by the four-line config with `options`; return the model and the highest learning rate of a step."""
    import vembed

    train_file, val_file = data.write(folder / "data")
    config = {
        "model_name": str(model),
        "data_path": str(train_file),
        "val_data_path": str(val_file),
        "output_dir": str(folder / "run"),
        "loss": data.loss,
        "seed": seed,
        "report_to": "none",
        "console": "quiet",
        **options,
    }
    rates: list[float] = []
    result = vembed.train(config, on_step=lambda step: rates.append(step.learning_rate))
    return result.model_dir, float(f"{max(rates):.3g}")


def train_with_peer(
    data: Collection, folder: Path, model: Path, max_length: int, seed: int
) -> Path:
    """Train by sentence-transformers as its documentation does; return the model."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers import losses as st_losses
    from sentence_transformers.training_args import BatchSamplers

    network = SentenceTransformer(str(model), device="cpu")
    network.max_seq_length = max_length
    is_scored = data.loss == "cosent"
    loss: Any = (
        st_losses.CoSENTLoss(network)
        if is_scored
        else st_losses.MultipleNegativesRankingLoss(network)
    )
    columns = {name: [row[name] for row in data.train] for name in data.train[0]}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=1,
        per_device_train_batch_size=16,
        learning_rate=2e-5,
        warmup_ratio=0.1,
        batch_sampler=BatchSamplers.BATCH_SAMPLER
        if is_scored
        else BatchSamplers.NO_DUPLICATES,
        seed=seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model=network,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
    )
    trainer.train()
    network.save_pretrained(str(folder / "final"))
    return folder / "final"


def score(model: Path, tests: Sequence[Collection], folder: Path) -> float:
    """Return the mean score on test sets."""
    import vembed

    scores = []
    for data in tests:
        _, file = data.write(folder / "test")
        scores.append(float(vembed.evaluate(model, file)[data.metric]))
    return statistics.mean(scores)


def peers(arguments: argparse.Namespace, known: Sequence[Options]) -> Iterator[Options]:
    """Yield the scores of both sides by seed, for those that are not known."""
    data, tests = parts(
        arguments.collection,
        arguments.size,
        arguments.val,
        arguments.tests,
        arguments.max_length,
    )
    model = made(arguments.family, arguments.models or Path(tempfile.mkdtemp()))
    for seed in range(arguments.seeds):
        entry: Options = {
            "collection": arguments.collection,
            "size": arguments.size,
            "seed": seed,
        }
        if any(entry.items() <= earlier.items() for earlier in known):
            continue
        folder = Path(tempfile.mkdtemp())
        if seed == 0:
            entry["before"] = score(model, tests, folder)
        ours, _ = train(data, folder / "ours", model, dict(arguments.option), seed)
        entry["vembed"] = score(ours, tests, folder)
        theirs = train_with_peer(
            data, folder / "theirs", model, arguments.max_length, seed
        )
        entry["sentence-transformers"] = score(theirs, tests, folder)
        shutil.rmtree(folder)
        yield entry


def search(trial: Trial) -> None:
    """Try each value with the first seed, the better third with the next, and so on; the best one with other seeds."""
    arguments = trial.arguments
    trial.before()
    seeds = range(arguments.seeds)
    remaining = searched(trial)
    for seed in seeds:
        confirm(trial, [{}, *remaining], [seed])
        remaining.sort(
            key=lambda options: _mean(trial, options, range(seed + 1)), reverse=True
        )
        remaining = remaining[: -(-len(remaining) // 3)]
    if remaining and _mean(trial, remaining[0], seeds) > _mean(trial, {}, seeds):
        confirm(trial, [{}, remaining[0]], range(arguments.seeds, 2 * arguments.seeds))


def searched(trial: Trial) -> list[Options]:
    """Return the values to try."""
    arguments = trial.arguments
    has_adapters = dict(arguments.option).get("use_lora", False)
    rates = arguments.rates or [
        float(f"{times * trial.default_rate():.2g}") for times in arguments.times
    ]
    epochs = epochs_for(
        arguments.size,
        from_scratch=arguments.family in INITIAL,
        has_logit_scale="clip" in arguments.family,
    )
    tried: list[Options] = [{"learning_rate": rate} for rate in rates]
    tried += [{"epochs": times * epochs} for times in PASSES]
    tried += SEARCHED + OF_LOSS[trial.data.loss] + (OF_ADAPTERS if has_adapters else [])
    return [
        options
        for options in tried
        if not arguments.only or set(options) & set(arguments.only)
    ]


def _mean(trial: Trial, options: Options, seeds: Iterable[int]) -> float:
    return statistics.mean(trial.score(options, seed) for seed in seeds)


def adapters(trial: Trial) -> None:
    """Train adapters and all weights in so many steps, with and without other rates."""
    arguments = trial.arguments
    trial.before()
    for steps in arguments.steps:
        shared: Options = {"max_steps": steps, "eval_steps": None, "eval_before": False}
        tried = [shared, {**shared, "use_lora": True}]
        tried += [
            {**shared, "use_lora": True, "learning_rate": value}
            for value in arguments.rates
        ]
        tried += [{**shared, "learning_rate": value} for value in arguments.full_rates]
        confirm(trial, tried, range(arguments.seeds))


def confirm(trial: Trial, options: Sequence[Options], seeds: Sequence[int]) -> None:
    """Run options with each seed."""
    for choice in options:
        for seed in seeds:
            trial.score(choice, seed)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


def main() -> None:
    """Run one comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["search", "adapters", "peers", "table"])
    parser.add_argument("--collection", choices=list(COLLECTIONS), default="docstrings")
    parser.add_argument("--family", choices=list(MODELS), default="encoder")
    parser.add_argument("--size", type=int, default=300)
    parser.add_argument(
        "--val", type=int, default=150, help="rows of the validation set"
    )
    parser.add_argument(
        "--tests", type=int, default=6, help="test sets of as many rows"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--max-length", type=int, default=32, help="tokens at which texts are cut"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="options to search; all if left out"
    )
    parser.add_argument("--steps", nargs="*", type=int, default=[20])
    parser.add_argument(
        "--rates", nargs="*", type=float, default=[], help="learning rates to try"
    )
    parser.add_argument(
        "--times",
        nargs="*",
        type=float,
        default=RATES,
        help="the same as multiples of the default",
    )
    parser.add_argument(
        "--models",
        type=Path,
        help="folder for the models that are made, to be used again",
    )
    parser.add_argument(
        "--full-rates",
        nargs="*",
        type=float,
        default=[],
        help="further learning rates of all weights",
    )
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument(
        "--option", nargs="*", default=[], type=_option, help="name=value, in every run"
    )
    parser.add_argument("--output", default="defaults.jsonl")
    arguments = parser.parse_args()
    output = Path(arguments.output)
    if arguments.what == "table":
        print_tables(
            [
                json.loads(line)
                for line in output.read_text(encoding="utf-8").splitlines()
            ],
            arguments.seeds,
        )
        return
    print(machine(), flush=True)
    if arguments.what == "peers":
        known = (
            output.read_text(encoding="utf-8").splitlines() if output.is_file() else []
        )
        for line in peers(arguments, [json.loads(entry) for entry in known]):
            print(json.dumps(line), flush=True)
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return
    trial = Trial(Runs(output), arguments, time.monotonic() + 60 * arguments.minutes)
    try:
        (search if arguments.what == "search" else adapters)(trial)
    except TimeoutError:
        print(
            f"{arguments.minutes:g} minutes are over; the same command continues",
            flush=True,
        )
    finally:
        shutil.rmtree(trial.folder)


if __name__ == "__main__":
    main()
