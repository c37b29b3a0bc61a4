"""The effect of each option: on a trainer that was built with it, on a loss, in the files of a run."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import yaml

import vembed
from tests import tiny
from tests.data.files import pair, write_jsonl
from tests.data.pictures import write
from tests.parallel.steps import listen
from vembed.config.loading import resolve_run
from vembed.parallel.session import start_session
from vembed.training.checkpoint.checkpointer import Checkpointer
from vembed.training.interrupts import Interrupts
from vembed.training.run_log import RunLog
from vembed.training.trainer import Trainer


@cache
def folder():
    """Data of every kind: pairs with negatives, of two sources, and with images."""
    path = Path(
        tempfile.mkdtemp(prefix="effects-", dir=tiny.shared(tiny.tiny_bert).parent)
    )
    words = tiny.WORDS
    pairs = []
    for number in range(40):
        query, other, *negatives = words[number : number + 4]
        pairs.append(pair(query, f"{query} {other}", negatives=negatives))
    pairs += pairs[:8]
    write_jsonl(path / "pairs.jsonl", pairs)
    write_jsonl(path / "more.jsonl", pairs[:16])
    write_jsonl(path / "val.jsonl", pairs[:12])
    images = []
    for number in range(8):
        write(path / f"{number}.png", "PNG")
        images.append(pair(words[number], {"image": f"{number}.png"}))
    write_jsonl(path / "images.jsonl", images)
    return path


def given(options):
    """The options of a small run; a value that is a function is called for a model's folder."""
    base = {
        "model_name": tiny.tiny_bert,
        "data_path": "pairs.jsonl",
        "batch_size": 8,
        "max_steps": 4,
        "use_gradient_cache": True,  # no search for a budget
        "report_to": [],
    }
    values = {**base, **options}
    if callable(values["model_name"]):
        values["model_name"] = str(tiny.shared(values["model_name"]))
    for name in ("data_path", "val_data_path"):
        first = values.get(name)
        if isinstance(first, str):
            values[name] = str(folder() / first)
        elif isinstance(first, list):
            values[name] = [str(folder() / entry) for entry in first]
    return {name: value for name, value in values.items() if value is not None}


def resolve(options):
    """Resolved from a YAML file."""
    path = Path(tempfile.mkdtemp(dir=folder())) / "cfg.yaml"
    output = {"output_dir": str(path.parent / "run")}
    path.write_text(yaml.safe_dump(given(output | options)))
    return resolve_run(path, env={})


@dataclass(frozen=True)
class Built:
    """A trainer that was built, not run; and what the log said."""

    trainer: Trainer
    lines: list[str]
    is_deterministic: bool


def build(options):
    """The trainer of a YAML file with these options, in one process."""
    run = resolve(options)
    config = run.config
    output_dir = Path(config.run.output_dir)
    output_dir.mkdir(parents=True)
    lines = listen()
    try:
        with (
            start_session(run) as session,
            Checkpointer(config.run, session) as checkpointer,
        ):
            trainer = Trainer(
                config,
                session,
                checkpointer,
                Interrupts(config.run.max_train_minutes),
                RunLog(config.logging, output_dir, rank="1"),
            )
            return Built(
                trainer, list(lines), torch.are_deterministic_algorithms_enabled()
            )
    finally:
        torch.use_deterministic_algorithms(False)


@cache
def built(group):
    """The trainer of a group of options, built once."""
    return build(GROUPS[group])


@cache
def finished(key):
    """The output folder of a run with a group of options."""
    options = RUNS[key]
    path = Path(tempfile.mkdtemp(dir=folder())) / "run"
    vembed.train(given({**options, "output_dir": str(path)}))
    return path


def adapter(value):
    for module in value.trainer.components.model.modules():
        if "lora_A" in dict(module.named_children()):
            return module
    raise AssertionError("no layer has an adapter")


def adapter_dropout(value):
    layer = adapter(value).lora_dropout["default"]
    return getattr(layer, "p", 0.0)


GROUPS = {
    "base": {},
    "patient": {"val_data_path": "val.jsonl", "patience": 2},
    "many": {
        "max_length": 9,
        "pooling": "max",
        "query_prompt": "red ",
        "document_prompt": "green blue ",
        "attn_implementation": "eager",
        "mrl_dims": [16, 8],
        "mrl_weights": [1, 2],
        "num_workers": 0,
        "batch_size": 5,
        "gradient_accumulation_steps": 2,
        "micro_batch_tokens": 99,
        "use_gradient_cache": False,
        "max_steps": 7,
        "learning_rate": 0.5,
        "adam_betas": [0.5, 0.6],
        "adam_epsilon": 0.7,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.75,
        "seed": 7,
        "deterministic": True,
        "loss": "infonce",
        "padding_free": False,
        "no_duplicates": True,
        "val_data_path": "val.jsonl",
    },
    "other": {
        "model_family": "text_decoder",
        "batch_size": None,
        "global_batch_size": 6,
        "max_steps": None,
        "epochs": 2.0,
        "warmup_steps": 0.5,
        "scale_learning_rate": "linear",
        "data_path": ["pairs.jsonl", "more.jsonl"],
        "homogeneous_batches": True,
    },
    "two": {"data_path": ["pairs.jsonl", "more.jsonl"]},
    "tempered": {"data_path": ["pairs.jsonl", "more.jsonl"], "sampling": "weights"},
    "adapters": {"use_lora": True},
    "other_adapters": {
        "use_lora": True,
        "lora_r": 3,
        "lora_alpha": 9,
        "lora_dropout": 0.5,
        "model_revision": "v2",
    },
}
RUNS = {
    "base": {"val_data_path": "val.jsonl", "report_to": ["tensorboard"]},
    "many": {
        "val_data_path": "val.jsonl",
        "report_to": ["tensorboard"],
        "run_name": "mine",
        "eval_steps": 2,
        "eval_before": False,
        "eval_metric": "mrr@3",
        "save_steps": 2,
        "async_save": True,
        "learning_rate": 1e-12,
        "load_best_model_at_end": True,
    },
    "adapters": {"use_lora": True, "learning_rate": 1e-3},
}
