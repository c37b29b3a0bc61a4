"""A row for every option: where its effect is seen on what was built or written. An option without one fails."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import vembed
from tests import tiny
from tests.config.effects import (
    GROUPS,
    RUNS,
    Built,
    adapter,
    adapter_dropout,
    adapter_names,
    build,
    built,
    finished,
    first_ids,
    given,
    lines_of,
    log_of,
    loss_value,
)
from tests.config.effects_on_ranks import ROWS as SHARDED
from tests.config.effects_on_ranks import facts
from vembed.config.loading import one_line_yaml, resolve_run
from vembed.config.options import all_options
from vembed.config.schema import TrainConfig
from vembed.errors import Stopped, UserError
from vembed.losses.table import LOSS_OPTIONS
from vembed.training.checkpoint.folders import candidates

Seen = Callable[[Built], Any] | str
"""A string: an attribute of the trainer."""
Row = tuple[str, Seen, Any] | tuple[str, Seen, Any, str]


def see(value, recorded):
    return (
        attrgetter(recorded)(value.trainer)
        if isinstance(recorded, str)
        else recorded(value)
    )


def _weights_dtype(value, name):
    return str(
        next(weight.dtype for key, weight in value.parameters().items() if name in key)
    )


def recomputes(layer):
    """Return True if a layer, compiled or not, is run again in the backward pass."""
    return isinstance(layer.forward, partial)


def is_compiled(layer):
    """Return True if a layer's forward, perhaps in a checkpoint, is not its class's method."""
    forward = layer.forward.args[1] if recomputes(layer) else layer.forward
    return not inspect.ismethod(forward)


BUILT = {
    # option: (group of options, what is seen, what it is with them, group without it)
    "model_name": ("many", lambda entry: len(entry.layers()), 3),
    "model_family": (
        "other",
        "components.embedder.description.family",
        "text_decoder",
    ),
    "model_revision": (
        "other_adapters",
        lambda entry: (
            entry.trainer.components.embedder.backbone.peft_config["default"].revision
        ),
        "v2",
        "adapters",
    ),
    "image_model_name": (
        "composed_plainly",
        lambda entry: "composed" in entry.lines[0] + str(entry.lines),
        True,
    ),
    "torch_dtype": (
        "frozen",
        lambda entry: _weights_dtype(entry, "vision_model"),
        "torch.bfloat16",
        "clip",
    ),
    "quantize_weights": (
        "many",
        lambda entry: (
            type(
                entry.trainer.components.embedder.backbone.encoder.layer[
                    0
                ].attention.self.query
            ).__name__
        ),
        "RoundedLinear",
    ),
    "attn_implementation": (
        "many",
        "components.embedder.backbone.config._attn_implementation",
        "eager",
    ),
    "padding_free": (
        "many",
        lambda entry: entry.trainer.components.embedder.packs_texts(),
        False,
    ),
    "bidirectional_attention": (
        "seeing",
        "components.embedder.description.pooling",
        "mean",
        "decoder",
    ),
    "max_length": ("many", lambda entry: len(entry.tokens("red " * 40, "document")), 9),
    "pooling": (
        "many",
        "components.embedder.description.pooling",
        "max",
    ),
    "query_prompt": ("many", lambda entry: len(entry.tokens("blue", "query")) - 2, 2),
    "document_prompt": (
        "many",
        lambda entry: len(entry.tokens("blue", "document")) - 2,
        3,
    ),
    "min_pixels": (
        "looking_less",
        lambda entry: (
            entry.image_tokens("small.png") > built("looking").image_tokens("small.png")
        ),
        True,
        "looking",
    ),
    "max_pixels": (
        "looking_less",
        lambda entry: (
            entry.image_tokens("large.png") < built("looking").image_tokens("large.png")
        ),
        True,
        "looking",
    ),
    "torch_compile": (
        "many",
        lambda entry: is_compiled(entry.layers()[0]),
        True,
    ),
    "gradient_checkpointing": (
        "many",
        lambda entry: recomputes(entry.layers()[0]),
        True,
    ),
    "mrl_dims": (
        "many",
        "components.loss.run_similarity.dims",
        (8, 16),
    ),
    "mrl_projection": (
        "mrl",
        lambda entry: entry.trainer.components.embedder.mrl_projection is not None,
        True,
        "whole",
    ),
    "use_lora": ("adapters", lambda entry: bool(adapter_names(entry)), True),
    "lora_r": (
        "other_adapters",
        lambda entry: adapter(entry).r["default"],
        3,
        "adapters",
    ),
    "lora_alpha": (
        "other_adapters",
        lambda entry: adapter(entry).lora_alpha["default"],
        9,
        "adapters",
    ),
    "lora_dropout": ("other_adapters", adapter_dropout, 0.5, "adapters"),
    "lora_variant": (
        "other_adapters",
        lambda entry: any("magnitude" in name for name in entry.parameters()),
        True,
        "adapters",
    ),
    "lora_target_modules": ("other_adapters", adapter_names, {"query"}, "adapters"),
    "freeze": ("many", lambda entry: _trained(entry, "embeddings"), False),
    "data_path": ("two", lambda entry: len(entry.trainer.data.examples), 64),
    "val_split": (
        "held_out",
        lambda entry: entry.trainer.data.evaluation is not None,
        True,
    ),
    "val_data_path": (
        "validated",
        lambda entry: entry.trainer.data.evaluation is not None,
        True,
    ),
    "column_mapping": (
        "named",
        lambda entry: len(entry.trainer.data.examples),
        48,
        "bad",
    ),
    "retrieval_mode": (
        "pictures",
        lambda entry: len(entry.trainer.data.examples[0].positives[0].images),
        1,
        "as_text",
    ),
    "image_root": (
        "pictures",
        lambda entry: "pictures" in str(entry.trainer.data.examples[0].positives[0]),
        True,
    ),
    "allow_image_urls": (
        "addresses",
        lambda entry: "http" in str(entry.trainer.data.examples[0].positives[0]),
        True,
    ),
    "on_bad_record": ("bad", lambda entry: len(entry.trainer.data.examples), 20),
    "max_negatives": (
        "many",
        lambda entry: len(entry.trainer.data.examples[0].negatives),
        1,
    ),
    "max_train_examples": ("many", lambda entry: len(entry.trainer.data.examples), 30),
    "no_duplicates": (
        "many",
        lambda entry: entry.trainer.data.batch_schedule.keys is not None,
        True,
    ),
    "homogeneous_batches": (
        "other",
        lambda entry: len({index // 48 for index in first_ids(entry)}),
        1,
        "two",
    ),
    "sampling": (
        "tempered",
        "data.batch_schedule._num_drawn",
        [32, 32],
        "two",
    ),
    "num_workers": ("many", "stream.num_workers", 0),
    "learn_temperature": (
        "many",
        lambda entry: len(list(entry.trainer.components.loss.parameters())),
        1,
    ),
    "batch_size": ("many", lambda entry: len(first_ids(entry)), 5),
    "global_batch_size": ("other", lambda entry: len(first_ids(entry)), 6),
    "gradient_accumulation_steps": (
        "many",
        "data.batches_per_step",
        2,
    ),
    "micro_batch_tokens": (
        "many",
        "training_step.budget.micro_batch_tokens",
        99,
    ),
    "use_gradient_cache": (
        "many",
        "training_step.budget.use_gradient_cache",
        False,
    ),
    "cache_frozen_features": (
        "frozen",
        lambda entry: bool(entry.trainer.components.input_builder.stores),
        True,
        "clip",
    ),
    "epochs": ("other", lambda entry: entry.trainer.data.total_steps > 10, True),
    "patience": ("patient", "intervals.patience", 2),
    "max_steps": ("many", "data.total_steps", 7),
    "learning_rate": ("many", "schedule.peak", 0.5),
    "scale_learning_rate": (
        "scaled",
        "schedule.multiplier",
        8 / 32,
    ),
    "optim": (
        "other",
        lambda entry: type(entry.trainer.components.optimizer).__name__,
        "SGD",
    ),
    "weight_decay": (
        "many",
        lambda entry: entry.group("query.weight")["weight_decay"],
        0.25,
    ),
    "adam_betas": (
        "many",
        lambda entry: entry.group("query.weight")["betas"],
        (0.5, 0.6),
    ),
    "adam_epsilon": ("many", lambda entry: entry.group("query.weight")["eps"], 0.7),
    "head_learning_rate": (
        "many",
        lambda entry: entry.group("head")["initial_lr"],
        0.125,
        "mrl",
    ),
    "warmup_steps": ("many", "schedule.warmup_steps", 3),
    "lr_scheduler_type": ("many", "schedule.kind", "cosine"),
    "max_grad_norm": ("many", "update.max_grad_norm", 0.75),
    "on_nonfinite": (
        "many",
        "config.optimizer.on_nonfinite",
        "skip",
    ),
    "seed": ("many", "data.batch_schedule.seed", 7),
    "deterministic": ("many", lambda entry: entry.is_deterministic, True),
    "sync_batchnorm": (
        "many",
        lambda entry: any("sync_batchnorm" in line for line in entry.lines),
        True,
    ),
}
GROUPS["as_text"] = {"model_name": tiny.tiny_clip, "data_path": "plain.jsonl"}


def _trained(value, name):
    return any(
        weight.requires_grad
        for key, weight in value.parameters().items()
        if name in key
    )


SCORED = {
    # option: (options of the loss, what the option is set to)
    "loss": ({}, {"loss": "triplet"}),
    "losses": (
        {},
        {
            "losses": [
                {"loss": "infonce", "weight": 1},
                {"loss": "triplet", "weight": 2},
            ]
        },
    ),
    "mrl_weights": ({"mrl_dims": [12, 4]}, {"mrl_weights": [1, 3]}),
    "similarity": ({}, {"similarity": "dot"}),
    "temperature": ({}, {"temperature": 0.2}),
    "bidirectional": ({}, {"bidirectional": True}),
    "same_side_negatives": ({}, {"same_side_negatives": "both"}),
    "false_negative_margin": ({}, {"false_negative_margin": -0.3}),
    "hard_negatives_scope": ({}, {"hard_negatives_scope": "own"}),
    "margin": ({"loss": "triplet"}, {"margin": 0.9}),
    "quantize_embeddings": ({}, {"quantize_embeddings": "binary"}),
}


@pytest.mark.parametrize("option", BUILT)
def test_what_is_built_shows_the_option(option):
    group, recorded, expected, *without = BUILT[option]
    assert see(built(group), recorded) == expected
    other = without[0] if without else "base"
    if option in ("on_bad_record", "column_mapping"):
        with pytest.raises(UserError):
            build({"data_path": GROUPS[group]["data_path"]})
    elif option in ("image_root", "allow_image_urls"):
        remaining = {
            name: value for name, value in GROUPS[group].items() if name != option
        }
        with pytest.raises(UserError):
            build(remaining)
    else:
        assert see(built(other), recorded) != expected, f"the same without {option}"


@pytest.mark.parametrize("option", SCORED)
def test_the_loss_shows_the_option(option):
    base, change = SCORED[option]
    assert loss_value({**base, **change}) != pytest.approx(loss_value(base), rel=1e-6)


# ---- what a run writes -----------------------------------------------------------------------------------------------

WRITTEN = {
    # option: (run with it, what is seen in its folder, what it is, run without it)
    "output_dir": (
        "many",
        lambda run: (run / "config.yaml").is_file(),
        True,
        "nowhere",
    ),
    "eval_steps": (
        "many",
        lambda run: [line["step"] for line in lines_of(run) if "eval" in line],
        [2, 4],
        "base",
    ),
    "eval_before": (
        "many",
        lambda run: any(line["step"] == 0 for line in lines_of(run) if "eval" in line),
        False,
        "base",
    ),
    "eval_metric": (
        "many",
        lambda run: yaml.safe_load((run / "run.json").read_text())["metric"],
        "mrr@3",
        "base",
    ),
    "save_steps": (
        "many",
        lambda run: bool(list(run.glob("checkpoint-*"))),
        True,
        "base",
    ),
    "torch_dtype": (
        "many",
        lambda run: str(_weight(run).dtype),
        "torch.bfloat16",
        "base",
    ),
    "logging_steps": (
        "many",
        lambda run: [line["step"] for line in lines_of(run) if "loss" in line],
        [1, 2, 4],
        "base",
    ),
    "report_to": ("many", lambda run: (run / "tensorboard").is_dir(), True, "adapters"),
    "run_name": (
        "many",
        lambda run: (run / "tensorboard" / "mine").is_dir(),
        True,
        "base",
    ),
    "log_file": ("many", lambda run: (run / "own.txt").is_file(), True, "base"),
    "debug": (
        "many",
        lambda run: (run / "logs" / "rank-0.log").is_file(),
        True,
        "base",
    ),
    "profile_steps": (
        "many",
        lambda run: bool(list(run.glob("trace-rank0*.json"))),
        True,
        "base",
    ),
    "load_best_model_at_end": (
        "many",
        lambda run: yaml.safe_load((run / "run.json").read_text())["final_step"],
        2,
        "base",
    ),
    "save_merged": (
        "adapters_alone",
        lambda run: (run / "final" / "adapter_config.json").is_file(),
        True,
        "adapters",
    ),
}


def _weight(run):
    weights = load_file(run / "final" / "model.safetensors")
    return next(tensor for name, tensor in weights.items() if "query.weight" in name)


@pytest.mark.parametrize("option", WRITTEN)
def test_what_is_written_shows_the_option(option):
    run, recorded, expected, without = WRITTEN[option]
    assert recorded(finished(run)) == expected
    if without != "nowhere":
        assert recorded(finished(without)) != expected, f"the same without {option}"
    else:
        assert not Path("output").exists(), "the default folder"


def test_run_json_holds_the_decisions_with_reason_and_source():
    decisions = json.loads((finished("base") / "run.json").read_text())["decisions"]
    assert decisions["strategy"] == {
        "value": "single",
        "reason": "one process",
        "source": "default",
    }
    assert decisions["gradient checkpointing"]["reason"] == "default without FSDP"
    assert set(decisions) == {
        "strategy",
        "gradient checkpointing",
        "mixed precision",
        "timeout in minutes",
        "compiled layers",
    }


def test_checkpoints_and_their_options(tmp_path):
    """save_total_limit, resume, max_train_minutes."""
    run = finished("many")
    assert {path.name for path in run.glob("checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-4",
    }, "the best and the newest"
    options = given({**RUNS["many"], "output_dir": str(run), "profile_steps": None})
    assert (
        candidates(TrainConfig(**{**options, "resume": True}).run)[0].name
        == "checkpoint-4"
    )
    assert (
        candidates(TrainConfig(**{**options, "output_dir": str(tmp_path / "new")}).run)
        == []
    )
    changed = {**options, "resume": True, "learning_rate": 1e-3}
    with pytest.raises(UserError, match="learning_rate"):
        vembed.train(changed)
    vembed.train({**changed, "resume": "force", "max_steps": 5})
    assert "resume: force: going on although" in log_of(run, "own.txt")
    with pytest.raises(
        Stopped, match="max_train_minutes: the time is up; stopped after step 1"
    ):
        vembed.train(
            given(
                {
                    "max_train_minutes": 1e-6,
                    "max_steps": 50,
                    "output_dir": str(tmp_path / "short"),
                }
            )
        )


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", SHARDED)
def test_two_processes_show_the_option(option):
    case, what, expected, without = SHARDED[option]
    assert facts()[case][what] == expected
    assert facts()[without][what] != expected, f"the same without {option}"


# ---- what takes a preparation of its own -----------------------------------------------------------------------------


TEACHERS = [{"name": "vectors", "model": "some/model"}]
TWO = [*TEACHERS, {"name": "reranker", "model": "another/model"}]
TAUGHT = {"teachers": TEACHERS, "loss": "kl"}
OF_TEACHERS = {
    "teacher_temperature": (TAUGHT, {"teacher_temperature": 0.9}),
    "guide": ({"teachers": TEACHERS}, {"guide": "vectors"}),
    "teacher": (
        {**TAUGHT, "teachers": TWO, "teacher": "vectors"},
        {"teacher": "reranker"},
    ),
    "teachers": ({"loss": "infonce"}, TAUGHT),
}


@pytest.mark.parametrize("option", OF_TEACHERS)
def test_the_loss_shows_the_option_of_teachers(option):
    base, change = OF_TEACHERS[option]
    assert loss_value({**base, **change}) != pytest.approx(loss_value(base), rel=1e-6)


# ---- every way in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
def test_a_yaml_file_a_dict_and_the_command_line_mean_the_same(group, tmp_path):
    options = given(GROUPS[group])
    (tmp_path / "cfg.yaml").write_text(yaml.safe_dump(options))
    words = [
        f"{name}={value if all_options()[name].is_plain_text else one_line_yaml(value)}"
        for name, value in options.items()
    ]
    runs = [
        resolve_run(tmp_path / "cfg.yaml", env={}),
        resolve_run(options, env={}),
        resolve_run({}, words, env={}),
    ]
    assert (
        runs[0].config.to_dict() == runs[1].config.to_dict() == runs[2].config.to_dict()
    )
    assert [run.recomputation.value for run in runs] == [
        runs[0].recomputation.value
    ] * 3


IN_A_FILE = {
    "fsdp_version": (1, "1"),
    "fsdp_sharding_strategy": ("SHARD_GRAD_OP", "SHARD_GRAD_OP"),
    "fsdp_offload_params": (True, "true"),
    "fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP", "SIZE_BASED_WRAP"),
    "fsdp_min_num_params": (77, "77"),
    "fsdp_forward_prefetch": (True, "true"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "FULL_STATE_DICT"),
    "gradient_checkpointing": (True, "true"),
}


def test_an_accelerate_file_and_the_launchers_environment_mean_what_the_yaml_means(
    tmp_path,
):
    base = {"model_name": "m", "data_path": "d"}
    values = {name: value for name, (value, _) in IN_A_FILE.items()}
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump(
            {
                "distributed_type": "FSDP",
                "mixed_precision": "fp16",
                "fsdp_config": values,
            }
        )
    )
    env = {name.upper(): text for name, (_, text) in IN_A_FILE.items()}
    env |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16"}
    said = resolve_run(
        {**base, **values, "strategy": "fsdp", "mixed_precision": "fp16"}, env={}
    )
    by_file = resolve_run(
        {**base, "accelerate_config": str(tmp_path / "own.yaml")}, env={}
    )
    launched = resolve_run(base, env=env)
    sources = {run.fsdp.source for run in (said, by_file, launched) if run.fsdp}
    assert len(sources) == 3
    actual = [
        replace(run.fsdp, source="") for run in (said, by_file, launched) if run.fsdp
    ]
    assert actual[0] == actual[1] == actual[2]
    assert {run.strategy.value for run in (said, by_file, launched)} == {"fsdp"}
    assert {run.recomputation.value for run in (said, by_file, launched)} == {True}


# ---- a summary -------------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "strategy",
    "accelerate_config",
    "fsdp_version",
    "fsdp_sharding_strategy",
    "fsdp_offload_params",
    "fsdp_reduce_dtype",
    "fsdp_state_dict_type",
    "mixed_precision",
    "dist_timeout_minutes",
    "save_total_limit",
    "async_save",
    "resume",
    "max_train_minutes",
    "wandb_project",
    "wandb_tags",
    "overwrite",
    "console",
    "trust_remote_code",
    "num_processes",
    "num_machines",
    "ema",
    "guards",
    "model_class",
    "model_arguments",
    "tokenizer_name",
    "auxiliary_losses",
    "from_scratch",
    "push_to_hub",
    "mine",
    "task",
    "reranker_head",
    "first_stage",
    "rerank_top_k",
    "in_batch_negatives",
}
"""Options of the tests above that take a preparation of their own, and those of other files: the strategy and FSDP's
in test_agreement.py, dtypes and the timeout in tests/parallel, `ema`, `guards`, `mine`, `async_save`, `wandb_project`,
`wandb_tags`, `fsdp_state_dict_type` and `console` in tests/training, `overwrite`, `num_processes` and `num_machines` in
tests/cli, those of own models in tests/own, `trust_remote_code` and those of language modelling in tests/models, of the
Hub in tests/publish, of rerankers in tests/rerank."""


def test_every_option_has_a_row():
    rows = {*BUILT, *SCORED, *WRITTEN, *SHARDED, *OF_TEACHERS, *ELSEWHERE}
    # The contract tests of losses compare each option of a loss with its formula.
    assert sorted(set(all_options()) - rows - set(LOSS_OPTIONS)) == []
    assert sorted(rows - set(all_options())) == []
