"""Every way of sharing a model gives the gradient of one process, with about 1/N of it on each rank."""

import warnings
from functools import cache

import pytest
import torch

from tests.harness import result_of, run_cases, run_ranks
from tests.parallel.steps import (
    check_against_one_process,
    config_of,
    prepared,
    sharded_step,
    whole_step,
)
from tests.tiny import shared, tiny_bert, tiny_clip, tiny_qwen3
from vembed.parallel import placement, session

FSDP1 = {"strategy": "fsdp", "fsdp_version": 1}


FSDP2 = {"strategy": "fsdp"}


BY_SIZE = {
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 2000,
}


GRAD_OP = {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}


CASES = {
    # name: ranks, options of the config, options of the step
    "ddp": (2, {"strategy": "ddp"}, {}),
    "no_shard": (2, FSDP2 | {"fsdp_sharding_strategy": "NO_SHARD"}, {}),
    "fsdp2": (2, FSDP2, {}),
    "fsdp2_gathered": (
        2,
        FSDP2 | {"fsdp_forward_prefetch": True},
        {"pattern": "gathered"},
    ),
    "fsdp2_reduces_each": (2, FSDP2, {"pattern": "each"}),
    "fsdp1_reduces_each": (2, FSDP1, {"pattern": "each"}),
    "fsdp2_shard_grad_op": (2, FSDP2 | GRAD_OP, {"pattern": "kept"}),
    "fsdp2_offload": (2, FSDP2 | {"fsdp_offload_params": True}, {}),
    "fsdp2_hybrid": (
        4,
        FSDP2 | {"fsdp_sharding_strategy": "HYBRID_SHARD"},
        {"local_world_size": 2},
    ),
    "fsdp2_no_wrap": (2, FSDP2 | {"fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
    "fsdp2_by_size": (2, FSDP2 | BY_SIZE, {}),
    "fsdp1": (2, FSDP1, {}),
    "fsdp1_shard_grad_op": (2, FSDP1 | GRAD_OP, {}),
    "fsdp1_by_size": (2, FSDP1 | BY_SIZE, {}),
}


def run_case(folder, config_options, step_options):
    options = {"gradient_checkpointing": False, **config_options}
    return sharded_step(config_of(folder, **options), **step_options)


@cache
def results_on(num_ranks):
    """All cases of so many ranks, in one start of them."""
    folder = shared(tiny_bert, layers=3)
    cases = {}
    for name, (ranks, *options) in CASES.items():
        if ranks == num_ranks:
            cases[name] = (folder, *options)
    return run_cases(run_case, num_ranks, cases)


@cache
def whole_of(folder, num_ranks):
    """The steps of so many ranks in one process."""
    return whole_step(config_of(folder, gradient_checkpointing=False), num_ranks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.promise(
    "A23", "B01", "B05", "C07", "C08", "C24", "D10", "D27", "D38", "E01"
)
def test_gradient_is_that_of_one_process(name):
    num_ranks = CASES[name][0]
    whole = whole_of(shared(tiny_bert, layers=3), num_ranks)
    results = result_of(results_on(num_ranks), name)
    check_against_one_process(results, whole)
    if name == "no_shard":
        log = "\n".join(results[0].lines)
        assert "NO_SHARD shards nothing: the run uses ddp" in log
    num_shards = 2 if name == "fsdp2_hybrid" else num_ranks
    if results[0].strategy == "ddp":
        num_shards = 1
    for result in results:
        for kind, size in whole.bytes.items():
            assert result.bytes[kind] == pytest.approx(size / num_shards, rel=0.1), kind


def units_by_size(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run_case(folder, FSDP2 | BY_SIZE, {})
    return result, [str(warning.message) for warning in caught]


def test_units_by_size_are_no_bare_linear_layers_and_return_no_views():
    # Its feed-forward blocks end in a linear layer, whose output is a view.
    folder = shared(tiny_qwen3)
    ranks = run_ranks(units_by_size, 2, folder)
    results = []
    for result, caught in ranks:
        assert "returned a view tensor" not in "\n".join(caught)
        results.append(result)
    check_against_one_process(results, whole_of(folder, 2))
    (units,) = (line for line in results[0].lines if line.startswith("FSDP2: "))
    assert "Qwen3MLP" in units and "Linear" not in units


def reduction(folder, limit):
    placement.UNSHARDED_SHARE = limit
    config = config_of(folder, strategy="fsdp")
    with session.start_session(config) as first:
        prepared(first, config, dtype=torch.float32)
        return first.reduces_each_micro_batch


def test_large_gradients_are_reduced_after_every_micro_batch():
    folder = shared(tiny_bert, layers=3)
    limits = {"once": (folder, 0.2), "every": (folder, 1e-9)}
    results = run_cases(reduction, 2, limits)
    assert result_of(results, "once") == [False, False]
    assert result_of(results, "every") == [True, True]


@pytest.mark.promise("B32")
def test_other_families_shard_without_options_of_their_own():
    """By FSDP1. With FSDP2 tests/parity/test_families_parity.py has them, and the test of units by size above."""
    cases = {}
    for make in (tiny_qwen3, tiny_clip):
        cases[make.__name__] = (shared(make), FSDP1, {})
    results = run_cases(run_case, 2, cases)
    for name, (folder, *_) in cases.items():
        check_against_one_process(result_of(results, name), whole_of(folder, 2))
