"""Every way of sharing a model gives the gradient of one process, with about 1/N of it on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.steps import (
    Result,
    build,
    check_against_one_process,
    config_of,
    listen,
    sharded_step,
    whole_step,
)
from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert, tiny_clip, tiny_qwen3, tiny_siglip
from vembed.distributed import placement, session

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # name: ranks, options of the config, options of the step
    "ddp": (2, {"strategy": "ddp"}, {}),
    "no_shard": (2, {"use_fsdp": True, "fsdp_sharding_strategy": "NO_SHARD"}, {}),
    "fsdp2": (2, {"use_fsdp": True}, {}),
    "fsdp2_three_ranks": (3, {"use_fsdp": True}, {"pattern": "kept"}),
    "fsdp2_cache": (2, {"use_fsdp": True}, {"pattern": "cache"}),
    "fsdp2_gathered": (2, {"use_fsdp": True, "fsdp_forward_prefetch": True}, {"pattern": "gathered"}),
    "fsdp2_reduces_each": (2, {"use_fsdp": True}, {"pattern": "each"}),
    "fsdp1_reduces_each": (2, {"use_fsdp": True, "fsdp_version": 1}, {"pattern": "each"}),
    "fsdp2_shard_grad_op": (2, {"use_fsdp": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"pattern": "kept"}),
    "fsdp2_offload": (2, {"use_fsdp": True, "fsdp_offload_params": True}, {}),
    "fsdp2_every_process_reads": (2, {"use_fsdp": True, "fsdp_cpu_ram_efficient_loading": False}, {}),
    "fsdp2_hybrid": (4, {"use_fsdp": True, "fsdp_sharding_strategy": "HYBRID_SHARD"}, {"local_world_size": 2}),
    "fsdp2_no_wrap": (2, {"use_fsdp": True, "fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
    "fsdp2_by_size": (
        2, {"use_fsdp": True, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000}, {},
    ),
    "fsdp1": (2, {"use_fsdp": True, "fsdp_version": 1}, {}),
    "fsdp1_cache": (2, {"use_fsdp": True, "fsdp_version": 1}, {"pattern": "cache"}),
    "fsdp1_shard_grad_op": (
        2, {"use_fsdp": True, "fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {},
    ),
    "fsdp1_flat": (2, {"use_fsdp": True, "fsdp_version": 1, "fsdp_use_orig_params": False}, {}),
    "fsdp1_by_size": (
        2,
        {"use_fsdp": True, "fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
        {},
    ),
}  # fmt: skip


def run_case(folder: str, config_options: dict[str, Any], step_options: dict[str, Any]) -> Result:
    return sharded_step(config_of(folder, gradient_checkpointing=False, **config_options), step_options)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_one_process_A23_B01_C08_C24_D38(name: str) -> None:
    num_ranks, config_options, step_options = CASES[name]
    folder = str(shared(tiny_bert, layers=3))
    whole = whole_step(config_of(folder, gradient_checkpointing=False), num_ranks)
    results = run_ranks(run_case, num_ranks, folder, config_options, step_options, process_group=False)
    check_against_one_process(results, whole)
    if name == "no_shard":
        assert (
            "fsdp_sharding_strategy: NO_SHARD shards nothing: the run uses ddp (a copy on each process)"
            in results[0].lines
        )
    copies = num_ranks if results[0].strategy == "ddp" else 1
    shards = {"fsdp2_hybrid": 2}.get(name, num_ranks) if copies == 1 else 1
    for result in results:
        for kind, size in whole.bytes.items():
            assert result.bytes[kind] == pytest.approx(size / shards, rel=0.1), kind


def reduction(folder: str, limit: float) -> tuple[bool, list[str]]:
    lines = listen()
    placement.WHOLE_GRADIENTS_SHARE = limit
    config = config_of(folder, use_fsdp=True)
    with session.start_session(config) as one:
        model, _ = build(config, dtype=torch.float32, meta=one.builds_empty)
        one.prepare(model, model.description.layer_classes)
        return one.reduces_each_micro_batch, [line for line in lines if line.startswith("gradients: ")]


def test_large_gradients_are_reduced_after_every_micro_batch() -> None:
    folder = str(shared(tiny_bert, layers=3))
    for limit, every in ((0.2, False), (1e-9, True)):
        for reduces, (line,) in run_ranks(reduction, 2, folder, limit, process_group=False):
            assert reduces is every
            assert line.startswith(
                f"gradients: reduced {'after every micro-batch' if every else 'once per step'} (whole"
            )


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_clip, tiny_siglip])
def test_other_families_shard_without_options_of_their_own_B32(make: Any) -> None:
    folder = str(shared(make))
    whole = whole_step(config_of(folder, gradient_checkpointing=False), 2)
    for version in (1, 2):
        results = run_ranks(run_case, 2, folder, {"use_fsdp": True, "fsdp_version": version}, {}, process_group=False)
        check_against_one_process(results, whole)
    assert any(line.startswith("FSDP2: ") and " units (" in line for line in results[0].lines)
