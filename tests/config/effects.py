"""The effect of each option: on a trainer that was built with it, on a loss, in the files of a run."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

import vembed
from tests import tiny
from tests.data.files import write_jsonl
from tests.losses.batches import SIZES, make_batch
from vembed.config.decisions import ResolvedRun
from vembed.config.loading import resolve_run
from vembed.data.examples import ImageRef, Item
from vembed.losses.build import build_loss
from vembed.models.families.backbones import layers_of
from vembed.parallel.session import start_session
from vembed.training.checkpoint.checkpointer import Checkpointer
from vembed.training.interrupts import Interrupts
from vembed.training.run_log import RunLog
from vembed.training.trainer import Trainer

Options = Mapping[str, Any]


@cache
def folder():
    """Data of every kind: pairs with negatives, of two sources, under other names, with a bad record, with images."""
    path = Path(
        tempfile.mkdtemp(prefix="effects-", dir=tiny.shared(tiny.tiny_bert).parent)
    )
    words = tiny.WORDS
    pairs = [
        {
            "query": words[number],
            "positive": f"{words[number]} {words[number + 1]}",
            "negatives": [words[number + 2], words[number + 3]],
        }
        for number in range(40)
    ]
    pairs += pairs[:8]
    write_jsonl(path / "pairs.jsonl", pairs)
    write_jsonl(path / "more.jsonl", pairs[:16])
    write_jsonl(path / "val.jsonl", pairs[:12])
    write_jsonl(
        path / "named.jsonl",
        [{"ask": pair["query"], "positive": pair["positive"]} for pair in pairs],
    )
    write_jsonl(path / "bad.jsonl", [*pairs[:20], {"query": "", "positive": ""}])
    (path / "pictures").mkdir()
    from PIL import Image

    for number in range(8):
        Image.new("RGB", (40 + number, 30), (30 * number, 90, 10)).save(
            path / "pictures" / f"{number}.png"
        )
    Image.new("RGB", (200, 200)).save(path / "large.png")
    Image.new("RGB", (8, 8)).save(path / "small.png")
    images = [
        {"query": words[number], "positive": {"image": f"pictures/{number}.png"}}
        for number in range(8)
    ]
    write_jsonl(path / "images.jsonl", images)
    write_jsonl(
        path / "plain.jsonl",
        [{"query": words[number], "positive": f"{number}.png"} for number in range(8)],
    )
    write_jsonl(
        path / "addresses.jsonl",
        [{"query": "a", "positive": {"image": "http://127.0.0.1:9/a.png"}}] * 8,
    )
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
    for name in ("model_name", "image_model_name"):
        if callable(values.get(name)):
            values[name] = str(tiny.shared(values[name]))
    if values.get("image_root") == "PICTURES":
        values["image_root"] = str(folder() / "pictures")
    for name in ("data_path", "val_data_path"):
        first = values.get(name)
        if isinstance(first, str):
            values[name] = str(folder() / first)
        elif isinstance(first, list):
            values[name] = [str(folder() / entry) for entry in first]
    return {name: value for name, value in values.items() if value is not None}


def resolve(options, env=None):
    """Resolved from a YAML file."""
    path = Path(tempfile.mkdtemp(dir=folder())) / "cfg.yaml"
    path.write_text(
        yaml.safe_dump(given({"output_dir": str(path.parent / "run"), **options}))
    )
    return resolve_run(path, env=env or {})


@dataclass(frozen=True)
class Built:
    """A trainer that was built, not run; and what the log said."""

    run: ResolvedRun
    trainer: Trainer
    lines: list[str]
    is_deterministic: bool

    def parameters(self):
        return dict(self.trainer.components.model.named_parameters())

    def group(self, of):
        """The optimizer's group of the first parameter whose name has `of` in it."""
        expected = next(
            parameter
            for name, parameter in self.parameters().items()
            if of in name and parameter.requires_grad
        )
        groups = self.trainer.components.optimizer.param_groups
        return next(
            group
            for group in groups
            if any(parameter is expected for parameter in group["params"])
        )

    def tokens(self, text, kind):
        featuriser = self.trainer.components.featuriser
        (features,) = featuriser.features([(Item(text=text), kind)])
        return list(map(int, features.token_ids))

    def image_tokens(self, name):
        """Return the length of an image for the model."""
        item = Item(images=(ImageRef(path=str(folder() / name)),))
        (features,) = self.trainer.components.featuriser.features([(item, "document")])
        return features.length

    def layers(self):
        return layers_of(self.trainer.components.model)


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def build(options):
    """The trainer of a YAML file with these options, in one process."""
    run = resolve(options)
    Path(run.config.run.output_dir).mkdir(parents=True)
    log = logging.getLogger("vembed")
    handler = _Lines()
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with (
            start_session(run) as session,
            Checkpointer(run.config.run, session) as checkpointer,
        ):
            config = run.config
            trainer = Trainer(
                config,
                session,
                checkpointer,
                Interrupts(config.run.max_train_minutes),
                RunLog(config.logging, Path(config.run.output_dir), rank="1"),
            )
            return Built(
                run,
                trainer,
                handler.lines,
                torch.are_deterministic_algorithms_enabled(),
            )
    finally:
        torch.use_deterministic_algorithms(False)
        log.setLevel(level)
        log.removeHandler(handler)


@cache
def _built(key):
    return build(GROUPS[key])


def built(group):
    """The trainer of a group of options, built once."""
    return _built(group)


@cache
def finished(key):
    """The output folder of a run with a group of options."""
    options = RUNS[key]
    path = Path(tempfile.mkdtemp(dir=folder())) / "run"
    vembed.train(given({**options, "output_dir": str(path)}))
    return path


def log_of(run, name="training_log.txt"):
    return (run / name).read_text()


