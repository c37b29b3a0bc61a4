"""A row for every option: where its effect is seen on what was built or written. An option without one fails."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import vembed
from tests.config.effects import (
    GROUPS,
    RUNS,
    Built,
    adapter,
    adapter_dropout,
    built,
    finished,
    first_ids,
    given,
    lines_of,
    loss_value,
)
from vembed.config.loading import one_line_yaml, resolve_run
from vembed.config.options import all_options
from vembed.config.schema import TrainConfig
from vembed.errors import Stopped, UserError
from vembed.losses.table import LOSS_OPTIONS
from vembed.training.checkpoint.folders import candidates

Seen = Callable[[Built], Any] | str
"""A string: an attribute of the trainer."""
Row = tuple[str, Seen, Any] | tuple[str, Seen, Any, str]


def see(entry, observed):
    if isinstance(observed, str):
        observed = attrgetter(f"trainer.{observed}")
    return observed(entry)


def backbone(entry):
    return entry.trainer.components.embedder.backbone


def is_trained(entry, part):
    weights = entry.parameters().items()
    return any(weight.requires_grad for name, weight in weights if part in name)


BUILT = {
    # option: (group of options, what is seen, what it is with them, group without it)
    "model_family": (
        "other",
        "components.embedder.description.family",
        "text_decoder",
    ),
    "model_revision": (
        "other_adapters",
        lambda entry: backbone(entry).peft_config["default"].revision,
        "v2",
        "adapters",
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
    "pooling": (
        "many",
        "components.embedder.description.pooling",
        "max",
    ),
    "document_prompt": (
        "many",
        lambda entry: len(entry.tokens("blue", "document")) - 2,
        3,
    ),
    "torch_compile": (
        "many",
        lambda entry: inspect.ismethod(entry.layers()[0].forward),
        False,
    ),
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
    "freeze": ("many", lambda entry: is_trained(entry, "embeddings"), False),
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
    "epochs": ("other", "data.total_steps", 20),
    "patience": ("patient", "intervals.patience", 2),
    "optim": (
        "other",
        "components.optimizer.__class__",
        torch.optim.SGD,
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
}


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
    assert see(built(other), recorded) != expected, f"the same without {option}"


@pytest.mark.parametrize("option", SCORED)
def test_the_loss_shows_the_option(option):
    base, change = SCORED[option]
    assert loss_value({**base, **change}) != pytest.approx(loss_value(base), rel=1e-6)


# ---- what a run writes -----------------------------------------------------------------------------------------------

WRITTEN = {
    # option: (run with it, what is seen in its folder, what it is, run without it)
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
}


def _weight(run):
    weights = load_file(run / "final" / "model.safetensors")
    return next(tensor for name, tensor in weights.items() if "query.weight" in name)


@pytest.mark.parametrize("option", WRITTEN)
def test_what_is_written_shows_the_option(option):
    run, recorded, expected, without = WRITTEN[option]
    assert recorded(finished(run)) == expected
    assert recorded(finished(without)) != expected, f"the same without {option}"


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
    names = {path.name for path in run.glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-4"}, "the best and the newest"
    options = given({**RUNS["many"], "output_dir": str(run), "profile_steps": None})
    newest, *_ = candidates(TrainConfig(**options, resume=True).run)
    assert newest.name == "checkpoint-4"
    changed = {**options, "resume": True, "learning_rate": 1e-3}
    with pytest.raises(UserError, match="learning_rate"):
        vembed.train(changed)
    vembed.train({**changed, "resume": "force", "max_steps": 5})
    log = (run / "training_log.txt").read_text()
    assert "resume: force: going on although" in log
    short = given({"max_train_minutes": 1e-6, "output_dir": str(tmp_path)})
    with pytest.raises(Stopped, match=r"max_train_minutes.*stopped after step 1"):
        vembed.train(short)


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
    first, *others = [
        resolve_run(tmp_path / "cfg.yaml", env={}),
        resolve_run(options, env={}),
        resolve_run({}, words, env={}),
    ]
    for run in others:
        assert run.config.to_dict() == first.config.to_dict()
        assert run.recomputation.value == first.recomputation.value


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
    path = tmp_path / "own.yaml"
    file = {"distributed_type": "FSDP", "mixed_precision": "fp16"}
    path.write_text(yaml.safe_dump({**file, "fsdp_config": values}))
    env = {name.upper(): text for name, (_, text) in IN_A_FILE.items()}
    env |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16"}
    options = {**base, **values, "strategy": "fsdp", "mixed_precision": "fp16"}
    runs = [
        resolve_run(options, env={}),
        resolve_run({**base, "accelerate_config": str(path)}, env={}),
        resolve_run(base, env=env),
    ]
    assert len({run.fsdp.source for run in runs}) == 3
    first, *others = [replace(run.fsdp, source="") for run in runs]
    assert others == [first, first]
    for run in runs:
        assert run.strategy.value == "fsdp"
        assert run.recomputation.value is True


# ---- a summary -------------------------------------------------------------------------------------------------------

ELSEWHERE = """
strategy accelerate_config fsdp_version fsdp_sharding_strategy fsdp_offload_params fsdp_forward_prefetch
gradient_checkpointing num_processes num_machines overwrite

column_mapping retrieval_mode image_root allow_image_urls on_bad_record max_negatives max_train_examples val_split

max_length query_prompt min_pixels max_pixels image_model_name save_merged

model_name use_lora lora_variant lora_target_modules bidirectional_attention quantize_weights trust_remote_code
tokenizer_name auxiliary_losses

fsdp_reduce_dtype mixed_precision dist_timeout_minutes sync_batchnorm

data_path val_data_path output_dir batch_size global_batch_size max_steps learning_rate scale_learning_rate
eval_steps save_steps ema guards mine async_save wandb_project wandb_tags fsdp_state_dict_type console log_file
debug cache_frozen_features

model_class model_arguments from_scratch fsdp_auto_wrap_policy fsdp_min_num_params
fsdp_transformer_layer_cls_to_wrap

push_to_hub task reranker_head first_stage rerank_top_k in_batch_negatives

mrl_dims mrl_projection save_total_limit resume max_train_minutes
"""
"""Options whose effect other tests show, a paragraph for each place: test_agreement.py and tests/cli; tests/data;
tests/features and tests/files; tests/models; tests/parallel; tests/training; tests/own; tests/publish and tests/rerank.
The last ones are in tests/models/test_families.py, and in the tests above that take a preparation of their own."""


def test_every_option_has_a_row():
    rows = {*BUILT, *SCORED, *WRITTEN, *OF_TEACHERS, *ELSEWHERE.split()}
    # The contract tests of losses compare each option of a loss with its formula.
    assert sorted(set(all_options()) - rows - set(LOSS_OPTIONS)) == []
    assert sorted(rows - set(all_options())) == []
