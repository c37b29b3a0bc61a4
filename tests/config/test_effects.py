"""Options whose effect is seen on what was built or written: a row for each."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import yaml

from tests.config.effects import (
    GROUPS,
    Built,
    adapter,
    adapter_dropout,
    built,
    finished,
    given,
)
from tests.tiny import read_json
from tests.training.test_run import metric_lines
from vembed.config.loading import one_line_yaml, resolve_run
from vembed.config.options import all_options

Seen = Callable[[Built], Any] | str
"""A string: an attribute of the trainer."""
Row = tuple[str, Seen, Any] | tuple[str, Seen, Any, str]


def see(entry, observed):
    if isinstance(observed, str):
        observed = attrgetter(f"trainer.{observed}")
    return observed(entry)


def backbone(entry):
    return entry.trainer.components.embedding_model.backbone


def optimizer_options(entry):
    return entry.trainer.components.optimizer.param_groups[0]


BUILT = {
    # option: (group of options, what is seen, what it is with them, group without it)
    "model_family": (
        "other",
        "components.embedding_model.description.family",
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
        "components.embedding_model.backbone.config._attn_implementation",
        "eager",
    ),
    "document_prompt": (
        "many",
        "components.embedding_model.description.document_prompt",
        "green blue ",
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
    "no_duplicates": (
        "many",
        lambda entry: entry.trainer.data.batch_schedule.keys is not None,
        True,
    ),
    "sampling": ("tempered", "data.batch_schedule._num_drawn", [32, 32], "two"),
    "num_workers": ("many", "stream.num_workers", 0),
    "gradient_accumulation_steps": ("many", "data.batches_per_step", 2),
    "micro_batch_tokens": ("many", "training_step.budget.micro_batch_tokens", 99),
    "use_gradient_cache": ("many", "training_step.budget.use_gradient_cache", False),
    "epochs": ("other", "data.total_steps", 20),
    "patience": ("patient", "intervals.patience", 2),
    "adam_betas": ("many", lambda entry: optimizer_options(entry)["betas"], (0.5, 0.6)),
    "adam_epsilon": ("many", lambda entry: optimizer_options(entry)["eps"], 0.7),
    "warmup_steps": ("many", "schedule.warmup_steps", 3),
    "lr_scheduler_type": ("many", "schedule.kind", "cosine"),
    "max_grad_norm": ("many", "update.max_grad_norm", 0.75),
    "seed": ("many", "data.batch_schedule.seed", 7),
    "deterministic": ("many", lambda entry: entry.is_deterministic, True),
}


@pytest.mark.parametrize("option", BUILT)
def test_what_is_built_shows_the_option(option):
    group, recorded, expected, *without = BUILT[option]
    assert see(built(group), recorded) == expected
    other = without[0] if without else "base"
    assert see(built(other), recorded) != expected, f"the same without {option}"


# ---- what a run writes -----------------------------------------------------------------------------------------------

WRITTEN = {
    # option: (run with it, what is seen in its folder, what it is, run without it)
    "eval_before": (
        "many",
        lambda run: any(
            line["step"] == 0 for line in metric_lines(run) if "eval" in line
        ),
        False,
        "base",
    ),
    "eval_metric": (
        "many",
        lambda run: yaml.safe_load((run / "run.json").read_text())["metric"],
        "mrr@3",
        "base",
    ),
    "report_to": ("many", lambda run: (run / "tensorboard").is_dir(), True, "adapters"),
    "run_name": (
        "many",
        lambda run: (run / "tensorboard" / "mine").is_dir(),
        True,
        "base",
    ),
}


@pytest.mark.parametrize("option", WRITTEN)
def test_what_is_written_shows_the_option(option):
    run, recorded, expected, without = WRITTEN[option]
    assert recorded(finished(run)) == expected
    assert recorded(finished(without)) != expected, f"the same without {option}"


def test_run_json_holds_the_decisions_with_reason_and_source():
    decisions = read_json(finished("base") / "run.json")["decisions"]
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
    "fsdp_version": 1,
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_offload_params": True,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 77,
    "fsdp_forward_prefetch": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "gradient_checkpointing": True,
}


def test_an_accelerate_file_and_the_launchers_environment_mean_what_the_yaml_means(
    tmp_path,
):
    base = {"model_name": "m", "data_path": "d"}
    path = tmp_path / "own.yaml"
    file = {"distributed_type": "FSDP", "mixed_precision": "fp16"}
    path.write_text(yaml.safe_dump({**file, "fsdp_config": IN_A_FILE}))
    env = {name.upper(): one_line_yaml(value) for name, value in IN_A_FILE.items()}
    env |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16"}
    options = {**base, **IN_A_FILE, "strategy": "fsdp", "mixed_precision": "fp16"}
    runs = [
        resolve_run(options, env={}),
        resolve_run({**base, "accelerate_config": str(path)}, env={}),
        resolve_run(base, env=env),
    ]
    assert len({run.fsdp.origin for run in runs}) == 3
    first, *others = [replace(run.fsdp, origin="") for run in runs]
    assert others == [first, first]
    for run in runs:
        assert run.strategy.value == "fsdp"
        assert run.recomputation.value is True