def lines_of(run):
    return [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def loss_value(options):
    """The loss of one batch with duplicates, several positives, hard negatives and teachers, seen by one of two
    ranks."""
    config = resolve({"data_path": "unused", **options}).config
    batch = make_batch(8, num_contents=24, max_positives=2, seed=3)
    half = batch.num_rows // 2
    batch = replace(
        batch,
        rank_rows=slice(0, half),
        rank_negatives=slice(0, batch.negative.numel() // 2),
    )
    loss = build_loss(config, mrl_dims=(12,), **SIZES).double()
    return float(loss(batch).detach())


def adapter_names(value):
    return {
        name.split(".lora_A")[0].rsplit(".", 1)[-1]
        for name in value.parameters()
        if ".lora_A" in name
    }


def adapter(value):
    layers = [
        module
        for module in value.trainer.components.model.modules()
        if "lora_A" in dict(module.named_children())
    ]
    return layers[0] if layers else None


def adapter_dropout(value):
    layer = adapter(value).lora_dropout["default"]
    return float(layer.p) if isinstance(layer, torch.nn.Dropout) else 0.0


def first_ids(value):
    return [int(index) for index in value.trainer.data.batch_schedule.batch(0, 0)]


GROUPS = {
    "base": {},
    "validated": {"val_data_path": "val.jsonl"},
    "patient": {"val_data_path": "val.jsonl", "patience": 2},
    "held_out": {"val_split": 0.25},
    "many": {
        "model_name": lambda path: tiny.tiny_bert(path, layers=3),
        "max_length": 9,
        "pooling": "max",
        "query_prompt": "red ",
        "document_prompt": "green blue ",
        "attn_implementation": "eager",
        "torch_compile": True,
        "quantize_weights": "int8",
        "gradient_checkpointing": True,
        "mrl_dims": [16, 8],
        "mrl_weights": [1, 2],
        "mrl_projection": True,
        "freeze": ["embeddings"],
        "max_negatives": 1,
        "max_train_examples": 30,
        "num_workers": 0,
        "batch_size": 5,
        "gradient_accumulation_steps": 2,
        "micro_batch_tokens": 99,
        "use_gradient_cache": False,
        "max_steps": 7,
        "learning_rate": 0.5,
        "weight_decay": 0.25,
        "adam_betas": [0.5, 0.6],
        "adam_epsilon": 0.7,
        "head_learning_rate": 0.125,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.75,
        "seed": 7,
        "deterministic": True,
        "on_nonfinite": "skip",
        "loss": "infonce",
        "learn_temperature": True,
        "padding_free": False,
        "sync_batchnorm": True,
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
        "optim": "sgd",
        "scale_learning_rate": "linear",
        "data_path": ["pairs.jsonl", "more.jsonl"],
        "homogeneous_batches": True,
    },
    "scaled": {"scale_learning_rate": "linear"},
    "two": {"data_path": ["pairs.jsonl", "more.jsonl"]},
    "tempered": {"data_path": ["pairs.jsonl", "more.jsonl"], "sampling": "weights"},
    "named": {"data_path": "named.jsonl", "column_mapping": {"ask": "query"}},
    "bad": {"data_path": "bad.jsonl", "on_bad_record": "skip"},
    "mrl": {"mrl_dims": [16, 8]},
    "whole": {"mrl_dims": [16, 8], "mrl_projection": False},
    "decoder": {"model_name": tiny.tiny_qwen3},
    "seeing": {"model_name": tiny.tiny_qwen3, "bidirectional_attention": True},
    "adapters": {"use_lora": True},
    "other_adapters": {
        "use_lora": True,
        "lora_r": 3,
        "lora_alpha": 9,
        "lora_dropout": 0.5,
        "lora_target_modules": ["query"],
        "lora_variant": "dora",
        "model_revision": "v2",
    },
    "clip": {"model_name": tiny.tiny_clip, "data_path": "images.jsonl"},
    "frozen": {
        "model_name": tiny.tiny_clip,
        "data_path": "images.jsonl",
        "freeze": ["vision"],
        "torch_dtype": "bfloat16",
        "cache_frozen_features": True,
    },
    "composed_plainly": {
        "image_model_name": tiny.tiny_dinov2,
        "data_path": "images.jsonl",
    },
    "pictures": {
        "model_name": tiny.tiny_clip,
        "data_path": "plain.jsonl",
        "retrieval_mode": "t2i",
        "image_root": "PICTURES",
    },
    "addresses": {
        "model_name": tiny.tiny_clip,
        "data_path": "addresses.jsonl",
        "allow_image_urls": True,
    },
    "looking": {"model_name": tiny.tiny_qwen3_vl, "data_path": "images.jsonl"},
    "looking_less": {
        "model_name": tiny.tiny_qwen3_vl,
        "data_path": "images.jsonl",
        "min_pixels": 3000,
        "max_pixels": 4000,
    },
}
RUNS = {
    "base": {"val_data_path": "val.jsonl", "report_to": ["tensorboard"]},
    "many": {
        "val_data_path": "val.jsonl",
        "report_to": ["tensorboard"],
        "run_name": "mine",
        "log_file": "own.txt",
        "eval_steps": 2,
        "eval_before": False,
        "eval_metric": "mrr@3",
        "save_steps": 2,
        "save_total_limit": 1,
        "async_save": True,
        "torch_dtype": "bfloat16",
        "logging_steps": 2,
        "debug": True,
        "profile_steps": [1, 1],
        "learning_rate": 1e-12,
        "load_best_model_at_end": True,
    },
    "adapters": {"use_lora": True, "learning_rate": 1e-3},
    "adapters_alone": {"use_lora": True, "learning_rate": 1e-3, "save_merged": False},
}
